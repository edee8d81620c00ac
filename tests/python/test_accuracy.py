# SPDX-License-Identifier: Apache-2.0
"""bench/python/accuracy.py: every storage keeps its bound, and what does not is marked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import accuracy
import pytest
import torch
from accuracy_bound import Errors, Truth, Way, bound, of_eights
from torch import Tensor
from torch.nn import functional as F

from stowage._ops.library import composite_forced

SHORT = ["--quick", "--rows", "1", "4", "16", "64"]
FEW = [*SHORT, "--storages", "nf4", "--dtypes", "fp32"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def ran(folder: Path, arguments: list[str], *product: Any) -> tuple[int, list[Any], str]:
    status = accuracy.main([*arguments, "--out", str(folder)], *product)
    rows = json.loads((folder / "accuracy.json").read_text())
    return status, rows, (folder / "accuracy.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif(composite_forced(), reason="exact products of bf16 need the kernels")
def test_every_storage_stays_within_its_bound(tmp_path: Path) -> None:
    status, rows, table = ran(tmp_path, SHORT)
    assert status == 0, table
    assert len(rows) == len(accuracy.STORAGES) * 3 * 4 * 2 and "OVER" not in table
    for row in rows:
        assert row["ms"] > 0
        for name in accuracy.DATA:
            found = row[name]
            assert 0 <= found["rms"] <= found["largest"] and 0 <= found["of_bound"] <= 1
    lines = table.splitlines()
    assert len(lines) == len(rows) + 2 and {line.count("|") for line in lines} == {16}


@pytest.mark.parametrize("rows", [1, 64])
def test_a_wrong_product_is_marked(tmp_path: Path, rows: int) -> None:
    """By a hundredth, for one number of rows only."""

    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x, w) * (1.01 if x.shape[0] == rows else 1.0)

    status, found, table = ran(tmp_path, FEW, wrong)
    assert status == 1
    assert {row["rows"] for row in found if row["over"]} == {rows}
    assert table.count("OVER: normal, heavy") == 2  # both policies


def test_nan_is_marked_and_the_file_is_json(tmp_path: Path) -> None:
    status, found, table = ran(tmp_path, FEW, lambda x, w: F.linear(x, w) * math.nan)
    assert status == 1 and all(row["over"] == list(accuracy.DATA) for row in found)
    assert found[0]["normal"] == {"largest": None, "rms": None, "of_bound": None}
    assert "none" in table


def test_cancelling_data_cancel() -> None:
    x, w = accuracy.cancelling(4, 256)
    truth = Truth.of(x, w)
    assert float((truth.y.abs() / truth.size).max()) < 2.0**-11


WAY = Way("f8_e4m3:row", torch.bfloat16, 4, False, "avx2")


@pytest.mark.parametrize(
    ("more", "slack"),
    [
        ({}, 2.0**-8),
        ({"exact": True}, 0.0),
        ({"dtype": torch.float32}, 0.0),
        ({"storage": "nf4", "rows": 64}, 2.0**-8),
    ],
)
def test_the_bound_is_that_of_the_page(more: dict[str, Any], slack: float) -> None:
    way = Way(**(vars(WAY) | more))
    truth = Truth.of(torch.randn(4, 64), torch.randn(8, 64))
    unit = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}[way.dtype]
    page = unit * truth.y.abs() + ((64 + 8) * 2.0**-24 + slack) * truth.size
    assert torch.allclose(bound(truth, way), page, rtol=1e-9)


def test_integers_take_a_power_of_two_for_eight_columns() -> None:
    x, w = torch.zeros(1, 64), torch.zeros(1, 64)
    x[0, 3], w[0, 5], w[0, 21] = 2.0, 1.0, 1.0
    truth = Truth.of(x, w)
    assert float(of_eights(truth, apart=False)) == 2.0  # columns 0 to 7
    assert float(of_eights(truth, apart=True)) == 0.0  # 0 to 3 and 16 to 19
    x[0, 6] = 3.0
    assert float(of_eights(Truth.of(x, w), apart=True)) == 6.0  # 4 to 7 and 20 to 23
    for storage, rows, isa, wanted in (
        ("int4:block32:bf16", 16, "avx2", True),
        ("int4:block32:bf16", 16, "avx512", False),
        ("f8_e4m3:row", 1, "avx2", False),
        ("q6_k", 4, "avx512", True),
        ("mxfp4", 1, "scalar", False),
    ):
        assert Way(storage, torch.bfloat16, rows, False, isa).in_integers is wanted, storage


def test_what_the_dtype_cannot_hold_may_be_infinite() -> None:
    way = Way("nf4", torch.float16, 1, True, "avx2")
    truth = Truth.of(torch.tensor([[1e3, 1e3]]), torch.tensor([[1e3, 1e3], [1.0, 1.0]]))
    errors = Errors.of(torch.tensor([[math.inf, 2e3]]).half(), truth, way)
    assert errors.largest == 0.0 and not errors.over
    assert Errors.of(torch.tensor([[2e6, math.inf]]), truth, way).over
