# SPDX-License-Identifier: Apache-2.0
"""transformers' `from_pretrained` with StowageConfig beside `stowage.load` and bitsandbytes.

A Llama-shaped decoder of 1.2e9 random weights in bf16 lies in the page cache. Each way to load it
with its weights at rest runs in a process of its own, in turn with the others; medians count.
Seconds are those of the load alone, after a tiny one in the same process; the peak is the memory of
the process that no file is behind, above what it had before. bitsandbytes takes half a
minute or more. Run: python bench/python/pretrained.py [--json] [--layers 24]
[--width 2048] [--rounds 3] [--storage nf4] [--only from_pretrained]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import stowage

WAYS = ("stowage.load", "from_pretrained", "bitsandbytes")
LIMIT_SECONDS, LIMIT_PEAK = 1.2, 1.15  # of stowage.load, and of what rests


@dataclass(frozen=True)
class Row:
    way: str
    seconds: float
    ratio: float  # to stowage.load
    rest: int
    peak: float  # of what rests


def write(folder: Path, layers: int, width: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 128, 1),
        num_key_value_heads=max(width // 128, 1),
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def anonymous() -> int:
    """Bytes of memory that no file is behind."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) << 10


class Watch:
    """The most of it while a load runs."""

    def __init__(self) -> None:
        self.before = self.most = anonymous()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(0.005):
            self.most = max(self.most, anonymous())

    def peak(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self.most, anonymous()) - self.before


def load(way: str, folder: str, storage: str) -> Any:
    if way == "stowage.load":
        config = AutoConfig.from_pretrained(folder)

        def build() -> Any:
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

        return stowage.load(build, folder, storage, measure=False, progress=False)
    if way == "bitsandbytes":
        from transformers import BitsAndBytesConfig

        given: Any = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    else:
        from stowage.integrations.transformers import StowageConfig

        given = StowageConfig(storage, measure=False)
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=given, dtype=torch.bfloat16, device_map="cpu"
    )


def one(way: str, folder: str, storage: str) -> None:
    """In a process of its own; prints seconds, bytes at rest and peak."""
    tiny = Path(folder) / "tiny"
    load(way, str(tiny), storage)  # imports, and what is made once
    watch = Watch()
    start = time.perf_counter()
    model = load(way, folder, storage)
    seconds = time.perf_counter() - start
    print(json.dumps([seconds, stowage.nbytes(model), watch.peak()]))


def measure(args: argparse.Namespace) -> list[Row]:
    ways = [way for way in WAYS if args.only in (None, way) or way == WAYS[0]]
    found: dict[str, list[tuple[float, int, int]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        write(Path(folder), args.layers, args.width)
        write(Path(folder) / "tiny", 1, 64)
        for file in Path(folder).glob("*.safetensors"):
            file.read_bytes()  # into the page cache
        for _ in range(args.rounds):
            for way in ways:
                command = [sys.executable, __file__, "--one", way, "--folder", folder]
                ran = subprocess.run(
                    [*command, "--storage", args.storage],
                    check=True,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                found[way].append(tuple(json.loads(ran.stdout)))
    least = statistics.median(seconds for seconds, _, _ in found[WAYS[0]])
    rows = []
    for way, runs in found.items():
        seconds, rest = statistics.median(run[0] for run in runs), runs[0][1]
        peak = statistics.median(run[2] for run in runs)
        rows.append(Row(way, seconds, seconds / least, rest, peak / rest))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--storage", default="nf4")
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--folder", help="where the model is written")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        return one(args.one, args.folder, args.storage)
    rows = measure(args)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for row in rows:
        print(
            f"{row.way:16} {row.seconds:8.2f} s  {row.ratio:6.2f} of stowage.load (limit "
            f"{LIMIT_SECONDS})  peak {row.peak:5.2f} of {row.rest >> 20} MiB at rest (limit "
            f"{LIMIT_PEAK})"
        )


if __name__ == "__main__":
    main()
