# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model rest, and how: rules by name or module type, and what happens where no
rule is given. Decides only; `modules` and `checkpoint` act. docs/loading.md states the rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd

from stowage._errors import InvalidArgument, StowageError
from stowage._resting import cannot_rest, is_narrow, too_narrow
from stowage._storage import Storage
from stowage._weights import Held, Site, buffers, parameters

Key = str | type[nn.Module]
Rules = Mapping["str | type[nn.Module]", "str | Storage | None"]

# Parts that PEFT adds to the path of what it wraps.
_WRAPPERS = frozenset({"base_layer", "original_module"})
# The last part of a module's path that makes it a head: it computes the model's answer, rounding
# shows most there, and PEFT trains a copy of it.
HEADS = frozenset({"classifier", "score", "qa_outputs", "classification_head", "lm_head"})
WEIGHT_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, _ConvNd)
VALUE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Choice:
    """What the policy says about one tensor: a storage, or the reason why it stays plain."""

    held: Held
    storage: Storage | None
    reason: str


@dataclass(frozen=True)
class Policy:
    """Rules in order, and the storage of what no rule names and the defaults select."""

    rules: tuple[tuple[Key, Storage | None], ...]
    default: Storage | None

    @classmethod
    def parse(cls, storage: str | Storage | Rules | None, rules: Rules | None = None) -> Policy:
        """Raises InvalidArgument for every misspelt storage at once, with the legal ones."""
        if isinstance(storage, Mapping):
            rules, storage = {**(rules or {}), **storage}, None
        for key in rules or {}:
            if not isinstance(key, str | type):
                raise InvalidArgument(
                    f"stowage: a rule must be a glob or a module type, got {key!r}"
                )
        given = list((rules or {}).items())
        parsed, errors = [], []
        for value in [*(value for _, value in given), storage]:
            try:
                parsed.append(_storage(value))
            except StowageError as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise InvalidArgument("\n".join(dict.fromkeys(map(str, errors))))
        *ordered, default = parsed
        return cls(tuple((key, to) for (key, _), to in zip(given, ordered, strict=True)), default)

    def choose(self, model: nn.Module, with_buffers: bool = False) -> list[Choice]:
        """One choice for each parameter, tied ones once; then, if asked, for each buffer."""
        every, asked = parameters(model), buffers(model) if with_buffers else []
        adapters, wide = adapter_paths(model), WidePlaces(model)
        narrow = self._narrow_rules([*every, *asked])
        chosen = [
            self._by_rule(held, narrow) or self._unruled(held, adapters, wide) for held in every
        ]
        left = "the defaults take parameters, this is a buffer"
        return chosen + [self._by_rule(held, narrow) or Choice(held, None, left) for held in asked]

    def _by_rule(self, held: Held, narrow: frozenset[Key]) -> Choice | None:
        named = self._rule(deciding_site(held))
        if named is None:
            return None
        key, storage = named
        if storage is None:
            return Choice(held, None, f"rule {label(key)} keeps it plain")
        unfit = obstacle_to(held, key, storage, narrow)
        return Choice(held, None, unfit) if unfit else Choice(held, storage, f"rule {label(key)}")

    def _unruled(self, held: Held, adapters: frozenset[str], wide: WidePlaces) -> Choice:
        if self.default is None:
            return Choice(held, None, "no rule names it")
        refusal = default_refusal(deciding_site(held), adapters, wide) or cannot_rest(held)
        if not refusal and is_narrow(held):
            refusal = "fewer than two dimensions"
        return Choice(held, None, refusal) if refusal else Choice(held, self.default, "")

    def _narrow_rules(self, every: list[Held]) -> frozenset[Key]:
        """The keys that match nothing of two or more dimensions, so that biases, norms and other
        narrow tensors are what they mean."""
        broad = {
            key
            for key, _ in self.rules
            if any(matches(key, site) for h in every if not is_narrow(h) for site in h.sites)
        }
        return frozenset(key for key, _ in self.rules) - broad

    def _rule(self, site: Site) -> tuple[Key, Storage | None] | None:
        for key, storage in self.rules:
            if matches(key, site):
                return key, storage
        return None

    def idle_rules(self, choices: list[Choice]) -> list[str]:
        """A sentence for each rule that matches no parameter of the model, or none that can rest:
        nearly always a misspelt name."""
        found = []
        narrow = self._narrow_rules([c.held for c in choices])
        for key, storage in self.rules:
            hit = [c.held for c in choices if any(matches(key, site) for site in c.held.sites)]
            if not hit:
                found.append(
                    f"rule {label(key)}: must match a parameter of the model, matches none"
                )
            elif storage is not None:
                reasons = [obstacle_to(held, key, storage, narrow) for held in hit]
                if all(reasons):
                    found.append(
                        f"rule {label(key)}: must match a weight that can rest as {storage.name}, "
                        f"matches only such as {hit[0].name} ({reasons[0]})"
                    )
        return found


def label(key: Key) -> str:
    return repr(key) if isinstance(key, str) else key.__name__


def obstacle_to(held: Held, key: Key, storage: Storage, narrow: frozenset[Key]) -> str:
    """Why the rule cannot let `held` rest; "" if it can."""
    if cannot := cannot_rest(held):
        return cannot
    if is_narrow(held) and key not in narrow:
        return "fewer than two dimensions; a rule that matches nothing wider would take it"
    return too_narrow(held, storage)


def _storage(value: str | Storage | None) -> Storage | None:
    if value is None or isinstance(value, str | Storage):
        return None if value is None else Storage.parse(value)
    raise InvalidArgument(
        f"stowage: a storage must be a string such as 'f8_e4m3', or None, got {value!r}"
    )


def matches(key: Key, site: Site) -> bool:
    """A glob is held against the parameter's name and the path of every module that contains it;
    case matters. A type is held against the module that has the parameter."""
    if isinstance(key, type):
        return isinstance(site.module, key)
    parts = site.name.split(".")
    return any(fnmatchcase(".".join(parts[:count]), key) for count in range(len(parts), 0, -1))


def deciding_site(held: Held) -> Site:
    """A tied weight is judged where an embedding holds it, else where it comes first."""
    for site in held.sites:
        if isinstance(site.module, nn.Embedding):
            return site
    return held.sites[0]


def default_refusal(site: Site, adapters: frozenset[str], wide: WidePlaces) -> str:
    """Why the defaults leave the parameter at `site` plain; "" if they select it."""
    kind = type(site.module).__name__
    if not isinstance(site.module, WEIGHT_TYPES):
        return f"the defaults take Linear, Embedding and Conv weights, this belongs to {kind}"
    if site.attribute != "weight":
        return f"the defaults take parameters named weight, this is {site.attribute}"
    if is_head(site.path):
        return "a head; name it in a rule to stow it"
    if wide.contain(site.name):
        return "the model lists it in _keep_in_fp32_modules"
    if site.path in adapters:
        return "an adapter, or a copy that trains"
    return ""


def is_head(path: str) -> bool:
    """Whether the module at `path` is one of HEADS; the root never is."""
    parts = path.split(".")
    while len(parts) > 1 and parts[-1] in _WRAPPERS:
        parts.pop()
    return parts[-1] in HEADS


class WidePlaces:
    """The places that a model wants in fp32: `_keep_in_fp32_modules` of transformers and
    diffusers, wherever in the model it is declared."""

    def __init__(self, model: nn.Module) -> None:
        self._patterns: list[re.Pattern[str]] = []
        for path, module in model.named_modules():
            for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
                declared = getattr(module, attribute, None) or ()
                # A bare string is one name; taken as a sequence it would be its letters.
                for part in (declared,) if isinstance(declared, str) else declared:
                    inside = rf"{re.escape(path)}\.(?:.*\.)?" if path else r"(?:.*\.)?"
                    self._patterns.append(re.compile(rf"{inside}{re.escape(part)}(?:\.|$)"))

    def contain(self, name: str) -> bool:
        return any(pattern.match(name) for pattern in self._patterns)


def adapter_paths(model: nn.Module) -> frozenset[str]:
    """Paths of the modules that PEFT put beside a base layer: adapters, and trainable copies."""
    found: set[str] = set()
    for path, module in model.named_modules():
        names = tuple(getattr(module, "adapter_layer_names", None) or ())
        if hasattr(module, "original_module"):
            names += ("modules_to_save",)
        for name in names:
            part = getattr(module, name, None)
            if isinstance(part, nn.Module):
                base = f"{path}.{name}" if path else name
                found.update(f"{base}.{n}" if n else base for n, _ in part.named_modules())
    return frozenset(found)
