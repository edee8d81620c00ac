# SPDX-License-Identifier: Apache-2.0
"""Rows of a weight: where they stand, how they are cut again, what they take, and what they are."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from storages import covering, flat_shapes, form_of_each

import stowage
from stowage._shard.records import encode
from stowage._shard.rows import Place, StowedRows, rows_that_fit

ROWS, COLUMNS = 12, 64
STORAGES = [*covering(form_of_each, flat_shapes), "nf4:torchao:scaler4", "int3:block32", "q6_k"]


def weight_of(storage: str, columns: int = COLUMNS) -> stowage.StowedTensor:
    torch.manual_seed(0)
    values = torch.randn(ROWS, columns, dtype=torch.bfloat16) * torch.logspace(-2, 2, ROWS)[:, None]
    return stowage.quantize(values.to(torch.bfloat16), storage)


def rows_of(weight: stowage.StowedTensor, first: int, count: int) -> StowedRows:
    """Cut of all rows, as DTensor does."""
    every = stowage.sharding.prepare(weight).chunk(1)[0]
    rows = every[first : first + count] if count < ROWS else every
    assert isinstance(rows, StowedRows)
    return rows


def records_of(weight: stowage.StowedTensor, first: int, last: int) -> torch.Tensor:
    return encode(weight._parts(), weight._storage, weight.shape, first, last)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("first", "count"), [(0, 4), (4, 6), (8, 4), (3, 0)])
def test_rows_say_what_they_are(storage: str, first: int, count: int) -> None:
    weight = weight_of(storage)
    rows = rows_of(weight, first, count)
    assert (rows.first, rows.shape, rows.resting) == (first, (count, COLUMNS), weight.resting)
    assert (rows.dtype, rows.device) == (weight.dtype, weight.device)
    assert torch.equal(rows.records, records_of(weight, first, first + count))
    assert rows.nbytes_at_rest == rows.records.nbytes + sum(t.nbytes for t in rows._shared())
    assert torch.equal(rows.dequantize(), weight.dequantize()[first : first + count])


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_of_rows_stand_where_they_stood(storage: str) -> None:
    weight = weight_of(storage)
    rows = rows_of(weight, 2, 8)
    cut = rows.split([3, 4, 1])[1]
    again = cut[1:3]
    assert (rows.first, cut.first, again.first) == (2, 5, 6)
    assert torch.equal(again.records, records_of(weight, 6, 8))
    assert torch.equal(again.dequantize(), weight.dequantize()[6:8])


def test_the_weight_is_let_go_when_records_are_made() -> None:
    rows = stowage.sharding.prepare(weight_of("nf4")).chunk(3)[1]
    assert isinstance(rows, StowedRows) and (rows.first, rows.shape[0]) == (4, 4)
    assert rows._source is not None and rows._held is None
    assert rows.records is rows.records
    assert rows._source is None


@pytest.mark.parametrize("storage", STORAGES)
def test_all_rows_are_the_weight_and_no_others(storage: str) -> None:
    weight = weight_of(storage)
    back = rows_of(weight, 0, ROWS).stowed()
    assert all(map(torch.equal, back.parts.values(), weight.parts.values()))
    for first, count in [(0, ROWS - 1), (1, ROWS - 1), (4, 4)]:
        with pytest.raises(stowage.Unsupported, match=f"all {ROWS} rows .* got {count};"):
            rows_of(weight, first, count).stowed()


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_a_weight_where_blocks_let_them(storage: str) -> None:
    weight = weight_of(storage)
    kind = weight._storage
    together = min(ROWS, kind.outer * kind.block // COLUMNS) or 1
    for first, count in [(4, 6), (8, 4), (0, ROWS)]:
        piece = rows_of(weight, first, count).piece()
        if first % together or count % together:  # they share the scale of scales with others
            assert piece is None
            continue
        assert piece is not None and (piece.shape, piece.dtype) == ((count, COLUMNS), weight.dtype)
        assert torch.equal(piece.dequantize(), weight.dequantize()[first : first + count])
    assert rows_of(weight, 4, 0).piece() is None


def test_rows_inside_of_blocks_are_values_only() -> None:
    weight = weight_of("nf4", columns=33)
    rows = rows_of(weight, 1, 5)
    assert rows.piece() is None
    assert torch.equal(rows.dequantize(), weight.dequantize()[1:6])


def test_rows_of_which_nobody_has_told_where_they_stand() -> None:
    weight = weight_of("int8:row")
    rows = rows_of(weight, 0, ROWS)
    lost = StowedRows(rows.records, rows._shared(), rows._whole, Place(None, "fc.weight"))
    assert lost.first is None and lost.piece() is None
    with pytest.raises(stowage.Unsupported):
        lost.dequantize()
    with pytest.raises(stowage.Unsupported, match="all 12 rows"):
        lost.stowed()


def test_rows_past_the_end_are_filled_up_for_a_collective() -> None:
    """Ranks send as many rows each, so that the last ones of the last may be none of the weight."""
    weight = weight_of("int8:row")
    some = rows_of(weight, 8, 4)
    filled = torch.cat([some.records, torch.zeros_like(some.records[:2])])
    rows = StowedRows(filled, some._shared(), some._whole, Place(8))
    assert rows.piece() is None and rows.shape[0] == 6
    exact = StowedRows(some.records, some._shared(), some._whole, Place(8)).piece()
    assert exact is not None and torch.equal(exact.dequantize(), weight.dequantize()[8:])


def test_rows_are_where_their_weight_is() -> None:
    with torch.device("meta"):
        weight = stowage.quantize(torch.randn(ROWS, COLUMNS, dtype=torch.float16), "int8")
    rows = stowage.sharding.prepare(weight).chunk(2)[1]
    assert isinstance(rows, StowedRows)
    assert (rows.device.type, rows.dtype) == ("meta", torch.float16)
    piece = rows.piece()
    assert piece is not None and {t.device.type for t in piece.parts.values()} == {"meta"}


def spanning(
    weight: stowage.StowedTensor, first: int, last: int, span: tuple[int, int]
) -> StowedRows:
    """Rows of which a gather fetches only a span, as with tensor parallelism around it."""
    rows = rows_of(weight, first, last - first)
    whole = rows._whole._replace(span=span)
    return StowedRows(rows.records, rows._shared(), whole, Place(first))


def test_rows_of_a_span_stay_so() -> None:
    rows = spanning(weight_of("int8:row"), 4, 8, (4, 11))
    for again in (copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))):
        assert again._whole == rows._whole and again.first == 4
        assert torch.equal(again.records, rows.records)


def test_a_rank_sends_as_many_rows_as_the_first_of_its_span() -> None:
    weight = weight_of("int8:row")
    mesh = SimpleNamespace(size=lambda: 2)
    for first, last in ((4, 8), (8, 11)):
        rows = spanning(weight, first, last, (4, 11))
        ((sent,), _) = rows.fsdp_pre_all_gather(mesh)
        assert sent.shape[0] == 4 and torch.equal(sent[: last - first], rows.records)
        assert not sent[last - first :].any()


def test_the_flat_form_is_where_the_rows_are() -> None:
    """Whatever the default device."""
    weight = weight_of("int8:row")
    rows = rows_of(weight, 0, ROWS)
    with torch.device("meta"):
        flat = rows.stowed()
    assert torch.equal(flat.dequantize(), weight.dequantize())


def test_sizes_that_rows_of_a_weight_have() -> None:
    like = (ROWS, COLUMNS)
    assert [rows_that_fit(size, like) for size in ((3, COLUMNS), (0,), (0, COLUMNS))] == [3, 0, 0]
    for size in ((3, COLUMNS + 1), (3,), (), (3, COLUMNS, 1)):
        assert rows_that_fit(size, like) is None
    assert rows_that_fit((3,), (ROWS,)) == 3
    assert rows_that_fit((), (ROWS,)) is None
