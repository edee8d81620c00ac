# SPDX-License-Identifier: Apache-2.0
"""Experts that are spread over ranks and rest in a file: each rank reads its own, within its own
budget, and the results are those of all in one process."""

from __future__ import annotations

from pathlib import Path

import expert_ranks
import mixed_ranks
import pytest
from ranks import on_ranks

import stowage
from stowage._ops.library import composite_forced

pytest.importorskip("transformers.distributed.expert_parallel")
pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")


def packed(to: Path, storage: str | None, family: str = "Qwen3Moe") -> str:
    model = expert_ranks.build(family)
    stowage.stow(model, "int8", rules={} if storage is None else {"*.experts.*_proj": storage})
    stowage.save(model, to)
    return str(to)


def test_each_of_two_ranks_reads_its_own_experts(tmp_path: Path) -> None:
    storages = [None, "int8:row2", "nf4", "f8_e4m3:block128x128", "mxfp4"]
    cases = [("Qwen3Moe", packed(tmp_path / str(i), s)) for i, s in enumerate(storages)]
    cases += [("Mixtral", packed(tmp_path / "mixtral", "nf4", "Mixtral"))]
    cases += [("GptOss", packed(tmp_path / "gpt-oss", "mxfp4:transposed", "GptOss"))]
    on_ranks(2, expert_ranks.in_files, 2, [*cases, published(tmp_path)])


def test_each_of_four_ranks_does(tmp_path: Path) -> None:
    cases = [("Qwen3Moe", packed(tmp_path / "m", "nf4")), published(tmp_path)]
    on_ranks(4, expert_ranks.in_files, 4, cases)


def published(folder: Path) -> tuple[str, str]:
    """By transformers' own writer: a tensor for each expert."""
    expert_ranks.build().save_pretrained(folder / "published")
    return "Qwen3Moe", str(folder / "published")


def test_adapters_train_beside_them(tmp_path: Path) -> None:
    on_ranks(2, expert_ranks.trained, 2, packed(tmp_path / "m", "int8:row2"))


def test_what_cannot_be_is_refused_in_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / ".metadata").touch()
    folder = packed(tmp_path / "m", "int8:row2")
    stowage.save(expert_ranks.build(), f"{folder}-plain")
    on_ranks(2, expert_ranks.refusals, 2, folder, str(tmp_path / "c"))


def test_ranks_have_budgets_of_their_own(tmp_path: Path) -> None:
    given = on_ranks(2, expert_ranks.budgets, 2, packed(tmp_path / "m", "nf4"))
    assert given == [[3 << 20], [4 << 20]]


@pytest.mark.parametrize("form", ["packed", "published"])
def test_ranks_keep_to_plans_of_their_own(tmp_path: Path, form: str) -> None:
    folder = packed(tmp_path / "m", "nf4") if form == "packed" else published(tmp_path)[1]
    on_ranks(2, expert_ranks.planned, 2, folder, str(tmp_path))


def test_they_are_written_as_they_rest(tmp_path: Path) -> None:
    folder = packed(tmp_path / "m", "nf4")
    on_ranks(2, expert_ranks.written, 2, folder, str(tmp_path))


def test_experts_that_a_caller_distributes(tmp_path: Path) -> None:
    model = expert_ranks.Grouped()
    stowage.stow(model, rules={"*": "int8:row2"})
    stowage.save(model, tmp_path / "m")
    on_ranks(2, expert_ranks.partitioned, 2, str(tmp_path / "m"))


def test_experts_over_one_dimension_of_a_mesh(tmp_path: Path) -> None:
    on_ranks(4, expert_ranks.over_a_dimension, packed(tmp_path / "m", "int8:row2"))


def test_experts_whose_rows_fully_shard_spreads(tmp_path: Path) -> None:
    folder, to = packed(tmp_path / "m", "int8:row2"), str(tmp_path / "checkpoint")
    on_ranks(4, expert_ranks.over_a_dimension_gathered, folder, to)


def test_experts_that_ranks_do_not_divide(tmp_path: Path) -> None:
    model = expert_ranks.Grouped()
    stowage.stow(model, rules={"*": "int8:row2"})
    stowage.save(model, tmp_path / "m")
    on_ranks(3, expert_ranks.uneven, str(tmp_path / "m"), str(tmp_path / "flat"))


# As transformers' `distributed_config` says: dense weights by FSDP2, by tensor parallelism, both.
SIZES = {
    "fsdp": {"fsdp_size": 2, "ep_size": 2},
    "tp": {"tp_size": 2, "ep_size": 2},
    "both": {"fsdp_size": 2, "tp_size": 2, "ep_size": 4},
}


@pytest.mark.parametrize("how", SIZES)
def test_other_weights_are_spread_beside_them(how: str, tmp_path: Path) -> None:
    sizes = SIZES[how]
    ranks = sizes.get("fsdp_size", 1) * sizes.get("tp_size", 1)
    on_ranks(ranks, mixed_ranks.in_files, packed(tmp_path / "m", "nf4"), sizes)
    if how != "both":
        on_ranks(ranks, mixed_ranks.in_files, published(tmp_path)[1], sizes)


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_what_one_rank_refuses_changes_none(how: str, tmp_path: Path) -> None:
    folder = packed(tmp_path / "m", "int8:row2")
    on_ranks(2, mixed_ranks.refused_before_a_change, folder, SIZES[how])


def test_weights_that_are_gathered_train_beside_them(tmp_path: Path) -> None:
    on_ranks(2, mixed_ranks.trained, packed(tmp_path / "m", "int8:row2"), SIZES["fsdp"])


def test_fully_shard_of_all_but_experts(tmp_path: Path) -> None:
    on_ranks(2, mixed_ranks.ignored, packed(tmp_path / "m", "nf4"), str(tmp_path))


@pytest.mark.parametrize("how", ["fsdp", "tp"])
def test_plans_count_what_is_spread_beside_them(how: str, tmp_path: Path) -> None:
    on_ranks(2, mixed_ranks.planned, packed(tmp_path / "m", "nf4"), SIZES[how], str(tmp_path))
