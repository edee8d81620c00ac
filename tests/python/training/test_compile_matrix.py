# SPDX-License-Identifier: Apache-2.0
"""docs/compile-matrix.md is what the command prints; FSDP2's hooks as nodes of graphs."""

from pathlib import Path

import compile_matrix
import float8_hooks
import pytest
from compile_matrix import Cell
from ranks import on_ranks

PAGE = (Path(__file__).parents[3] / "docs/compile-matrix.md").read_text()


@pytest.mark.slow
def test_lines_of_the_page_are_those_of_a_run() -> None:
    cells = [Cell("delayed", "fp8", "model with hooks"), Cell("dynamic", "fp8", "block with hooks")]
    for line in compile_matrix.rows(cells):
        assert line in PAGE.splitlines()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_page_shows_both_tables_as_they_are_printed() -> None:
    assert compile_matrix.tables() in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("cases", ["SOME", pytest.param("EVERY", marks=pytest.mark.nightly)])
def test_hooks_as_nodes_change_nothing_whatever_the_policy(cases: str) -> None:
    cases = getattr(float8_hooks, cases)
    assert on_ranks(2, float8_hooks.ways, cases, seconds=200) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "gather"),
    [("delayed", "fp8")]
    + [
        pytest.param(*c, marks=pytest.mark.nightly)
        for c in (("rowwise", "fp8"), ("rowwise", "high"))
    ],
)
def test_compilers_cannot_read_a_weight_before_its_gather(recipe: str, gather: str) -> None:
    """Seven weights, forward and backward: by data, whatever order a compiler chooses."""
    assert on_ranks(2, float8_hooks.early_reads, recipe, gather) == [([], 14)] * 2


def test_what_cannot_have_its_hooks_replaced_is_refused() -> None:
    for said in on_ranks(2, float8_hooks.refusals):
        assert len(said) == 3
        assert "modules in it must be sharded" in said[0] and said[0] == said[1]
        assert "Two must return one tensor" in said[2]
