# SPDX-License-Identifier: Apache-2.0
"""Defects of bitsandbytes 0.50.2, each as the same call on our facade; the first line of each test
says what went wrong there."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import stowage.compat.bitsandbytes as bnb


def layer(n: int, k: int, **arguments: bool) -> bnb.nn.LinearNF4:
    torch.manual_seed(n + k)
    made = bnb.nn.LinearNF4(k, n, compute_dtype=torch.bfloat16, **arguments)
    nn.init.normal_(made.weight)
    return made.to("cpu")


@pytest.mark.parametrize(
    ("shape", "block"),
    [((64, 96), 64), ((256, 64), 128), ((64, 1152), 256), ((300, 400), 64), ((64, 128), 64)],
)
def test_row_60_rows_that_blocks_do_not_divide(shape: tuple[int, int], block: int) -> None:
    """Scales of other blocks were taken: twice the error."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, state = bnb.functional.quantize_4bit(x, blocksize=block, quant_type="nf4")
    values = bnb.functional.dequantize_4bit(packed, state)
    flat = packed.view(-1)
    codes = torch.stack([flat >> 4, flat & 15], 1).view(-1).long()
    scales = state.absmax.repeat_interleave(block)[: x.numel()]
    assert torch.equal(values.view(-1), state.code[codes] * scales)
    assert (values - x).abs().mean() < 0.085


@pytest.mark.parametrize(("k", "n"), [(256, 48), (256, 300), (96, 64), (80, 64), (256, 64)])
def test_row_61_eval_takes_every_shape(k: int, n: int) -> None:
    """An eval forward raised where training did not."""
    made, x = layer(n, k), torch.randn(3, k)
    trained, evaluated = made.train()(x), made.eval()(x)
    assert torch.equal(trained, evaluated)


@pytest.mark.parametrize("nested", [False, True])
def test_row_62_a_forward_changes_nothing_that_is_saved(nested: bool) -> None:
    """Saved after an eval forward, absmax was transposed and rounded."""
    made = layer(64, 256, compress_statistics=nested)
    before = copy.deepcopy(made.state_dict())
    made.eval()(torch.randn(2, 256))
    after = made.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_row_63_values_after_an_eval_forward() -> None:
    """dequantize_4bit of a weight that had worked once gave garbage."""
    made = layer(64, 256)
    before = bnb.functional.dequantize_4bit(made.weight, made.weight.quant_state)
    made.eval()(torch.randn(2, 256))
    after = bnb.functional.dequantize_4bit(made.weight.data, made.weight.quant_state)
    assert torch.equal(before, after)


def test_row_64_gradients_after_an_eval_forward() -> None:
    """The result required a gradient and the input got none."""
    made = layer(64, 256)
    made.eval()(torch.randn(2, 256))
    x = torch.randn(2, 256, requires_grad=True)
    made.train()(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(
        x.grad, made.weight.dequantize().sum(0).expand(2, 256), rtol=2e-2, atol=0.2
    )


def test_row_65_moves_and_copies_after_an_eval_forward() -> None:
    """`.to("meta")` raised; other moves are suspected to corrupt."""
    made, x = layer(64, 256).eval(), torch.randn(2, 256)
    y = made(x)
    for twin in (
        copy.deepcopy(made).to("cpu"),
        copy.deepcopy(made).to(torch.bfloat16),
        copy.deepcopy(made).train(),
    ):
        assert torch.allclose(twin(x), y, atol=0.2)
        assert torch.equal(twin.weight.data, made.weight.data)
    assert copy.deepcopy(made).to("meta").weight.is_meta


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 64))


@pytest.mark.parametrize("nested", [False, True])
def test_row_66_a_packed_parameter_loads_what_it_saved(nested: bool) -> None:
    """replace_parameter_4bit saved keys that it did not know when loading."""
    made, other = Owner(), Owner()
    for module in (made, other):
        bnb.nn.parametrize.replace_parameter_4bit(module, "w", nested, "nf4", 64)
    assert not torch.equal(other.w, made.w)
    other.load_state_dict(made.state_dict())
    assert torch.equal(other.w, made.w)
    made.load_state_dict(made.state_dict())
    dense = Owner()
    other.load_state_dict(dense.state_dict())  # float values are quantized just in time
    assert (other.w - dense.w).abs().mean() < 0.1
    with pytest.raises(RuntimeError, match=r"w: must be \[64, 64\], got \[64\]"):
        other.load_state_dict({"w": torch.randn(64)})


def test_row_67_a_layer_loads_what_it_saved() -> None:
    """Its own keys were unexpected."""
    made, other = layer(64, 256), layer(64, 256)
    nn.init.zeros_(other.bias)
    made.load_state_dict(made.state_dict())
    other.load_state_dict(made.state_dict(), strict=True)
    x = torch.randn(2, 256)
    assert torch.equal(other(x), made(x))


def test_row_68_the_bias_keeps_its_dtype_and_values() -> None:
    """A forward rounded the fp32 bias for good."""
    made = layer(64, 256)
    before = made.bias.detach().clone()
    made(torch.randn(2, 256))
    assert made.bias.dtype is torch.float32 and torch.equal(made.bias, before)
