# SPDX-License-Identifier: Apache-2.0
"""Hooks around forwards: what they get and give, and that they end with the module."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections import namedtuple
from typing import Any

import pytest
import torch
from dispatched import Block, Small
from torch import nn

from stowage.compat.accelerate import cpu_offload_with_hook
from stowage.compat.accelerate import hooks as ours
from stowage.compat.accelerate._attaching import _frames
from stowage.compat.accelerate.utils import align_module_device


class Adds(ours.ModelHook):
    def __init__(self, before: float = 0, after: float = 0) -> None:
        self.before, self.after, self.events = before, after, []

    def init_hook(self, module: nn.Module) -> nn.Module:
        self.events.append("init")
        return module

    def pre_forward(self, module: nn.Module, x: torch.Tensor, **kwargs: Any) -> Any:
        return (x + self.before,), kwargs

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        return output + self.after

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self.events.append("detach")
        return module


def test_hooks_are_added_and_removed() -> None:
    model, hook = Small(), Adds()
    ours.add_hook_to_module(model, hook)
    assert model._hf_hook is hook
    assert hasattr(model, "_old_forward")
    assert model.forward.__name__ == "forward"
    assert list(inspect.signature(model.forward).parameters) == ["x"]
    ours.remove_hook_from_module(model)
    assert not hasattr(model, "_hf_hook")
    assert not hasattr(model, "_old_forward")
    assert "forward" not in vars(model)
    assert hook.events == ["init", "detach"]


def test_hooks_replace_or_follow_each_other() -> None:
    model, x = Small().eval(), torch.arange(6.0).reshape(2, 3)
    ours.add_hook_to_module(model, Adds(before=1))
    assert torch.equal(model(x), Small.forward(model, x + 1))
    ours.add_hook_to_module(model, Adds(before=1))
    assert torch.equal(model(x), Small.forward(model, x + 1))
    ours.add_hook_to_module(model, Adds(before=1, after=2), append=True)
    assert isinstance(model._hf_hook, ours.SequentialHook)
    assert len(model._hf_hook.hooks) == 2
    assert torch.equal(model(x), Small.forward(model, x + 2) + 2)
    assert torch.equal(model.forward(x), model(x))
    ours.remove_hook_from_submodules(model)
    assert torch.equal(model(x), Small.forward(model, x))


def test_no_grad() -> None:
    model = Small()
    hook = ours.ModelHook()
    ours.add_hook_to_module(model, hook)
    assert model(torch.randn(2, 3)).requires_grad
    hook.no_grad = True
    assert not model(torch.randn(2, 3)).requires_grad
    ours.add_hook_to_module(model, ours.ModelHook(), append=True)
    assert not model(torch.randn(2, 3)).requires_grad


def test_copies_and_pickles_run_their_own_module() -> None:
    """Row 50, and the copies that ran the original's forward."""
    model, x = ours.add_hook_to_module(Small().eval(), Adds(after=3)), torch.randn(2, 3)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x), model(x))
        nn.init.zeros_(other.linear2.weight)
        nn.init.zeros_(other.linear2.bias)
        assert torch.equal(other(x), torch.full((2, 5), 3.0))
        ours.remove_hook_from_module(other)
        assert not other(x).any()
    assert model(x).any()


def test_nothing_keeps_a_dropped_model_alive() -> None:
    """Row 43."""
    model = ours.add_hook_to_module(Small(), Adds())
    weight = weakref.ref(model.linear1.weight)
    gc.disable()
    try:
        forward = model.forward
        del model
        assert weight() is None
    finally:
        gc.enable()
    with pytest.raises(ReferenceError, match="gone"):
        forward(torch.zeros(1, 3))


def test_swapped_classes_and_edited_graphs_run() -> None:
    class Other(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1)

    model = ours.add_hook_to_module(Small(), Adds(after=1))
    model.__class__ = Other
    assert torch.equal(model(torch.zeros(2, 3)), torch.ones(1))
    graph = torch.fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    ours.add_hook_to_module(graph, Adds(after=1))
    relu = next(n for n in graph.graph.nodes if n.op == "call_module")
    with graph.graph.inserting_after(relu):
        double = graph.graph.call_function(torch.mul, (relu, 2))
        relu.replace_all_uses_with(double, lambda user: user is not double)
    graph.recompile()
    assert torch.equal(graph(torch.ones(2)), torch.full((2,), 3.0))
    ours.remove_hook_from_module(graph)
    assert torch.equal(graph(torch.ones(2)), torch.full((2,), 2.0))


def test_a_patch_of_somebody_else_stays() -> None:
    model = Small()
    model.forward = lambda x: x * 2  # type: ignore[method-assign]
    ours.add_hook_to_module(model, Adds(after=1))
    assert torch.equal(model(torch.ones(1)), torch.full((1,), 3.0))
    ours.remove_hook_from_module(model)
    assert torch.equal(model(torch.ones(1)), torch.full((1,), 2.0))


Pair = namedtuple("Pair", "first second")


class Nested(nn.Module):
    def forward(self, given: Any, kept: Any = None) -> Any:
        return given, kept


def test_inputs_go_to_the_device_and_outputs_back() -> None:
    """On "meta" as the other device."""
    model = ours.add_hook_to_module(
        Nested(), ours.AlignDevicesHook("meta", io_same_device=False, skip_keys=["kept"])
    )
    given = {"a": Pair(torch.ones(1), [torch.ones(1), "text"]), "b": 3}
    moved, kept = model(given, kept=torch.ones(1))
    assert type(moved["a"]) is Pair
    assert moved["a"].first.is_meta
    assert moved["a"].second[0].is_meta
    assert moved["a"].second[1] == "text"
    assert not kept.is_meta
    ours.add_hook_to_module(model, ours.AlignDevicesHook("cpu", io_same_device=True))
    assert not model(torch.ones(1, device="cpu"))[0].is_meta


def test_an_error_leaves_no_state_behind() -> None:
    """Row 45, and two threads (row 49)."""

    class Fails(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            if x.numel() == 0:
                raise KeyError
            return self(x, depth=depth + 1) + 1 if depth < 2 else x

    model = ours.add_hook_to_module(Fails(), ours.AlignDevicesHook("cpu", io_same_device=True))
    wrong: list[Any] = []

    def run(value: float) -> None:
        for _ in range(50):
            with pytest.raises(KeyError):
                model(torch.empty(0))
            if model(torch.full((1,), value)).item() != value + 2:
                wrong.append(value)

    threads = [threading.Thread(target=run, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert _frames() == [{}]


def test_align_hooks_place_what_they_hold() -> None:
    model, x = nn.Sequential(Block(4), nn.BatchNorm1d(4)), torch.randn(2, 4)
    wanted = copy.deepcopy(model).eval()(x)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    ours.attach_align_device_hook(model.to("meta"), "cpu", offload=True, weights_map=state)
    assert torch.equal(model.eval()(x), wanted)
    ours.remove_hook_from_submodules(model)
    assert torch.equal(model(x), wanted)
    preload = copy.deepcopy(model).to("meta")
    ours.attach_align_device_hook(preload, "cpu", True, state, preload_module_classes=["Block"])
    assert hasattr(preload[0], "_hf_hook")
    assert not hasattr(preload[0].first, "_hf_hook")
    assert torch.equal(preload(x), wanted)
    with pytest.raises(ValueError, match=r"lacks \['weight', 'bias'"):
        ours.attach_align_device_hook(copy.deepcopy(model).to("meta"), "cpu", True, {})


def test_hooks_without_a_meaning_say_what_to_use() -> None:
    for call, text in (
        (lambda: ours.AlignDevicesHook("meta", offload=True), r"stowage\.offload"),
        (lambda: ours.LayerwiseCastingHook(torch.float16, torch.float32, False), "attach_layer"),
        (lambda: ours.attach_align_device_hook_on_blocks(Small()), "dispatch_model"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            call()


def test_models_take_turns() -> None:
    """On the CPU nothing moves; that the model before is sent back is counted."""
    x = torch.randn(2, 3)
    first, hook = cpu_offload_with_hook(Small().eval(), "cpu")
    second, other = cpu_offload_with_hook(Small().eval(), "cpu", prev_module_hook=hook)
    calls: list[str] = []
    hook.offload = lambda: calls.append("first")  # type: ignore[method-assign]
    assert torch.equal(first(x), Small.forward(first, x))
    assert torch.equal(second(x), Small.forward(second, x))
    assert calls == ["first"]
    other.offload()
    other.remove()
    assert not hasattr(second, "_hf_hook")
    away, hook = cpu_offload_with_hook(Small(), "meta")
    assert away(x).is_meta
    assert away.linear1.weight.is_meta


def test_writes_inside_an_aligned_module_stay() -> None:
    """Row 54."""
    layer = nn.Linear(3, 3)
    with align_module_device(layer), torch.no_grad():
        layer.weight.fill_(2)
    assert layer.weight.unique().tolist() == [2]
    weight = layer.weight
    with align_module_device(layer, "meta"):
        assert layer.weight.is_meta
    assert layer.weight is weight
    assert layer.weight.unique().tolist() == [2]
