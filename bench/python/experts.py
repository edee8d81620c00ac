# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts within a budget: what a token takes beside all in memory, and which experts
had to be read beside what no policy could have spared; and what a plan predicts of it.

A small Qwen3-MoE of random weights, whose router prefers some experts to others, says one token at
a time. The routing is noted, and played again by Belady's optimum, which knows the future, by least
recently used, by most often used and by a policy that knows the next token's, with room for as many
experts. What the first ten tokens
read is counted in a run that knows nothing, and in one that `stowage.foresee` told which experts
other tokens took. Run:
python bench/python/experts.py [--layers 4] [--experts 32] [--width 1024] [--inner 768]
     [--share 0.25 0.5] [--tokens 100] [--storage int8:row2] [--reads direct] [--ahead] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stowage

Use = tuple[int, int]  # a layer, an expert
FIRST = 10  # tokens of a beginning
ROUTED = 4  # experts of a token in each layer
TILE = 4 << 20  # that a plan counts beside weights
MATRICES = 2  # of an expert: `gate_up_proj`, `down_proj`


def build(options: argparse.Namespace) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096, hidden_size=options.width, moe_intermediate_size=options.inner,
        num_hidden_layers=options.layers, num_attention_heads=8, num_key_value_heads=2,
        head_dim=64, num_experts=options.experts, num_experts_per_tok=ROUTED, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("grouped_mm")
    rank = torch.arange(1, options.experts + 1, dtype=torch.float32)
    for layer in model.model.layers:  # larger rows of the router win more often
        order = torch.randperm(options.experts)
        layer.mlp.gate.weight.data.mul_(8 * (rank[order] ** -0.25).unsqueeze(1).bfloat16())
    return model


class Routing:
    """Notes which experts each layer takes."""

    def __init__(self, model: nn.Module) -> None:
        self.uses: list[Use] = []
        self._hooks = [
            layer.mlp.experts.register_forward_pre_hook(self._note(i))
            for i, layer in enumerate(model.get_submodule("model.layers"))
        ]

    def _note(self, layer: int) -> Callable[..., None]:
        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            numbers = next(t for t in args if t.dtype == torch.int64)
            self.uses += [(layer, expert) for expert in numbers.unique().tolist()]

        return note

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


@torch.inference_mode()
def say(model: Any, tokens: Sequence[int]) -> list[float]:
    """Seconds of each."""
    taken = []
    for token in tokens:
        start = time.perf_counter()
        model(torch.tensor([[token]]))
        taken.append(time.perf_counter() - start)
    return taken


def beginning(model: Any, tokens: Sequence[int]) -> float:
    """Reads of experts for these tokens, the first; what was begun before is waited for."""
    before = stowage.engine_report(model)
    time.sleep(0.2)
    while (now := stowage.engine_report(model)).bytes_read != before.bytes_read:
        before = now
        time.sleep(0.2)
    begun = stowage.uses(model)
    say(model, tokens)
    found = stowage.uses(model).since(begun).weights.values()
    return sum(uses.misses + uses.ahead for uses in found if uses.by_index) / MATRICES


def optimum(uses: Sequence[Use], room: int) -> int:
    """Reads where what is used last of all goes (Belady)."""
    following: list[int] = [0] * len(uses)
    last: dict[Use, int] = {}
    for i in range(len(uses) - 1, -1, -1):
        following[i] = last.get(uses[i], len(uses))
        last[uses[i]] = i
    held: dict[Use, int] = {}
    reads = 0
    for i, use in enumerate(uses):
        if use not in held:
            reads += 1
            if len(held) >= room:
                del held[max(held, key=held.__getitem__)]
        held[use] = following[i]
    return reads


def by(uses: Sequence[Use], room: int, worth: Callable[[Use, int, Counter[Use]], float]) -> int:
    """Reads where what was worth least when it was used goes."""
    held: dict[Use, float] = {}
    counts: Counter[Use] = Counter()
    reads = 0
    for i, use in enumerate(uses):
        counts[use] += 1
        if use not in held:
            reads += 1
            if len(held) >= room:
                del held[min(held, key=held.__getitem__)]
        held[use] = worth(use, i, counts)
    return reads


def lookahead(uses: Sequence[Use], room: int, span: int) -> int:
    """Reads of a policy that knows the next `span` uses, those of a token: what none of them names
    goes, the least often used so far first, else what they name last."""
    coming: dict[Use, list[int]] = {}
    for i, use in enumerate(uses):
        coming.setdefault(use, []).append(i)
    counts: Counter[Use] = Counter()
    held: set[Use] = set()
    reads = 0
    for i, use in enumerate(uses):
        counts[use] += 1
        coming[use].pop(0)
        if use in held:
            continue
        reads += 1

        def worth(of: Use, now: int = i) -> tuple[int, int]:
            following = coming[of][0] if coming[of] else len(uses)
            return (1, -following) if following <= now + span else (0, counts[of])

        if len(held) >= room:
            held.remove(min(held, key=worth))
        held.add(use)
    return reads


def by_plan(
    model: Any, ram: int, learnt: stowage.Uses, tokens: Sequence[int], one: int, folder: Path
) -> dict[str, Any]:
    """What `stowage.plan` predicts of the same budget, and what a run by it takes. `one`: bytes of
    an expert."""
    plan = stowage.plan(model, ram=ram, uses=learnt, folder=folder)
    stowage.offload(model, plan=plan, folder=folder / "w", reads="direct")
    say(model, tokens[: len(tokens) // 2])
    before, routing = stowage.engine_report(model), Routing(model)
    taken = statistics.median(say(model, tokens))
    read = stowage.engine_report(model).since(before).bytes_read
    routing.remove()
    stowage.onload(model)
    hits = 1 - read / (len(routing.uses) * one)
    return {
        "hits": [plan.predicted.hits, hits],
        "bytes": [plan.predicted.bytes["disk->ram"], read / len(tokens)],
        "ms": [plan.predicted.seconds * 1e3, taken * 1e3],
    }


def measured(
    options: argparse.Namespace, share: float, tokens: Sequence[int], first: Sequence[int]
) -> dict[str, Any]:
    model = build(options)
    stowage.stow(model, "int8", rules={"*.experts.*_proj": options.storage}, measure=False)
    stacks = [p for n, p in model.named_parameters() if "experts" in n]
    of_experts = sum(stowage.nbytes(stack) for stack in stacks)
    one = of_experts // (options.layers * options.experts) + 4 * 4096  # with edges of pages
    room = int(share * options.layers * options.experts)
    routing = Routing(model)
    say(model, tokens[: len(tokens) // 2])
    resident = statistics.median(say(model, tokens))
    routing.remove()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        ram = stowage.nbytes(model) - of_experts + room * one
        how = {"reads": options.reads, "route_ahead": options.ahead}
        stowage.offload(model, ram=ram, folder=Path(folder) / "w", **how)
        routing = Routing(model)
        untold, since = beginning(model, first), stowage.uses(model)
        say(model, tokens[: len(tokens) // 2])  # until all has been seen
        before, begun = stowage.engine_report(model), len(routing.uses)
        taken = statistics.median(say(model, tokens))
        report = stowage.engine_report(model).since(before)
        routing.remove()
        learnt = stowage.uses(model).since(since)
        stowage.onload(model)
        stowage.offload(model, ram=ram, folder=Path(folder) / "w", **how)
        stowage.foresee(model, learnt)
        told = beginning(model, first)
        stowage.onload(model)
        planned = by_plan(model, ram + TILE, learnt, tokens, one, Path(folder))
    warm, uses = routing.uses[:begun], routing.uses
    policies: dict[str, Callable[[Sequence[Use]], int]] = {
        "optimum": lambda seen: optimum(seen, room),
        "least recently used": lambda seen: by(seen, room, lambda _, i, __: i),
        "most often used": lambda seen: by(seen, room, lambda use, _, counts: counts[use]),
        "knowing a token": lambda seen: lookahead(seen, room, options.layers * ROUTED),
    }
    found = {name: reads(uses) - reads(warm) for name, reads in policies.items()}
    return {
        "share": share,
        "uses": len(uses) - begun,
        "reads": round(report.bytes_read / one, 1),
        "waits": report.misses + report.late,
        "in_vain": report.unused,
        "stall": report.stall,
        "bound": found,
        "first_reads": [untold, told],
        "ms": taken * 1e3,
        "of_resident": resident / taken,
        "peak_of_ram": report.peak / ram,
        "planned": planned,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        beside = ", ".join(f"{name} {count}" for name, count in row["bound"].items())
        lines.append(
            f"{row['share']:.2f} of the experts in memory: {row['uses']} uses, {row['reads']:.0f} "
            f"read ({beside}), {row['in_vain']} in vain; "
            f"{row['waits']} waits of {row['stall'] * 1e3:.0f} ms; "
            f"{row['ms']:.2f} ms a token, {row['of_resident']:.2f} of all in memory's speed; "
            f"peak {row['peak_of_ram']:.3f} of the budget; the first {FIRST} tokens read "
            f"{row['first_reads'][0]:.0f}, told of others {row['first_reads'][1]:.0f}"
        )
        plan = row["planned"]
        lines.append(
            f"  by a plan of what was used: {plan['hits'][0]:.0%} of uses predicted in memory, "
            f"{plan['hits'][1]:.0%} were; {plan['bytes'][0] / 1e6:.1f} MB read a token predicted, "
            f"{plan['bytes'][1] / 1e6:.1f} were; {plan['ms'][0]:.2f} ms a token predicted, "
            f"{plan['ms'][1]:.2f} taken"
        )
    return "\n".join(lines)


def main() -> None:
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    about.add_argument("--ahead", action="store_true", help="with route_ahead=True")
    about.add_argument("--layers", type=int, default=4)
    about.add_argument("--experts", type=int, default=32)
    about.add_argument("--width", type=int, default=1024)
    about.add_argument("--inner", type=int, default=768)
    about.add_argument("--share", type=float, nargs="+", default=[0.25, 0.5])
    about.add_argument("--tokens", type=int, default=100)
    about.add_argument("--storage", default="int8:row2")
    about.add_argument("--reads", default="direct")
    about.add_argument("--folder", default=None, help="on the disk to read from")
    about.add_argument("--json", action="store_true")
    options = about.parse_args()
    torch.manual_seed(1)
    every = (torch.rand(options.tokens + FIRST) ** 4 * 4096).long().tolist()  # some more often
    tokens, first = every[: options.tokens], every[options.tokens :]
    rows = [measured(options, share, tokens, first) for share in options.share]
    print(json.dumps(rows) if options.json else table(rows))


if __name__ == "__main__":
    main()
