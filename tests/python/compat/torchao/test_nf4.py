# SPDX-License-Identifier: Apache-2.0
"""torchao's NF4 names over Stowage: names, attributes, life cycle; torchao's defects, each as the
same call; and torchao itself, where it is installed."""

from __future__ import annotations

import copy
import importlib
import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import stowage
import stowage.compat.torchao as ao
from stowage.compat.torchao import FrozenNF4Linear, quantize_
from stowage.compat.torchao.dtypes.nf4tensor import linear_nf4
from stowage.compat.torchao.prototype._nf4tensor_api import nf4_weight_only
from stowage.compat.torchao.quantization import NF4Tensor, to_nf4

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(rows: int = 256, columns: int = 256, dtype: Any = torch.float32) -> torch.Tensor:
    rng = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=rng).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attributes_are_those_of_torchao(dtype: torch.dtype) -> None:
    w = to_nf4(values(dtype=dtype), 32, 128)
    assert isinstance(w, NF4Tensor) and not isinstance(torch.ones(1), NF4Tensor)
    assert (w.block_size, w.scaler_block_size, w.n_blocks) == (32, 128, 2048)
    assert (w.dtype, w.shape) == (dtype, (256, 256))
    assert (w.quantized_data.dtype, w.quantized_data.shape) == (torch.uint8, (32768,))
    assert (w.quantized_scalers.dtype, w.quantized_scalers.shape) == (torch.int8, (2048,))
    assert (w.quantization_factor.dtype, w.quantization_factor.shape) == (dtype, (16,))
    assert (w.scaler_mean.dtype, w.scaler_mean.shape) == (dtype, ())
    assert (w.nf4.dtype, w.nf4.shape) == (dtype, (16,))
    assert torch.equal(w.get_original_weight(), w.dequantize())
    assert type(w.get_original_weight()) is torch.Tensor
    plain = stowage.quantize(values(), "nf4")
    assert not isinstance(plain, NF4Tensor) and not hasattr(plain, "block_size")
    assert not hasattr(plain, "get_original_weight")
    with pytest.raises(ValueError, match="must be made with to_nf4"):
        NF4Tensor(1, 2)


def test_defaults() -> None:
    w = to_nf4(values())
    assert (w.block_size, w.scaler_block_size) == (64, 256)
    again = NF4Tensor.from_tensor(values(), 64, 256)
    assert torch.equal(w.quantized_data, again.quantized_data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", DTYPES)
def test_linear_has_the_dtype_of_the_input(dtype: torch.dtype, given: torch.dtype) -> None:
    w = to_nf4(values(dtype=dtype))
    x = values(4, dtype=given).requires_grad_()
    y = linear_nf4(input=x, weight=w)
    assert y.dtype is given
    expected = x.double() @ w.get_original_weight().double().t()
    close = dict(rtol=2e-2, atol=0.2) if given is not torch.float32 else dict(rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y.double(), expected, **close)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype is given
    with pytest.raises(ValueError, match="must be an NF4Tensor"):
        linear_nf4(x, values(dtype=given))


@pytest.mark.parametrize("bias", [False, True])
def test_frozen_linear(bias: bool) -> None:
    layer = FrozenNF4Linear(256, 128, bias=bias, dtype=torch.bfloat16, block_size=32)
    assert isinstance(layer.weight, NF4Tensor) and layer.weight.block_size == 32
    assert not any(p.requires_grad for p in layer.parameters())
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    expected = nn.functional.linear(x, layer.weight.get_original_weight(), layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=2e-2, atol=2e-2)
    other = FrozenNF4Linear(256, 128, bias=bias, dtype=torch.bfloat16, block_size=32)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_quantize_a_model() -> None:
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 128), nn.Embedding(8, 8))
    quantize_(model, nf4_weight_only(), lambda module, name: name == "0")
    assert isinstance(model[0].weight, NF4Tensor) and type(model[2].weight) is nn.Parameter
    quantize_(model, nf4_weight_only(32, 16))
    assert model[2].weight.scaler_block_size == 16 and model[0].weight.scaler_block_size == 256
    odd = nn.Sequential(nn.Linear(256, 128), nn.Linear(3, 5))
    with pytest.raises(ValueError, match="multiple of 16384"):
        quantize_(odd, nf4_weight_only())
    assert type(odd[0].weight) is nn.Parameter  # nothing was changed


# --- defects of torchao 0.18, by their rows -------------------------------------------------------


def test_row_70_clone_is_exact() -> None:
    """clone() quantized again, with default blocks: 92 % of the values changed."""
    w = to_nf4(values(), 32, 128)
    twin = w.clone().clone().clone()
    assert isinstance(twin, NF4Tensor) and (twin.block_size, twin.scaler_block_size) == (32, 128)
    assert torch.equal(twin.get_original_weight(), w.get_original_weight())
    assert torch.equal(copy.deepcopy(w).quantized_scalers, w.quantized_scalers)


def test_rows_71_and_74_are_the_dialect_and_nf4_has_neither() -> None:
    """Zeros beside an outlier decode to something else, and the widest block loses 1/128: equal
    bytes ask for both. The other dialect is exact."""
    x = values()
    x[3, :64], x[5, 64] = 0, 40.0
    assert to_nf4(x).get_original_weight()[3, :64].abs().max() > 0
    exact = stowage.quantize(x, "nf4").dequantize()
    assert not exact[3, :64].any() and exact[5, 64] == 40.0


def test_row_72_shapes_are_refused_with_the_rule_and_nf4_takes_them() -> None:
    """Asserts without a rule; rank 3 and other counts have nowhere to go."""
    for shape in ((100, 300), (48, 64)):
        with pytest.raises(ValueError, match="multiple of 16384 elements"):
            to_nf4(torch.randn(shape))
        assert stowage.quantize(torch.randn(shape), "nf4").shape == shape
    with pytest.raises(ValueError, match="at most 2 dimensions"):
        to_nf4(torch.randn(3, 128, 128))


def test_row_73_everyday_operations(tmp_path: Path) -> None:
    """safetensors, indexing, bias by keyword, norms, equality and stacking failed or were wrong."""
    w = to_nf4(values(256, 128))
    dense = w.get_original_weight()
    x, bias = torch.randn(3, 128), torch.randn(256)
    torch.testing.assert_close(
        nn.functional.linear(x, weight=w, bias=bias), x @ dense.t() + bias, rtol=1e-4, atol=1e-4
    )
    assert w.t().shape == (128, 256)
    torch.testing.assert_close(x @ w.t(), x @ dense.t(), rtol=1e-4, atol=1e-4)
    assert torch.equal(w[5] + 0, dense[5]) and torch.equal(w * 2, dense * 2)
    assert torch.equal(torch.stack([w, w])[1], dense) and torch.equal(w.norm(), dense.norm())
    assert torch.equal(w.flatten() + 0, dense.flatten()) and bool((w == dense).all())
    assert type(w.bfloat16()) is torch.Tensor
    module = nn.Linear(128, 256, bias=False)
    module.weight = nn.Parameter(w, requires_grad=False)
    safetensors.torch.save_file(stowage.state_dict(module), tmp_path / "m.safetensors")
    other = nn.Linear(128, 256, bias=False)
    stowage.load_state_dict(other, safetensors.torch.load_file(tmp_path / "m.safetensors"))
    assert torch.equal(other.weight + 0, dense)
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True).quantized_data, w.quantized_data)


OLD_AND_NEW = {
    "dtypes": ["NF4Tensor", "to_nf4"],
    "dtypes.nf4tensor": [
        "NF4Tensor",
        "to_nf4",
        "linear_nf4",
        "nf4_weight_only",
        "_INNER_TENSOR_NAMES_FOR_SHARDING",
    ],
    "quantization": ["NF4Tensor", "to_nf4", "quantize_"],
    "quantization.quantize_.workflows.nf4.nf4_tensor": [
        "NF4Tensor",
        "to_nf4",
        "linear_nf4",
        "_INNER_TENSOR_NAMES_FOR_SHARDING",
    ],
    "prototype._nf4tensor_api": ["nf4_weight_only"],
}


@pytest.mark.parametrize("path", OLD_AND_NEW)
def test_row_75_every_import_path_is_there(path: str) -> None:
    """The path of all tutorials, torchao.dtypes.nf4tensor, was gone."""
    module = importlib.import_module(f"stowage.compat.torchao.{path}")
    for name in OLD_AND_NEW[path]:
        assert hasattr(module, name)
        if name in ("NF4Tensor", "to_nf4", "quantize_"):
            known = {"NF4Tensor": NF4Tensor, "to_nf4": to_nf4, "quantize_": quantize_}
            assert getattr(module, name) is known[name]
    assert ao.quantize_ is quantize_


def test_row_76_copies_between_block_sizes_keep_those_of_the_target() -> None:
    """copy_ forgot the target's block sizes: 0.52 off."""
    source, target = to_nf4(values(), 32, 128), to_nf4(torch.ones(256, 256))
    target.copy_(source)
    assert (target.block_size, target.scaler_block_size) == (64, 256)
    expected = to_nf4(source.get_original_weight())
    assert torch.equal(target.get_original_weight(), expected.get_original_weight())
    with pytest.raises((RuntimeError, ValueError)):
        to_nf4(values(256, 512)).copy_(to_nf4(values(512, 256)))


# --- torchao itself -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(64, 256), (32, 2)])
def test_equal_to_torchao(dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    theirs = pytest.importorskip("torchao.quantization")
    # On a lattice sums are exact: torchao adds scales in the order of the machine.
    x = (values(256, 512) * 32).round() / 32
    x = (x * torch.exp2(torch.arange(256) % 5)[:, None]).to(dtype)
    one, other = to_nf4(x, *sizes), theirs.to_nf4(x, *sizes)
    for name in ("quantized_scalers", "quantization_factor", "scaler_mean", "nf4"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert torch.equal(one.quantized_data, other.quantized_data)
    assert torch.equal(one.get_original_weight(), other.get_original_weight())
    assert (one.block_size, one.n_blocks) == (other.block_size, other.n_blocks)
