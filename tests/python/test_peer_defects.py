# SPDX-License-Identifier: Apache-2.0
"""Defects that were reproduced in other packages, as tests of ours: one for each row that applies.

The numbers are those of the list they were collected in; the first line of each says what went
wrong elsewhere.
"""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage

STORAGES = ["f8_e4m3", "int8", "nf4", "nf4:block64:nested"]


class Block(nn.Module):
    def __init__(self, storage: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = stow(nn.Linear(64, 48), storage, dtype)

    def forward(self, x: Tensor, fail: bool = False) -> Tensor:
        y: Tensor = self.inner(x.to(self.inner.weight.dtype))
        if fail:
            raise KeyError("in the middle")
        return y


def stow(layer: nn.Linear, storage: str, dtype: torch.dtype = torch.float32) -> nn.Linear:
    w = stowage.quantize(layer.weight.detach(), storage, compute_dtype=dtype)
    layer.weight = nn.Parameter(w, requires_grad=False)
    return layer.to(dtype)


def parts(layer: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in layer.inner.weight.parts.items()}


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_01_02_62_63_a_forward_changes_nothing(storage: str) -> None:
    """Codes re-made by each forward; widened for good by an exception; repacked by an eval one."""
    block = Block(storage).eval()
    before, values = parts(block), block.inner.weight.dequantize()
    addresses = [p.data_ptr() for p in block.inner.weight.parts.values()]
    x = torch.randn(3, 64)
    for run in (lambda: block(x), lambda: block.train()(x), lambda: block.eval()(x)):
        with torch.no_grad():
            run()
    with pytest.raises(KeyError):
        block(x, fail=True)
    assert [p.data_ptr() for p in block.inner.weight.parts.values()] == addresses
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), parts(block).values(), strict=True)
    )
    assert torch.equal(block.inner.weight.dequantize(), values)


def test_rows_03_27_a_reader_sees_the_compute_dtype() -> None:
    """A parent that reads child.weight.dtype saw float8, and so did the state dict."""
    block = Block("f8_e4m3", torch.bfloat16)
    assert block(torch.randn(3, 64)).dtype == torch.bfloat16
    assert {v.dtype for v in block.state_dict().values()} == {torch.bfloat16}


@pytest.mark.parametrize("storage", STORAGES)
def test_row_10_dtype_moves_keep_the_rest_bytes(storage: str) -> None:
    """model.float() gave the memory back until the next forward."""
    block = Block(storage)
    before, size = parts(block), block.inner.weight.nbytes_at_rest
    for move in (block.half, block.float, block.bfloat16, block.double, lambda: block.to("cpu")):
        move()
        assert block.inner.weight.nbytes_at_rest == size
        assert all(torch.equal(before[k], v) for k, v in parts(block).items())


def test_row_11_a_tied_layer_computes_in_the_same_dtype() -> None:
    """The skipped user of a tied weight computed with the storage dtype."""
    a, b = stow(nn.Linear(64, 48), "f8_e4m3"), nn.Linear(64, 48)
    b.weight = a.weight
    assert a(torch.randn(2, 64)).dtype == b(torch.randn(2, 64)).dtype == torch.float32


def test_row_12_weight_norm_runs() -> None:
    """The kernel of weight_norm knows no float8."""
    for wrap in (nn.utils.weight_norm, nn.utils.parametrizations.weight_norm):
        layer = stow(nn.Linear(64, 48), "f8_e4m3")
        wanted, x = layer.weight.dequantize(), torch.randn(2, 64)
        assert torch.allclose(wrap(layer)(x), F.linear(x, wanted, layer.bias), atol=1e-5)


def test_rows_16_49_threads_share_a_model() -> None:
    """Half of the concurrent forwards failed or gave wrong values."""
    block, inputs = Block("nf4").eval(), [torch.randn(2, 64) for _ in range(8)]
    wanted = [block(x).detach() for x in inputs]

    def run(i: int) -> bool:
        with torch.inference_mode():
            return torch.equal(block(inputs[i % 8]), wanted[i % 8])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(400)))


@pytest.mark.parametrize("storage", ["f8_e4m3", "int8", "nf4"])
def test_row_18_an_adapter_is_fused(storage: str) -> None:
    """Adding to a float8 weight has no promotion."""
    layer = stow(nn.Linear(64, 48), storage)
    wanted = layer.weight.dequantize() + 0.1 * torch.ones(48, 64)
    layer.weight.data += 0.1 * torch.ones(48, 64)
    assert torch.equal(layer.weight.dequantize(), stowage.quantize(wanted, storage).dequantize())


def test_row_19_a_copy_is_its_own() -> None:
    """A deep copy called the original's forward."""
    block = Block("int8")
    twin, x = copy.deepcopy(block), torch.randn(2, 64)
    twin.inner.weight.data.zero_()
    assert torch.equal(twin(x), twin.inner.bias.expand(2, 48)) and not torch.equal(
        twin(x), block(x)
    )


@pytest.mark.parametrize("columns", [64, 80, 96, 200, 1152])
@pytest.mark.parametrize("rows", [48, 300])
@pytest.mark.parametrize("block", [64, 128, 256])
def test_rows_60_61_72_any_shape_has_the_right_scales(rows: int, columns: int, block: int) -> None:
    """Wrong scales where a row is no whole number of blocks; assertions for odd shapes in eval."""
    w = stowage.quantize(torch.randn(rows, columns), f"nf4:block{block}")
    flat = F.pad(w.dequantize().view(-1), (0, -rows * columns % block)).view(-1, block)
    assert torch.equal(flat.abs().amax(1), w.parts["absmax"])
    x = torch.randn(3, columns)
    assert torch.allclose(F.linear(x, w), x @ w.dequantize().t(), rtol=1e-4, atol=1e-3)


def test_rows_64_65_train_after_eval() -> None:
    """No input gradient after one eval forward; copies and moves broke."""
    block, x = Block("nf4").eval(), torch.randn(2, 64, requires_grad=True)
    with torch.inference_mode():
        block(x)
    copy.deepcopy(block.to("cpu")).train()(x).sum().backward()
    assert torch.allclose(x.grad, block.inner.weight.dequantize().sum(0).expand(2, 64), atol=1e-5)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_66_67_a_module_loads_its_own_state_dict(storage: str) -> None:
    """It had keys that its own load did not know."""
    block, twin, file = Block(storage), Block(storage), io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(v, parts(block)[k]) for k, v in parts(twin).items())


def test_row_68_the_bias_keeps_its_values() -> None:
    """A forward rounded the fp32 bias for good."""
    layer = stow(nn.Linear(64, 48), "nf4")
    before = layer.bias.detach().clone()
    with torch.autocast("cpu", torch.bfloat16):
        layer(torch.randn(2, 64))
    assert layer.bias.dtype == torch.float32 and torch.equal(layer.bias, before)


@pytest.mark.parametrize("storage", [*STORAGES, "nf4:block32", "int8:block16"])
def test_rows_70_76_copies_are_exact_and_keep_the_form(storage: str) -> None:
    """clone() quantized again, with default block sizes; copy_ changed the block sizes."""
    w = stowage.quantize(torch.randn(64, 256), storage)
    once = w.clone()
    for _ in range(3):
        once = once.clone()
    other = stowage.quantize(torch.randn(64, 256), storage)
    other.copy_(w)
    for got in (once, other):
        assert got.resting == w.resting
        assert all(torch.equal(p, w.parts[k]) for k, p in got.parts.items())
    coarse = stowage.quantize(torch.zeros(64, 256), "nf4:block128")
    coarse.copy_(w)
    wanted = stowage.quantize(w.dequantize(), "nf4:block128")
    assert coarse.resting == "nf4:block128" and torch.equal(
        coarse.dequantize(), wanted.dequantize()
    )


@pytest.mark.parametrize("storage", STORAGES)
def test_row_71_zeros_stay_zeros(storage: str) -> None:
    """A zero block decoded to something else beside an outlier."""
    values = torch.zeros(256, 256)
    values[0, 0] = 40.0
    assert torch.equal(stowage.quantize(values, storage).dequantize() != 0, values != 0)


@pytest.mark.parametrize("codes", ["nf4", "fp4"])
@pytest.mark.parametrize("scaling", ["block64", "block32", "block64:nested", "block128:nested"])
def test_row_74_the_widest_block_keeps_its_scale(codes: str, scaling: str) -> None:
    """The block scale with the largest positive deviation was clipped, and its values with it."""
    torch.manual_seed(1)
    values = torch.randn(256, 256)
    values[7, 9] = 8.933
    w = stowage.quantize(values, f"{codes}:{scaling}")
    assert w.dequantize()[7, 9].item() == pytest.approx(8.933, rel=1e-6)
    nf4_torchao = stowage.quantize(values, "nf4:torchao").dequantize()  # the dialect asks for it
    assert nf4_torchao[7, 9].item() == pytest.approx(8.933 * (1 - 1 / 128), rel=5e-3)
    assert nf4_torchao[7, 9] < 0.997 * 8.933


class Layers(nn.Module):
    """Six weights; no module is named wo or norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"proj_in": nn.Linear(8, 8), "proj_out": nn.Linear(8, 8)})
            for _ in range(3)
        )


def test_row_13_the_callers_list_stays_as_it_is() -> None:
    """The caller's list of patterns was extended in place."""
    model, given = Layers(), ["*proj_out"]
    model._skip_layerwise_casting_patterns = ["norm"]
    stowage.stow(model, "f8_e4m3", skip=given)
    assert given == ["*proj_out"]


def test_row_14_a_string_is_one_pattern() -> None:
    """Its letters were patterns: nothing was cast, in silence."""
    report = stowage.stow(Layers(), "f8_e4m3", skip="*proj_out")
    assert [row.name for row in report.stowed] == [f"blocks.{i}.proj_in.weight" for i in range(3)]


def test_row_15_a_string_among_types_is_a_pattern() -> None:
    """The call that the manual shows, with a string in a list of classes, raised a TypeError."""
    report = stowage.stow(
        Layers(), "f8_e4m3", skip=["blocks.0", nn.Embedding, nn.Conv2d], allow_unmatched=True
    )
    assert len(report.stowed) == 4


def test_row_17_clipping_is_counted_or_refused() -> None:
    """Values beyond the range became the largest one or NaN, small ones 0, without a word."""
    model = Layers()
    with torch.no_grad():
        model.blocks[1]["proj_in"].weight[0, :2] = torch.tensor([1000.0, 5e-4])
    with pytest.raises(stowage.InvalidArgument, match=r"blocks\.1\.proj_in.* with 1 clipped"):
        stowage.stow(model, "f8_e4m3", max_error=10.0, on_exceed="raise")
    kept = copy.deepcopy(model)
    assert stowage.stow(kept, "f8_e4m3", max_error=10.0)["blocks.1.proj_in.weight"].storage is None
    report = stowage.stow(model, "f8_e4m3")
    assert report.saturated == 1
    assert "1 value saturated, in blocks.1.proj_in.weight" in str(report)


def test_row_33_a_declared_string_is_one_name() -> None:
    """`_keep_in_fp32_modules = "wo"` became the patterns "w" and "o": nothing was cast."""
    for attribute in ("_keep_in_fp32_modules", "_skip_layerwise_casting_patterns"):
        model = Layers()
        setattr(model, attribute, "wo")
        assert len(stowage.stow(model, "f8_e4m3").stowed) == 6
