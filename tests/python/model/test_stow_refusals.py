# SPDX-License-Identifier: Apache-2.0
"""What stow refuses, and that a refusal or any other exception leaves the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage._model.rest import formation
from stowage._ops import library
from stowage.tensor import StowedTensor


def model_with_buffer() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    model.register_buffer("scale", torch.rand(8))
    return model


def test_every_problem_is_told_at_once_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    model.register_parameter("deep", nn.Parameter(torch.zeros((1,) * 9)))
    with torch.no_grad():
        model[0].weight[1, 2] = float("nan")
        model[1].weight[0, 0] = float("-inf")
    before = dict(model.named_parameters())
    with pytest.raises(ValueError) as caught:
        stowage.stow(model, rules={"nothing": "nf4", "*": "int8"})
    text = str(caught.value)
    assert "nothing was changed" in text
    for expected in ("rule 'nothing'", "0.weight: ", "1.weight: ", "2.weight: ", "meta", "deep: "):
        assert expected in text
    assert dict(model.named_parameters()) == before
    with pytest.raises(ValueError, match=r"0\.weight: .*finite.*\n.*1\.weight: .*finite"):
        stowage.stow(model, rules={"0": "int8", "1": "nf4"})
    assert dict(model.named_parameters()) == before


def test_non_finite_values_can_be_kept() -> None:
    model = nn.Linear(64, 4)
    with torch.no_grad():
        model.weight[1, 2] = float("nan")
    report = stowage.stow(model, "f8_e4m3", keep_nonfinite=True)
    assert model.weight.dequantize()[1, 2].isnan()
    assert report["weight"].nonfinite == 1
    with pytest.raises(stowage.InvalidArgument, match="weight"):
        stowage.stow(model, "int8", restow=True, keep_nonfinite=True)


def test_float8_and_lazy_and_foreign_weights_are_refused_by_name() -> None:
    cast = nn.Linear(4, 4, bias=False)
    cast.weight = nn.Parameter(cast.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match=r"weight: values must be float64, .*got float8_e4m3fn"):
        stowage.stow(cast, "int8")
    with pytest.raises(ValueError, match="weight: must have a shape: run the model once"):
        stowage.stow(nn.LazyLinear(4), rules={"weight": "int8"})

    class Foreign(torch.Tensor):
        pass

    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Foreign))
    with pytest.raises(ValueError, match="weight: must be an ordinary tensor, got Foreign"):
        stowage.stow(layer, "int8")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.complex64])
def test_compute_dtypes(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="compute_dtype must be one of float64, float32, bfloat16"):
        stowage.stow(layer, "int8", compute_dtype=dtype)
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("error", [MemoryError("none left"), KeyboardInterrupt()])
def test_any_exception_leaves_the_model_as_it_was(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    model = model_with_buffer()
    before = {name: (p, p.clone(), p.dtype) for name, p in model.named_parameters()}
    real, calls = library.quantize, []

    def quantize(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 3:
            raise error
        return real(*args)

    monkeypatch.setattr(formation.library, "quantize", quantize)
    with pytest.raises(type(error)):
        stowage.stow(model, "int8", compute_dtype=torch.bfloat16)
    assert len(calls) == 3
    for name, p in model.named_parameters():
        same, values, dtype = before[name]
        assert p is same and p.dtype == dtype and torch.equal(p, values)
    assert model.scale.dtype == torch.float32


def test_an_exception_while_the_tensors_are_put_in_is_undone() -> None:
    class Stubborn(nn.Linear):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "weight" and isinstance(value, StowedTensor):
                raise RuntimeError("no")
            super().__setattr__(name, value)

    model = nn.Sequential(nn.Linear(8, 8), Stubborn(8, 8))
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="no"):
        stowage.stow(model, "int8", compute_dtype=torch.bfloat16)
    assert dict(model.named_parameters()) == before
    assert {p.dtype for p in model.parameters()} == {torch.float32}
