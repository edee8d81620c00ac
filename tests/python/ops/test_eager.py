# SPDX-License-Identifier: Apache-2.0
"""What runs beside a model is not compiled, wherever the compiler gave up around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stowage
from stowage._ops.eager import eagerly
from stowage._tiers.plans.execution import KeptPlan


def watched(function: Callable[..., Any], graphs: list[list[Any]]) -> Callable[..., Any]:
    """It as a frame that runs as it is, while the compiler takes each frame that it calls."""

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    skipped = torch._dynamo.disable(function, recursive=False)  # type: ignore[call-overload]
    return torch.compile(skipped, backend=keep)  # type: ignore[no-any-return]


def body(x: Tensor) -> Tensor:
    return torch.sin(x) + 1


def test_only_what_is_called_otherwise_is_compiled() -> None:
    graphs: list[list[Any]] = []
    x = torch.ones(3)
    assert torch.equal(watched(lambda: body(x), graphs)(), body(x))
    assert any(torch.sin in graph for graph in graphs)
    graphs.clear()
    assert torch.equal(watched(lambda: eagerly(body, x), graphs)(), body(x))
    assert not any(torch.sin in graph for graph in graphs)


def test_a_plan_is_compared_where_the_compiler_has_given_up() -> None:
    """A hook that was recompiled too often runs as it is, and the compiler takes what it calls."""
    model = nn.Sequential(nn.Linear(64, 64)).eval().requires_grad_(False)
    stowage.stow(model, "nf4")
    kept = KeptPlan(stowage.plan(model, ram="1MiB", rows=2))
    run = watched(lambda: eagerly(kept.end, None, 1), [])
    for _ in range(2):  # what the hook of a pass does
        run()
    assert kept._told
