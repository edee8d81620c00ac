# SPDX-License-Identifier: Apache-2.0
"""The compile matrix of fp8 training under FSDP2, on two gloo ranks, against eager ones.

`python tests/shared/compile_matrix.py` prints the tables of docs/compile-matrix.md.
"""

import copy
from typing import Any, NamedTuple

import torch
from float8_ranks import plain, sharded
from ranks import on_ranks
from torch import Tensor, nn

from stowage.training import convert_float8, opaque_hooks, refresh_scales
from stowage.training.recipes import amax_of, tensor_scale
from stowage.training.scaled_product import Cast, cast

STEPS = 10
RECIPES = {"delayed": "delayed", "dynamic": "tensorwise"}
HEAD = "| scaling | gather | compiled | graphs | breaks | recompiles | gathers in them | scales, codes | losses, weights |"  # noqa: E501
ATTEMPT_HEAD = "| how | outcome | gathers in graphs | see |"


class Cell(NamedTuple):
    scaling: str
    gather: str  # fp8, high
    scope: str
    backend: str = "aot_eager"


SCOPES = (
    "block forward",
    "block forward, output projection",
    "block with hooks",
    "model",
    "model with hooks",
    "model with hooks, nothing off",
)
CELLS = [Cell(s, g, scope) for s in RECIPES for g in ("fp8", "high") for scope in SCOPES]
WITH_INDUCTOR = ("block forward", "model with hooks")
CELLS += [Cell(s, "fp8", scope, "inductor") for s in RECIPES for scope in WITH_INDUCTOR]
BOUND = 1e-4  # relative, of the losses of all steps, where a backend orders sums in its own way


class Block(nn.Module):
    own = False  # whether the forward itself gathers

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        if self.own:
            self.unshard()  # type: ignore[operator]
        x = x + self.down(torch.tanh(self.up(x)))
        if self.own:
            self.reshard()  # type: ignore[operator]
        return x


class Stack(nn.Module):
    """Three equal blocks between an embedding and an output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(24, 32)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 24)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Graphs:
    """A backend that keeps the names of the nodes it is given."""

    def __init__(self, backend: str) -> None:
        self.backend = torch._dynamo.lookup_backend(backend)
        self.targets: list[list[str]] = []

    def __call__(self, module: Any, inputs: Any) -> Any:
        nodes = [node for node in module.graph.nodes if node.op == "call_function"]
        self.targets.append([str(node.target) for node in nodes])
        return self.backend(module, inputs)

    def gathers(self) -> int:
        return sum("before_block" in name for names in self.targets for name in names)


def shards(model: Stack) -> Stack:
    for layer in model.layers:
        sharded(layer)
    sharded(model)
    return model


def compiled(model: Stack, scope: str, graphs: Any) -> Any:
    """What is to be called; `model` is sharded meanwhile."""
    whole = {"backend": graphs, "fullgraph": True}
    if scope.startswith("block forward"):
        for module in [*model.layers, *([model.head] if "projection" in scope else [])]:
            module.forward = torch.compile(module.forward, **whole)
    shards(model)
    if "hooks" in scope:
        opaque_hooks(model)
    if scope == "block with hooks":
        for layer in model.layers:
            layer.forward = torch.compile(layer.forward, **whole)
    if scope.startswith("model"):
        return torch.compile(model, backend=graphs, fullgraph="hooks" in scope)
    return model


def breaks() -> int:
    counters = torch._dynamo.utils.counters
    return sum(counters["graph_break"].values()) + sum(counters["unimplemented"].values())


def facts(model: Stack) -> list[Tensor]:
    """Scales and codes of the shards, and the histories of delayed layers."""
    found = list(model.buffers())
    for layer in model.layers:
        for module in (layer.up, layer.down):
            found += of_codes(module.weight._local_tensor.cast())
    return found


def of_codes(made: Cast) -> list[Tensor]:
    return [made.codes.view(torch.uint8), made.factor]


def run(cell: Cell) -> list[str]:
    """Ten steps of a compiled model and of an eager one: the last columns of the row."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    eager = convert_float8(Stack(), RECIPES[cell.scaling], gather=cell.gather)
    model, graphs = copy.deepcopy(eager), Graphs(cell.backend)
    calls = (shards(eager), compiled(model, cell.scope, graphs))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, foreach=False) for m in (eager, model)]
    first, alike, worst = 0, True, 0.0
    inductor = cell.backend == "inductor"
    for _ in range(STEPS):
        ids, losses = torch.randint(24, (8,)), []
        for call, of, optimizer in zip(calls, (eager, model), optimizers, strict=True):
            loss = call(ids).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if "nothing off" not in cell.scope:
                refresh_scales(of)
        first = first or len(graphs.targets)
        alike &= inductor or all(map(torch.equal, facts(eager), facts(model)))
        worst = max(worst, abs(losses[0] - losses[1]) / losses[0])
    pairs = zip(eager.parameters(), model.parameters(), strict=True)
    same = worst == 0 and all(torch.equal(plain(a), plain(b)) for a, b in pairs)
    numbers = [first, breaks(), len(graphs.targets) - first, graphs.gathers()]
    near = f"within {BOUND:g}" if worst < BOUND else f"{worst:.1e} apart"
    if inductor:  # other sums, so other values to cast: the same ones, then
        alike, same = casts_alike(model), False
    return [*map(str, numbers), "equal bits" if alike else "NO", "equal bits" if same else near]


def casts_alike(model: Stack) -> bool:
    """Whether Inductor's scale and codes of the values at hand have the bits of eager ones."""

    def made(value: Tensor) -> list[Tensor]:
        scale = tensor_scale(amax_of(value), model.layers[0].up.weight._local_tensor._layer.recipe)
        return of_codes(cast(value, scale, torch.float8_e4m3fn))

    value = model.layers[0].up.weight._local_tensor._value.detach()
    return all(map(torch.equal, made(value), torch.compile(made)(value)))


def rows(cells: list[Cell]) -> list[str]:
    """Lines of the table, from the first rank of two; fails where the ranks differ."""
    answers = on_ranks(2, many, cells, seconds=600)
    assert answers[0] == answers[1]
    return [line(cell, found) for cell, found in zip(cells, answers[0], strict=True)]


def many(cells: list[Cell]) -> list[list[str]]:
    return [run(cell) for cell in cells]


def line(cell: Cell, found: list[str]) -> str:
    gather = {"fp8": "fp8", "high": "values"}[cell.gather]
    scope = cell.scope + ("" if cell.backend == "aot_eager" else f" ({cell.backend})")
    return "| " + " | ".join([cell.scaling, gather, scope, *found]) + " |"


# --- torch's own ways to a graph that holds the hooks -------------------------------------------


def attempts() -> list[list[str]]:
    return [_setting(), _custom_ops(), _tried("block.compile"), _tried("model"), _tried("own")]


def _setting() -> list[str]:
    try:
        torch._dynamo.config.skip_fsdp_hooks = False
        outcome = "taken"
    except AttributeError:
        outcome = "no such setting"
    how = "`torch._dynamo.config.skip_fsdp_hooks = False`"
    return [how, outcome, "-", "pytorch #179817 took it away"]


def _custom_ops() -> list[str]:
    import torch.distributed.fsdp as fsdp

    there = hasattr(fsdp, "install_fsdp_custom_ops")
    outcome = "there" if there else "no such function"
    return ["`install_fsdp_custom_ops(model)`", outcome, "-", "pytorch #181924, not in torch 2.13"]


def _tried(way: str) -> list[str]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model, graphs = convert_float8(Stack(), "tensorwise"), Graphs("aot_eager")
    Block.own = way == "own"
    shards(model)
    call: Any = model
    for layer in model.layers if way != "model" else ():
        if way == "own":
            layer.forward = torch.compile(layer.forward, backend=graphs, fullgraph=True)
        else:
            layer.compile(backend=graphs, fullgraph=True)
    if way == "model":
        call = torch.compile(model, backend=graphs, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    outcome = "runs, the hooks outside"
    try:
        for _ in range(STEPS):
            call(torch.randint(24, (8,))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    except Exception as error:
        outcome = f"{type(error).__name__}"
    Block.own = False
    how = {
        "block.compile": "`block.compile(fullgraph=True)` after `fully_shard`",
        "model": "`torch.compile(model, fullgraph=True)`",
        "own": "`unshard()` and `reshard()` in the block's own forward",
    }[way]
    nodes = sum("gather" in name or "unshard" in name for t in graphs.targets for name in t)
    return [how, outcome, str(nodes), "pytorch #174863"]


def tables() -> str:
    """Both tables of the page."""
    tried = on_ranks(2, attempts, seconds=200)[0]
    lines = [HEAD, "|" + "---|" * 9, *rows(CELLS), "", ATTEMPT_HEAD, "|" + "---|" * 4]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in tried])


if __name__ == "__main__":
    print(tables())
