# SPDX-License-Identifier: Apache-2.0
"""What became of each weight's uses, and what the next run makes of them."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import stowage
from stowage._ops.library import composite_forced
from stowage._tiers.disk.engine import engine_of

pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

EXPERTS, OUT, IN = 12, 128, 192
ONE = OUT * IN + 4 * 4096  # bytes of a matrix, with the pages that it shares
GATES = 2 * (IN * IN + 4 * 4096)
X = torch.randn(3, IN, generator=torch.Generator().manual_seed(1))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(IN, IN, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, OUT, IN), requires_grad=False)

    def forward(self, x: torch.Tensor, routed: list[int]) -> torch.Tensor:
        x = self.gate(x)
        return torch.stack([F.linear(x, self.experts[e]) for e in routed]).sum(0)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: torch.Tensor, routed: list[int]) -> list[torch.Tensor]:
        return [layer(x, routed) for layer in self.layers]


def mixture(folder: Path, matrices: int, reads: str = "direct", workers: int = 2) -> Mixture:
    torch.manual_seed(0)
    model = Mixture()
    stowage.stow(model, rules={"*.experts": "int8:row2", "*.gate.weight": "int8:row"})
    stowage.offload(model, ram=GATES + matrices * ONE, folder=folder, reads=reads, workers=workers)
    return model


def test_each_weight_and_each_expert_is_counted(tmp_path: Path) -> None:
    model = mixture(tmp_path / "w", 30)
    for routed in ([1, 5], [5], [5, 7, 1]):
        model(X, routed)
    found = stowage.uses(model)
    assert set(found.weights) == {
        f"layers.{i}.{n}" for i in (0, 1) for n in ("gate.weight", "experts")
    }
    for i in (0, 1):
        experts = found.weights[f"layers.{i}.experts"]
        assert experts.by_index == (0, 2, 0, 0, 0, 3, 0, 1, 0, 0, 0, 0)
        assert experts.acquired == 6 and experts.misses + experts.late == 3
        assert found.weights[f"layers.{i}.gate.weight"].acquired == 3
    report = stowage.engine_report(model)
    for field in ("acquired", "hits", "misses", "late", "borrowed", "ahead", "unused"):
        assert sum(getattr(u, field) for u in found.weights.values()) == getattr(report, field)
    assert found.layers["layers.1"].acquired == 9
    assert found.layers["layers.1"].by_index == experts.by_index
    model(X, [9])
    later = stowage.uses(model).since(found)
    assert later.weights["layers.0.experts"].by_index[9] == 1
    assert later.weights["layers.0.experts"].acquired == 1
    table = str(found).splitlines()
    assert table[0].split()[:2] == ["layer", "uses"] and table[1].startswith("layers.0")
    assert table[2].endswith("3 of 12")


def test_they_go_on_through_another_budget(tmp_path: Path) -> None:
    model = mixture(tmp_path / "w", 30)
    model(X, [1])
    stowage.rebudget(model, ram=GATES + 20 * ONE)
    model(X, [1, 2])
    assert stowage.uses(model).weights["layers.0.experts"].by_index[:3] == (0, 2, 1)


def test_the_next_run_begins_with_them(tmp_path: Path) -> None:
    model = mixture(tmp_path / "w", 8)
    stowage.foresee(model, stowage.Uses({}))  # nothing
    for _ in range(3):
        want = model(X, [2, 3, 8])
    stowage.uses(model).save(tmp_path / "uses.json")
    del model
    gc.collect()
    told, other = mixture(tmp_path / "w", 8), mixture(tmp_path / "w", 8)
    stowage.foresee(told, tmp_path / "uses.json")
    got = told(X, [2, 3, 8])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    experts = [u for n, u in stowage.uses(told).weights.items() if n.endswith("experts")]
    assert sum(u.misses for u in experts) == 0 and sum(u.ahead for u in experts) == 6
    other(X, [2, 3, 8])
    assert sum(u.misses for n, u in stowage.uses(other).weights.items() if n.endswith("ts")) > 0
    assert stowage.engine_report(told).peak <= GATES + 8 * ONE


def test_they_last_through_another_budget(tmp_path: Path) -> None:
    model = mixture(tmp_path / "w", 8)
    counts = tuple(int(i in (4, 6)) for i in range(EXPERTS))
    stowage.foresee(model, stowage.Uses({"layers.0.experts": stowage.WeightUses(by_index=counts)}))
    stowage.rebudget(model, ram=GATES + 6 * ONE)
    model(X, [4, 6])
    assert stowage.uses(model).weights["layers.0.experts"].misses == 0


def test_what_was_used_as_a_whole_is_passed_over(tmp_path: Path) -> None:
    model = mixture(tmp_path / "w", 8)
    whole = stowage.WeightUses(hits=7)
    stowage.foresee(model, stowage.Uses({"layers.0.gate.weight": whole, "layers.0.experts": whole}))
    of_a_matrix = stowage.WeightUses(by_index=(7,))  # where a stack comes as a whole
    stowage.foresee(model, stowage.Uses({"layers.0.gate.weight": of_a_matrix}))
    model(X, [0])


def test_many_budgets_are_one_record(tmp_path: Path) -> None:
    model = mixture(tmp_path / "w", 30)
    for i in range(4):
        model(X, [1, i])
        stowage.rebudget(model, ram=GATES + (20 + i) * ONE)
    engine = engine_of(model)
    assert engine is not None and len(engine._used) == 4
    assert stowage.uses(model).weights["layers.0.experts"].by_index[:4] == (1, 5, 1, 1)


@pytest.mark.parametrize(
    ("uses", "message"),
    [
        ({"layers.9.experts": (1,) * EXPERTS}, "must have layers.9.experts, whose uses are given"),
        ({"layers.0.experts": (1, 2)}, "must be 12 counts, got 2"),
        ({"layers.0.experts": (1, -1)}, "must be a JSON object of lists of counts"),
    ],
)
def test_uses_of_other_weights_are_refused(
    uses: dict[str, tuple[int, ...]], message: str, tmp_path: Path
) -> None:
    model = mixture(tmp_path / "w", 8)
    given = stowage.Uses({n: stowage.WeightUses(by_index=counts) for n, counts in uses.items()})
    with pytest.raises(stowage.InvalidArgument, match=message):
        stowage.foresee(model, given)
    model(X, [0])
    with pytest.raises(stowage.InvalidArgument, match="must be said before the first"):
        stowage.foresee(model, stowage.Uses({}))


def test_a_model_without_an_engine_is_refused() -> None:
    for call in (stowage.uses, lambda m: stowage.foresee(m, stowage.Uses({}))):
        with pytest.raises(stowage.InvalidArgument, match="must have weights in a file"):
            call(nn.Linear(2, 2))


def test_files_are_read_back_and_others_named(tmp_path: Path) -> None:
    path = tmp_path / "uses.json"
    uses = stowage.Uses({"a.0": stowage.WeightUses(1, 2, 3, 4, 5, 6, 0.5, (7, 8))})
    uses.save(path)
    assert stowage.Uses.load(path) == uses
    good = json.loads(path.read_text())
    for broken in (
        "",
        "[]",
        json.dumps({**good, "stowage_uses": 2}),
        json.dumps({**good, "weights": {"a": {"hits": 1}}}),
        json.dumps({**good, "weights": {"a": {"by_index": [-1]}}}),
        json.dumps({**good, "weights": {"a": {"by_index": [], "others": 1}}}),
    ):
        path.write_text(broken)
        with pytest.raises(stowage.BadFile, match=r"uses\.json: must hold uses of version 1"):
            stowage.Uses.load(path)
    with pytest.raises(stowage.FileError, match="must be readable"):
        stowage.Uses.load(tmp_path / "none.json")
    with pytest.raises(stowage.FileError, match="must be writable"):
        uses.save(tmp_path / "none" / "uses.json")
