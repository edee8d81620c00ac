# SPDX-License-Identifier: Apache-2.0
"""Resting weights under FSDP2, in 1 to 4 processes: the same losses and bytes as unsharded."""

import math
from typing import Any

import pytest
import qlora_models
import sharded
from sharded import run
from storages import covering, flat_shapes, form

from stowage._ops.storage import Storage

CASES: list[Any] = [
    ("nf4", (32, 64), {}),
    ("nf4:block64:nested", (7, 33), {"reshard_after_forward": False}),
    ("f8_e4m3:row", (1, 65), {"recompute": True}),
    ("int8:block16", (65, 7), {"offload": True}),
]
SHORT: list[Any] = [("nf4:block64:nested", (5, 33), {"recompute": True, "offload": True})]
STORAGES = (
    "nf4",
    "nf4:nested",
    "fp4:block32",
    "f8_e4m3:row",
    "int8:tensor",
    "int8:block16",
    "bf16",
)
COLUMNS = (3, 31, 33, 63, 64, 65, 96, 127, 200)


def check_losses(world: int, cases: list[Any]) -> None:
    for case, (want, got) in zip(cases, run(world, sharded.losses_of, cases), strict=True):
        if world == 3:  # a sum of three is not a product by three
            assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(want, got, strict=True)), (
                case
            )
        else:
            assert got == want, case


EVERY: list[Any] = [  # with CASES each storage once, and each form
    ("fp4:block32", (6, 31), {}),
    ("int8:tensor", (9, 3), {"recompute": True, "offload": True}),
    ("bf16", (3, 127), {}),
    ("nf4:nested", (9, 200), {}),
    ("int4:block32:zero", (10, 80), {}),
    ("int3:block32:bf16:zero", (24, 80), {}),
    ("q6_k", (24, 264), {}),
    ("uint4:column8:bf16:zero_rounded", (24, 80), {}),
]
HAD = {feature for name, _, _ in CASES + EVERY for feature in form(Storage(name))}
EVERY += [(name, (24, 80), {}) for name in covering(lambda s: {*form(s)} - HAD, flat_shapes)]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_losses_are_those_of_the_unsharded_model(world: int) -> None:
    check_losses(world, CASES + EVERY[: len(EVERY) * (world == 2)])


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_losses_with_uneven_and_empty_shards(world: int) -> None:
    check_losses(world, [*SHORT, ("nf4", (1, 65), {})])


@pytest.mark.slow
def test_torchao_storage() -> None:
    check_losses(4, [("nf4:torchao:block16:scaler4", (12, 64), {})])


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("reshard", [True, False])
def test_every_shape(world: int, storage: str, reshard: bool) -> None:
    options = {"reshard_after_forward": reshard}
    for rows in (1, 3, 6, 9):
        check_losses(world, [(storage, (rows, columns), options) for columns in COLUMNS])


@pytest.mark.slow
@pytest.mark.parametrize(
    "world", [2, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 4))]
)
def test_qlora_of_every_kind_of_weight(world: int) -> None:
    ways = [(recompute, offload) for recompute in (False, True) for offload in (False, True)]
    cases = [("gather_only", *way) for way in ways]
    cases += [("rowwise", *way) for way in ways[:: 3 if world == 2 else 1]]
    for case, (want, got) in zip(cases, run(world, qlora_models.losses, cases), strict=True):
        assert got == want, case


@pytest.mark.slow
def test_bytes_on_the_wire() -> None:
    cases = [("nf4", (8, 4096)), ("nf4:nested", (8, 4096)), ("nf4", (5, 33))]
    (plain,), (nested,), odd = run(2, sharded.wire_bytes, cases)
    assert plain * 2 <= 8 * 4096 * 0.5625 * 1.01
    assert nested * 2 <= 8 * 4096 * 0.516 * 1.01
    # ceil(5 / 2) records of 33 columns: 2 slots and 17 bytes of codes, in fours
    assert odd == [3 * 28]


@pytest.mark.slow
def test_memory_is_free_after_a_block() -> None:
    full = [32 * 32, 32 * 4]
    assert run(2, sharded.memory) == [(full, [0, 0]), (full, full)]


@pytest.mark.slow
def test_blocks_compiled_before() -> None:
    run(2, sharded.compiled)


@pytest.mark.slow
def test_layers_that_gather_fp8_beside() -> None:
    run(2, sharded.with_fp8_gather)


@pytest.mark.slow
def test_pairs_that_replicate_each_other_and_mixed_precision() -> None:
    run(4, sharded.two_by_two)


@pytest.mark.slow
def test_a_model_of_many_storages_and_trainable_weights() -> None:
    run(2, sharded.mixed)


@pytest.mark.slow
def test_groups_of_columns_are_spread_by_rows() -> None:
    run(2, sharded.groups_of_columns)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "kind", "text"),
    [
        (4, "int", "^stowage: .*Block: reshard_after_forward must be True or False"),
        (2, "dim1", r"sharded along dim 0.*got Shard\(1\).*sharded already.*model again"),
        (2, "unequal", "0.up.base.weight: must rest in process 1 as in 0"),
    ],
)
def test_refusals_are_the_same_in_every_process(world: int, kind: str, text: str) -> None:
    import re

    assert re.search(text, run(world, sharded.refused, kind))
