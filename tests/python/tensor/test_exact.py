# SPDX-License-Identifier: Apache-2.0
"""exact=True is bit-equal to the dense model that holds the dequantized weights, each mode against
the same mode, compiled against compiled, in every storage and compute dtype."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from storages import covering, flat_shapes, form_of_each
from torch import Tensor, nn

import stowage
from stowage._ops.library import composite_forced

pytestmark = pytest.mark.skipif(composite_forced(), reason="stock ops have no bf16 products")

EVERY = [*covering(form_of_each, flat_shapes), "f8_e4m3:row", "f8_e5m2:tensor", "int8:block32"]
EVERY += ["int3:block8:bf16", "int6:row:zero"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MODES: dict[str, Callable[[], Any]] = {
    "eager": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


class Model(nn.Module):
    """The ops of ours, with a bias and without, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 72)
        self.conv = nn.Conv1d(72, 40, 3, padding=1)
        self.up, self.down = nn.Linear(40, 136), nn.Linear(136, 40, bias=False)
        self.mix = nn.Parameter(torch.randn(40, 40) / 6)

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.conv(self.embed(ids).mT * scale).mT
        x = self.down(torch.relu(self.up(x)))
        return x @ self.mix + x @ self.mix.t()


def pair(storage: str, dtype: torch.dtype) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model().to(dtype)
    stowage.stow(model, rules={"*": storage}, exact=True)
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    return model, twin


def outcome(model: Any, mode: str, ids: Tensor, dtype: torch.dtype) -> list[Tensor]:
    grad = mode in ("eager", "autocast")
    scale = torch.ones((), dtype=dtype, requires_grad=grad)
    with MODES[mode]():
        y = model(ids, scale)
    if not grad:
        return [y]
    y.float().square().mean().backward()
    assert scale.grad is not None
    return [y.detach(), scale.grad]


def check(model: Any, twin: Any, mode: str, dtype: torch.dtype, batches: tuple[int, ...]) -> None:
    for batch in batches:
        ids = torch.arange(batch * 4).remainder(32).view(batch, 4)
        found = outcome(model, mode, ids, dtype), outcome(twin, mode, ids, dtype)
        for got, wanted in zip(*found, strict=True):
            assert got.dtype == wanted.dtype and torch.equal(got, wanted), (mode, batch)


SHORT = ["f8_e4m3", "f8_e4m3:row", "int8:block32", "bf16", "nf4", "nf4:block64:nested", "fp4"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "storage", [s if s in SHORT else pytest.param(s, marks=pytest.mark.nightly) for s in EVERY]
)
def test_each_mode_is_that_of_the_dense_model(storage: str, dtype: torch.dtype) -> None:
    model, twin = pair(storage, dtype)
    for mode in MODES:
        check(model, twin, mode, dtype, (1, 9))


def test_autocast_rounds_an_exact_weight_as_often_as_a_dense_one() -> None:
    """To its own 16-bit dtype, then to autocast's; a cast that the caller writes stays at rest."""
    model, twin = pair("nf4", torch.bfloat16)
    x = torch.randn(3, 40, dtype=torch.bfloat16)
    for cast in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", cast):
            y, wanted = model.up(x), twin.up(x)
            assert y.dtype is cast and torch.equal(y, wanted)
            assert torch.equal(x @ model.mix.t(), x @ twin.mix.t())
            assert type(model.up.weight.half()) is stowage.StowedTensor
            model.to(cast)
        assert type(model.up.weight) is stowage.StowedTensor and model.up.weight.dtype is cast
        model.to(torch.bfloat16)


def compiled(model: nn.Module, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, backend=backend, fullgraph=True, dynamic=True)


@pytest.mark.parametrize(
    ("storage", "mode"),
    [("f8_e4m3:row", "eager"), ("nf4", "inference_mode")],
)
def test_compiled_is_the_dense_model_compiled(storage: str, mode: str) -> None:
    model, twin = pair(storage, torch.float32)
    pairs = compiled(model, "aot_eager"), compiled(twin, "aot_eager")
    check(*pairs, mode, torch.float32, (2, 9))


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("storage", EVERY)
def test_every_compiled_storage_is_the_dense_one(storage: str, mode: str) -> None:
    dtype = DTYPES[(EVERY.index(storage) + [*MODES].index(mode)) % 3]
    model, twin = pair(storage, dtype)
    pairs = compiled(model, "aot_eager"), compiled(twin, "aot_eager")
    check(*pairs, mode, dtype, (2, 9))


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["f8_e4m3:row", pytest.param("nf4", marks=pytest.mark.nightly)])
def test_inductor_is_the_dense_linear_by_inductor(storage: str) -> None:
    """Of the linear layers alone: what Inductor fuses around them it rounds as it likes."""
    torch.manual_seed(0)
    model = nn.Linear(72, 40)
    stowage.stow(model, storage, exact=True)
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    with torch.inference_mode():
        fast = compiled(model, "inductor"), compiled(twin, "inductor")
        for rows in (2, 9, 40):
            x = torch.randn(rows, 72)
            assert torch.equal(fast[0](x), fast[1](x))
            assert torch.equal(fast[0](x), model(x))


class Strided(nn.Module):
    """A product, given an input with other strides than a contiguous one."""

    def __init__(self, product: str) -> None:
        super().__init__()
        self.product = product
        self.layer = nn.Linear(64, 96, bias=product == "biased")
        self.gate = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mT.contiguous().mT
        if self.product == "gate":
            return x @ self.gate
        return x @ self.gate.t() if self.product == "transposed" else self.layer(x)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(10, 64), (2, 5, 64)], ids=str)
@pytest.mark.parametrize("product", ["plain", "biased", "gate", "transposed"])
def test_strides_choose_the_dense_product(
    product: str, shape: tuple[int, ...], threads: int
) -> None:
    torch.manual_seed(0)
    model = Strided(product)
    stowage.stow(model, rules={"*": "f8_e4m3:row"}, exact=True)
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        values = torch.randn(shape)
        g = torch.randn(model(values).shape)
        for cotangent in (g, g.mT.contiguous().mT):
            found = []
            for one in (model, twin):
                x = values.clone().requires_grad_()
                y = one(x)
                y.backward(cotangent)
                assert x.grad is not None
                found.append((y.detach(), x.grad))
            assert torch.equal(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])
    finally:
        torch.set_num_threads(before)
