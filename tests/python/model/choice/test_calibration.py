# SPDX-License-Identifier: Apache-2.0
"""Choosing by the error of outputs: what is measured, beside a plain computation of the same, and
that the model is as it was afterwards."""

from __future__ import annotations

import copy
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage._model.choice.calibration import output_errors
from stowage._model.weights import Held, Inventory
from stowage._ops.storage import Storage

INT8, NF4, BF16 = Storage("int8"), Storage("nf4"), Storage("bf16")


class Mixed(nn.Module):
    """Layers of several kinds, dropout, batch norm, one layer that runs twice, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.first = nn.Linear(32, 32)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.unused = nn.Linear(32, 32)
        self.register_buffer("runs", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, ids: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        self.runs += 1
        self.last = ids.float().mean()
        x = self.drop(self.first(self.embed(ids))) * scale
        x = self.first(torch.relu_(x))
        return x, self.norm(self.conv(x.transpose(1, 2)))


def mixed() -> Mixed:
    torch.manual_seed(0)
    return Mixed()


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (2, 8), generator=generator) for _ in range(count)]


def weights_of(model: nn.Module, *storages: Storage) -> list[tuple[Held, list[Storage]]]:
    return [(h, list(storages)) for h in Inventory(model).parameters if h.tensor.dim() > 1]


def measured(model: nn.Module, calibrate: Any, *storages: Storage) -> dict[str, float]:
    with torch.no_grad():
        found = output_errors(model, weights_of(model, *storages), calibrate)
    return {f"{name}:{storage.codes}": error for (name, storage), error in found.items()}


def expected(model: Mixed, name: str, storage: Storage, inputs: list[Tensor]) -> float:
    """The same by hand: every call's arguments are recorded, then a layer with the dequantized
    weight is called on each."""
    model = copy.deepcopy(model).eval()
    layer, calls = model.get_submodule(name), []
    layer.register_forward_pre_hook(lambda module, args: calls.append(args[0].clone()))
    with torch.no_grad():
        for ids in inputs:
            model(ids)
        layer._forward_pre_hooks.clear()
        rested = copy.deepcopy(layer)
        values = stowage.quantize(layer.weight.detach(), storage.name)
        rested.weight = nn.Parameter(values.dequantize(), requires_grad=False)
        error2 = sum((rested(x) - layer(x)).double().square().sum() for x in calls)
        value2 = sum(layer(x).double().square().sum() for x in calls)
    return float((error2 / value2).sqrt())


@pytest.mark.parametrize("storage", [INT8, NF4])
def test_errors_are_those_of_the_modules_outputs(storage: Storage) -> None:
    model, inputs = mixed(), batches()
    found = measured(model, inputs, storage)
    for name in ("embed", "first", "conv"):
        wanted = expected(model, name, storage, inputs)
        assert found[f"{name}.weight:{storage.codes}"] == pytest.approx(wanted, rel=1e-5)
    assert "unused.weight:int8" not in found


def forms() -> list[Any]:
    ids = batches(1)[0]

    return [
        ids,
        [ids],
        (ids,),
        [(ids,)],
        [[ids, 1.0]],
        {"ids": ids},
        [{"ids": ids}],
        [UserDict(ids=ids)],  # as the batches of tokenizers are
        iter([ids]),
        (one for one in [ids]),
        torch.utils.data.DataLoader([{"ids": ids[0]}, {"ids": ids[1]}], batch_size=2),
        lambda model: model(ids),
    ]


@pytest.mark.parametrize("which", range(12))
def test_inputs_come_in_many_forms(which: int) -> None:
    wanted = measured(mixed(), [batches(1)[0]], INT8)
    assert measured(mixed(), forms()[which], INT8) == wanted


@pytest.mark.parametrize("calibrate", [3, "text", nn.Linear(2, 2), [3], [None], nn.Linear])
def test_what_is_no_input_is_refused(calibrate: Any) -> None:
    with pytest.raises(stowage.InvalidArgument, match=r"(an input of )?calibrate must be"):
        stowage.stow(mixed(), "int8", max_error=1, calibrate=calibrate)


@pytest.mark.parametrize("calibrate", [[], lambda model: None])
def test_calibration_that_runs_nothing_is_refused(calibrate: Any) -> None:
    model = mixed()
    with pytest.raises(stowage.InvalidArgument, match="calibrate must run the model"):
        stowage.stow(model, "int8", max_error=1, calibrate=calibrate)
    assert not stowage.report(model).stowed


def snapshot(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [
        [(name, id(t), t.detach().clone(), t.requires_grad) for name, t in tensors],
        [(m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        torch.get_rng_state(),
    ]


def unchanged(before: list[Any], after: list[Any]) -> bool:
    tensors = all(
        a[0] == b[0] and a[1] == b[1] and torch.equal(a[2], b[2]) and a[3] == b[3]
        for a, b in zip(before[0], after[0], strict=True)
    )
    return tensors and before[1] == after[1] and torch.equal(before[2], after[2])


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was(fails: bool) -> None:
    model = mixed()
    model.drop.eval()  # not all modules are in one mode
    before = snapshot(model)
    runs = []

    def run(it: nn.Module) -> None:
        assert not any(module.training for module in it.modules())
        torch.rand(3)
        it(batches(1)[0])
        it.train()
        runs.append(torch.is_grad_enabled())
        if fails:
            raise KeyError("in the middle")

    if fails:
        with pytest.raises(KeyError):
            stowage.stow(model, "int8", max_error=1, calibrate=run)
        assert not stowage.report(model).stowed
    else:
        measured(model, run, INT8, NF4)
    assert unchanged(before, snapshot(model)) and not any(runs)


def test_a_layer_that_fails_on_a_candidate_gets_its_weight_back() -> None:
    class Picky(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if not self.weight.requires_grad:
                raise KeyError("another weight")
            return super().forward(x)

    model = nn.Sequential(Picky(8, 8), nn.Linear(8, 8))
    before = snapshot(model)
    with pytest.raises(KeyError):
        stowage.stow(model, "int8", max_error=1, calibrate=[torch.ones(1, 8)])
    assert unchanged(before, snapshot(model))


class Attention(nn.Module):
    """Reads the weight of a child that it never calls, and writes to its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 16, bias=False)
        self.noise = nn.Dropout(0.0)

    def forward(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x.clone())
        y = x @ self.out.weight.t() * torch.rand(16)
        x.zero_()
        return y


def test_a_module_that_is_never_called_is_measured_around_it() -> None:
    torch.manual_seed(0)
    model, seen, drawn = nn.ModuleDict({"inner": Attention()}), [], []
    x = torch.randn(4, 16)

    def run(it: Any) -> None:
        torch.manual_seed(5)
        it["inner"](x.clone(), seen)
        drawn.append(torch.rand(1))

    found = measured(model, run, NF4)
    w = model["inner"].out.weight.detach()
    rested = stowage.quantize(w, "nf4").dequantize()
    scale = torch.manual_seed(5) and torch.rand(16)
    wanted = (x @ (rested - w).t() * scale).norm() / (x @ w.t() * scale).norm()
    assert found["inner.out.weight:nf4"] == pytest.approx(float(wanted), rel=1e-5)
    assert drawn == [torch.rand(1)] * 2  # as without us
    assert len(seen) == 2  # two runs, and no trace of the others
    assert all(torch.equal(one, x) for one in seen)


def test_hooks_of_the_callers_change_no_measure() -> None:
    wanted = measured(layer := nn.Linear(32, 32), [torch.ones(1, 32)], INT8)
    layer.register_forward_hook(lambda module, args, output: output + 1000)
    assert measured(layer, [torch.ones(1, 32)], INT8) == wanted


def test_a_tied_weight_counts_at_its_worst_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 40, bias=False))
    alone = measured(model, [batches(1)[0]], NF4)
    model[1].weight = model[0].weight
    tied = measured(model, [batches(1)[0]], NF4)
    assert list(tied) == ["0.weight:nf4"]
    assert tied["0.weight:nf4"] >= alone["0.weight:nf4"]


def test_weights_that_no_input_reaches_are_judged_by_their_weight() -> None:
    model, inputs = mixed(), batches()
    report = stowage.stow(model, ["nf4", "int8"], max_error=0.05, calibrate=inputs)
    assert report["unused.weight"].storage == "int8:row"
    assert "of the weight, which no input reached: nf4" in report["unused.weight"].reason
    assert "of the output: nf4" in report["first.weight"].reason


def test_inputs_decide() -> None:
    """Columns that inputs do not use may be coarse."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32, bias=False)
    with torch.no_grad():
        model.weight[:, 32:] *= 1e4  # one plain cast clips nothing, but nf4 loses the small half
    x = torch.randn(8, 64)
    quiet = x.clone()
    quiet[:, 32:] = 0
    for inputs, storage in ((x, "nf4:block64"), (quiet, "bf16")):
        found = stowage.stow(
            copy.deepcopy(model), ["nf4", "bf16"], max_error=0.2, calibrate=[inputs]
        )
        assert found["weight"].storage == storage


def test_a_budget_can_be_of_output_errors() -> None:
    model, inputs = mixed(), batches()
    whole = stowage.report(model).rest_bytes
    report = stowage.stow(model, ["nf4", "int8", "bf16"], budget=whole // 3, calibrate=inputs)
    assert report.rest_bytes <= whole // 3 and len(report.stowed) == 4
    assert "error of the output: nf4:block64" in report["conv.weight"].reason


def test_masters_are_what_outputs_are_compared_with() -> None:
    model, inputs = mixed(), batches()
    wanted = measured(mixed(), inputs, INT8)
    stowage.stow(model, "nf4", keep_master="ram")
    assert measured(model, inputs, INT8) == pytest.approx(wanted, rel=0.2)
    report = stowage.stow(model, ["nf4", "int8"], max_error=0.05, calibrate=inputs)
    assert report["first.weight"].storage == "int8:row"


def test_compiled_models_run_as_written() -> None:
    model = mixed()
    wanted = measured(model, batches(), INT8)
    runs = []

    def backend(graph: Any, example: Any) -> Any:
        runs.append(graph)
        return graph.forward

    assert measured(torch.compile(model, backend=backend), batches(), INT8) == {
        f"_orig_mod.{name}": error for name, error in wanted.items()
    }
    assert not runs


def test_an_embedding_that_rescales_its_rows_is_put_back() -> None:
    model = nn.Sequential(nn.Embedding(40, 32, max_norm=0.1), nn.Linear(32, 8))
    before = snapshot(model)
    measured(model, batches(), INT8)
    assert unchanged(before, snapshot(model))
