# SPDX-License-Identifier: Apache-2.0
"""What loading leaves as it is: the tensors that a model holds, whoever else holds them too, and an
optimizer that was made before. Every door, from every form into every form."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage.training import MasterOptimizer, quantized_init

Into = Callable[[nn.Module, nn.Module, Path], object]


class Net(nn.Module):
    """A weight that rests, one that is trained beside it, a tied one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(8, 32), nn.Linear(32, 32), nn.Linear(32, 8)
        self.norm = nn.LayerNorm(32)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.rand(()) + 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.body(self.table(ids))))) * self.scale  # type: ignore[no-any-return]


IDS = torch.arange(8)
FORMS = ("plain", "f8_e4m3:row", "int8:tensor", "nf4:nested", "trained")


def net(form: str, seed: int) -> Net:
    torch.manual_seed(seed)
    if form == "trained":
        with quantized_init("f8_e4m3:row"):
            return Net()
    model = Net()
    if form != "plain":
        stowage.stow(model, form)
    return model


def _file(of: nn.Module, into: nn.Module, folder: Path) -> None:
    stowage.save(of, folder)
    stowage.load(into, folder)


DOORS: dict[str, Into] = {
    "load_state_dict of torch": lambda of, into, _: into.load_state_dict(of.state_dict()),
    "load_state_dict": lambda of, into, _: stowage.load_state_dict(into, of.state_dict()),
    "load_state_dict of a flat state": lambda of, into, _: stowage.load_state_dict(
        into, stowage.state_dict(of), strict=False
    ),
    "load": _file,
}


def held(model: nn.Module) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
    return dict(named)


def versions(tensor: Any) -> list[int]:
    inner = tensor.parts.values() if isinstance(tensor, stowage.StowedTensor) else [tensor]
    return [part._version for part in inner]


def rests_as(tensor: Any) -> str:
    return tensor.resting if isinstance(tensor, stowage.StowedTensor) else "plain"


def values(tensor: Any) -> Tensor:
    return (tensor.dequantize() if isinstance(tensor, stowage.StowedTensor) else tensor).clone()  # type: ignore[no-any-return]


def rests(model: Net) -> bool:
    return isinstance(model.body.weight, stowage.StowedTensor)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    if any(isinstance(p, stowage.StowedTensor) and p.requires_grad for p in model.parameters()):
        return MasterOptimizer(torch.optim.SGD, model, lr=0.1)
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    loss = model(IDS).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


@pytest.mark.parametrize("of", ["plain", "f8_e4m3:row", "nf4:nested"])
@pytest.mark.parametrize("into", FORMS)
@pytest.mark.parametrize("door", DOORS)
def test_tensors_stay_and_an_optimizer_goes_on(
    door: str, into: str, of: str, tmp_path: Path
) -> None:
    source, model = net(of, 1), net(into, 2)
    becomes = door != "load_state_dict of torch" and not rests(model) and rests(source)
    optimizer, calls = optimizer_of(model), list[str]()
    step(model, optimizer)
    model.body.bias.register_hook(lambda g: calls.append("hook"))
    model.body.weight.of_others = "kept"
    model.norm.weight.grad = grad = torch.ones(32)
    before = held(model)
    seen = {name: versions(t) for name, t in before.items()}
    forms = {name: rests_as(t) for name, t in before.items()}
    ids = {name: id(t) for name, t in before.items()}
    DOORS[door](source, model, tmp_path)
    after = held(model)
    assert model.head.weight is model.table.weight
    for name, tensor in after.items():
        if becomes and name in ("table.weight", "head.weight", "body.weight"):
            assert type(tensor) is stowage.StowedTensor and not tensor.requires_grad
            continue  # a plain parameter that is to rest is replaced, as by stow
        assert id(tensor) == ids[name] and tensor is before[name], name
        if rests_as(tensor) == forms[name]:  # else its memory is another one
            assert all(a > b for a, b in zip(versions(tensor), seen[name], strict=True)), name
    if not becomes:
        assert model.body.weight.of_others == "kept"
    assert model.norm.weight.grad is grad
    optimizer.zero_grad()
    twin = copy.deepcopy(model)
    assert step(model, optimizer) == step(twin, optimizer_of(twin)) and calls == ["hook"]
    for name, tensor in held(twin).items():
        assert torch.equal(values(tensor), values(after[name])), name
    moved = [n for n, t in model.named_parameters() if t.requires_grad]
    assert "body.bias" in moved and not torch.equal(model.body.bias, source.body.bias)


@pytest.mark.parametrize("of", FORMS)
@pytest.mark.parametrize("into", FORMS)
def test_the_state_says_how_a_weight_rests(into: str, of: str) -> None:
    source, model = net(of, 1), net(into, 2)
    stowage.load_state_dict(model, source.state_dict())
    name = "f8_e4m3:row" if "trained" in (of if rests(source) else into) else None
    wanted = name or (of if rests(source) else into)
    if wanted == "plain":
        assert torch.equal(model.body.weight, source.body.weight)
        return
    assert model.body.weight.resting == stowage.quantize(torch.zeros(32, 32), wanted).resting
    given = source.body.weight
    plain = given if rests(source) else stowage.quantize(given.detach(), wanted)
    assert torch.equal(model.body.weight.dequantize(), plain.dequantize())
    assert model.body.weight.requires_grad == (into == "trained")
    assert torch.equal(model.table.weight.dequantize(), model.head.weight.dequantize())


def test_what_is_in_training_is_not_put_to_rest() -> None:
    source, model = net("int8:tensor", 1), net("plain", 2)
    model(IDS).sum().backward()
    before = {name: values(t) for name, t in held(model).items()}
    with pytest.raises(ValueError, match=r"body\.weight: must not be in training.*zero_grad"):
        stowage.load_state_dict(model, source.state_dict())
    assert all(torch.equal(values(t), before[name]) for name, t in held(model).items())
    model.zero_grad()
    stowage.load_state_dict(model, source.state_dict())
    assert rests(model)


@pytest.mark.parametrize("into", ["plain", "f8_e4m3:row"])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_an_interrupted_load_changes_nothing(
    into: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the middle of the copies."""
    from stowage._model import weights

    source, model = net(into, 1), net(into, 2)
    before, fill, calls = {n: values(t) for n, t in held(model).items()}, weights._fill, 0

    def interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise KeyboardInterrupt
        return fill(*args)

    monkeypatch.setattr(weights, "_fill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stowage.load_state_dict(model, source.state_dict())
    monkeypatch.undo()
    assert calls > at
    assert all(torch.equal(values(t), before[name]) for name, t in held(model).items())


def test_aliases_and_the_given_state_keep_their_memory() -> None:
    model, source = net("plain", 1), net("plain", 2)
    alias, given = model.body.weight.detach(), source.state_dict()
    stowage.load_state_dict(model, given)
    assert torch.equal(alias, given["body.weight"])
    with torch.no_grad():
        model.body.weight.zero_()
    assert given["body.weight"].abs().max() > 0


def test_a_file_of_another_dtype_moves_the_same_parameters(tmp_path: Path) -> None:
    stowage.save(net("plain", 1).bfloat16(), tmp_path)
    model = net("plain", 2)
    before = held(model)
    stowage.load(model, tmp_path)
    assert all(held(model)[name] is t and t.dtype is torch.bfloat16 for name, t in before.items())
