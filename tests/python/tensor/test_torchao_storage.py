# SPDX-License-Identifier: Apache-2.0
"""nf4:torchao in the front end: whatever nf4 does, it does."""

import copy
import pickle

import pytest
import torch
from torch import nn

import stowage
from stowage._ops.errors import InvalidArgument, Unsupported
from stowage._ops.storage import Storage

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NAMES = ("f32", "bf16", "f16", "f64")


def weight(dtype: torch.dtype = torch.bfloat16, rows: int = 256) -> stowage.StowedTensor:
    torch.manual_seed(0)
    return stowage.quantize(torch.randn(rows, 256).to(dtype), "nf4:torchao")


def same(a: stowage.StowedTensor, b: stowage.StowedTensor) -> bool:
    return a.resting == b.resting and all(
        torch.equal(x, y) for x, y in zip(a.parts.values(), b.parts.values(), strict=True)
    )


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 256)).to(dtype)


@pytest.mark.parametrize(("dtype", "name"), [*zip(DTYPES, NAMES, strict=True)])
def test_the_storage_takes_the_dtype_of_the_values(dtype, name) -> None:
    w = weight(dtype)
    assert w.resting == f"nf4:torchao:{name}"
    assert w.dtype == dtype
    assert list(w.parts) == [
        "codes",
        "quantized_scalers",
        "quantization_factor",
        "scaler_mean",
        "nf4",
    ]
    assert w.parts["quantized_scalers"].dtype == torch.int8
    assert w.parts["nf4"].dtype == dtype
    assert (w.dequantize(torch.float32) - weight(torch.float32).dequantize()).abs().mean() < 0.02


def test_bits_a_weight() -> None:
    w = stowage.quantize(torch.randn(512, 512).bfloat16(), "nf4:torchao")
    assert w.nbytes_at_rest * 8 / w.numel() < 4.128


def test_strings() -> None:
    assert Storage("nf4:torchao:block64:scaler256:bf16") is Storage("nf4:torchao:bf16")
    assert Storage("nf4:torchao:block32:scaler4").scaler_block == 4
    assert Storage("nf4:torchao").accepts(Storage("nf4:torchao:f16"))
    assert not Storage("nf4:torchao:bf16").accepts(Storage("nf4:torchao:f16"))
    assert not Storage("nf4:torchao").accepts(Storage("nf4"))
    assert pickle.loads(pickle.dumps(Storage("nf4:torchao:f16"))) is Storage("nf4:torchao:f16")


def test_shapes_that_do_not_fit_are_refused_by_rule() -> None:
    with pytest.raises(InvalidArgument, match="a multiple of 16384 elements"):
        stowage.quantize(torch.randn(3, 64), "nf4:torchao")
    with pytest.raises(InvalidArgument, match=r"0: .*|0\.weight"):
        stowage.stow(nn.Sequential(nn.Linear(60, 60)), "nf4:torchao")
    with pytest.raises(InvalidArgument, match="at most 2 dimensions"):
        parts = list(weight().parts.values())
        stowage.StowedTensor(parts, "nf4:torchao:bf16", (4, 64, 256), torch.bfloat16)
    with pytest.raises(InvalidArgument, match="name the dtype of its parts"):
        parts = list(weight().parts.values())
        stowage.StowedTensor(parts, "nf4:torchao", (256, 256), torch.bfloat16)


def test_copies_are_exact() -> None:
    w = weight()
    assert same(copy.deepcopy(w), w)
    assert same(w.clone(), w)
    assert same(pickle.loads(pickle.dumps(w)), w)
    other = stowage.quantize(torch.zeros(256, 256).bfloat16() + 1, "nf4:torchao")
    other.copy_(w)
    assert same(other, w)


def test_row_slices_stay_stowed_on_whole_scaler_blocks() -> None:
    w = weight()  # 64 rows are a scaler block
    part = w[64:192]
    assert isinstance(part, stowage.StowedTensor)
    assert part.parts["quantization_factor"].numel() == 2
    assert torch.equal(part.dequantize(), w.dequantize()[64:192])
    assert torch.equal(w[5:70].clone(), w.dequantize()[5:70])


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_writes_land_and_touch_nothing_else(dtype) -> None:
    w = weight(dtype)
    before = w.dequantize()
    w[64:128] = before[0:64]
    after = w.dequantize()
    assert torch.equal(after[:64], before[:64])
    assert torch.equal(after[128:], before[128:])
    assert (after[64:128] - before[0:64]).abs().mean() < 0.02
    w[10] = before[20]  # one row of 4 blocks, in a scaler block of others
    assert (w.dequantize()[10] - before[20]).abs().mean() < 0.05
    assert torch.equal(w.dequantize()[11:64], before[11:64])


def test_a_write_that_shared_scales_cannot_hold_is_refused() -> None:
    w = weight()
    before = w.dequantize()
    with pytest.raises(Unsupported, match="block maxima like those of the rows beside them"):
        w[10] = torch.full((256,), 1e4)
    assert torch.equal(w.dequantize(), before)


def test_a_write_of_a_whole_scaler_block_takes_a_factor_of_its_own() -> None:
    w = weight(torch.float32)
    values = 3 * torch.randn(64, 256)
    w[128:192] = values
    error = (w.dequantize()[128:192] - values).abs().mean() / values.abs().mean()
    assert error < 0.1
    factors = w.parts["quantization_factor"]
    assert factors[2] < factors[1] / 2


def test_a_whole_write_is_a_new_quantization() -> None:
    w, values = weight(), torch.randn(256, 256).bfloat16()
    w.copy_(values)
    assert same(w, stowage.quantize(values, "nf4:torchao"))


def test_stow_rests_each_weight_in_its_dtype_and_again_changes_nothing() -> None:
    m = model()
    report = stowage.stow(m, "nf4:torchao")
    assert m[0].weight.resting == "nf4:torchao:bf16"
    assert report is not None
    parts = [p.clone() for p in m[0].weight.parts.values()]
    stowage.stow(m, "nf4:torchao", restow=True)
    assert all(torch.equal(a, b) for a, b in zip(parts, m[0].weight.parts.values(), strict=True))
    x = torch.randn(4, 256).bfloat16()
    dense = model()
    with torch.no_grad():
        for ours, theirs in zip(m[::2], dense[::2], strict=True):
            theirs.weight.copy_(ours.weight.dequantize())
        torch.testing.assert_close(m(x), dense(x), rtol=2e-2, atol=2e-2)


def test_gradients_reach_the_input() -> None:
    m = model(torch.float32)
    stowage.stow(m, "nf4:torchao")
    x = torch.randn(4, 256, requires_grad=True)
    m(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


@pytest.mark.parametrize(("dtype", "name"), [*zip(DTYPES, NAMES, strict=True)])
def test_files_hold_the_same_bytes(tmp_path, dtype, name) -> None:
    m = model(dtype)
    stowage.stow(m, "nf4:torchao")
    stowage.save(m, tmp_path / "a")
    back = stowage.load(lambda: model(dtype), tmp_path / "a")
    assert back[0].weight.resting == f"nf4:torchao:{name}"
    assert same(back[0].weight, m[0].weight) and same(back[2].weight, m[2].weight)
    stowage.save(back, tmp_path / "b")
    (first,), (second,) = ((tmp_path / d).glob("*.safetensors") for d in "ab")
    assert first.read_bytes() == second.read_bytes()
    asked = stowage.load(lambda: model(dtype), tmp_path / "a", storage="nf4:torchao")
    assert same(asked[0].weight, m[0].weight)


def test_loading_quantizes_just_in_time(tmp_path) -> None:
    m = model()
    stowage.save(m, tmp_path / "plain")
    made = stowage.load(lambda: model(), tmp_path / "plain", storage="nf4:torchao")
    stowage.stow(m, "nf4:torchao")
    assert same(made[0].weight, m[0].weight)


def test_states_round_trip_flat_and_stowed() -> None:
    m = model()
    stowage.stow(m, "nf4:torchao:block32:scaler128")
    flat = stowage.state_dict(m)
    assert "0.weight.quantized_scalers" in flat and "0.weight.quant_map" not in flat
    other = model(torch.bfloat16)
    stowage.stow(other, "nf4:torchao:block32:scaler128")
    stowage.load_state_dict(other, flat)
    assert same(other[0].weight, m[0].weight)
    third = model()
    stowage.stow(third, "nf4:torchao:block32:scaler128")
    third.load_state_dict(m.state_dict())
    assert same(third[2].weight, m[2].weight)


def test_compile_has_no_break() -> None:
    m = model(torch.float32)
    stowage.stow(m, "nf4:torchao")
    x = torch.randn(4, 256)
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), m(x))


def test_slices_join_again_and_others_give_values() -> None:
    w = weight()
    joined = torch.cat([w[:64], w[64:128]])
    assert isinstance(joined, stowage.StowedTensor)
    assert torch.equal(joined.dequantize(), w.dequantize()[:128])
    small = stowage.quantize(torch.randn(8, 64).bfloat16(), "nf4:torchao:block32:scaler2")
    halves = torch.cat([small[:2], small[2:]])
    assert isinstance(halves, stowage.StowedTensor)
    assert torch.equal(halves.dequantize(), small.dequantize())
    assert torch.equal(torch.stack([w, w])[1], w.dequantize())
