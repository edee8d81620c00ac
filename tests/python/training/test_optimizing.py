# SPDX-License-Identifier: Apache-2.0
"""MasterOptimizer in the surroundings of a training loop, bit for bit with plain masters."""

from __future__ import annotations

import pytest
from kept_training import scaled_on_ranks
from lock_step import CASES, OPTIMIZERS, STORAGE, adamw, in_lock_step, pair, sgd
from ranks import on_ranks
from surroundings import SURROUNDINGS, plainly, scaled


@pytest.mark.parametrize(("optimizer", "surrounding"), CASES)
def test_lock_step_with_plain_masters(optimizer: str, surrounding: str) -> None:
    in_lock_step(SURROUNDINGS[surrounding], pair(OPTIMIZERS[optimizer]))


@pytest.mark.nightly
@pytest.mark.parametrize("storage", ["f8_e4m3:row", "int8:block32", "nf4:nested", "bf16"])
@pytest.mark.parametrize("surrounding", SURROUNDINGS)
def test_lock_step_of_every_storage(storage: str, surrounding: str) -> None:
    in_lock_step(SURROUNDINGS[surrounding], pair(adamw(), storage))


def test_a_scaled_step_is_as_long_as_one_that_is_not() -> None:
    """The defect: gradients of resting weights were never unscaled."""
    moved = []
    for run in (plainly, scaled(unscale=True)):
        (model, optimizer), _ = pair(sgd)
        before = model.up.weight.dequantize()  # type: ignore[operator]
        next(run(model, optimizer))
        moved.append((model.up.weight.dequantize() - before).abs().max().item())  # type: ignore[operator]
    assert moved[0] == moved[1] > 0


@pytest.mark.slow
def test_sharded_in_a_scaler_equals_plain_masters() -> None:
    """Losses, skipped steps and scales; rank 1 alone has the infinite gradient."""
    first, second = on_ranks(2, scaled_on_ranks, STORAGE)
    assert first == second == "alike"
