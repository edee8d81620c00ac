# SPDX-License-Identifier: Apache-2.0
"""Arguments made wrong, by the type that an op's schema gives them."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from scenes import COMPUTE, STORAGES, VALUES
from torch import Tensor

from stowage._ops.storage import Storage

_HUGE = (2**31 - 1, 2**31, 2**40, 2**50, 2**62, 2**63 - 1)
_EDGES = (0, 1, 2, 3, 7, 8, 9, 64, 257, -1, -2, *_HUGE, *(-h for h in _HUGE), -(2**63))
_DTYPES = (
    *VALUES, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
    torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex32, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.float8_e4m3fnuz,
)  # fmt: skip
_NODES = (None, True, 0, -1, 1.5, 1e308, 2**63, 2**64, "", "x", [], [[]], {}, [0, 0])
_TEXTS = ("", "\0", "a\0b", "[" * 20000, "{}", "[]", "null", "1e999", "\u20ac", '{"a":1,"a":2}')


def _ranked(t: Tensor, random: Random) -> Tensor:
    """The same elements in another number of dimensions, 0 to 12."""
    wanted = random.randint(0, 12)
    while t.dim() < wanted:
        t = t.unsqueeze(random.randint(0, t.dim()))
    while t.dim() > wanted:
        t = t.flatten(0, 1) if t.dim() > 1 else t.reshape(-1)[:1].reshape(())
    return t


def _resized(t: Tensor, random: Random) -> Tensor:
    if not t.dim():
        return t.reshape(1)
    dim = random.randrange(t.dim())
    size = t.shape[dim]
    return t.narrow(
        dim, 0, random.choice([n for n in (0, 1, size - 1, size // 2) if 0 <= n <= size])
    )


def _longer(t: Tensor, random: Random) -> Tensor:
    return torch.cat([t, t], random.randrange(t.dim())) if t.dim() else t.repeat(2)


def _expanded(t: Tensor, random: Random) -> Tensor:
    return t.expand(random.choice((0, 1, 2, 3, 2**50)), *t.shape)


def _strided(t: Tensor, random: Random) -> Tensor:
    """Overlapping, or with strides of 0."""
    sizes = [random.randint(0, 3) for _ in range(random.randint(0, 12))]
    if random.random() < 0.5:
        sizes = list(t.shape)
    return t.as_strided(sizes, [random.choice((0, 0, 1)) for _ in sizes]) if t.numel() else t


def _spread(t: Tensor, random: Random) -> Tensor:
    """Equal, but every second element of a larger tensor, or transposed in memory."""
    if t.dim() > 1 and random.random() < 0.5:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    return torch.stack([t, t], -1)[..., 1]


def _misaligned(t: Tensor, random: Random) -> Tensor:
    """Equal, at an address that only its element is aligned to."""
    return torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape) if t.numel() else t


def released(t: Tensor, random: Random) -> Tensor:
    copy = t.clone()
    copy.untyped_storage().resize_(random.choice((0, 0, copy.untyped_storage().nbytes() // 2)))
    return copy


def _noise(t: Tensor, random: Random) -> Tensor:
    """Any bits at all, in the same sizes."""
    return (
        torch.randint(256, (t.numel() * t.element_size(),), dtype=torch.uint8)
        .view(t.dtype)
        .view(t.shape)
    )


def _emptied(t: Tensor, random: Random) -> Tensor:
    sizes = [random.choice((0, 1, 5, 2**31, 2**40)) for _ in range(random.randint(1, 12))]
    sizes[0] = 0
    empty = torch.empty(sizes, dtype=t.dtype)
    return empty.permute(random.sample(range(len(sizes)), len(sizes)))


def _negated(t: Tensor, random: Random) -> Tensor:
    if random.random() < 0.5 and t.dtype in (torch.float32, torch.float64):
        return torch.complex(t, t).conj().imag
    return torch._neg_view(t)


_TENSORS: tuple[Callable[[Tensor, Random], Tensor], ...] = (
    _ranked, _resized, _longer, _expanded, _strided, _spread, _misaligned, released, _noise,
    _emptied, _negated,
    lambda t, r: t.to(r.choice(_DTYPES)),
    lambda t, r: t.view(r.choice([d for d in _DTYPES if d.itemsize == t.element_size()])),
    lambda t, r: t.to("meta"),
    lambda t, r: t.flip(list(range(t.dim()))),
    lambda t, r: torch.full_like(t, r.choice((0, 255, 1e38, -1, float("inf"), float("nan")))),
    lambda t, r: t.to_sparse(),
    lambda t, r: torch.nn.Parameter(t, t.is_floating_point()),
    lambda t, r: torch.empty(0),
    lambda t, r: torch.randn(r.randint(1, 70), r.randint(1, 70)).to(r.choice(COMPUTE)),
    lambda t, r: torch.empty([1] * r.choice((9, 64, 65, 200)), dtype=t.dtype),
)  # fmt: skip


def tensor(t: Tensor, random: Random) -> Tensor:
    how = random.choice(_TENSORS)
    try:
        return how(t, random)
    except (RuntimeError, NotImplementedError):
        return t  # torch has no such form of it


def integer(n: int, random: Random) -> int:
    near = (n + 1, n - 1, n * 2, -n, n ^ 1 << random.randrange(62))
    far = (*_EDGES, Storage(random.choice(STORAGES)).key, random.getrandbits(62))
    return max(-(2**63), min(2**63 - 1, random.choice(near if random.random() < 0.5 else far)))


def integers(given: list[int], random: Random) -> list[int]:
    if not given or random.random() < 0.3:
        return [random.choice((*_EDGES, 1, 1, 1)) for _ in range(random.randint(0, 12))]
    bent, at = list(given), random.randrange(len(given))
    bent[at] = integer(bent[at], random)
    return bent if random.random() < 0.7 else bent[:at] + bent[at + 1 :]


def tensors(given: list[Tensor], random: Random) -> list[Tensor]:
    bent = list(given)
    if bent and random.random() < 0.6:
        at = random.randrange(len(bent))
        bent[at] = tensor(bent[at], random)
        return bent
    return random.choice((bent[1:], bent * 2, [*bent, torch.ones(3)], bent * 90, bent[::-1]))


def _in_json(node: Any, random: Random) -> Any:
    """One value of a document, or one key, is another."""
    if isinstance(node, dict | list) and node and random.random() < 0.85:
        at = random.choice(list(node)) if isinstance(node, dict) else random.randrange(len(node))
        if isinstance(node, dict) and random.random() < 0.1:
            return {k: v for k, v in node.items() if k != at}
        node[at] = _in_json(node[at], random)
        return node
    return random.choice(
        (None, True, 0, -1, 1.5, 1e308, 2**63, 2**64, "", "x", [], [[]], {}, [0, 0])
    )


def text(given: str, random: Random) -> str:
    try:
        document = json.loads(given)
    except ValueError:
        document = None
    if document is not None and random.random() < 0.7:
        return json.dumps(_in_json(document, random))
    at = random.randrange(len(given) + 1)
    return random.choice(
        (*_TEXTS, given[:at], given[:at] + chr(random.randrange(256)) + given[at:])
    )


def bent(kind: str, given: Any, random: Random) -> Any:
    """`given` made wrong, as an argument of the schema's type `kind`."""
    if kind == "Optional[Tensor]":
        return (
            None
            if random.random() < 0.3
            else tensor(torch.ones(3) if given is None else given, random)
        )
    if kind == "Tensor":
        return tensor(given, random)
    if kind == "List[Tensor]":
        return tensors(given, random)
    if kind in ("int", "SymInt"):
        return integer(given, random)
    if kind in ("List[int]", "List[SymInt]"):
        return integers(list(given), random)
    if kind == "bool":
        return not given
    if kind == "float":
        return random.choice((0.0, -1.0, 1e-300, 1e300, float("inf"), float("nan")))
    if kind == "str":
        return text(given, random)
    if kind == "ScalarType":
        return random.choice(_DTYPES)
    raise AssertionError(f"no rule for arguments of type {kind}")
