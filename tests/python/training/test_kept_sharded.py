# SPDX-License-Identifier: Apache-2.0
"""Kept init values under FSDP2: those of the local rows, also from the meta device."""

import re
from pathlib import Path

import kept_ranks
import kept_training
import pytest
import torch
from ranks import on_ranks

PAGE = Path(__file__).resolve().parents[3] / "docs/kept-init.md"
FEW = [("f8_e4m3:tensor", False), ("f8_e4m3:tensor", True), ("nf4:nested", True)]
ALL = [
    (storage, meta)
    for storage in ("f8_e4m3:tensor", "f8_e4m3:row", "int8:block32", "nf4", "nf4:nested", "bf16")
    for meta in (False, True)
]


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [False, True])
def test_values_and_bytes_are_those_of_the_plain_shards(prepare: bool) -> None:
    rows = on_ranks(2, kept_ranks.values_of, FEW, prepare)
    assert rows[0] == [[4 * 33 * 4, 3 * 7 * 4, 5 * 4]] * len(FEW)
    assert rows[1] == [[3 * 33 * 4, 2 * 7 * 4, 0]] * len(FEW)


@pytest.mark.slow
def test_rows_give_exact_values_in_the_type_that_is_asked_for() -> None:
    assert on_ranks(2, kept_ranks.read_as, torch.float64) == [True, True]


@pytest.mark.nightly
@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_storage(world: int) -> None:
    on_ranks(world, kept_ranks.values_of, ALL, seconds=300)


@pytest.mark.slow
def test_whole_values_die_and_loads_invalidate(tmp_path: Path) -> None:
    for whole_died, forward, states in on_ranks(2, kept_ranks.ends, str(tmp_path)):
        assert whole_died and forward == [True, False]
        assert states == ["kept"] * 3 + ["invalid"] * 3


@pytest.mark.slow
def test_budgets_are_refused_on_every_rank_or_on_none() -> None:
    largest = 4 * (4 * 33 + 3 * 7 + 5)
    for fits, text in on_ranks(2, kept_ranks.refused_alike, [largest, largest - 1]):
        assert fits == "all kept" and "budget must have room for 20 more bytes" in text


@pytest.mark.slow
def test_master_first_from_meta_takes_masters_rest_and_one_parameter() -> None:
    for peak, held, one in on_ranks(2, kept_ranks.master_first, 256, 4):
        assert held <= peak <= held + one


@pytest.mark.slow
def test_the_recipe_runs_as_it_stands(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.S | re.M)
    for first, second in on_ranks(2, kept_training.recipe, code, str(tmp_path)):
        assert first == second
