# SPDX-License-Identifier: Apache-2.0
"""The report's figures are true, and stay true after a write, a copy or a move."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

import stowage
from stowage._model.reports.table import bytes_text, table


def model_of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers)


@pytest.mark.parametrize("storage", ["f8_e4m3", "int8", "nf4", "nf4:block64:nested", "fp4", "f16"])
def test_errors_are_those_of_the_dequantized_values(storage: str) -> None:
    layer = nn.Linear(96, 64)
    values = layer.weight.detach().double()
    row = stowage.stow(layer, storage)["weight"]
    error = (values - layer.weight.dequantize(torch.float64)).abs()
    assert row.max_error == pytest.approx(error.max().item(), rel=1e-6)
    assert row.rms_error == pytest.approx(error.square().mean().sqrt().item(), rel=1e-6)
    expected = (error.square().sum() / values.square().sum()).sqrt().item()
    assert row.relative_error == pytest.approx(expected, rel=1e-6)
    assert (row.saturated, row.nonfinite) == (0, 0)


@pytest.mark.parametrize(
    ("storage", "shape", "blocks"),
    [
        ("nf4", (64, 96), lambda e: e.reshape(-1, 64)),
        ("nf4:block128:nested", (64, 96), lambda e: e.reshape(-1, 128)),
        ("nf4:torchao", (128, 128), lambda e: e.reshape(-1, 64)),
        ("int8:row", (64, 96), lambda e: e),
        ("f8_e4m3:block32", (64, 96), lambda e: e.reshape(-1, 32)),
        ("int8:tensor", (64, 96), lambda e: e.reshape(1, -1)),
        ("f8_e4m3", (64, 96), lambda e: e.reshape(1, -1)),
    ],
)
def test_the_worst_block_is_found_and_named(
    storage: str, shape: tuple[int, int], blocks: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0])
    values = layer.weight.detach().double()
    report = stowage.stow(layer, storage)
    error = values - layer.weight.dequantize(torch.float64)
    relative = blocks(error).norm(dim=1) / blocks(values).norm(dim=1)
    row = report["weight"]
    assert row.worst_block == relative.argmax().item()
    assert row.worst_block_error == pytest.approx(relative.max().item(), rel=1e-9)
    assert row.worst_block_error >= 0.999999 * (row.relative_error or 0)
    assert f"number {row.worst_block} of weight" in str(report)
    assert json.loads(report.to_json())["rows"][0]["worst_block"] == row.worst_block


def test_a_weight_of_zeros_has_no_worst_block() -> None:
    layer = nn.Linear(64, 64, bias=False)
    nn.init.zeros_(layer.weight)
    report = stowage.stow(layer, "nf4")
    assert (report["weight"].worst_block, report["weight"].worst_block_error) == (None, 0)
    assert "worst block:" not in str(report)


def test_saturation_is_counted() -> None:
    """Peer defect 17: a cast that clips says so."""
    layer = nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight[0, :3] = torch.tensor([1000.0, -449.0, 448.0])
    row = stowage.stow(layer, "f8_e4m3")["weight"]
    assert row.saturated == 2
    assert row.max_error == 552.0


def test_bytes_are_those_of_the_parts() -> None:
    layer = nn.Linear(128, 64)
    report = stowage.stow(layer, "nf4:block64:nested", compute_dtype=torch.bfloat16)
    row = report["weight"]
    blocks = 128 * 64 // 64
    assert row.rest_bytes == 128 * 64 // 2 + blocks + 4 * 1 + 4 * 256 + 4
    assert row.rest_bytes == layer.weight.nbytes_at_rest
    assert row.logical_bytes == 128 * 64 * 2
    assert report.stowed_bytes == row.rest_bytes
    assert report.rest_bytes == row.rest_bytes + 64 * 2
    assert report.logical_bytes == row.logical_bytes + 64 * 2


def test_shared_bytes_are_counted_once() -> None:
    model = model_of(nn.Embedding(64, 32), nn.Linear(32, 64, bias=False))
    model[1].weight = model[0].weight
    report = stowage.stow(model, "int8")
    assert [(row.name, row.also) for row in report.rows] == [("0.weight", ("1.weight",))]
    assert report.rest_bytes == 64 * 32 + 64 * 4

    twins = model_of(nn.Linear(32, 16), nn.Linear(32, 16))
    twins[1].weight.data = twins[0].weight.data  # two parameters, one memory
    twins.register_buffer("same", twins[0].weight.data)
    twins.register_buffer("own", torch.zeros(10))
    report = stowage.report(twins)
    assert report["1.weight"].rest_bytes == 0
    assert report.rest_bytes == 4 * (32 * 16 + 2 * 16)
    assert report.buffer_bytes == 40


def test_a_write_makes_the_error_unknown() -> None:
    layer = nn.Linear(64, 64)
    stowage.stow(layer, "int8")
    assert stowage.report(layer)["weight"].max_error is not None
    assert stowage.report(copy.deepcopy(layer))["weight"].max_error is not None
    with torch.no_grad():
        layer.weight[0] = 1.0
    assert stowage.report(layer)["weight"].max_error is None


def test_a_change_of_dtype_keeps_it() -> None:
    layer = nn.Linear(64, 64)
    error = stowage.stow(layer, "int8")["weight"].max_error
    layer.bfloat16()
    row = stowage.report(layer)["weight"]
    assert (row.max_error, row.compute) == (error, "bfloat16")


def test_measuring_can_be_left_out() -> None:
    row = stowage.stow(nn.Linear(8, 8), "int8", measure=False)["weight"]
    assert row.max_error is None and row.saturated is None


def test_reasons_stay_with_the_model() -> None:
    model = model_of(nn.Linear(8, 8), nn.LayerNorm(8))
    first = stowage.stow(model, rules={"0.*": "int8"})
    assert first["0.weight"].reason == "rule '0.*'"
    assert stowage.report(model).rows == first.rows
    with pytest.raises(KeyError, match="no parameter is named"):
        first["2.weight"]


def test_fallbacks_are_counted() -> None:
    layer = nn.Linear(8, 8)
    stowage.stow(layer, "int8")
    before = stowage.report(layer).fallbacks
    torch.cumsum(layer.weight, 0)
    after = stowage.report(layer).fallbacks
    (operator,) = [name for name in after if after[name] != before.get(name, 0)]
    assert "cumsum" in operator
    assert f"{operator} dequantized" in str(stowage.report(layer))


def test_json_has_every_figure() -> None:
    report = stowage.stow(model_of(nn.Linear(64, 8), nn.LayerNorm(8)), "nf4")
    read = json.loads(report.to_json())
    assert read["totals"]["rest_bytes"] == report.rest_bytes
    assert read["totals"]["stowed"] == 1
    assert read["rows"][0]["storage"] == "nf4:block64"
    assert read["rows"][0]["max_error"] == report["0.weight"].max_error
    assert read["rows"][2]["storage"] is None


def test_the_table_has_one_line_for_each_parameter() -> None:
    report = stowage.stow(model_of(nn.Linear(64, 8), nn.LayerNorm(8)), "nf4")
    lines = str(report).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [row.name for row in report.rows]
    assert "1 of 4 parameters rest in 288 B" in lines[6]
    assert str(stowage.report(nn.ReLU())).startswith("weight")


def test_tiers_of_meta_and_memory() -> None:
    assert stowage.report(nn.Linear(4, 4, device="meta"))["weight"].tier == "none"
    assert stowage.report(nn.Linear(4, 4, device="meta")).rest_bytes == 0
    layer = nn.Linear(64, 64)
    stowage.stow(layer, "int8")
    assert stowage.report(layer)["weight"].tier == "ram"
    layer.share_memory()
    assert stowage.report(layer)["weight"].tier == "ram"
    row = stowage.report(layer.to("meta"))["weight"]
    assert (row.tier, row.rest_bytes, row.max_error) == ("none", 0, None)


def test_tables_leave_out_empty_columns() -> None:
    assert table(("a", "b", "c"), [("1", "", "22"), ("333", "", "4")]) == (
        "a    c\n---  --\n1    22\n333  4"
    )
    assert table(("a", "b"), []) == "a\n-"
    texts = [bytes_text(count) for count in (0, 1023, 1536, 5 << 30)]
    assert texts == ["0 B", "1023 B", "1.5 KiB", "5.0 GiB"]
