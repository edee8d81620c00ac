# SPDX-License-Identifier: Apache-2.0
"""What single ranks do in the tests of FSDP2's hooks as nodes of graphs."""

import copy
import itertools
from typing import Any

import torch
from compile_matrix import Graphs, Stack
from float8_ranks import differences, sharded
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from stowage.training import convert_float8, opaque_hooks, refresh_scales

POLICIES = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


EVERY = list(itertools.product(POLICIES, (None, "aot_eager"), (1, 2)))
SOME = [("plain", None, 2), ("bf16", "aot_eager", 1)]


def ways(cases: list[Any]) -> list[str]:
    """Sharded models with opaque hooks, by policy, backend and micro-batches: what differs."""
    return [f"{case}: {wrong}" for case in cases if (wrong := _wrong(*case))]


def _wrong(policy: str, backend: str | None, micro: int) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = convert_float8(Stack(), "delayed")
    model, graphs = copy.deepcopy(eager), Graphs("aot_eager")
    pair = [_sharded(m, POLICIES[policy]) for m in (eager, model)]
    opaque_hooks(model)
    if backend:
        model.compile(backend=graphs, fullgraph=True)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=False) for m in pair]
    wrong = []
    for step in range(3):
        ids, losses = torch.randint(24, (micro, 8)), []
        for m, optimizer in zip(pair, optimizers, strict=True):
            for i, batch in enumerate(ids):
                m.set_requires_gradient_sync(i + 1 == micro)
                loss = m(batch).float().square().mean()
                loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            refresh_scales(m)
        with torch.no_grad():
            losses += [m(ids[0]).float().sum().item() for m in pair]
        if losses[::2] != losses[1::2]:
            wrong.append(f"step {step}: {losses}")
    for m in pair:
        m.reshard()
    if backend and graphs.gathers() % 3:
        wrong.append(f"{graphs.gathers()} gathers in {len(graphs.targets)} graphs")
    return wrong + differences(*pair)


def _sharded(model: Any, options: dict[str, Any]) -> Any:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def refusals() -> list[str]:
    """What is said to no shards, to no blocks, and to a block of two results."""

    class Two(nn.Linear):
        def forward(self, x: Any) -> Any:
            return x, x

    said = []
    two = nn.Sequential(Two(4, 4))
    sharded(two[0])
    sharded(two)
    for ask in (
        lambda: opaque_hooks(Stack()),
        lambda: opaque_hooks(sharded(Stack())),
        lambda: opaque_hooks(two)(torch.ones(1, 4)),
    ):
        try:
            ask()
        except ValueError as error:
            said.append(str(error))
    return said


def early_reads(recipe: str, gather: str) -> tuple[list[str], int]:
    """Of the graphs, forward and backward, that a compiler gets: what reads gathered memory without
    waiting for the node that gathers; and the nodes that wait."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    torch.manual_seed(0)
    early, waiting = [], []

    def look(module: Any, inputs: Any) -> Any:
        fed = zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
        for node in [node for node, value in fed if value.dtype == torch.uint8]:
            for user in node.users:
                waits = user.target is torch.ops.stowage.read_after.default
                (waiting if waits or user.op == "output" else early).append(str(user.target))
        return make_boxed_func(module.forward)

    model = convert_float8(Stack(), recipe, gather=gather)
    fully_shard(model.head)
    _sharded(model, {})
    compiled = torch.compile(
        opaque_hooks(model),
        backend=aot_autograd(fw_compiler=look, bw_compiler=look),
        fullgraph=True,
    )
    compiled(torch.randint(24, (8,))).square().mean().backward()
    return early, waiting.count("stowage.read_after.default")
