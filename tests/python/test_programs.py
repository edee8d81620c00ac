# SPDX-License-Identifier: Apache-2.0
"""Random programs over one stowed weight: views, reads, writes and copies in any order, under any
mode. After each step every weight has the bytes and every view the values that it must have.

STOWAGE_PROGRAM_STEPS=100000 runs that many steps (`make test-all`); a failure prints the program
and how to run it again. `pytest --hypothesis-seed=N` repeats a run.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections.abc import Callable

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from programs import MODES, Alias, View, World, run
from torch import Tensor, nn

import stowage

STEPS = int(os.environ.get("STOWAGE_PROGRAM_STEPS", "600"))

STORAGES = [
    "bf16", "f8_e4m3", "f8_e5m2", "f8_e4m3:tensor", "f8_e4m3:row", "f8_e4m3:block32", "int8",
    "int8:tensor", "int8:block48", "nf4:block32", "nf4:block64", "fp4", "nf4:block64:nested",
    "nf4:torchao:block32:scaler4:f32",
]  # fmt: skip
SHAPES = [(8, 64), (16, 32), (5, 96), (6, 33), (4, 8, 16), (7,), (1, 64)]
DTYPES = [torch.float32, torch.bfloat16]


def values(shape: torch.Size, seed: int, dtype: torch.dtype, spread: float = 1.0) -> Tensor:
    """Random numbers; some rows are zeros, as those of padding are."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * spread
    if seed % 3 == 0 and made.dim():
        made[0] = 0
    return made.to(dtype)


# Views and reads take numbers that hypothesis draws, in range or not; a dense tensor says what is
# right, errors included.
def views(n: int, m: int) -> dict[str, View]:
    return {
        "detach": lambda t: t.detach(),
        "data": lambda t: t.data,
        "t": lambda t: t.t(),
        "mT": lambda t: t.transpose(-1, -2),
        "select": lambda t: t.select(n % 3, m),
        "index": lambda t: t[m],
        "slice": lambda t: t[min(n, m) : max(n, m)],
        "columns": lambda t: t[..., min(n, m) : max(n, m)],
        "strided": lambda t: t[:: max(1, n)],
        "narrow": lambda t: t.narrow(n % 2, m, 2),
        "split": lambda t: t.split(max(1, n), m % 3)[0],
        "chunk": lambda t: t.chunk(max(1, n), m % 2)[-1],
        "unbind": lambda t: t.unbind(m)[n],
        "unsqueeze": lambda t: t.unsqueeze(m),
        "squeeze": lambda t: t.squeeze(),
        "flatten": lambda t: t.flatten(),
        "view": lambda t: t.view(-1),
        "reshape": lambda t: t.view(2, -1),
        "expand": lambda t: t.expand(2, *t.shape),
        "diagonal": lambda t: t.diagonal(m),
        "permute": lambda t: t.permute(*reversed(range(t.dim()))),
        "as_strided": lambda t: t.as_strided((2, 2), (3, 1)),
    }


def reads(n: int, m: int) -> dict[str, Callable[[Tensor], object]]:
    ids = torch.tensor([abs(n), 0, abs(m)], device="cpu")
    return {
        "rows": lambda t: t[ids],
        "index_select": lambda t: t.index_select(n, ids),
        "gather": lambda t: t.gather(n, torch.zeros_like(t, dtype=torch.int64, device="cpu")),
        "cat": lambda t: torch.cat([t, t], n),
        "stack": lambda t: torch.stack([t, t], n),
        "sum": lambda t: t.sum(n),
        "amax": lambda t: t.amax(n),
        "split": lambda t: t.split(m, n),
        "chunk": lambda t: t.chunk(m, n),
        "unbind": lambda t: t.unbind(n),
        "flip": lambda t: t.flip(n),
        "roll": lambda t: t.roll(m, n),
        "cumsum": lambda t: t.cumsum(n),
        "sort": lambda t: tuple(t.sort(n, stable=True)),
        "softmax": lambda t: t.softmax(n),
        "movedim": lambda t: t.movedim(n, m).clone(),
        "add": lambda t: t + 1,
        "matmul": lambda t: torch.ones(2, t.shape[0], dtype=t.dtype, device="cpu").abs().sum(n),
        "clone": lambda t: t.clone(),
        "contiguous": lambda t: t.contiguous() * 1,
        "shape": lambda t: (t.shape, t.stride(), t.dtype, t.numel(), t.is_contiguous()),
        "item": lambda t: t.flatten()[n].item(),
        "tolist": lambda t: t[n].tolist(),
        "isnan": lambda t: t.isnan().any().item(),
        "masked": lambda t: t.masked_select(t > 0),
        "zeros_like": lambda t: torch.zeros_like(t, device="cpu"),
        "where": lambda t: torch.where(t > 0, t, -t),
    }


# A whole write names every element and reads none.
def whole_writes(seed: int) -> dict[str, Callable[[Tensor], object]]:
    def new(t: Tensor) -> Tensor:
        return values(t.shape, seed, t.dtype, 10.0 ** (seed % 5 - 2))

    def moved(t: Tensor) -> object:
        t.data = new(t)
        return t

    return {
        "copy_": lambda t: t.copy_(new(t)),
        "w[...] =": lambda t: t.__setitem__(..., new(t)),
        "w[:] =": lambda t: t.__setitem__(slice(None), new(t)),
        "zero_": lambda t: t.zero_(),
        "fill_": lambda t: t.fill_(seed % 7 - 3),
        "out=": lambda t: torch.mul(new(t), 2, out=t),
        "constant_": lambda t: nn.init.constant_(t, 0.25),
        "uniform_": lambda t: t.uniform_(generator=torch.Generator().manual_seed(seed)),
        "normal_": lambda t: nn.init.normal_(t, generator=torch.Generator().manual_seed(seed)),
        "foreach copy": lambda t: torch._foreach_copy_([t], [new(t)]),
        "data =": moved,
    }


def writes(seed: int, n: int) -> dict[str, Callable[[Tensor], object]]:
    def new(t: Tensor) -> Tensor:
        return values(t.shape, seed, t.dtype)

    return {
        "mul_": lambda t: t.mul_(-2),
        "add_": lambda t: t.add_(new(t)),
        "sub_": lambda t: t.sub_(new(t), alpha=0.5),
        "div_": lambda t: t.div_(3),
        "neg_": lambda t: t.neg_(),
        "abs_": lambda t: t.abs_(),
        "clamp_": lambda t: t.clamp_(-0.5, 0.5),
        "masked_fill_": lambda t: t.masked_fill_(new(t) > 1, 0.5),
        "w[i] =": lambda t: t.__setitem__(n, 0.75),
        "w[a:b] =": lambda t: t.__setitem__(slice(n, n + 2), 0.5),
        "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0], device="cpu"), 0.1),
        "index_copy_": lambda t: t.index_copy_(0, torch.tensor([0], device="cpu"), new(t)[:1]),
        "foreach mul": lambda t: torch._foreach_mul_([t], 2.0),
        "pow_": lambda t: t.pow_(2),
        "cumsum_": lambda t: t.cumsum_(0),
        "lerp_": lambda t: t.lerp_(new(t), 0.25),
        "tanh_": lambda t: t.tanh_(),
        "flip": lambda t: t.copy_(t.flip(0)),
        "t.t()": lambda t: t.t().copy_(new(t).t()),
    }


def _pickled(weight: Tensor) -> Tensor:
    return pickle.loads(pickle.dumps(weight))


def _saved(weight: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": _pickled,
    "torch.save": _saved,
    "clone": lambda t: t.clone(),
    "to copy": lambda t: t.to(t.dtype, copy=True),
}

SMALL = st.integers(-3, 6)
SEEDS = st.integers(0, 1000)
NAMES = st.sampled_from(sorted(MODES))


class Weights(RuleBasedStateMachine):
    """A weight, its copies, and views of them all."""

    @initialize(
        storage=st.sampled_from(STORAGES),
        shape=st.sampled_from(SHAPES),
        dtype=st.sampled_from(DTYPES),
        exact=st.booleans(),
        seed=SEEDS,
    )
    def begin(
        self, storage: str, shape: tuple[int, ...], dtype: torch.dtype, exact: bool, seed: int
    ) -> None:
        self.world = World()
        try:
            weight = stowage.quantize(values(torch.Size(shape), seed, dtype), storage, exact=exact)
        except stowage.InvalidArgument:  # this storage has no such shape
            weight = stowage.quantize(values(torch.Size(shape), seed, dtype), "f8_e4m3:tensor")
        self._enter(nn.Parameter(weight, requires_grad=False))

    def _enter(self, weight: Tensor) -> None:
        cell = self.world.add(weight)
        self.world.aliases.append(Alias(weight, cell, lambda t: t))

    def _pick(self, which: int) -> Alias:
        return self.world.aliases[which % len(self.world.aliases)]

    @rule(which=SEEDS, name=st.sampled_from(sorted(views(0, 0))), n=SMALL, m=SMALL, mode=NAMES)
    def view(self, which: int, name: str, n: int, m: int, mode: str) -> None:
        alias, make = self._pick(which), views(n, m)[name]
        if mode == "inference" or len(self.world.aliases) > 12:
            return  # tensors made in inference mode take no further part in autograd's
        try:
            make(alias.view(alias.cell.values()))
        except Exception:
            self.world.read(alias, make)
            return
        with MODES[mode]():
            seen = make(alias.tensor)
        chain = alias.view
        if hasattr(seen, "dequantize") and type(seen) is not Tensor:
            entry = Alias(seen, alias.cell, lambda t: make(chain(t)), alias.counted)
            self.world.aliases.append(entry)

    @rule(which=SEEDS, name=st.sampled_from(sorted(reads(0, 0))), n=SMALL, m=SMALL, mode=NAMES)
    def read(self, which: int, name: str, n: int, m: int, mode: str) -> None:
        def function(t: Tensor) -> object:
            with MODES[mode]():
                return reads(n, m)[name](t)

        self.world.read(self._pick(which), function)

    def _write(self, which: int, function: Callable[[Tensor], object], mode: str, whole: bool):
        alias = self._pick(which)

        def call(t: Tensor) -> None:
            with MODES[mode](), torch.no_grad():
                function(t)

        try:
            call(alias.view(alias.cell.values().clone()))
        except Exception:
            return  # nothing that a dense tensor takes; reads compare errors
        self.world.write(alias, call, whole, moves=mode != "inference")

    @rule(which=SEEDS, name=st.sampled_from(sorted(whole_writes(0))), seed=SEEDS, mode=NAMES)
    def write_all(self, which: int, name: str, seed: int, mode: str) -> None:
        alias = self._pick(which)
        if name == "data =" and alias.tensor is not alias.cell.weight:
            return
        self._write(which, whole_writes(seed)[name], mode, whole=True)

    @rule(which=SEEDS, name=st.sampled_from(sorted(writes(0, 0))), seed=SEEDS, n=SMALL, mode=NAMES)
    def write_some(self, which: int, name: str, seed: int, n: int, mode: str) -> None:
        self._write(which, writes(seed, n)[name], mode, whole=False)

    @rule(which=SEEDS, how=st.sampled_from(sorted(COPIES)))
    def copy(self, which: int, how: str) -> None:
        alias = self._pick(which)
        if len(self.world.cells) > 4:
            return
        made = COPIES[how](alias.tensor)
        if isinstance(made, stowage.StowedTensor):
            wanted = alias.view(alias.cell.values(made.dtype))
            assert torch.equal(made.dequantize(), wanted)
            self._enter(made)

    @rule()
    def copy_together(self) -> None:
        """Views of a weight that is copied with them are views of the copy."""
        every = [(a.tensor, a.cell.weight) for a in self.world.aliases]
        copied = copy.deepcopy(every)
        world = World()
        cells: dict[int, int] = {}
        for (tensor, weight), alias in zip(copied, self.world.aliases, strict=True):
            if id(weight) not in cells:
                cells[id(weight)] = len(world.cells)
                world.add(weight)
            cell = world.cells[cells[id(weight)]]
            cell, counted = world.cells[cells[id(weight)]], tensor is weight
            world.aliases.append(Alias(tensor, cell, alias.view, counted))
        self.world.check()
        self.world = world

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()


@pytest.mark.slow
@pytest.mark.timeout(0 if STEPS > 1000 else 300)
def test_random_programs_over_weights() -> None:
    run(Weights, STEPS)
