# SPDX-License-Identifier: Apache-2.0
"""fp8 training under tensor parallelism, alone and with FSDP2 on the same weights: codes and scales
are those of the whole weights, and one reduction makes all scales."""

from pathlib import Path
from typing import Any

import parallel
import pytest
import torch
from ranks import on_ranks

RECIPES = ("tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "gather_only")
ROWS = ("rowwise", "rowwise_with_gw_hp")
NOT_FINITE = "stowage: weight down.weight must be finite, got inf or NaN on rank"
UNEVEN = (34, 6, 5)  # rows that the data-parallel ranks have unequally many of


def check(case: tuple[Any, ...], facts: dict[str, Any]) -> None:
    """What differs is the order in which a product adds: over ranks, and that of torch's matrix
    product, which goes by the number of columns (`up`: bit-equal where 8 divides it)."""
    given = (*case, *(4, {}, torch.float32, parallel.SIZES)[len(case) - 3 :])
    recipe, shape, fsdp, count, _, dtype, sizes = given
    assert facts["codes"] == [], case
    exact = shape[1] == 1
    bound = 0 if exact else 1e-6 if dtype == torch.float32 else 0.02
    assert facts["forward"] <= bound, (case, facts)
    if facts["forward"]:  # then an input of `down` may round to another fp8 code
        bound = 0.05
    assert max(facts["losses"], facts["gradients"]) <= bound, (case, facts)
    rows = 4 * sizes[2] if recipe in ROWS else 0  # of `down`, whose rows are cut
    spread = [56 + rows] if shape[0] * shape[1] > 1 and (fsdp or not exact) else []
    assert facts["reductions"] == [spread] * count, case


def test_pieces_in_fp8_are_those_of_whole_weights(tmp_path: Path) -> None:
    cases = [(recipe, (2, 2), True, 2) for recipe in RECIPES]
    cases += [(recipe, (2, 2), False, 1) for recipe in ("delayed", "rowwise")]
    found = on_ranks(4, parallel.float8, str(tmp_path), cases, seconds=120)
    for facts in found:
        for case, steps in zip(cases, facts["steps"], strict=True):
            check(case, steps)
        # one for the stale scales; then that of the inputs of `down`, whose columns are cut
        assert facts["stale"] == [([56, 4], True), ([56 + 4 * 32, 4 * 4], True)]
        assert facts["saved"] == []
        assert facts["not finite"] == [f"{NOT_FINITE} 3"] * 2, "on every rank"
    assert [facts["not finite here"][-1] for facts in found] == ["1", "1", "3", "3"]
    mesh, plain, tied = found[0]["refusals"]
    assert "0.weight in fp8 must be distributed over one dimension of a mesh, got 2" in mesh
    assert (
        "the input of 0.weight must be a DTensor over the mesh of the weight, got Tensor" in plain
    )
    assert "0.weight in fp8 must belong to one module to be distributed" in tied


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(2, 2), (1, 2), (2, 1), (1, 4), (4, 1)])
def test_every_recipe_on_every_mesh(shape: tuple[int, int]) -> None:
    cases: list[Any] = [(r, shape, fsdp) for r in RECIPES for fsdp in (False, True)]
    high, te = {"gather": "high"}, {"scale_mode": "te", "pow2": True}
    for recipe in RECIPES:
        cases.append((recipe, shape, True, 4, high))
        cases.append((recipe, shape, True, 4, te, torch.bfloat16))
        if shape[1] < 4:
            cases.append((recipe, shape, True, 4, {}, torch.float32, UNEVEN))
    for answer in on_ranks(shape[0] * shape[1], parallel.all_steps, cases, seconds=200):
        for case, facts in zip(cases, answer, strict=True):
            check(case, facts)
