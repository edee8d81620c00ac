# SPDX-License-Identifier: Apache-2.0
"""Columns in another order than their groups (`:actorder`): values, products and writes, with the
kernels and without them. Files of such weights: tests/python/files/test_dialects.py."""

from __future__ import annotations

import copy
import io
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage
from stowage._ops import library
from stowage._ops.numbers import ordered, scaled, stochastic
from stowage._ops.storage import Storage
from stowage._shard.pieces import columns_misfit
from stowage._tensor.stowed import StowedTensor, wrap

STORAGES = [
    "int4:block32:actorder",
    "int4:block6:bf16:zero:actorder",
    "int4:block16:f16:actorder",
    "int8:block7:f16:actorder",
    "int8:block32:zero:actorder",
]
ROWS, COLUMNS = 12, 96


def made(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, even: bool = False
) -> StowedTensor:
    """Any codes, scales and zeros; columns in groups at random, or each in as many as another."""
    torch.manual_seed(seed)
    storage, shape = Storage(name), (ROWS, COLUMNS)
    parts = []
    for part, kind, sizes in storage.layout(shape):
        if part == "g_idx":
            count = -(-COLUMNS // storage.block)
            plain = torch.arange(COLUMNS) // storage.block
            groups = plain[torch.randperm(COLUMNS)] if even else torch.randint(count, (COLUMNS,))
            parts.append(groups.int())
        elif kind.is_floating_point:
            parts.append((torch.rand(sizes) + 0.1).to(kind))
        else:
            low, high = (0, 256) if part == "codes" else (-8, 8)
            parts.append(torch.randint(low, high, sizes).to(kind))
    return wrap(parts, storage, shape, dtype, False)


def oracle(weight: StowedTensor) -> torch.Tensor:
    parts = weight.parts
    codes, groups = parts["codes"], parts["g_idx"].long()
    if weight.resting.startswith("int4"):
        numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float() - 8
    else:
        numbers = codes.view(torch.int8).float()
    if "zero" in parts:
        numbers = numbers - parts["zero"][:, groups]
    return numbers * parts["scale"].float()[:, groups]


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("seed", range(5))
def test_each_column_has_the_scale_of_its_group(name: str, seed: int) -> None:
    weight = made(name, seed=seed)
    want, parts = oracle(weight), list(weight.parts.values())
    storage, ids = Storage(name), torch.tensor([3, 0, 11, 3])
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(weight.dequantize(dtype), want.to(dtype))
    assert torch.equal(nn.functional.embedding(ids, weight), want[ids])
    # The same in stock torch, for devices without kernels.
    assert torch.equal(scaled.values(parts, storage, weight.shape, slice(2, ROWS)), want[2:])
    assert torch.equal(scaled.pick(parts, storage, weight.shape, ids), want[ids])


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_values(name: str, dtype: torch.dtype) -> None:
    weight = made(name, dtype)
    dense = oracle(weight).to(dtype)
    for rows in (1, 5, 40):
        x = torch.randn(rows, COLUMNS, dtype=dtype, requires_grad=True)
        y, want = nn.functional.linear(x, weight), nn.functional.linear(x, dense)
        bound = (torch.finfo(dtype).eps + 2**-16) * (x.abs() @ dense.abs().T)
        assert bool(((y - want).abs() <= 2 * bound).all())
        g = torch.randn_like(y)
        (got,) = torch.autograd.grad(y, x, g)
        bound = (torch.finfo(dtype).eps + 2**-16) * (g.abs() @ dense.abs())
        assert bool(((got - g @ dense).abs() <= 2 * bound).all())
    rows = weight[3:7]
    assert isinstance(rows, StowedTensor) and torch.equal(rows.dequantize(), dense[3:7])
    joined = torch.cat([weight[:4], weight[4:]])
    assert isinstance(joined, StowedTensor) and torch.equal(joined.dequantize(), dense)
    assert not isinstance(torch.cat([weight, made(name, dtype, seed=1)]), StowedTensor)


@pytest.mark.parametrize("name", STORAGES)
def test_a_write_quantizes_the_groups_that_are_named(name: str) -> None:
    """The bytes of the plain storage, whose columns are sorted by group; the order stays."""
    weight, plain = made(name, even=True), name.removesuffix(":actorder")
    values = torch.randn(ROWS, COLUMNS)
    order = weight.parts["g_idx"].clone()
    with torch.no_grad():
        weight.copy_(values)
    perm = order.argsort(stable=True)
    want = stowage.quantize(values[:, perm].contiguous(), plain)
    _, *scales, groups = weight.parts.values()
    assert torch.equal(groups, order)
    for got, expected in zip(scales, list(want.parts.values())[1:], strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(weight.dequantize()[:, perm], want.dequantize())
    before = [part.clone() for part in weight.parts.values()]
    with torch.no_grad():
        weight.mul_(1)  # no value changes
    assert all(map(torch.equal, before, weight.parts.values()))


@pytest.mark.parametrize("name", STORAGES)
def test_a_write_to_some_elements_leaves_the_others(name: str) -> None:
    weight = made(name, even=True)
    with torch.no_grad():
        weight.copy_(torch.randn(ROWS, COLUMNS))
        was = weight.dequantize()
        before = {part: held.clone() for part, held in weight.parts.items()}
        weight[2, 5:9] = was[2, 5:9] * 0.5
    now, rest = weight.dequantize(), [i for i in range(ROWS) if i != 2]
    assert torch.equal(before["g_idx"], weight.parts["g_idx"])
    assert not torch.equal(before["codes"][2], weight.parts["codes"][2])
    for part in weight.resting.count(":zero") * ["zero"] + ["codes", "scale"]:
        assert torch.equal(before[part][rest], weight.parts[part][rest])
    assert torch.equal(now[rest], was[rest])
    groups = before["g_idx"].long()
    other = ~torch.isin(groups, groups[5:9])
    if "zero" not in name:  # these have other zeros than values that were read
        assert torch.equal(now[2, other], was[2, other])
    if name.startswith("int4") and "zero" not in name:  # whose scale would move with each write
        left = torch.ones(COLUMNS, dtype=torch.bool)
        left[5:9] = False
        assert torch.equal(now[2, left], was[2, left])
    step = weight.parts["scale"].float()[2][groups[5:9]]
    assert bool(((now[2, 5:9] - was[2, 5:9] * 0.5).abs() <= step * 0.5001).all())


@pytest.mark.parametrize("name", STORAGES)
def test_rounding_at_random_takes_a_neighbour(name: str) -> None:
    values = torch.randn(ROWS, COLUMNS)
    groups, storage = made(name, even=True).parts["g_idx"], Storage(name)
    parts = ordered.quantize(values, storage, groups)
    nearest = wrap(parts, storage, (ROWS, COLUMNS), torch.float32, False)
    chosen = stochastic.quantize(values, storage, 7, groups=groups)
    again = wrap(chosen, storage, (ROWS, COLUMNS), torch.float32, False)
    assert all(map(torch.equal, chosen[1:], parts[1:]))
    step = parts[1].float()[:, groups.long()]
    clamped = (again.dequantize() - nearest.dequantize()).abs()
    assert bool((clamped <= step * 1.0001).all()) and bool(clamped.any())


def test_values_alone_make_none() -> None:
    values, layer = torch.randn(4, 64), nn.Linear(64, 4)
    rule = "groups that values alone make"
    with pytest.raises(stowage.InvalidArgument, match=f"{rule}, such as int4:block32, got"):
        stowage.quantize(values, "int4:block32:actorder")
    with pytest.raises(stowage.InvalidArgument, match=rule):
        stowage.stow(layer, "int4:block32:actorder")
    with pytest.raises(RuntimeError, match=rule):
        library.quantize(values.to("meta"), Storage("int4:block32:actorder").key)
    assert type(layer.weight) is nn.Parameter


def test_columns_have_no_pieces() -> None:
    rule = columns_misfit(Storage("int4:block32:actorder"), (64, 128), 2)
    assert rule is not None and "use Shard(0)" in rule
    assert columns_misfit(Storage("int4:block32"), (64, 128), 2) is None


class Layer(nn.Module):
    def __init__(self, weight: StowedTensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize("name", STORAGES)
def test_copies_states_and_files_keep_the_order(name: str, tmp_path: Path) -> None:
    layer, other = Layer(made(name)), Layer(made(name, seed=1))

    def same(weight: StowedTensor) -> bool:
        parts = zip(weight.parts.values(), layer.weight.parts.values(), strict=True)
        return weight.resting == name and all(torch.equal(a, b) for a, b in parts)

    assert same(copy.deepcopy(layer).weight)
    sent = io.BytesIO()
    torch.save(layer.weight, sent)
    assert same(torch.load(io.BytesIO(sent.getvalue())))
    other.load_state_dict(layer.state_dict())
    assert same(other.weight)
    again = Layer(made(name, seed=2))
    stowage.load_state_dict(again, stowage.state_dict(layer))
    assert same(again.weight)
    path = stowage.save(layer, tmp_path)
    for mmap in (False, True):
        assert same(stowage.load(Layer(made(name, seed=3)), tmp_path, mmap=mmap).weight)
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin = 8 + size + json.loads(data[8 : 8 + size])["weight_g_idx"]["data_offsets"][0]
    data[begin + 3] = 0x7F
    path.write_bytes(data)
    with pytest.raises(stowage.BadFile, match=f"weight_g_idx.* byte {begin}.* of column 0, of"):
        stowage.load(Layer(made(name)), tmp_path)
