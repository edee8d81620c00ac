# SPDX-License-Identifier: Apache-2.0
"""fp8 on the wire of FSDP2: the same bytes, losses and weights as without shards, on gloo."""

import itertools
from pathlib import Path

import float8_lives
import float8_ranks
import pytest
import torch
from ranks import on_ranks

NIGHTLY = pytest.mark.nightly
RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "gather_only")


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.nightly)])
def test_twenty_steps_equal_the_unsharded_ones_bit_for_bit(world: int) -> None:
    cases = [(recipe, 20 if world > 1 else 4, {}, {}) for recipe in RECIPES]
    high = {"convert": {"gather": "high"}}  # values travel, and are cast alike by every rank
    cases += [(recipe, 4, {}, high) for recipe in ("tensorwise", "rowwise") if world == 2]
    assert on_ranks(world, float8_ranks.matrix, cases) == [[]] * world


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_every_way_to_shard_and_to_step_gives_the_same(world: int) -> None:
    cases = [
        (recipe, 4, {"reshard_after_forward": reshard}, extra)
        for recipe, reshard, extra in itertools.product(
            ("tensorwise", "delayed", "rowwise"),
            (True, False),
            ({"refresh": False}, {"micro": 2}, {"checkpointed": True}),
        )
    ]
    cases += [("tensorwise", 4, {}, {"convert": {"scale_mode": "te", "pow2": True}})]
    assert on_ranks(world, float8_ranks.matrix, cases) == [[]] * world


@pytest.mark.parametrize("world", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_gathered_bytes_are_those_of_the_whole_weight(world: int) -> None:
    """Uneven and empty shards too, and not a byte more on the wire than is said."""
    for answer in on_ranks(world, float8_ranks.all_bytes):
        for recipe, rows, same, factor, gathered, reductions in answer:
            assert same and factor, (rows, world)
            if world > 1:
                length = 33 if recipe == "tensorwise" else 40  # 4 + 33, filled to 4
                wire = -(-rows // world) * world * length
                assert gathered == [(torch.uint8, wire)]
                assert len(reductions) == (recipe == "tensorwise")


@pytest.mark.parametrize(
    "change", ["data", "foreach", "fused", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_a_write_to_the_weights_makes_one_reduction_of_all_scales(change: str) -> None:
    for reductions, same in on_ranks(2, float8_ranks.stale, change):
        assert reductions == [4 * 7 * 4] and same  # four weights, 28 bytes each


def test_scales_survive_the_offloading_of_shards() -> None:
    for reductions, wrong in on_ranks(2, float8_ranks.offloaded):
        assert wrong == [] and len(reductions) == 4  # the first step, and one after each of three


@pytest.mark.parametrize(
    ("recipe", "bad"), [("tensorwise", float("nan")), ("rowwise", -float("inf"))]
)
def test_every_rank_names_the_weight_and_the_rank_that_is_not_finite(
    recipe: str, bad: float
) -> None:
    texts = on_ranks(2, float8_ranks.refusal, recipe, bad)
    assert texts[0] == texts[1]
    assert "layers.0.weight must be finite, got inf or NaN" in texts[0] and "rank 1" in texts[0]


def test_a_policy_of_mixed_precision_computes_in_its_dtype_and_gathers_fp8() -> None:
    for result, gradient, gathered in on_ranks(2, float8_ranks.mixed):
        assert result == torch.bfloat16 and gradient == torch.float32
        # codes, then the bias in bf16; rows filled up to a multiple of two
        assert gathered[0] == (torch.uint8, 8 * 32 + 8 * 2)


def test_resharding_to_a_number_of_ranks_is_refused_by_all() -> None:
    for texts in on_ranks(4, float8_lives.refused_int):
        for text in texts:
            assert "Net: reshard_after_forward must be True or False" in text


@pytest.mark.parametrize(
    ("world", "shape"),
    [(2, (2,)), (3, (3,)), pytest.param(4, (2, 2), marks=pytest.mark.slow)],
    ids=["2", "3", "2x2"],
)
def test_own_batches_average_gradients(world: int, shape: tuple[int, ...]) -> None:
    """The second mesh replicates over pairs of shards. Gradients are averages, not sums."""
    for recipe in ("rowwise", "tensorwise")[: 1 + (world == 4)]:
        for errors, different in on_ranks(world, float8_lives.own_batches, recipe, shape, 4):
            assert errors[0] == 0 and max(errors) < 1e-6
            if world == 2:
                assert max(errors) == 0 and different == []


@pytest.mark.parametrize(
    ("world", "recipe", "steps"),
    [(3, "tensorwise", 8)]
    + [pytest.param(w, r, 100, marks=NIGHTLY) for w in (3, 4) for r in ("plain", *RECIPES)],
)
def test_own_batches_added_in_the_order_of_ranks_give_the_same_bits(
    world: int, recipe: str, steps: int
) -> None:
    """gloo adds three and more in an order of its own, with plain weights too."""
    for errors, different in on_ranks(
        world, float8_lives.own_batches, recipe, (world,), steps, True, seconds=200
    ):
        assert max(errors) == 0 and different == []


def test_gathers_leave_no_memory_behind() -> None:
    for first, last, empty in on_ranks(2, float8_lives.cycles, 100):
        assert last - first < 1024 and empty, "a scalar of torch may come; a leak is 100 gathers"


@pytest.mark.nightly
def test_a_thousand_gathers_leave_no_memory_behind() -> None:
    for first, last, empty in on_ranks(2, float8_lives.cycles, 1000, seconds=120):
        assert last - first < 1024 and empty, "a scalar of torch may come; a leak is 100 gathers"


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_hundred_steps_equal_the_unsharded_ones_bit_for_bit(world: int) -> None:
    cases = [(recipe, 100, {}, {}) for recipe in RECIPES]
    assert on_ranks(world, float8_ranks.matrix, cases, seconds=250) == [[]] * world


def test_sharded_checkpoints_and_full_state_dicts(tmp_path: Path) -> None:
    for different, same, types in on_ranks(2, float8_lives.restored, str(tmp_path)):
        assert different == [] and same and types == {"Tensor"}


def test_sharded_models_that_begin_on_the_meta_device() -> None:
    assert on_ranks(2, float8_lives.from_meta) == [("TrainedWeight", [])] * 2


def test_ranks_that_hold_other_layers_are_told_alike() -> None:
    first, second = on_ranks(2, float8_lives.unlike)
    assert first == second and len(first) == 3
    for text in first:
        assert "0.weight must be the same layer on every rank, got different ones" in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["delayed", *(pytest.param(r, marks=NIGHTLY) for r in ("tensorwise", "rowwise"))]
)
def test_compiled_blocks_equal_eager_ones_and_stay_one_graph_each(recipe: str) -> None:
    for wrong, graphs, later in on_ranks(2, float8_lives.compiled, recipe, 10):
        assert wrong == [] and graphs == 4 and later == 0
