# SPDX-License-Identifier: Apache-2.0
"""Compiled float8 models: one graph, no breaks, the bits of eager."""

import copy
import math

import pytest
import torch
from torch import nn

from stowage.training import RECIPES, convert_float8, refresh_scales, reset_history


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 12), nn.GELU(), nn.Linear(12, 5))


@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_models_are_one_graph_with_the_same_bits(recipe: str) -> None:
    """The history of delayed scaling too, whose scales are refreshed where that was forgotten."""
    eager = convert_float8(net(), recipe)
    model = copy.deepcopy(eager)
    graph = torch.compile(model, backend="aot_eager", fullgraph=True)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for _ in range(3):
        x = torch.randn(4, 20)
        for run, weights in ((eager, eager), (graph, model)):
            run(x).square().sum().backward()
            with torch.no_grad():
                for parameter in weights.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-2)
                    parameter.grad = None
        other = model.state_dict()
        assert all(torch.equal(a, other[name]) for name, a in eager.state_dict().items())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_compiled_delayed_layer_finds_its_own_state_when_it_runs() -> None:
    """One graph serves equal layers; evaluation, resets and values that are not finite count."""
    first, other = (convert_float8(nn.Linear(8, 8), "delayed") for _ in range(2))
    counters = torch._dynamo.utils.counters
    counters.clear()
    graph = torch.compile(lambda layer, x: layer(x), backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 8)
    for layer, batch in ((first, x), (other, 4 * x)):
        graph(layer, batch)
        refresh_scales(layer)
        amax = layer.fp8_history.view(torch.float32)[0, 2]
        assert amax == batch.abs().max()
    before = first.fp8_history.clone()
    graph(first.eval(), 8 * x)
    assert torch.equal(first.fp8_history, before)
    graph(first.train(), 8 * x)
    assert first.fp8_history.view(torch.float32)[0, 1] == (8 * x).abs().max()
    reset_history(first)
    assert torch.equal(graph(first, 2 * x), first(2 * x))
    first.weight.data[0, 0] = math.nan
    with pytest.raises(ValueError, match="weight must be finite"):
        graph(first, x)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_what_a_compiled_optimizer_writes_makes_scales_stale() -> None:
    model = convert_float8(net())
    step = torch.compile(torch.optim.AdamW(model.parameters(), 0.5).step, backend="aot_eager")
    x = torch.randn(4, 20)
    for _ in range(2):
        model(x).square().sum().backward()
        before = model[0].weight.detach().clone()
        step()
        assert not torch.equal(model[0].weight, before)
        dense = net()
        dense.load_state_dict(model.state_dict())
        assert torch.equal(model(x), convert_float8(dense)(x))
