# SPDX-License-Identifier: Apache-2.0
"""4-bit modules of the facade: life cycle, state dicts, copies, compile."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import stowage.compat.bitsandbytes as bnb

KINDS = [("nf4", True), ("nf4", False), ("fp4", True)]


def linear(n: int = 48, k: int = 96, **arguments: Any) -> Any:
    torch.manual_seed(n * k)
    return bnb.nn.Linear4bit(k, n, **{"quant_type": "nf4", **arguments})


def saved(module: nn.Module) -> dict[str, bytes]:
    state = module.state_dict()
    return {
        k: v.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for k, v in state.items()
    }


@pytest.mark.parametrize(("kind", "nested"), KINDS)
def test_a_layer_quantizes_when_it_is_moved(kind: str, nested: bool) -> None:
    layer = linear(quant_type=kind, compress_statistics=nested)
    dense = layer.weight.detach().clone()
    assert not layer.weight.bnb_quantized and layer.quant_state is None
    with pytest.raises(ValueError, match=r"call \.to"):
        layer(torch.randn(2, 96))
    weight = layer.weight
    assert layer.to("cpu") is layer and layer.weight is weight
    assert type(weight) is bnb.nn.Params4bit and weight.dtype is torch.uint8
    assert weight.shape == (48 * 96 // 2, 1) and not weight.requires_grad
    packed, state = bnb.functional.quantize_4bit(dense, compress_statistics=nested, quant_type=kind)
    assert torch.equal(weight.data, packed) and layer.quant_state == state
    x = torch.randn(3, 96, requires_grad=True)
    y = layer(x)
    expected = nn.functional.linear(x, weight.dequantize(), layer.bias)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert x.grad is not None and layer.bias.grad is not None


def test_defaults_are_those_of_bitsandbytes() -> None:
    made = bnb.nn.Linear4bit(64, 32)
    assert (made.weight.quant_type, made.weight.compress_statistics) == ("fp4", True)
    assert bnb.nn.LinearNF4(64, 32).weight.quant_type == "nf4"
    assert bnb.nn.LinearFP4(64, 32).weight.quant_type == "fp4"
    table = bnb.nn.EmbeddingNF4(8, 64)
    assert (table.weight.quant_type, table.weight.compress_statistics) == ("nf4", False)
    assert bnb.nn.EmbeddingFP4(8, 64).weight.quant_type == "fp4"
    assert bnb.nn.Params4bit(torch.ones(2, 2)).blocksize == 64


@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
def test_results_have_the_dtype_of_the_input(
    given: torch.dtype, compute: torch.dtype | None
) -> None:
    layer = linear(compute_dtype=compute).to("cpu")
    x = torch.randn(2, 96).to(given)
    assert layer(x).dtype is given
    assert layer.compute_dtype is (compute if compute or given is torch.float16 else given)
    assert layer.bias.dtype is torch.float32


@pytest.mark.parametrize("quant_storage", [torch.uint8, torch.bfloat16])
def test_dtypes_of_the_model_do_not_reach_the_codes(quant_storage: torch.dtype) -> None:
    layer = linear(quant_storage=quant_storage).to("cpu")
    before, x = saved(layer), torch.randn(2, 96)
    y = layer(x)
    for change in (layer.half, layer.bfloat16, layer.double, lambda: layer.to(torch.float32)):
        change()
        assert layer.weight.dtype is quant_storage
        assert saved(layer)["weight"] == before["weight"]
    assert torch.allclose(layer(x), y, atol=1e-2)


@pytest.mark.parametrize(("kind", "nested"), KINDS)
@pytest.mark.parametrize("quant_storage", [torch.uint8, torch.bfloat16])
def test_saved_is_loaded(kind: str, nested: bool, quant_storage: torch.dtype) -> None:
    facts = {"quant_type": kind, "compress_statistics": nested, "quant_storage": quant_storage}
    layer, x = linear(**facts).to("cpu"), torch.randn(2, 96)
    state = safetensors.torch.load(safetensors.torch.save(layer.state_dict()))
    fresh = [linear(), linear(**facts).to("cpu"), linear(quant_type="fp4").to("cpu")]
    for other in fresh:
        other.load_state_dict(state)
        assert saved(other) == saved(layer) and torch.equal(other(x), layer(x))
    empty = linear(device="meta")
    empty.load_state_dict(state, assign=True)
    assert saved(empty) == saved(layer)
    nn.init.zeros_(fresh[0].bias)
    assert not torch.equal(fresh[0].bias, layer.bias)  # loading has copied


def test_float_weights_are_quantized_while_loading() -> None:
    dense, layer = nn.Linear(96, 48), linear().to("cpu")
    layer.load_state_dict(dense.state_dict())
    direct = linear()
    direct.load_state_dict(dense.state_dict())
    assert saved(direct.to("cpu")) == saved(layer)


def test_what_cannot_be_loaded_is_said() -> None:
    layer = linear().to("cpu")
    before = saved(layer)
    state = linear(32, 96).to("cpu").state_dict() | {"bias": layer.bias}
    with pytest.raises(RuntimeError, match=r"weight: .* \[48, 96\], got \[32, 96\]"):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"weight: .* unknown \['unknown'\]"):
        layer.load_state_dict({"weight.unknown": torch.ones(1), **state})
    del state["weight.absmax"]
    with pytest.raises(RuntimeError, match=r"weight: .* missing \['absmax'\]"):
        layer.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*bias.*Unexpected key.*other"):
        layer.load_state_dict({"weight": torch.zeros(48, 96, 1), "other": torch.ones(1)})
    assert saved(layer) == before


@pytest.mark.parametrize("nested", [False, True])
def test_copies_are_exact_and_independent(nested: bool) -> None:
    layer, x = linear(compress_statistics=nested).to("cpu"), torch.randn(2, 96)
    file = io.BytesIO()
    torch.save(layer.weight, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for twin in (copy.deepcopy(layer.weight), copy.copy(layer.weight), loaded):
        assert type(twin) is bnb.nn.Params4bit and twin.quant_state == layer.quant_state
        assert torch.equal(twin.data, layer.weight.data)
    other = copy.deepcopy(layer)
    assert other.weight.data_ptr() != layer.weight.data_ptr()
    assert other.weight.absmax.data_ptr() != layer.weight.absmax.data_ptr()
    assert torch.equal(other(x), layer(x))
    other.weight.data.zero_()
    assert not torch.equal(other(x), layer(x))
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), layer(x))


def test_the_parameter_answers_for_its_state() -> None:
    weight = linear().to("cpu").weight
    state = weight.quant_state
    assert weight.absmax is state.absmax and weight.code is weight.quant_map is state.code
    assert weight.offset is weight.nested_offset is state.offset and weight.state2 is state.state2
    assert weight.nested_absmax is state.state2.absmax and weight.nested_blocksize == 256
    assert weight.nested_quant_map is state.state2.code and weight.nested_dtype is torch.float32
    plain = linear(compress_statistics=False)
    assert not hasattr(plain.weight, "absmax") and not hasattr(plain.weight, "offset")
    assert plain.to("cpu").weight.offset is None and not hasattr(plain.weight, "nested_absmax")


def test_pieces_keep_the_state() -> None:
    weight = linear(quant_storage=torch.bfloat16).to("cpu").weight
    for pieces in (torch.chunk(weight, 2), torch.split(weight, len(weight) // 2)):
        assert [type(piece) for piece in pieces] == [bnb.nn.Params4bit] * 2
        assert all(piece.quant_state is weight.quant_state for piece in pieces)
        assert torch.equal(
            torch.cat([piece.data for piece in pieces]).view(torch.uint8),
            weight.data.view(torch.uint8),
        )


@pytest.mark.parametrize("width", [64, 128, 65, 30])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_embeddings(kind: str, width: int) -> None:
    table = bnb.nn.Embedding4bit(50, width, quant_type=kind, dtype=torch.bfloat16)
    table.to("cpu")
    ids = torch.tensor([[0, 49], [7, 7]])
    rows = table(ids)
    assert rows.dtype is torch.bfloat16
    assert torch.equal(rows, table.weight.dequantize()[ids])
    other = bnb.nn.Embedding4bit(50, width, quant_type=kind)
    other.load_state_dict(table.state_dict())
    assert torch.equal(other(ids).bfloat16(), rows)


@pytest.mark.parametrize("mode", ["forward", "train"])
def test_compiles_into_one_graph(mode: str) -> None:
    layer = nn.Sequential(linear().to("cpu"), nn.ReLU(), linear(8, 48).to("cpu"))
    x = torch.randn(4, 96, requires_grad=mode == "train")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    layer(x)  # sets the compute dtype
    y = compiled(x)
    assert torch.allclose(y, layer(x), atol=1e-6)
    if mode == "train":
        (gradient,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad(layer(x).sum(), x)
        assert torch.allclose(gradient, expected, atol=1e-6)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 32, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bk,enk->ben", x, self.w)


@pytest.mark.parametrize(("kind", "nested"), KINDS)
def test_any_parameter_may_be_packed(kind: str, nested: bool) -> None:
    torch.manual_seed(0)
    module, x = Experts(), torch.randn(2, 24)
    dense = module.w.detach().clone()
    bnb.nn.parametrize.replace_parameter_4bit(module, "w", nested, kind)
    values = bnb.functional.dequantize_4bit(
        *bnb.functional.quantize_4bit(dense, compress_statistics=nested, quant_type=kind)
    )
    assert torch.equal(module.w, values)
    assert torch.equal(module(x), torch.einsum("bk,enk->ben", x, values))
    assert torch.nn.utils.parametrize._cache_enabled == 0
    state = module.state_dict()
    assert {"w", "w.absmax", "w.quant_map", f"w.quant_state.bitsandbytes__{kind}"} <= state.keys()
    plain = Experts()
    plain.w = nn.Parameter(state["w"], requires_grad=False)
    stats = {k: v for k, v in state.items() if k != "w"}
    bnb.nn.parametrize.replace_parameter_4bit_prequantized(plain, "w", stats, "cpu")
    assert torch.equal(plain.w, values)
    with pytest.raises(AttributeError, match="none"):
        bnb.nn.parametrize.replace_parameter_4bit(module, "none")
    with pytest.raises(TypeError, match=r"must be an nn\.Parameter"):
        bnb.nn.parametrize.replace_parameter_4bit(module, "forward")
