# SPDX-License-Identifier: Apache-2.0
"""Sharding that is not known for what it is does not go on with dense weights in silence."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sharding_modes
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import stowage
from stowage import sharding
from stowage._shard import sharding_calls
from stowage.training import convert_float8, init_value, quantized_init


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that makes room for shards in another way: operators that are not answered."""
    monkeypatch.setattr(sharding_calls, "_may_be_sharded", lambda: False)


def rests(storage: str = "nf4") -> Any:
    model = nn.Sequential(nn.Linear(64, 32)).requires_grad_(False)
    stowage.stow(model, rules={"0.weight": storage})
    return model


def made_at_rest() -> Any:
    with quantized_init("nf4"):
        return nn.Sequential(nn.Linear(64, 32))


def given_by_hand() -> Any:
    model = nn.Sequential(nn.Linear(64, 32)).requires_grad_(False)
    model[0].weight = nn.Parameter(stowage.quantize(model[0].weight.detach(), "nf4"), False)
    return copy.deepcopy(model)


@pytest.mark.parametrize("make", [rests, made_at_rest, given_by_hand])
def test_check_and_save_compare_with_what_was_stowed(
    mesh: Any, unknown: None, tmp_path: Path, make: Any
) -> None:
    model = make()
    fully_shard(model, mesh=mesh)
    text = r"0\.weight: must be spread as it was stowed, as nf4:block64, got plain torch\.float32"
    for call in (sharding.check, sharding.state_dict, lambda m: sharding.save(m, tmp_path)):
        with pytest.raises(stowage.InvalidArgument, match=text):
            call(model)
    assert not list(tmp_path.iterdir())


def test_what_one_rank_widened_is_refused_on_all(tmp_path: Path) -> None:
    first, second = on_ranks(2, sharding_modes.widened_on_one, str(tmp_path / "saved"))
    assert first == second and len(first) == 2 and not (tmp_path / "saved").exists()
    for text in first:
        assert "up.weight: must be spread as it was stowed, as nf4:block64, got plain" in text


def test_check_passes_what_rests_and_what_was_unstowed(mesh: Any) -> None:
    model, plain = rests(), rests()
    stowage.unstow(plain)
    for each in (model, plain):
        fully_shard(each, mesh=mesh)
        sharding.check(each)
        each(torch.ones(1, 64))
        sharding.check(each)


PREPARE = r"call stowage\.sharding\.prepare\(model\) before parallelize_module or distribute_tensor"


@pytest.mark.parametrize(
    ("storage", "what"),
    [("nf4", "a slice"), ("nf4:block64:nested", r"plain torch\.float32 values")],
)
def test_tensor_parallelism_must_be_prepared_for(storage: str, what: str) -> None:
    """By an error in each process, also where torch sends nothing, and modules stay as they are."""
    dense = rf"weight of Linear rests as {storage}.* got a DTensor of "
    early = rf"must be prepared before it is distributed, got \[20, 64\] as {storage}"
    columns = r"plain torch\.float32 values \[40, 32\]"
    wanted = [early, rf"{dense}{what} \[20, 64\]", dense + columns, dense + columns, early]
    for *texts, replicated in on_ranks(2, sharding_modes.not_prepared, storage):
        for text, want in zip(texts, wanted, strict=True):
            assert re.search(rf"{want}.*; {PREPARE}", text), text
        assert replicated == "distributed"  # the whole weight rests, in each process


def test_prepare_takes_modules_and_weights(mesh: Any) -> None:
    model = rests()
    assert sharding.prepare(model) is model
    weight = stowage.quantize(torch.ones(8, 64), "nf4")
    spread: Any = distribute_tensor(sharding.prepare(weight), mesh, [Shard(0)])
    assert isinstance(spread._local_tensor, sharding.StowedRows)
    with pytest.raises(stowage.InvalidArgument, match="a module or a resting weight, got list"):
        sharding.prepare([weight])  # type: ignore[type-var]


def test_what_is_prepared_stays_so_and_computes_as_before(mesh: Any) -> None:
    model, x = rests(), torch.linspace(-1, 1, 64)
    want = model(x)
    sharding.prepare(model)
    stowage.fallbacks(clear=True)
    for each in (model, copy.deepcopy(model), model.to(torch.float32)):
        assert torch.equal(each(x), want) and not stowage.fallbacks()
        assert all(isinstance(p, sharding.StowedRows) for p in each[0].weight.chunk(2))
    given: Any = distribute_tensor(model[0].weight, mesh, [Shard(0)]).full_tensor()
    assert all(type(piece) is stowage.StowedTensor for piece in given.chunk(2))


def test_room_reads_as_zeros_and_takes_rows_of_its_weight_alone(mesh: Any) -> None:
    weight, other = rests()[0].weight, rests()[0].weight
    room = weight.new_zeros(3, 64)
    assert isinstance(room, sharding.StowedRows)
    assert torch.equal(room + 1, torch.ones(3, 64))
    assert weight.bfloat16().new_zeros(3, 64).dequantize().dtype is torch.bfloat16
    for write in (
        lambda: room.add_(1),
        lambda: room[0].fill_(1),
        lambda: room[:, :3].zero_(),
        lambda: room.view(-1)[:3].zero_(),
        lambda: room.copy_(torch.ones(3, 64)),
        lambda: room.copy_(other[:3]),
        lambda: room.copy_(weight.t()[:3, :3]),
        lambda: room.copy_(weight[::2][:3]),
    ):
        with pytest.raises(stowage.StowageError, match=r"take torch\.zeros for plain memory"):
            write()
    room.copy_(weight[5:8])
    assert room.first == 5 and torch.equal(room.dequantize(), weight.dequantize()[5:8])


@pytest.mark.parametrize("size", [(33, 64), (3, 65), (64,), (32, 8, 8), (0,), (5, 32)])
def test_other_memory_is_plain(mesh: Any, size: tuple[int, ...]) -> None:
    made = rests()[0].weight.new_zeros(size)
    assert type(made) is torch.Tensor and torch.equal(made, torch.zeros(size))
    typed = rests()[0].weight.new_zeros(3, 64, dtype=torch.float32)
    assert type(typed) is torch.Tensor


def test_rows_by_any_view_of_them(mesh: Any) -> None:
    """Whatever way leads to consecutive rows: slices that rest, views, a slice's slice."""
    for storage in ("nf4", "nf4:block64:nested", "f8_e4m3:row", "f8_e4m3", "int8:block16"):
        weight = stowage.quantize(torch.randn(24, 33 if storage != "int8:block16" else 32), storage)
        records = sharding_calls.rows_of(weight, 0, 24).records
        for held in (weight, nn.Parameter(weight, False)):
            for values, first in (
                (held[4:9], 4),
                (held.narrow(0, 4, 9)[3:5], 7),
                (held.split(8)[2], 16),
                (held.detach().view(24, -1)[23:], 23),
                (held.t().t()[1:4], 1),
                (held, 0),
            ):
                room: Any = held.new_zeros(values.shape)
                room.copy_(values)
                assert room.first == first
                assert torch.equal(room.records, records[first : first + len(values)])


def test_a_slice_as_a_parameter_is_sharded_by_its_own_rows(mesh: Any) -> None:
    whole = stowage.quantize(torch.randn(32, 64), "nf4")
    model = nn.Sequential(nn.Linear(64, 16, bias=False).requires_grad_(False))
    model[0].weight = nn.Parameter(whole[16:], False)
    want = model[0].weight.dequantize()
    fully_shard(model, mesh=mesh)
    rows: Any = model[0].weight
    assert rows._local_tensor.first == 0 and torch.equal(rows.full_tensor().dequantize(), want)


def test_a_dense_dtensor_takes_no_place_of_a_resting_weight(mesh: Any) -> None:
    model = rests("f8_e4m3:row")
    dense = model[0].weight.dequantize()
    spread = nn.Parameter(DTensor.from_local(dense, mesh, [Replicate()]), False)
    with pytest.raises(stowage.Unsupported, match=r"rests as f8_e4m3:row .*plain torch\.float32"):
        model[0].weight = spread
    stowage.unstow(model)
    model[0].weight = spread
    assert model[0].weight is spread


def test_plain_values_take_no_place_of_a_float8_weight(mesh: Any) -> None:
    model: Any = convert_float8(nn.Sequential(nn.Linear(16, 16)))
    dense = DTensor.from_local(model[0].weight.detach().plain_value, mesh, [Replicate()])
    with pytest.raises(stowage.Unsupported, match="weight of Linear in fp8 must stay so"):
        model[0].weight = nn.Parameter(dense)
    assert "forward" not in model[0].__dict__


def test_rows_are_refused_along_columns(mesh: Any) -> None:
    both = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model = sharding.prepare(rests("int8:row"))
    parallelize_module(model, both["tp"], {"0": ColwiseParallel()})
    with pytest.raises(stowage.Unsupported, match=r"rows of .* along dim 0, got Shard\(1\)"):
        fully_shard(model[0], mesh=both["dp"], shard_placement_fn=lambda _: Shard(1))


def test_a_copy_of_rows_keeps_its_init_values(mesh: Any) -> None:
    with quantized_init("f8_e4m3:row", preserve_init=True):
        model: Any = nn.Sequential(nn.Linear(16, 8))
    fully_shard(model, mesh=mesh)
    rows = model[0].weight._local_tensor
    assert isinstance(rows, sharding.StowedRows)
    value, copied = init_value(rows), copy.deepcopy(rows)
    assert torch.equal(init_value(copied), value)
    assert init_value(copied) is not value and copied.records is not rows.records
    copied._origin.clear()
    assert init_value(rows) is value
