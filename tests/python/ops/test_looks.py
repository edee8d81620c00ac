# SPDX-License-Identifier: Apache-2.0
"""A device is asked once for all weights of a model, not once for each, whether it refused some."""

import pretended_cuda
import pytest
import torch
from torch import nn

import stowage
from stowage._ops import composite, library
from stowage._ops.device_kernels import Looks
from stowage._ops.storage import Storage


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Where ops of a pretended device wait; quantize() is its."""
    if pretended_cuda.library() is None:
        pytest.skip("needs the C++ tests to be built")
    found: list[object] = []
    asked = library.device_refused

    def device_refused(*arguments: object) -> bool:
        found.append(arguments)
        return bool(asked(*arguments))

    monkeypatch.setattr(composite, "kernels_of", pretended_cuda.kernels_of)
    monkeypatch.setattr(library, "quantize", composite.quantize)
    monkeypatch.setattr(library, "device_refused", device_refused)
    return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("storage", ["int8:row", "nf4:block64:nested", "q4_k", "f8_e4m3"])
def test_a_model_is_looked_at_once(storage: str, measure: bool, waits: list[object]) -> None:
    made, shape = model(), (64, 256)
    for layer in made:
        layer.weight = nn.Parameter(torch.randn(shape))
    wanted = [stowage.quantize(layer.weight, storage).dequantize() for layer in made]
    assert len(waits) == len(made)
    stowage.stow(made, storage, skip="*.bias", measure=measure, allow_unmatched=True)
    assert len(waits) == len(made)
    for layer, values in zip(made, wanted, strict=True):
        assert torch.equal(layer.weight.dequantize(), values)


@pytest.mark.parametrize("measure", [True, False])
@pytest.mark.parametrize("storage", ["int8:row", "nf4:block64:nested", "f8_e4m3"])
def test_what_was_refused_is_named_and_nothing_changed(
    storage: str, measure: bool, waits: list[object]
) -> None:
    made = model()
    made[1].weight.data[3, 5], made[2].weight.data[0, 7] = float("nan"), float("inf")
    before = {name: value.clone() for name, value in made.state_dict().items()}
    with pytest.raises(stowage.InvalidArgument) as error:
        stowage.stow(made, storage, measure=measure)
    told = str(error.value)
    assert told.count("must be finite") == 2 or told.count("finite") == 2
    for name, element in (("1.weight", 3 * 64 + 5), ("2.weight", 7)):
        assert f"{name}: " in told
        assert f"element {element}" in told
    assert len(waits) == 2  # those that are refused, once more
    for name, value in made.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value.nan_to_num(), before[name].nan_to_num())


def test_what_is_kept_is_not_looked_at(waits: list[object]) -> None:
    made = model()
    made[1].weight.data[3, 5] = float("nan")
    stowage.stow(made, "f8_e4m3", keep_nonfinite=True)
    assert made[1].weight.dequantize().isnan().sum() == 1
    assert not waits


def test_looks_end_where_they_began(waits: list[object]) -> None:
    key, x = Storage("int8:row").key, torch.full((2, 4), float("nan"))
    with Looks() as outer:
        with Looks() as inner:
            inner.of = "inner"
            library.quantize(x, key)
        assert inner.refused() == ["inner"]
        assert outer.refused() == []
    with pytest.raises(RuntimeError, match="finite"):
        library.quantize(x, key)
    assert len(waits) == 1
