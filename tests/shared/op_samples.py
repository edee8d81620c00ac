# SPDX-License-Identifier: Apache-2.0
"""Arguments for any operator of torch's registry, drawn from its schema by a seed.

A sample holds WEIGHT where the operator gets the weight, so that the same call can be made with a
stowed tensor and with its dense twin. Samples are often refused by the operator: what counts is
that both refuse alike.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

WEIGHT: Any = type("Weight", (), {"__repr__": lambda self: "WEIGHT"})()

# They end the process, or hang, or read memory for wrong arguments of plain tensors; take functions
# or storages; or serve another device.
_UNSAFE = ("_", "set_", "fbgemm", "mkldnn", "cudnn", "miopen", "quantize", "fake_quant", "fft")
_UNSAFE_ALSO = (
    "backward",
    "sparse",
    "nested",
    "record_stream",
    "resize",
    "retain_grad",
    "requires_grad_",
)
_TEXTS = {"reduce": ("sum", "add", "mean", "amax"), "mode": ("reduce",), "indexing": ("ij",)}
_INDICES = ("index", "indices", "mask", "condition")


class Sample(NamedTuple):
    """One call of an operator."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, weight: Tensor) -> Any:
        """Calls it with `weight`; other tensors are copies, since it may write to them."""

        def filled(leaf: Any) -> Any:
            return weight if leaf is WEIGHT else leaf.clone() if type(leaf) is Tensor else leaf

        torch.manual_seed(0)
        args, kwargs = tree_map(filled, (self.args, self.kwargs))
        return self.op(*args, **kwargs)


def operators(wanted: Callable[[Any], bool]) -> list[Any]:
    """Overloads of torch's own operators whose schema is `wanted`, by name."""
    found = []
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space != "aten" or name.startswith(_UNSAFE) or any(u in name for u in _UNSAFE_ALSO):
            continue
        packet = getattr(torch.ops.aten, name, None)
        overload = schema.overload_name or "default"
        if any(str(a.type) in ("t", "List[t]") for a in schema.arguments):
            continue  # TorchScript's own
        if packet is not None and overload in packet.overloads() and wanted(schema):
            found.append(getattr(packet, overload))
    return sorted(set(found), key=str)


def written(schema: Any) -> list[str]:
    """The tensors that an operator writes, by its schema."""
    marked = (a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [a.name for a in marked if "Tensor" in str(a.type)]


def draw(op: Any, shape: tuple[int, ...], seed: int) -> Sample:
    """A call of `op`: the weight, of this shape, is what it writes, or else its first tensor."""
    rng, schema = random.Random(f"{op} {seed}"), op._schema
    of_tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    place = (written(schema) or of_tensors)[0]
    args, kwargs, omitted = [], {}, False
    for argument in schema.arguments:
        optional = argument.has_default_value() and argument.name != place
        skip = optional and rng.random() < 0.5
        if skip or (omitted and not argument.kwarg_only):
            omitted = omitted or not argument.kwarg_only
            continue
        value = _value(argument, shape, argument.name == place, rng)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return Sample(op, tuple(args), kwargs)


def samples(op: Any, shape: tuple[int, ...], count: int) -> Iterator[Sample]:
    """Calls that differ."""
    seen = set()
    for seed in range(count):
        sample = draw(op, shape, seed)
        if (known := repr((sample.args, sample.kwargs))) not in seen:
            seen.add(known)
            yield sample


def _value(argument: Any, shape: tuple[int, ...], is_weight: bool, rng: random.Random) -> Any:
    kind, name = str(argument.type), argument.name
    if name in ("layout", "memory_format", "device", "pin_memory", "generator"):
        return None
    if name.endswith("dtype"):
        return rng.choice([torch.float32, torch.float64])
    if kind.startswith("Optional") and rng.random() < 0.3:
        return None
    kind = kind.removeprefix("Optional[").removesuffix("]") if kind[0] == "O" else kind
    if "Tensor" in kind:
        made = WEIGHT if is_weight else _tensor(name, shape, rng)
        if kind == "Tensor":
            return made
        return [made, *(_tensor(name, shape, rng) for _ in range(rng.randrange(2)))]
    if kind.startswith("List[") and ("int" in kind or "Int" in kind):
        return [_integer(name, shape, rng) for _ in range(rng.randrange(1, len(shape) + 2))]
    if kind.startswith("List["):
        return []
    if kind in ("int", "SymInt"):
        return _integer(name, shape, rng)
    if kind == "str":
        return rng.choice(_TEXTS.get(name, ("none",)))
    plain = {"float": (0.5, 1.0, 2.0), "number": (2, 0.5, 1.0), "bool": (False, True)}
    return rng.choice(plain[kind]) if kind in plain else None


def _integer(name: str, shape: tuple[int, ...], rng: random.Random) -> int:
    rank = len(shape)
    if "dim" in name or name in ("axis", "source", "destination"):
        return rng.choice([*range(-rank, rank), 0, rank, -rank - 1, rank + 1])
    if "size" in name or name in ("shape", "repeats"):
        return rng.choice([*shape, 1, 2, -1, 0])
    return rng.choice([0, 1, 2, -1, -2, shape[0], shape[-1] - 1])


def _tensor(name: str, shape: tuple[int, ...], rng: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if "mask" in name or name == "condition":
        return torch.rand(shape, generator=generator) > rng.choice([0.5, -1.0])
    if name in _INDICES or "ind" in name:
        sizes = rng.choice([(1,), (2,), (shape[0],), shape])
        bound = rng.choice([min(shape), max(shape), max(shape) + 1])
        return torch.randint(0, bound, sizes, generator=generator)
    values = torch.randn(rng.choice([shape, shape, shape[-1:], ()]), generator=generator)
    return 100 * values if rng.random() < 0.5 else values
