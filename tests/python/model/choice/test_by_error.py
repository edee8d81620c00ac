# SPDX-License-Identifier: Apache-2.0
"""Choosing by the error of weights, and under a budget of bytes."""

from __future__ import annotations

import itertools
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stowage
from stowage._model.choice import calibration, trials
from stowage._model.rest import formation

LIST = ["nf4", "f8_e4m3:row", "bf16"]


def model_of(seed: int = 0, layers: int = 6) -> nn.Sequential:
    """Layers of several shapes; the second has outliers that a plain cast clips."""
    torch.manual_seed(seed)
    widths = [32, 64, 96, 32, 48, 80, 32, 64]
    model = nn.Sequential(*(nn.Linear(widths[i], widths[i + 1]) for i in range(layers)))
    with torch.no_grad():
        for i, layer in enumerate(model):
            layer.weight.mul_(torch.exp(torch.randn_like(layer.weight) * (i % 3)))
        model[1].weight[0, :2] = 1000.0
    return model


def error_of(layer: nn.Linear, storage: str) -> float:
    """||w - w'|| / ||w||, from the values themselves."""
    w = layer.weight.detach().double()
    rested = stowage.quantize(layer.weight.detach(), storage).dequantize(torch.float64)
    return float((w - rested).norm() / w.norm())


def bytes_of(model: nn.Module) -> int:
    return stowage.report(model).rest_bytes


def same(model: nn.Module, before: dict[str, Any]) -> bool:
    now = dict(model.named_parameters())
    return all(now[name] is tensor for name, tensor in before.items()) and len(now) == len(before)


def test_one_storage_and_a_bound() -> None:
    model = model_of()
    errors = [error_of(layer, "f8_e4m3") for layer in model]
    bound = sorted(errors)[3]
    report = stowage.stow(model, "f8_e4m3", max_error=bound)
    for i, error in enumerate(errors):
        row = report[f"{i}.weight"]
        assert (row.storage is not None) == (error <= bound and i != 1)
        assert f"max_error={bound:g} of the weight: f8_e4m3 {error:.2e}" in row.reason
    assert report["1.weight"].reason.endswith("with 2 clipped")


PUBLISHED = [
    "mxfp4", "mxfp8_e4m3", "nvfp4", "int4:block128", "int4:block128:bf16:zero", "int8:block32:f16",
    "int4:block32:f16", "q4_k", "q6_k", "int3:block32:bf16", "int6:block128:zero",
    "f8_e4m3:block128x128",
]  # fmt: skip


@pytest.mark.parametrize("storage", PUBLISHED)
def test_what_models_are_published_in_is_chosen_like_others(storage: str) -> None:
    """By its error and by its bytes, the least of which are its own."""
    name, wide = stowage._ops.storage.Storage(storage).name, [256, 512, 384]

    def made() -> nn.Sequential:
        torch.manual_seed(4)
        return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(wide)))

    errors = [error_of(layer, storage) for layer in made()]
    low, high = sorted(errors)
    report = stowage.stow(made(), [storage, "bf16"], max_error=(low + high) / 2)
    for i, error in enumerate(errors):
        row = report[f"{i}.weight"]
        assert row.storage == (name if error == low else "bf16")
        assert error == high or row.relative_error == pytest.approx(error, rel=1e-6)
    resting = made()
    stowage.stow(resting, storage)
    model, budget = made(), bytes_of(resting)
    report = stowage.stow(model, ["bf16", storage], budget=budget)
    assert [row.storage for row in report.stowed] == [name] * 2
    assert bytes_of(model) == budget < 2 * sum(p.numel() for p in model.parameters())
    with pytest.raises(stowage.InvalidArgument, match="budget"):
        stowage.stow(made(), ["bf16", storage], budget=budget - 1)


def test_plain_weights_get_the_compute_dtype() -> None:
    model = model_of()
    stowage.stow(model, "nf4", max_error=0.0, compute_dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not stowage.report(model).stowed


def test_the_first_that_is_good_enough_is_taken() -> None:
    model = model_of()
    table = [[error_of(layer, storage) for storage in LIST] for layer in model]
    report = stowage.stow(model, LIST, max_error=0.05)
    for i, errors in enumerate(table):
        fits = [storage for storage, error in zip(LIST, errors, strict=True) if error <= 0.05]
        row, count = report[f"{i}.weight"], LIST.index(fits[0]) + 1
        assert row.storage == stowage._ops.storage.Storage(fits[0]).name
        assert row.relative_error == pytest.approx(errors[count - 1], rel=1e-6)
        assert row.reason.count(",") == count - 1  # none after it was tried


def test_exceeding_can_be_an_error() -> None:
    model = model_of()
    before = dict(model.named_parameters())
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.stow(model, ["f8_e4m3", "f16"], max_error=1e-8, on_exceed="raise")
    text = str(caught.value)
    assert "6 problems, nothing was changed" in text and "f8_e4m3 " in text and "f16 " in text
    assert "5.weight: relative error of the weight must be at most 1e-08" in text
    assert same(model, before)


def test_rules_have_lists_and_are_bound_too() -> None:
    model = model_of()
    rules: Any = {"0": ["nf4", "bf16"], "2": None}
    report = stowage.stow(model, "int8", rules=rules, max_error=0.005)
    assert report["0.weight"].storage == "bf16"
    assert report["0.weight"].reason.startswith("rule '0'; max_error=0.005")
    assert report["2.weight"].reason == "rule '2' keeps it plain"
    assert report["4.weight"].storage is None or report["4.weight"].relative_error <= 0.005


def test_a_storage_that_cannot_hold_a_weight_is_passed_over() -> None:
    model = model_of()
    with torch.no_grad():
        model[3].weight[0, 0] = float("nan")
    with pytest.raises(stowage.InvalidArgument, match=r"3\.weight: (?s:.*)finite"):
        stowage.stow(model, ["int8", "nf4"], max_error=1.0)
    report = stowage.stow(model, ["int8", "nf4"], max_error=1.0, keep_nonfinite=True)
    assert report["3.weight"].storage == "nf4:block64" and "finite" in report["3.weight"].reason
    assert len(report.stowed) == 6 and report["4.weight"].storage == "int8:row"


@pytest.mark.parametrize(
    ("storage", "options", "text"),
    [
        (LIST, {}, "a list of storages must come with max_error or budget"),
        ([], {"budget": 1}, "must have one"),
        (["nf4", None, "int8"], {"budget": 1}, "None only at its end"),
        (["nf4", "nf5"], {"budget": 1}, "nf5"),
        (["nf4", 3], {"budget": 1}, "got 3"),
        ("nf4", {"max_error": -1}, "max_error must be a relative error"),
        ("nf4", {"max_error": float("nan")}, "max_error must be a relative error"),
        ("nf4", {"max_error": True}, "max_error must be a relative error"),
        ("nf4", {"max_error": "5%"}, "max_error must be a relative error"),
        ("nf4", {"max_error": 1, "on_exceed": "stop"}, "on_exceed must be 'plain' or 'raise'"),
        ("nf4", {"calibrate": [torch.ones(1, 32)]}, "calibrate must come with"),
        ("nf4", {"budget": "3 gigs"}, "budget must be a number of bytes"),
    ],
)
def test_what_means_nothing_is_refused(storage: Any, options: Any, text: str) -> None:
    model = model_of()
    before = dict(model.named_parameters())
    with pytest.raises(stowage.InvalidArgument, match=text):
        stowage.stow(model, storage, **options)
    assert same(model, before)


def total_error(model: nn.Module) -> float:
    """What a budget makes least, as the report has it; plain weights have none."""
    return sum(row.relative_error**2 for row in stowage.report(model).stowed)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_a_budget_is_within_five_percent_of_every_combination(seed: int, share: float) -> None:
    """Six layers with three storages: all 729 combinations, from errors and bytes that are
    measured here."""
    model = model_of(seed)
    biases = 4 * sum(layer.bias.numel() for layer in model)
    options = []
    for layer in model:
        rested = [stowage.quantize(layer.weight.detach(), storage) for storage in LIST]
        errors = [error_of(layer, storage) ** 2 for storage in LIST]
        options.append([(w.nbytes_at_rest, e) for w, e in zip(rested, errors, strict=True)])
    least, most = (sum(f(o[0] for o in some) for some in options) + biases for f in (min, max))
    budget = least + round((most - least) * share)
    wanted = min(
        sum(o[1] for o in combination)
        for combination in itertools.product(*options)
        if sum(o[0] for o in combination) + biases <= budget
    )
    report = stowage.stow(model, LIST, budget=budget)
    assert report.rest_bytes <= budget
    assert total_error(model) <= wanted * 1.05 + 1e-12
    for i in range(3):  # no uniform storage that fits is better
        if sum(some[i][0] for some in options) + biases <= budget:
            assert total_error(model) <= sum(some[i][1] for some in options) * (1 + 1e-9)


def test_a_budget_counts_all_parameters_as_the_report_does() -> None:
    def build() -> nn.Module:
        model = model_of()
        model.append(nn.LayerNorm(32))
        model.embed = nn.Embedding(50, 32)
        model.head = nn.Linear(32, 50, bias=False)
        model.head.weight = model.embed.weight
        model.twin = nn.Parameter(model[6].weight.data)  # two parameters, one memory
        return model

    for dtype in (None, torch.bfloat16):
        least = stowage.stow(build(), "nf4", compute_dtype=dtype).rest_bytes
        model = build()
        report = stowage.stow(model, LIST, budget=least, compute_dtype=dtype)
        assert report.rest_bytes == least == bytes_of(model)
        with pytest.raises(stowage.InvalidArgument, match=f"must be at least {least} bytes"):
            stowage.stow(build(), LIST, budget=least - 1, compute_dtype=dtype)


def test_a_budget_that_nothing_meets_names_the_largest_weights() -> None:
    model = model_of()
    before = dict(model.named_parameters())
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.stow(model, LIST, budget="1KiB", rules={"0": None})
    text = str(caught.value)
    # 64 x 32 plain fp32 values are more than 96 x 64 codes and scales
    assert "the largest weights are 0.weight (as it is) 8192 bytes, 1.weight (nf4:block64)" in text
    assert text.count(" bytes,") == 2 and same(model, before)


def test_none_is_the_plain_weight_and_bf16_a_storage() -> None:
    everything = bytes_of(model_of())
    report = stowage.stow(model_of(), ["nf4", None], budget=everything)
    assert not report.stowed
    report = stowage.stow(model_of(), LIST, budget=everything)
    assert {row.storage for row in report.stowed} == {"bf16"}
    report = stowage.stow(model_of(), ["nf4", None], budget=everything - 1)
    assert 0 < len(report.stowed) < 6 and report["0.weight"].reason.startswith("budget of ")


def test_a_budget_with_a_bound() -> None:
    report = stowage.stow(model_of(), LIST, budget="1MiB", max_error=0.03)
    assert all(row.relative_error <= 0.03 for row in report.stowed)
    assert not stowage.stow(model_of(), ["nf4"], budget="1MiB", max_error=0.001).stowed
    with pytest.raises(stowage.InvalidArgument, match="6 problems"):
        stowage.stow(model_of(), ["nf4"], budget="1MiB", max_error=0.001, on_exceed="raise")


def test_the_same_question_has_the_same_answer() -> None:
    reports = [stowage.stow(model_of(), LIST, budget=22000) for _ in range(3)]
    assert len({str(report.rows) for report in reports}) == 1
    assert len({row.storage for row in reports[0].stowed}) > 1


def test_resting_weights_stay_unless_they_may_be_made_again() -> None:
    model = model_of()
    stowage.stow(model, "nf4")
    assert {row.storage for row in stowage.stow(model, LIST, max_error=0.001).stowed} == {
        "nf4:block64"
    }
    again = stowage.stow(model, ["int8"], max_error=0.2, restow=True)
    assert {row.storage for row in again.stowed} == {"int8:row"}
    kept = model_of()
    stowage.stow(kept, "nf4", keep_master="ram")
    report = stowage.stow(kept, ["nf4", "bf16"], max_error=0.01)  # from the exact values
    for i, layer in enumerate(model_of()):
        expected = "nf4:block64" if error_of(layer, "nf4") <= 0.01 else "bf16"
        assert report[f"{i}.weight"].storage == expected
    least = stowage.stow(model_of(), "nf4").rest_bytes
    assert stowage.stow(model, LIST, budget=bytes_of(model)).rest_bytes >= least


def test_choosing_needs_no_measure() -> None:
    report = stowage.stow(model_of(), LIST, max_error=0.05, measure=False)
    assert report.stowed and all(row.relative_error is None for row in report.stowed)
    assert "nf4:block64 " in report["0.weight"].reason


@pytest.mark.parametrize("module", [trials, calibration])
def test_one_candidate_exists_at_a_time(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    made: list[weakref.ref[Any]] = []

    def counted(*args: Any) -> Any:
        assert not [ref for ref in made if ref() is not None]
        found = formation.from_values(*args)
        made.append(weakref.ref(found[0]))
        return found

    monkeypatch.setattr(module, "from_values", counted)
    stowage.stow(model_of(), LIST, budget="1MiB", calibrate=[torch.randn(2, 32)])
    assert len(made) == 18


def test_what_was_chosen_is_saved(tmp_path: Path) -> None:
    model = model_of()
    chosen = {r.name: r.storage for r in stowage.stow(model, LIST, budget=22000).rows}
    stowage.save(model, tmp_path)
    twin = stowage.load(model_of, tmp_path)
    assert {r.name: r.storage for r in stowage.report(twin).rows} == chosen
    x = torch.randn(3, 32)
    assert torch.equal(twin(x), model(x))
