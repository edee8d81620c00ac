# SPDX-License-Identifier: Apache-2.0
"""Defects of diffusers' layerwise casting, each as the same call on our facade. The numbers are
those of tests/python/test_peer_defects.py; the first line of each test says what went wrong there.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn

import stowage
from stowage.compat.diffusers import (
    disable_layerwise_casting,
    enable_layerwise_casting,
    patched,
)
from stowage.compat.diffusers.hooks import apply_layerwise_casting

modeling = pytest.importorskip("diffusers.models.modeling_utils")
configuration = pytest.importorskip("diffusers.configuration_utils")
E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


class Model(modeling.ModelMixin, configuration.ConfigMixin):  # type: ignore[misc,name-defined]
    """What the rows were reproduced on: a few layers, and a norm that is skipped."""

    config_name = "config.json"

    @configuration.register_to_config
    def __init__(self, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.fail_after = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            # as T5 and Z-Image do: the parent asks what the child computes in
            x = torch.tanh(block(x.to(block.weight.dtype)))
            if i == self.fail_after:
                raise KeyError("in the middle")
        return self.norm(x)


def model(**arguments: Any) -> Any:
    torch.manual_seed(0)
    return Model(**arguments)


def enabled(compute: torch.dtype = F32, **arguments: Any) -> Any:
    made = model()
    with patched():
        made.enable_layerwise_casting(E4M3, compute, **arguments)
    return made


def codes(made: nn.Module) -> list[torch.Tensor]:
    return [p.parts["codes"] for p in made.parameters() if isinstance(p, stowage.StowedTensor)]


def test_rows_01_02_a_forward_changes_nothing() -> None:
    """Each forward re-made the resting storage; one that raised left a layer widened."""
    made, x = enabled(), torch.randn(2, 32)
    before = [(c.data_ptr(), c.clone()) for c in codes(made)]
    made(x)
    made.fail_after = 1
    with pytest.raises(KeyError):
        made(x)
    assert len(before) == 3
    for (address, values), now in zip(before, codes(made), strict=True):
        assert now.data_ptr() == address and torch.equal(now, values)


def test_row_03_a_parent_reads_the_compute_dtype() -> None:
    """It saw the storage dtype and cast its input to float8."""
    made = enabled()
    assert made.blocks[0].weight.dtype == made.dtype == F32
    assert torch.isfinite(made(torch.randn(2, 32))).all()


def test_row_04_casting_can_be_repeated_and_undone() -> None:
    """A second enable raised; nothing could be disabled."""
    made, x = enabled(), torch.randn(2, 32)
    first, before = made(x), codes(made)
    enable_layerwise_casting(made, E4M3, F32)
    assert all(a is b for a, b in zip(before, codes(made), strict=True))
    with pytest.raises(ValueError, match="plain or rest as f8_e5m2, got some that rest as f8_e4m3"):
        enable_layerwise_casting(made, torch.float8_e5m2, F32)
    enable_layerwise_casting(made, E4M3, BF16)  # the same bytes, another compute dtype
    assert made.blocks[0].weight.dtype == BF16 and torch.equal(codes(made)[0], before[0])
    with patched():
        made.disable_layerwise_casting()
    assert not codes(made)
    assert torch.allclose(made.float()(x), first, atol=0.02)  # biases have been bf16


def test_row_05_saving_never_writes_codes_without_saying(tmp_path: Path) -> None:
    """save_pretrained wrote fp8 without a word; a reload widened it. It writes values."""
    made, x = enabled(), torch.randn(2, 32)
    made.save_pretrained(tmp_path / "values")
    values = Model.from_pretrained(tmp_path / "values").blocks[0].weight
    assert values.dtype == F32 and torch.equal(values, made.blocks[0].weight.dequantize())
    stowage.save(made, tmp_path)
    made.save_config(tmp_path)
    loaded = stowage.load(lambda: Model.from_config(Model.load_config(tmp_path)), tmp_path)
    assert torch.equal(loaded(x), made(x)) and loaded.blocks[0].weight.resting == "f8_e4m3"
    disable_layerwise_casting(made)
    made.save_pretrained(tmp_path / "plain")
    again = Model.from_pretrained(tmp_path / "plain")
    assert torch.equal(again.blocks[0].weight, loaded.blocks[0].weight.dequantize())


@pytest.mark.parametrize("kind", ["Linear", "Conv2d", "ConvTranspose2d", "Embedding"])
def test_row_06_gradients_pass_without_autocast(kind: str) -> None:
    """At backward the graph found the storage dtype in a Conv's weight."""
    torch.manual_seed(0)
    layer = getattr(nn, kind)(4, 4, *([3] if "Conv" in kind else []))
    apply_layerwise_casting(layer, E4M3, F32, ())
    dense, x = copy.deepcopy(layer), torch.randn(2, 4, 8, 4)
    disable_layerwise_casting(dense)
    gradients = []
    for run in (layer, dense):
        scale = torch.ones(4, requires_grad=True)
        out = run(torch.tensor([1, 2])) * scale if kind == "Embedding" else run(x * scale)
        out.square().sum().backward()
        gradients.append(scale.grad)
    assert torch.allclose(*gradients, rtol=1e-4)


def test_row_07_gradients_are_never_rounded() -> None:
    """The hook's module.to() cast .grad to float8 at the next forward."""
    made, x = enabled(), torch.randn(2, 32)
    made(x).sum().backward()
    bias, norm = made.blocks[0].bias, made.norm.weight
    before = bias.grad.clone(), norm.grad.clone()
    made(x)
    assert bias.grad.dtype == norm.grad.dtype == F32
    assert torch.equal(bias.grad, before[0]) and torch.equal(norm.grad, before[1])


def test_row_08_an_optimizer_takes_a_step() -> None:
    """It raised on float8 parameters, or lost the update."""
    made, x = enabled(), torch.randn(2, 32)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    resting, bias = [c.clone() for c in codes(made)], made.blocks[0].bias.detach().clone()
    made(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(made.blocks[0].bias, bias)  # what trains, trains
    assert all(torch.equal(a, b) for a, b in zip(resting, codes(made), strict=True))  # frozen
    assert not any(p.requires_grad for p in made.parameters() if hasattr(p, "parts"))


def test_row_10_dtype_moves_keep_the_rest_bytes() -> None:
    """model.float() gave the memory back until the next forward."""
    made = enabled(BF16)
    stowed = stowage.report(made).stowed_bytes
    for move, dtype in ((made.float, F32), (made.half, torch.float16), (made.bfloat16, BF16)):
        move()
        assert stowage.report(made).stowed_bytes == stowed == 3 * 32 * 32
        assert made.dtype == made(torch.randn(2, 32)).dtype == dtype


def test_row_11_a_tie_to_a_skipped_layer_holds() -> None:
    """The skipped user of a tied weight computed with the storage dtype."""
    for order in ((0, 2), (2, 0)):
        made = model()
        made.blocks[order[0]].weight = made.blocks[order[1]].weight
        enable_layerwise_casting(made, E4M3, F32, ["norm", r"blocks\.2"])
        assert made.blocks[0].weight is made.blocks[2].weight
        assert made.blocks[0].weight.dtype == F32
        assert type(made.blocks[2].weight) is nn.Parameter  # as precise as was asked
        assert torch.isfinite(made(torch.randn(2, 32))).all()


def test_row_13_the_callers_list_is_left_alone() -> None:
    """`+=` wrote the model's own patterns into it."""
    patterns = ["pos"]
    made = model()
    made._skip_layerwise_casting_patterns = ["norm"]
    enable_layerwise_casting(made, E4M3, F32, skip_modules_pattern=patterns)
    assert patterns == ["pos"] and made._skip_layerwise_casting_patterns == ["norm"]


def test_row_14_a_string_is_one_pattern() -> None:
    """Its letters were taken for patterns, and nearly everything was skipped."""
    made = model()
    apply_layerwise_casting(made, E4M3, F32, skip_modules_pattern="proj_out")
    assert len(codes(made)) == 3
    assert len(codes(enabled(skip_modules_pattern="proj_out"))) == 3


def test_row_15_classes_may_be_named() -> None:
    """The documented skip_modules_classes=["norm"] raised TypeError."""
    assert len(codes(enabled(skip_modules_classes=["norm"]))) == 3
    assert len(codes(enabled(skip_modules_classes=["linear"]))) == 0


def test_row_17_what_the_storage_cannot_hold_is_counted() -> None:
    """1000 became 448 (NaN in older releases) and 5e-4 zero, without a word."""
    made = model()
    with torch.no_grad():
        made.blocks[0].weight[0, 0], made.blocks[1].weight.data[:] = 1000.0, 5e-4
    enable_layerwise_casting(made, E4M3, F32)
    found = stowage.report(made)
    row = found["blocks.0.weight"]
    assert row.saturated == 1 and row.max_error == 552.0
    assert found["blocks.1.weight"].relative_error == 1.0
    assert found["blocks.2.weight"].saturated == 0


def test_row_19_copies_and_class_swaps_are_their_own() -> None:
    """Hooks on the instance's forward: a copy ran the original, a new class was bypassed."""

    class Doubled(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    made, x = enabled(), torch.randn(2, 32)
    want, twin = made(x), copy.deepcopy(made)
    twin.blocks[0].weight.data.zero_()
    assert torch.equal(made(x), want) and not torch.equal(twin(x), want)
    made.__class__ = Doubled
    assert torch.equal(made(x), 2 * want)


def test_row_27_state_dict_has_one_dtype() -> None:
    """It mixed float8 with others, and model.dtype said something else."""
    made = enabled(BF16).bfloat16()
    assert {v.dtype for v in made.state_dict().values()} == {BF16} and made.dtype == BF16
    disable_layerwise_casting(made)
    assert {v.dtype for v in made.state_dict().values()} == {BF16}


def test_row_28_the_graph_keeps_nothing_wide() -> None:
    """Autograd held every widened weight until backward: four times the bytes at rest."""
    made, kept = enabled(), []
    made.requires_grad_(False)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = made(torch.randn(2, 32, requires_grad=True))
    assert kept
    wide = [t for t in kept if t.numel() >= 32 * 32 and type(t) is torch.Tensor and t.itemsize > 1]
    assert not wide
    y.sum().backward()


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@pytest.mark.parametrize("disk", [False, True])
def test_row_29_casting_and_offload_in_either_order(kind: str, disk: bool, tmp_path: Path) -> None:
    """Offloading first bypassed the casting: four times the bytes, other values. Now the wrong
    order is refused; files on a disk hold values."""
    from diffusers.hooks import apply_group_offloading

    how: dict[str, Any] = {"onload_device": torch.device("cpu"), "offload_type": kind}
    how |= {"num_blocks_per_group": 1} if kind == "block_level" else {}
    how |= {"offload_to_disk_path": str(tmp_path)} if disk else {}
    made, x = enabled(), torch.randn(2, 32)
    want = made(x)
    apply_group_offloading(made, **how)
    assert torch.equal(made(x), want) and len(codes(made)) == 3
    offloaded = model()
    apply_group_offloading(offloaded, **how)
    with pytest.raises(ValueError, match="must come before group offloading"):
        enable_layerwise_casting(offloaded, E4M3, F32)


def test_row_33_a_bare_string_is_one_name() -> None:
    """_keep_in_fp32_modules = "wo" became the patterns "w" and "o": nothing was cast."""
    made = model()
    made._keep_in_fp32_modules = "wo"
    enable_layerwise_casting(made, E4M3, F32)
    assert len(codes(made)) == 3
