# SPDX-License-Identifier: Apache-2.0
"""torch's FlopCounterMode counts for a stowed model what it counts for the dense one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import stowage
from stowage._tensor.products import convolution, grouped

NO_PRODUCTS = {  # of the ops on weights
    "quantize", "dequantize", "embedding", "amax", "measure", "engine_want",
    "engine_together",
}  # fmt: skip


def counted(model: nn.Module, x: Tensor, need_x: bool) -> tuple[int, int]:
    """Of the forward, and of all."""
    given = x.clone().requires_grad_(need_x)
    with FlopCounterMode(display=False) as forward:
        y = model(given)
    with FlopCounterMode(display=False) as backward:
        if y.requires_grad:
            y.sum().backward()
    return forward.get_total_flops(), backward.get_total_flops()


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32, bias=False))


def conv() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.ConvTranspose2d(8, 4, 3, groups=2)
    )


def large_conv() -> nn.Module:
    """Weights of more than a tile."""
    return nn.Sequential(nn.Conv1d(520, 680, 3, padding=1), nn.ConvTranspose1d(680, 520, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (mlp, (3, 5, 64)),
    "conv": (conv, (2, 3, 9, 9)),
    "large conv": (large_conv, (1, 520, 12)),
    "encoder": (lambda: nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), (2, 6, 32)),
}


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("storage", ["f8_e4m3", "int8", "nf4:block64:nested"])
@pytest.mark.parametrize("name", MODELS)
def test_as_many_as_the_dense_twin(name: str, storage: str, exact: bool, trains: bool) -> None:
    make, shape = MODELS[name]
    pair = [make(), make()]
    stowage.stow(pair[0], storage, exact=exact)
    for model in pair:
        for parameter in model.parameters():
            rests = parameter.dim() > 1
            parameter.requires_grad_(trains and not (model is pair[0] and rests))
    for mine, theirs in zip(pair[0].parameters(), pair[1].parameters(), strict=True):
        theirs.requires_grad_(mine.requires_grad)
    x = torch.randn(shape)
    wanted = counted(pair[1], x, need_x=True)
    assert wanted[0] > 0 and wanted[1] > 0
    assert counted(pair[0], x, need_x=True) == wanted


def test_a_compiled_model_counts_as_its_dense_twin() -> None:
    """torch runs it eagerly while a mode of dispatch is active, so there is no graph to ask for."""
    totals = []
    for stow in (False, True):
        torch.manual_seed(0)
        model = mlp()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        if stow:
            stowage.stow(model, "int8")
        compiled = torch.compile(model, backend="aot_eager")
        x = torch.randn(3, 64)
        compiled(x)
        totals.append(counted(compiled, x, need_x=True))
    assert totals[0] == totals[1] and totals[0][0] > 0


def test_every_product_has_a_formula() -> None:
    assert convolution.convolution and grouped.grouped  # they are defined
    packets = [getattr(torch.ops.stowage, name.removeprefix("stowage::"))
               for name in torch._C._dispatch_get_all_op_names()
               if name.startswith("stowage::")]  # fmt: skip
    on_weights = {str(packet) for packet in packets
                  if any(a.name == "codes" for a in packet.default._schema.arguments)}  # fmt: skip
    counted = {str(packet) for packet in flop_registry if str(packet).startswith("stowage.")}
    assert on_weights - {f"stowage.{name}" for name in NO_PRODUCTS} == counted
