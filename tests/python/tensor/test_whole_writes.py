# SPDX-License-Identifier: Apache-2.0
"""A write of a whole weight leaves what quantizing the values gives, byte for byte, whatever the
weight held before: rows that keep their values (the zeros of a padding row) are written too."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from whole_writes import ASSIGNED, FORMS

import stowage

ROWS, COLUMNS = 16, 32  # blocks of 64 lie across rows
QUICK = ("int8:tensor", "nf4", "nf4:block64:nested")
MORE = (
    "f8_e4m3", "f8_e4m3:tensor", "f8_e5m2:row", "int8", "int8:row2", "int8:block24", "bf16",
    "fp4:block32", "fp4", "fp4:block128:nested", "nf4:torchao",
)  # fmt: skip
STORAGES = [*QUICK, *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)]


def drawn(storage: str, seed: int, by: float) -> Tensor:
    """Values with a padding row, and rows of very different sizes."""
    rows = 512 if "torchao" in storage else ROWS
    generator = torch.Generator().manual_seed(seed)
    values = by * torch.randn(rows, COLUMNS, generator=generator)
    values[0] = 0
    values[3] *= 0.05
    return values


def layers(storage: str, by: float, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A stowed layer, and its dense twin with the values that rest."""
    before = drawn(storage, 1, by).to(dtype)
    stowed, dense = (nn.Linear(COLUMNS, len(before), bias=False, dtype=dtype) for _ in range(2))
    stowed.weight = nn.Parameter(stowage.quantize(before, storage), requires_grad=False)
    dense.weight = nn.Parameter(stowed.weight.dequantize(), requires_grad=False)
    return stowed, dense


def bytes_of(w: Tensor) -> list[bytes]:
    return [part.reshape(-1).view(torch.uint8).numpy().tobytes() for part in w.parts.values()]


def check(storage: str, form: str, by: float, dtype: torch.dtype = torch.float32) -> None:
    stowed, dense = layers(storage, by, dtype)
    for layer in (dense, stowed):
        torch.manual_seed(0)
        version = layer.weight._version
        FORMS[form](layer, drawn(storage, 2, 1.0).to(dtype))
    assert type(stowed.weight) is stowage.StowedTensor and stowed.weight._version > version
    wanted = stowage.quantize(dense.weight.detach(), stowed.weight.resting)
    assert bytes_of(stowed.weight) == bytes_of(wanted)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("form", FORMS)
def test_whole_write_leaves_what_quantizing_gives(form: str, storage: str) -> None:
    check(storage, form, 1000.0)
    if form in ASSIGNED:
        check(storage, form, 1e-3)
        check(storage, form, 1000.0, torch.bfloat16)


@pytest.mark.parametrize("storage", STORAGES)
def test_embedding_with_a_padding_row_is_loaded(storage: str) -> None:
    weight = drawn(storage, 1, 1e-3)
    layer = nn.Embedding(len(weight), COLUMNS, padding_idx=0)
    layer.load_state_dict({"weight": weight})
    stowage.stow(layer, storage)
    layer.load_state_dict({"weight": drawn(storage, 2, 1.0)})
    wanted = stowage.quantize(drawn(storage, 2, 1.0), storage)
    assert torch.equal(layer.weight.dequantize(), wanted.dequantize())


@pytest.mark.parametrize("storage", ["int8:tensor", "nf4:block64:nested"])
def test_the_same_values_are_no_write_and_stale_scales_end(storage: str) -> None:
    w = stowage.quantize(drawn(storage, 1, 1.0), storage)
    before = bytes_of(w)
    w.copy_(w.dequantize())  # quantizing them again might round again
    assert bytes_of(w) == before
    for row in w:
        row.zero_()
    w.zero_()  # changes no value, but leaves no scale of values that are gone
    assert bytes_of(w) == bytes_of(stowage.quantize(torch.zeros(w.shape), storage))


@pytest.mark.parametrize("storage", ["int8:tensor", "f8_e4m3:row", "nf4", "nf4:block64:nested"])
def test_a_weight_of_the_same_form_is_copied_byte_for_byte(storage: str) -> None:
    w, x = (stowage.quantize(drawn(storage, seed, 1.0), storage) for seed in (1, 2))
    for row in x[1:]:
        row.zero_()  # no values are left that its scales could be computed from
    w.copy_(x)
    assert bytes_of(w) == bytes_of(x)
    row = stowage.quantize(drawn(storage, 3, 1.0)[1:2], storage)
    w.copy_(row)  # of another shape: its values, broadcast
    wanted = stowage.quantize(row.dequantize().expand(ROWS, COLUMNS).contiguous(), storage)
    assert bytes_of(w) == bytes_of(wanted)


@pytest.mark.parametrize("other", ["nf4", "int8:tensor", "f8_e4m3:row", "bf16"])
def test_a_weight_of_another_form_gives_its_values(other: str) -> None:
    w = stowage.quantize(drawn("int8:row", 1, 1.0), "int8:row")
    given = stowage.quantize(drawn("int8:row", 2, 3.0), other)
    wanted = stowage.quantize(given.dequantize(), "int8:row")
    w.copy_(given)
    assert bytes_of(w) == bytes_of(wanted)
    w.zero_()
    w.T.copy_(given.T)
    assert bytes_of(w) == bytes_of(wanted)
    square = stowage.quantize(torch.randn(8, 8), "int8:row")
    turned = stowage.quantize(square.dequantize().T.contiguous(), "int8:row")
    square.T.copy_(stowage.quantize(square.dequantize(), "int8:row"))  # of that form, in a view
    assert bytes_of(square) == bytes_of(turned)


@pytest.mark.parametrize("storage", ["int8:tensor", "int8:row", "nf4:block64:nested"])
def test_a_slice_takes_no_scales_of_the_same_form(storage: str) -> None:
    """They would be those of all rows."""
    weight = stowage.quantize(torch.randn(8, 64), storage)
    before = weight.dequantize()
    given = stowage.quantize(before[2:6] * 0.75, storage)
    weight[2:6].copy_(given)
    after = weight.dequantize()
    assert torch.equal(after[:2], before[:2]) and torch.equal(after[6:], before[6:])
    assert (after[2:6] - given.dequantize()).abs().max() < 0.2 * given.dequantize().abs().max()


def test_a_row_that_keeps_its_value_counts_as_written_in_a_slice() -> None:
    w = stowage.quantize(drawn("nf4", 1, 1000.0), "nf4")
    x = drawn("nf4", 2, 1.0)
    w[:4] = x[:4]  # four rows are two blocks, and one row is zeros as before
    assert torch.equal(w[:4].dequantize(), stowage.quantize(x[:4], "nf4").dequantize())
    w.index_copy_(0, torch.arange(4), x[4:8])
    assert torch.equal(w[:4].dequantize(), stowage.quantize(x[4:8], "nf4").dequantize())


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


def test_an_inverse_parametrization_puts_a_plain_weight_in_and_loses_nothing() -> None:
    """torch swaps what `right_inverse` gives into the Parameter and asks nobody."""
    stowed, dense = layers("int8:tensor", 1000.0, torch.float32)
    for layer in (stowed, dense):
        parametrize.register_parametrization(layer, "weight", Doubled())
        layer.weight = drawn("int8:tensor", 2, 1.0)
    assert type(stowed.parametrizations.weight.original) is nn.Parameter
    assert torch.equal(stowed.weight, dense.weight)
