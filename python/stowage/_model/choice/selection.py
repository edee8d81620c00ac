# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model rest, and as what: what is skipped, rules by pattern, and the defaults.
Decides by names and types; `by_error.py` by measured errors. docs/loading.md and choosing.md state
the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from stowage._model.choice.skips import HEADS, NO_SKIPS, ROUTERS, Skip, Skips, contained
from stowage._model.declared import (
    UncastPlaces,
    WidePlaces,
    adapter_paths,
    cannot_rest,
    is_narrow,
    too_narrow,
)
from stowage._model.patterns import ByPattern, Pattern, check, label, matches, near_misses
from stowage._model.weights import LAZY, Candidates, Choice, Held, Inventory, Site
from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument, StowageError
from stowage._ops.storage import Storage

# What a weight may rest as: one storage, None (plain), or several of them to choose from.
Wish = str | Storage | None | Sequence["str | Storage | None"]
Rules = ByPattern[Wish]

# Parts that PEFT adds to the path of what it wraps.
_WRAPPERS = frozenset({"base_layer", "original_module"})
WEIGHT_TYPES: tuple[type[nn.Module], ...] = (nn.Linear, nn.Embedding, _torch.ConvNd)


@dataclass(frozen=True)
class Selection:
    """Rules in order, the storages of what no rule names and the defaults select, and what stays
    plain whatever they say."""

    rules: tuple[tuple[Pattern, Candidates], ...]
    default: Candidates
    skips: Skips = NO_SKIPS
    allow_unmatched: bool = False

    @classmethod
    def parse(
        cls,
        storage: Wish,
        rules: Rules | None = None,
        skip: Skip = None,
        allow_unmatched: bool = False,
    ) -> Selection:
        """Raises InvalidArgument for every misspelt storage at once, with the legal ones."""
        if isinstance(storage, Mapping):
            raise InvalidArgument(
                "stowage: rules must come as rules=, got a mapping in the place of the storage"
            )
        if not isinstance(rules, Mapping | None):
            raise InvalidArgument(
                f"stowage: rules must be a mapping of patterns to storages, got {rules!r}"
            )
        given = list((rules or {}).items())
        for key, _ in given:
            check(key, "a rule")
        parsed, errors = [], []
        for value in [*(value for _, value in given), storage]:
            try:
                parsed.append(_candidates(value))
            except StowageError as error:
                errors.append(error)
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise InvalidArgument("\n".join(dict.fromkeys(map(str, errors))))
        *ordered, default = parsed
        pairs = tuple((key, to) for (key, _), to in zip(given, ordered, strict=True))
        return cls(pairs, default, Skips.parse(skip), allow_unmatched)

    @property
    def empty(self) -> bool:
        """Whether it lets nothing rest."""
        return not self.rules and self.default == (None,)

    @property
    def several(self) -> bool:
        """Whether some weight has a list of storages to choose from."""
        return any(len(wanted) > 1 for wanted in (self.default, *(to for _, to in self.rules)))

    def choices(self, inventory: Inventory, with_buffers: bool = False) -> list[Choice]:
        """One for each parameter, tied ones once, and with `with_buffers` for each buffer."""
        model, every = inventory.model, inventory.parameters
        asked = inventory.buffers if with_buffers else []
        places = _Places(model, self.skips.settled(model), self._narrow_rules([*every, *asked]))
        chosen = [self._named(held, places) or self._unruled(held, places) for held in every]
        left = "the defaults take parameters, this is a buffer"
        return chosen + [self._named(held, places) or Choice(held, None, left) for held in asked]

    def _named(self, held: Held, places: _Places) -> Choice | None:
        site = deciding_site(held)
        skipped = places.skips.reason(held, site)
        if skipped:
            return Choice(held, None, skipped)
        named = self._rule(site)
        if named is None:
            return None
        key, wanted = named
        if wanted[0] is None:
            return Choice(held, None, f"rule {label(key)} keeps it plain")
        unfit = [obstacle_to(held, key, storage, places.narrow) for storage in wanted]
        fit = [storage for storage, why in zip(wanted, unfit, strict=True) if not why]
        if not fit or fit[0] is None:
            return Choice(held, None, unfit[0])
        return Choice(held, fit[0], f"rule {label(key)}", tuple(fit[1:]))

    def _unruled(self, held: Held, places: _Places) -> Choice:
        if self.default[0] is None:
            return Choice(held, None, "no rule names it")
        refusal = default_refusal(deciding_site(held), places) or cannot_rest(held)
        if not refusal and is_narrow(held):
            refusal = "fewer than two dimensions"
        if refusal:
            return Choice(held, None, refusal)
        return Choice(held, self.default[0], "", self.default[1:])

    def _narrow_rules(self, every: list[Held]) -> frozenset[Pattern]:
        """The keys that match nothing of two or more dimensions, so that biases, norms and other
        narrow tensors are what they mean."""
        broad = {
            key
            for key, _ in self.rules
            if any(matches(key, site) for h in every if not is_narrow(h) for site in h.sites)
        }
        return frozenset(key for key, _ in self.rules) - broad

    def _rule(self, site: Site) -> tuple[Pattern, Candidates] | None:
        for key, wanted in self.rules:
            if matches(key, site):
                return key, wanted
        return None

    def idle_rules(self, choices: list[Choice]) -> list[str]:
        """A sentence for each pattern that matches no parameter of the model, nearly always a
        misspelt name, and each rule that matches none that can rest; none with `allow_unmatched`.
        """
        if self.allow_unmatched:
            return []
        found, every = [], [name for c in choices for name in c.held.names]
        narrow = self._narrow_rules([c.held for c in choices])
        for pattern in self.skips.patterns:
            if not any(contained(pattern, s) for c in choices for s in c.held.sites):
                found.append(f"skip {_unmatched(pattern, every)}")
        for key, wanted in self.rules:
            hit = [c.held for c in choices if any(matches(key, site) for site in c.held.sites)]
            storage = wanted[0]
            if not hit:
                found.append(f"rule {_unmatched(key, every)}")
            elif storage is not None:
                reasons = [
                    [obstacle_to(held, key, one, narrow) for one in wanted if one] for held in hit
                ]
                if all(map(all, reasons)):
                    found.append(
                        f"rule {label(key)}: must match a weight that can rest as {storage.name}, "
                        f"matches only such as {hit[0].name} ({reasons[0][0]})"
                    )
        return found


class _Places:
    """What a selection asks of a model, looked up once."""

    def __init__(self, model: nn.Module, skips: Skips, narrow: frozenset[Pattern]) -> None:
        self.skips, self.narrow = skips, narrow
        self.adapters, self.wide = adapter_paths(model), WidePlaces(model)
        self.uncast = UncastPlaces(model)


def obstacle_to(
    held: Held, key: Pattern, storage: Storage | None, narrow: frozenset[Pattern]
) -> str:
    """Why the rule cannot let `held` rest; "" if it can."""
    if cannot := cannot_rest(held):
        return cannot
    if is_narrow(held) and key not in narrow:
        return "fewer than two dimensions; a rule that matches nothing wider would take it"
    return too_narrow(held, storage) if storage is not None else ""


def _unmatched(pattern: Pattern, names: list[str]) -> str:
    near = near_misses(pattern, names)
    return f"{label(pattern)}: must match a parameter of the model, matches none{near}"


def _candidates(value: object) -> Candidates:
    if isinstance(value, list | tuple):
        if not value or None in value[:-1]:
            raise InvalidArgument(
                f"stowage: a list of storages must have one, and None only at its end, got {value}"
            )
        return tuple(dict.fromkeys(_storage(one) for one in value))
    return (_storage(value),)


def _storage(value: object) -> Storage | None:
    if value is None or isinstance(value, str | Storage):
        return None if value is None else Storage.parse(value)
    raise InvalidArgument(
        f"stowage: a storage must be a string such as 'f8_e4m3', or None, got {value!r}"
    )


def deciding_site(held: Held) -> Site:
    """A tied weight is judged where an embedding holds it, else where it comes first."""
    for site in held.sites:
        if isinstance(site.module, nn.Embedding):
            return site
    return held.sites[0]


def default_refusal(site: Site, places: _Places) -> str:
    """Why the defaults leave the parameter at `site` plain; "" if they select it."""
    kind = type(site.module).__name__
    if not isinstance(site.module, WEIGHT_TYPES):
        return f"the defaults take Linear, Embedding and Conv weights, this belongs to {kind}"
    if site.attribute != "weight":
        return f"the defaults take parameters named weight, this is {site.attribute}"
    if is_head(site.path):
        return "a head; name it in a rule to stow it"
    if is_router(site):
        return "a router; name it in a rule to stow it"
    if places.wide.contain(site.name):
        return "the model lists it in _keep_in_fp32_modules"
    uncast = places.uncast.pattern_of(site.path)
    if uncast:
        return f"the model lists it in _skip_layerwise_casting_patterns ({uncast!r})"
    if site.path in places.adapters:
        return "an adapter, or a copy that trains"
    return ""


def is_head(path: str) -> bool:
    """Whether the module at `path` is one of HEADS; the root never is."""
    return _last_part(path) in HEADS


def is_router(site: Site) -> bool:
    """Whether the weight at `site` is that of one of ROUTERS, which has at most a fourth as many
    rows as columns: layers of gated MLPs that are called `gate` have more."""
    if _last_part(site.path) not in ROUTERS:
        return False
    weight = getattr(site.module, site.attribute)
    if isinstance(weight, LAZY) or weight.dim() != 2:
        return False
    rows, columns = weight.shape
    return bool(rows * 4 <= columns)


def _last_part(path: str) -> str:
    parts = path.split(".")
    while len(parts) > 1 and parts[-1] in _WRAPPERS:
        parts.pop()
    return parts[-1]
