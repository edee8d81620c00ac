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
from stowage._shard import callers, sharding_calls
from stowage.training import convert_float8, init_value, quantized_init


@pytest.fixture(scope="module", autouse=True)
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch whose sharding code has other names, which nobody noticed."""
    monkeypatch.setattr(callers, "_SHARDS", ("torch.distributed.elsewhere.",))


def rests(storage: str = "nf4") -> Any:
    model = nn.Sequential(nn.Linear(64, 32)).requires_grad_(False)
    stowage.stow(model, {"0.weight": storage})
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


def test_check_passes_what_rests_and_what_was_unstowed(mesh: Any) -> None:
    model, plain = rests(), rests()
    stowage.unstow(plain)
    for each in (model, plain):
        fully_shard(each, mesh=mesh)
        sharding.check(each)
        each(torch.ones(1, 64))
        sharding.check(each)


@pytest.mark.parametrize("library", ["fsdp", "tensor"])
def test_a_torch_without_the_known_names_is_refused(
    mesh: Any, unknown: None, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    key = f"torch.distributed.{library}."
    ((module, name),) = callers._KNOWN[key]
    monkeypatch.setitem(callers._KNOWN, key, ((module, f"{name}_of_old"),))
    callers._missing.cache_clear()
    model = rests()
    try:
        with pytest.raises(stowage.Unsupported, match=rf"has no {module}\.{name}_of_old, by which"):
            if library == "fsdp":
                fully_shard(model, mesh=mesh)
            else:
                distribute_tensor(model[0].weight, mesh, [Shard(0)])
    finally:
        callers._missing.cache_clear()
    assert type(model[0].weight) is stowage.StowedTensor


def test_room_that_is_not_known_for_what_it_is(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding_calls, "rows_that_fit", lambda *sizes: None)
    model = rests()
    with pytest.raises(stowage.Unsupported, match=r"must make room .*plain memory \[32, 64\]"):
        fully_shard(model, mesh=mesh)
    assert type(model[0].weight) is stowage.StowedTensor


def test_the_known_names_are_there() -> None:
    assert [callers._missing(library) for library in callers._KNOWN] == ["", ""]


@pytest.mark.parametrize(
    ("storage", "what"),
    [("nf4", "a slice"), ("nf4:block64:nested", r"plain torch\.float32 values")],
)
def test_tensor_parallelism_that_was_not_known_changes_no_module(storage: str, what: str) -> None:
    for text in on_ranks(2, sharding_modes.unknown_plan, storage):
        wanted = rf"weight of Linear rests as {storage}.* got a DTensor of {what} \[20, 64\]"
        assert re.search(wanted, text), text


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
    model = parallelize_module(rests("int8:row"), both["tp"], {"0": ColwiseParallel()})
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
