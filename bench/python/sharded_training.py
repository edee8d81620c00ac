# SPDX-License-Identifier: Apache-2.0
"""fp8 on the wire of FSDP2 beside bf16, and beside torchao where it is installed, with gloo.

wire     bytes that a rank gives to collectives in a step of 4 layers, and the number of calls
step     time of that step, all models in turn; the ratio is the median over the rounds
refresh  scales of 500 weights of 256 x 256: one reduction, beside one for each weight
peak     memory of a step by torch's allocator, beside the formula of docs/scaling.md
Each run on ranks has a time-out: whoever waits longer prints where, for every rank. Run:
python bench/python/sharded_training.py [--width 1024] [--rounds 7] [--ranks 2] [--json]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/shared"))
import scaled
from ranks import on_ranks

from stowage.training import convert_float8, refresh_scales
from stowage.training.recipes import amax_of, tensor_scale

try:
    from torchao import float8 as peer
    from torchao.float8 import float8_utils
except ImportError:
    peer = None

SECONDS = 500  # the longest that a run on ranks may take
LAYERS, TOKENS = 4, 64
WEIGHTS, SIDE = 500, 256
PEAKS = ("plain", "tensorwise", "rowwise", "nf4", "nf4:nested", "int8:row")
OURS = {
    "bf16": "",
    "fp8 gather, bf16 products": "gather_only",
    "fp8": "tensorwise",
    "fp8, scales of rows": "rowwise",
}


def _model(name: str, width: int) -> tuple[nn.Module, Callable[[nn.Module], None]]:
    """Sharded; and what is called after the optimizer's step."""
    torch.manual_seed(0)
    wide = 4 * width
    # Biases also let gloo carry torchao's gathers: a group of fp8 alone is refused.
    layers = [(nn.Linear(width, wide), nn.ReLU(), nn.Linear(wide, width)) for _ in range(LAYERS)]
    blocks = [nn.Sequential(*three) for three in layers]
    model: nn.Module = nn.Sequential(*blocks)
    after: Callable[[Any], None] = refresh_scales if OURS.get(name) else lambda _: None
    if name == "torchao":
        config = peer.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        model = peer.convert_to_float8_training(model, config=config)
        after = peer.precompute_float8_dynamic_scale_for_fsdp
    elif OURS[name]:
        convert_float8(model, OURS[name])
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, after


def _step(model: nn.Module, after: Callable[[nn.Module], None], optimizer: Any, x: Tensor) -> None:
    model(x).float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    after(model)


def _counted(step: Callable[[], None]) -> dict[str, int]:
    extra: list[int] = []
    old = functional.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        extra.append(tensor.nbytes)
        return old(tensor, *args, **kwargs)

    places = [functional, *([float8_utils] if peer else [])]
    for place in places:
        place.all_reduce = all_reduce
    with scaled.counted() as counts:
        step()
    for place in places:
        place.all_reduce = old
    reductions = counts.reductions + extra
    return {
        "gathered": sum(counts.gathers),
        "reduced": sum(counts.scatters),
        "scales": sum(reductions),
        "calls": len(counts.gathers) + len(counts.scatters) + len(reductions),
    }


def steps(width: int, rounds: int) -> dict[str, dict[str, float]]:
    """Bytes, calls, seconds and the ratio to bf16 for each model."""
    names = [*OURS, *(["torchao"] if peer else [])]
    x = torch.randn(TOKENS, width, dtype=torch.bfloat16)
    run, found = {}, {}
    for name in names:
        model, after = _model(name, width)
        run[name] = partial(_step, model, after, torch.optim.SGD(model.parameters(), 1e-3), x)
        run[name]()
        found[name] = dict[str, float](_counted(run[name]))
    seconds = _in_turn(run, rounds)
    for name in names:
        found[name]["seconds"] = statistics.median(seconds[name])
        found[name]["ratio"] = _ratio(seconds["bf16"], seconds[name])
    return found


def _in_turn(run: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in run}
    for round_ in range(rounds + 1):
        for name, call in run.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if round_:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _ratio(base: list[float], other: list[float]) -> float:
    return statistics.median(b / o for b, o in zip(base, other, strict=True))


@torch.no_grad()
def _each(weights: list[Any], group: Any) -> None:
    """What a refresh does, with a reduction for each weight."""
    for weight in weights:
        amax = amax_of(weight._value)
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=group)
        weight._stamp.set_scale(tensor_scale(amax, weight._layer.recipe))


@torch.no_grad()
def _each_of_peer(weights: list[Tensor], mesh: Any) -> None:
    for weight in weights:
        float8_utils.tensor_to_scale(
            weight, torch.float8_e4m3fn, reduce_amax=True, device_mesh=mesh
        )


def refresh(rounds: int) -> dict[str, dict[str, float]]:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    models = [
        nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(WEIGHTS)))
        for _ in range(1 + bool(peer))
    ]
    convert_float8(models[0])
    if peer:
        config = peer.Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
        peer.convert_to_float8_training(models[1], config=config)
    for model in models:
        fully_shard(model, mesh=mesh)
    weights = [module.weight._local_tensor for module in models[0]]
    run: dict[str, Callable[[], None]] = {
        "ours": partial(refresh_scales, models[0]),
        "ours, one for each weight": partial(_each, weights, mesh.get_group()),
    }
    if peer:
        theirs = [module.weight._local_tensor._tensor for module in models[1]]
        run["torchao"] = partial(peer.precompute_float8_dynamic_scale_for_fsdp, models[1])
        run["torchao, one for each weight"] = partial(_each_of_peer, theirs, mesh)
    found = {name: dict[str, float](_counted(call)) for name, call in run.items()}
    seconds = _in_turn(run, rounds)
    for name in run:
        found[name]["seconds"] = statistics.median(seconds[name])
        found[name]["ratio"] = _ratio(seconds[name], seconds["ours"])  # ours is so much faster
    return found


def peaks(ranks: int) -> dict[str, dict[str, float]]:
    found = {}
    for form in PEAKS:
        counted, said = scaled.compare(form, {"shards": ranks})["peak"]
        found[form] = {"counted": counted, "formula": said, "off": counted / said - 1}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", choices=("step", "refresh", "peak"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    tasks: dict[str, tuple[Any, ...]] = {
        "step": (steps, given.width, given.rounds),
        "refresh": (refresh, given.rounds),
        "peak": (peaks, given.ranks),
    }
    found = {}
    for name, (task, *arguments) in tasks.items():
        if given.only in (None, name):
            found[name] = on_ranks(given.ranks, task, *arguments, seconds=SECONDS)[0]
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for section, rows in found.items():
        for name, facts in rows.items():
            cells = (f"{key} {value:.4g}" for key, value in facts.items())
            print(f"{section:8} {name:30} {'  '.join(cells)}")


if __name__ == "__main__":
    main()
