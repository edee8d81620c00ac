# SPDX-License-Identifier: Apache-2.0
"""Whole steps of sharded fp8 models: every collective and its bytes, averages, ties, optimizers,
meshes, and models of transformers and PEFT."""

import float8_models
import float8_steps
import pytest
import torch
from ranks import on_ranks

CODES, HIGH = torch.uint8, torch.float32


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_a_step_has_these_collectives_and_no_others(recipe: str, offload: bool) -> None:
    """Two weights of 64 x 64 are gathered twice, a byte for each value and 4 for each scale of a
    row; one reduction for all scales, also where shards rest on the CPU."""
    gather = ("allgather_base", CODES, 64 * (64 if recipe == "tensorwise" else 64 + 4))
    scatter = ("reduce_scatter_base", HIGH, 64 * 64 * 4)
    scales = [("allreduce", HIGH, 2 * 28)] if recipe == "tensorwise" else []
    for first, *later in on_ranks(2, float8_steps.collectives, recipe, offload):
        assert first == [*scales, *[gather] * 4, *[scatter] * 2, *scales]
        assert later == [[*[gather] * 4, *[scatter] * 2, *scales]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_averages_of_gradients_are_averages(world: int, dtype: torch.dtype) -> None:
    for values, found in on_ranks(world, float8_steps.averages, dtype):
        assert values == [8 * (world + 1) / 2] and found == torch.float32


def test_a_tied_embedding_stays_plain_and_shared_under_shards() -> None:
    for wrong, holds, gathers in on_ranks(2, float8_steps.tied):
        assert wrong == [] and holds
        # the tied weight, of 8 rows with the filled one; two weights in fp8 with their biases
        layers = 48 * 32 + 32 * 48 + 4 * (48 + 32)
        assert gathers == [("allgather_base", HIGH, 8 * 32 * 4), ("allgather_base", CODES, layers)]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_optimizers_of_loops_and_foreach_round_alike_for_shards(world: int) -> None:
    """The fused one need not, with plain weights either: docs/training.md."""
    for found in on_ranks(world, float8_steps.optimizers):
        assert found["loops"] == found["foreach"] == ([], [])


@pytest.mark.slow
def test_shards_over_one_dimension_of_two_reduce_over_that_one() -> None:
    assert on_ranks(4, float8_steps.of_two_meshes) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "weights"), [("llama", 15), ("peft", 15)])
def test_models_of_other_libraries_train_as_whole_ones(kind: str, weights: int) -> None:
    for wrong, count, changed in on_ranks(2, float8_models.trained, kind, "tensorwise"):
        assert wrong == [] and count == weights and changed == 0
