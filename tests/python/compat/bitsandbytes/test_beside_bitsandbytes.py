# SPDX-License-Identifier: Apache-2.0
"""Facade and bitsandbytes in one process: orders of import, ops, modules that exchange state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fresh
import pytest
import torch

import stowage.compat.bitsandbytes as ours

theirs = pytest.importorskip("bitsandbytes")


def run(code: str) -> str:
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    return done.stdout


CHECK = """
import torch
x = torch.randn(64, 128)
ops = torch.ops.bitsandbytes
packed, absmax = ops.quantize_4bit(x, 64, "nf4", torch.uint8)
dense = ops.dequantize_4bit(packed, absmax, 64, "nf4", [64, 128], torch.float32)
a = torch.randn(2, 128)
y = ops.gemm_4bit(a, packed, [64, 128], absmax, 64, "nf4")
assert torch.allclose(y, a @ dense.t(), atol=1e-4)
code = torch.linspace(-1, 1, 256)
codes, scale = ops.quantize_blockwise(x, code, 256)
assert (ops.dequantize_blockwise(codes, scale, code, 256, torch.float32) - x).abs().max() < 0.05
"""


WITHOUT = """
import sys
import stowage.compat.bitsandbytes as ours
assert "bitsandbytes" not in sys.modules
sys.modules["bitsandbytes"] = None  # as if it was not installed
from stowage.compat.bitsandbytes.nn import Linear8bitLt
import torch
assert not isinstance(torch.nn.Linear(1, 1), Linear8bitLt)
assert hasattr(ours.functional, "int8_double_quant") and not hasattr(ours.nn, "NoSuchThing")
for absent in (Linear8bitLt, ours.nn.StableEmbedding, ours.optim.Adam8bit, ours.matmul):
    try:
        absent(64, 64)
    except NotImplementedError as error:
        assert "must come from bitsandbytes" in str(error)
    else:
        raise AssertionError(absent)
"""
OPS = """
table = ours.functional.get_4bit_type("nf4", "cpu")
row = ops.gemv_4bit(a[:1], packed, [64, 128], absmax, table, 64)
assert torch.allclose(row, a[:1] @ dense.t(), atol=1e-4)
a.requires_grad_()
product = lambda a: ops.gemm_4bit(a, packed, [64, 128], absmax, 64, "nf4")
product(a).sum().backward()
assert torch.allclose(a.grad, dense.sum(0).expand(2, 128), atol=1e-4)
compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
assert torch.allclose(compiled(a), a @ dense.t(), atol=1e-4)
"""
OURS = "import stowage.compat.bitsandbytes as ours\n"
THEIRS = "import bitsandbytes as theirs\n"
BOTH = """
assert "bitsandbytes/_ops.py" in str(theirs._ops.__file__)
assert torch.ops.bitsandbytes.int8_linear_matmul is not None
for one in (ours, theirs):
    layer = one.nn.LinearNF4(64, 32).to("cpu")
    assert layer(torch.randn(2, 64)).shape == (2, 32)
assert torch.equal(ours.functional.quantize_nf4(x)[0], theirs.functional.quantize_nf4(x)[0])
assert ours.nn.Linear8bitLt is theirs.nn.Linear8bitLt and ours.matmul is theirs.matmul
assert ours.optim.AdamW8bit is theirs.optim.AdamW8bit
"""
LOOK = """
import importlib.util
assert importlib.util.find_spec("bitsandbytes") is not None  # as transformers asks
"""


@pytest.mark.slow
def test_without_bitsandbytes_and_then_with_it() -> None:
    """Ours first: our ops serve, until bitsandbytes takes its names back."""
    back = "del sys.modules['bitsandbytes']\n"
    run(WITHOUT + CHECK + OPS + back + LOOK + CHECK + THEIRS + CHECK + BOTH)


@pytest.mark.slow
def test_bitsandbytes_first() -> None:
    run(THEIRS + OURS + CHECK + BOTH)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_state_dicts_go_both_ways(kind: str, nested: bool) -> None:
    facts: dict[str, Any] = {"quant_type": kind, "compress_statistics": nested}
    peer = theirs.nn.Linear4bit(128, 64, **facts).to("cpu")
    mine = ours.nn.Linear4bit(128, 64, **facts)
    mine.load_state_dict(peer.state_dict())
    values = theirs.functional.dequantize_4bit(peer.weight.data, peer.weight.quant_state)
    assert torch.equal(mine.weight.dequantize(), values) and torch.equal(mine.bias, peer.bias)
    back = mine.state_dict()
    assert [*back] == [*peer.state_dict()]
    other = theirs.nn.Params4bit.from_prequantized(
        back["weight"],
        {k.removeprefix("weight."): v for k, v in back.items() if k.startswith("weight.")},
        device="cpu",
    )
    assert torch.equal(theirs.functional.dequantize_4bit(other.data, other.quant_state), values)
    # bitsandbytes' layers have no loading of their own: theirs is given the parameter.
    fresh = theirs.nn.Linear4bit(128, 64, **facts)
    fresh.weight, fresh.bias = other, torch.nn.Parameter(back["bias"])
    x = torch.randn(3, 128)
    torch.testing.assert_close(fresh.train()(x), mine(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("nested", [False, True])
def test_linears_and_gradients_agree(nested: bool) -> None:
    torch.manual_seed(1)
    peer = theirs.nn.LinearNF4(128, 64, compress_statistics=nested)
    mine = ours.nn.LinearNF4(128, 64, compress_statistics=nested)
    mine.load_state_dict(peer.state_dict())
    peer.to("cpu").train()
    mine.to("cpu")
    mine.load_state_dict(peer.state_dict())  # the same map and offset
    x = torch.randn(5, 128)
    results = []
    for layer in (peer, mine):
        given = x.clone().requires_grad_()
        y = layer(given)
        y.square().sum().backward()
        results.append((y.detach(), given.grad, layer.bias.grad))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_transformers_path_still_works(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    asked = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, quantization_config=asked, device_map="cpu"
    )
    layer = model.model.layers[0].mlp.up_proj
    assert type(layer) is theirs.nn.Linear4bit
    values = ours.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert torch.equal(
        values, theirs.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    )
    assert model.train()(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
