# SPDX-License-Identifier: Apache-2.0
"""Published mixtures of real width that are larger than the memory they get, one token at a time:
written by `large_checkpoints`, run from the untouched files in a control group of a share of their
bytes (interpreter, activations and page cache included), beside a peer in as much memory. `held` is
the time of a token whose experts are all in memory.

    python bench/python/larger_than_memory.py qwen3 gpt-oss --folder /data
    python bench/python/larger_than_memory.py gpt-oss --peer mmap
    python bench/python/larger_than_memory.py mixtral --peer accelerate --tokens 2
    python bench/python/larger_than_memory.py mixtral --peer llama.cpp  # with llama_cpp at hand

Control groups ask for a user who may make them; `--free` goes without, so that the page cache may
hold what the budget does not.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import large_checkpoints
import peer_llama
import torch

import stowage

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/shared"))
import control_group

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Talk:
    """Goes on from a prompt, greedily."""

    def __init__(self, model: Any) -> None:
        self._model = model
        start = time.perf_counter()
        self._step(PROMPT, None)
        self.prompt = time.perf_counter() - start

    def _step(self, ids: list[int], cache: Any) -> None:
        found = self._model(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        self._last, self._cache = int(found.logits[0, -1].argmax()), found.past_key_values

    def tokens(self, count: int) -> list[float]:
        """Seconds of each."""
        taken = []
        for _ in range(count):
            start = time.perf_counter()
            self._step([self._last], self._cache)
            taken.append(time.perf_counter() - start)
        return taken


@torch.inference_mode()
def held(model: Any) -> float:
    """Seconds of one token again and again: its experts are there, whatever else is not."""
    taken = []
    for _ in range(6):
        start = time.perf_counter()
        model(torch.tensor([[PROMPT[0]]]), use_cache=False)
        taken.append(time.perf_counter() - start)
    return min(taken)


def by_accelerate(folder: Path, ram: int) -> Any:
    """What `ram` has no room for comes from a disk by accelerate, a module at a time."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": ram},
        offload_folder=folder / "offloaded",
    )


@torch.inference_mode()
def measured(
    family: str,
    layers: int,
    smaller: dict[str, Any],
    folder: Path,
    ram: int,
    ahead: bool,
    tokens: int,
    peer: str,
) -> dict[str, Any]:
    """`peer` mmap: the mapped files, of which the page cache holds as much as it may."""
    if peer == "llama.cpp":
        other = peer_llama.Talk(folder, PROMPT)
        row = {"load": other.load, "prompt": other.prompt}
        row |= {"token": statistics.mean(other.tokens(tokens))}
        return row | {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    how: dict[str, Any] = {"mmap": True} if peer == "mmap" else {"ram": ram, "route_ahead": ahead}
    start = time.perf_counter()
    make = functools.partial(large_checkpoints.build, family, layers, **smaller)
    model: Any
    if peer == "accelerate":
        model = by_accelerate(folder, ram)
    else:
        model = stowage.load(make, folder, **how)
    loaded = time.perf_counter() - start
    talk = Talk(model)
    before = None if peer else stowage.engine_report(model)
    taken = talk.tokens(tokens)
    row = {"load": loaded, "prompt": talk.prompt, "token": statistics.mean(taken)}
    if before is not None:
        report = stowage.engine_report(model).since(before)
        row |= {"read": report.bytes_read / tokens, "hits": report.hits / report.acquired}
        row |= {"waited": report.stall / tokens, "peak_of_ram": report.peak / ram}
        row["in_vain"] = report.unused / max(report.ahead, 1)
    row["held"] = held(model)
    row["resident"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return row


def run(options: argparse.Namespace, family: str, folder: Path) -> dict[str, Any]:
    smaller = json.loads(options.smaller)
    layers = large_checkpoints.layers_for(family, options.bytes, **smaller)
    size = large_checkpoints.write(family, layers, folder, **smaller)
    limit = int(size * options.share)
    if options.peer == "llama.cpp":
        peer_llama.write(folder)
    ram = int(limit - options.beside)
    asked = ["--child", family, str(layers), options.smaller, str(folder), str(ram)]
    asked += [str(int(options.ahead)), str(options.tokens), options.peer]
    if options.drop:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    if options.free:
        ran = subprocess.run([sys.executable, __file__, *asked], capture_output=True, text=True)
        peak = 0
    else:
        with control_group.limited(limit) as group:
            ran = control_group.run(group, Path(__file__), *asked)
            peak = control_group.peak(group)
    said = {"family": family, "layers": layers, "bytes": size, "limit": limit, "peak": peak}
    if ran.returncode != 0:
        return said | {"failed": ran.returncode, "why": ran.stderr[-300:]}
    return said | json.loads(ran.stdout.splitlines()[-1])


def line(row: dict[str, Any]) -> str:
    text = f"{row['family']}, {row['layers']} layers, {row['bytes'] / 1e9:.1f} GB in "
    text += f"{row['limit'] / 1e9:.1f} GB: "
    if "failed" in row:
        return text + f"ended with {row['failed']} {row['why']}"
    text += f"{row['load']:.0f} s to load, {row['prompt']:.1f} s for {len(PROMPT)} tokens, "
    text += f"then {row['token']:.2f} s each"
    if "held" in row:
        text += f" ({row['held']:.2f} where experts are held)"
    if "read" in row:
        text += f"; {row['read'] / 1e9:.2f} GB read a token, "
        text += f"{row['hits']:.0%} in memory, {row['in_vain']:.0%} of reads in vain, "
        text += f"{row['waited']:.2f} s waited; "
        text += f"peak {row['peak_of_ram']:.3f} of the budget"
    return text + f"; {row['resident'] / 1e9:.2f} GB resident"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        family, layers, smaller, folder, ram, ahead, tokens, peer = sys.argv[2:]
        numbers = int(ram), bool(int(ahead)), int(tokens)
        row = measured(family, int(layers), json.loads(smaller), Path(folder), *numbers, peer)
        print(json.dumps(row))
        return
    about = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    about.add_argument("families", nargs="+", choices=large_checkpoints.FAMILIES)
    about.add_argument("--folder", type=Path, help="on the disk to measure")
    about.add_argument("--bytes", type=float, default=20e9, help="of each checkpoint, at least")
    about.add_argument("--share", type=float, default=0.25, help="of its bytes, that may be used")
    about.add_argument("--beside", type=float, default=1.1e9, help="of these, not for weights")
    about.add_argument("--smaller", default="{}", help="JSON that replaces what configs say")
    about.add_argument("--tokens", type=int, default=16)
    about.add_argument(
        "--peer",
        choices=["mmap", "accelerate", "llama.cpp"],
        default="",
        help="instead: the mapped files, or transformers with a device map and a folder, which\n"
        "makes files of its own beside the checkpoint where this has a tensor for each expert,\n"
        "or llama.cpp (mixtral), for which one of bf16 is made",
    )
    about.add_argument("--ahead", action="store_true", help="with route_ahead=True")
    about.add_argument("--free", action="store_true", help="without a control group")
    about.add_argument("--drop", action="store_true", help="empty the page cache first (root)")
    about.add_argument("--json", action="store_true")
    options = about.parse_args()
    rows = []
    for family in options.families:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            free = shutil.disk_usage(folder).free
            if free < (2.4 if options.peer == "llama.cpp" else 1.4) * options.bytes:
                raise SystemExit(f"{folder} has {free / 1e9:.0f} GB free")
            rows.append(run(options, family, Path(folder)))
        if not options.json:
            print(line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
