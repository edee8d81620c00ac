# SPDX-License-Identifier: Apache-2.0
"""Peak of memory and time of the granularities, beside the dense model and the expected peak.

    peak = rest + max(activations, activations at a product + working set)

Activations are the dense model's peak without its weights, counted in the same run. The working set
is a tile, the largest weight, or the weights of the largest block; in a backward no block is open.
Two models: blocks of attention and feed-forward, and blocks of two convolutions. Run:
python bench/python/granularity.py [--json] [--resident] [--width 1024] [--tokens 256] [--blocks 3]
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from peaks import Peak, peak_of, resident_peak_of
from torch import Tensor, nn
from torch.nn import functional as F

import stowage

TILE = 4 << 20
MODES = ("dense", "tile", "layer", "block")
PHASES = ("inference", "forward", "backward")
HEAD = 64


class Attention(nn.Module):
    """Attention and feed-forward on [tokens, width]; in-place where torch allows it, so that the
    peak of the activations is at a product."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        return x + self.down(F.relu_(self.up(self.between(x))))

    def attend(self, x: Tensor) -> Tensor:
        heads = (
            f(x).unflatten(-1, (-1, HEAD)).transpose(0, 1)[None] for f in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(*heads)[0].transpose(0, 1).flatten(1))


class Convolutions(nn.Module):
    """Two convolutions on [1, channels, height, width]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = channels + HEAD
        self.up = nn.Conv2d(channels, wide, 3, padding=1)
        self.down = nn.Conv2d(wide, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu_(self.up(x)))


@dataclass(frozen=True)
class Case:
    name: str
    block: type[nn.Module]
    size: int
    blocks: int
    x: Tensor

    def model(self, mode: str, storage: str) -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(*(self.block(self.size) for _ in range(self.blocks)))
        made.to(self.x.dtype).requires_grad_(False)
        if mode != "dense":
            blocks = self.block if mode == "block" else None
            stowage.stow(made, storage, working=mode, blocks=blocks, measure=False)
        return made


def _bytes(model: nn.Module) -> list[int]:
    return [p.numel() * p.dtype.itemsize for p in model.parameters() if p.dim() > 1]


def working_set(case: Case, mode: str, phase: str) -> int:
    """Bytes of the formula."""
    block = case.block(case.size).to(case.x.dtype)
    if mode == "dense":
        return 0
    if mode == "block" and phase != "backward":
        return sum(_bytes(block))
    largest = max(_bytes(block))
    return largest if mode != "tile" else min(largest, TILE)


def expected(case: Case, mode: str, phase: str, dense: Peak) -> int:
    """The peak beyond rest."""
    work = working_set(case, mode, phase)
    if mode == "block" and phase != "backward":  # held between products too
        return dense.anywhere + work
    return max(dense.anywhere, dense.products + work)


def peaks(case: Case, model: nn.Module) -> dict[str, Peak]:
    """By phase; the second run of each counts."""
    found = {}
    with torch.inference_mode():
        model(case.x)
        found["inference"] = peak_of(lambda: model(case.x))
    leaf, kept = case.x.clone().requires_grad_(), []
    for _ in range(2):
        leaf.grad = None
        kept.clear()
        found["forward"] = peak_of(lambda: kept.append(model(leaf)))
        g = torch.ones_like(kept[0])
        found["backward"] = peak_of(lambda g=g: kept[0].backward(g))
    return found


@dataclass(frozen=True)
class Row:
    """Bytes, and milliseconds: medians of rounds in which every mode has its turn."""

    model: str
    mode: str
    rest: int  # of all parameters
    working_set: int
    activations: int
    peak: int  # inference, beyond rest
    expected: int
    peak_of_expected: float
    backward_peak: int  # beyond rest and what the forward saved
    backward_expected: int
    saved_beyond_dense: int  # by a forward with gradients
    resident: int | None  # the rise of resident memory in a first inference, beside
    ms: float
    ms_of_dense: float
    gradient_ms: float  # forward and backward


def _times(models: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, list[float]]:
    def timed(run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    taken: dict[str, list[float]] = {}
    leaf = x.clone().requires_grad_()
    for _ in range(rounds):
        for mode, model in models.items():
            with torch.inference_mode():
                taken.setdefault(mode, []).append(timed(lambda m=model: m(x)))
            taken.setdefault(f"{mode}, gradients", []).append(
                timed(lambda m=model: m(leaf).sum().backward())
            )
    return taken


Resident = Callable[[Case, str], int] | None


def measure(case: Case, storage: str, rounds: int, resident: Resident = None) -> list[Row]:
    models = {mode: case.model(mode, storage) for mode in MODES}
    seen = {mode: peaks(case, model) for mode, model in models.items()}
    taken = {k: statistics.median(v) for k, v in _times(models, case.x, rounds).items()}
    dense, rows = seen["dense"], []
    for mode, model in models.items():
        here = {phase: expected(case, mode, phase, dense[phase]) for phase in PHASES}
        peak = seen[mode]["inference"].total
        rows.append(
            Row(
                case.name,
                mode,
                stowage.report(model).rest_bytes,
                working_set(case, mode, "inference"),
                dense["inference"].anywhere,
                peak,
                here["inference"],
                peak / here["inference"],
                seen[mode]["backward"].total,
                here["backward"],
                seen[mode]["forward"].held - dense["forward"].held,
                None if resident is None else resident(case, mode),
                taken[mode],
                taken[mode] / taken["dense"],
                taken[f"{mode}, gradients"],
            )
        )
    return rows


def cases(width: int, tokens: int, blocks: int, dtype: torch.dtype) -> list[Case]:
    side = max(4, int(tokens**0.5))
    channels = width // 2 + HEAD
    return [
        Case("attention", Attention, width, blocks, torch.randn(tokens, width).to(dtype)),
        Case(
            "convolution",
            Convolutions,
            channels,
            blocks,
            torch.randn(1, channels, side, side).to(dtype),
        ),
    ]


def in_a_process(argv: list[str]) -> Callable[[Case, str], int]:
    """Measures the rise of resident memory in a process that has run nothing before."""

    def run(case: Case, mode: str) -> int:
        call = [sys.executable, __file__, *argv, "--only", f"{case.name}:{mode}"]
        return int(subprocess.run(call, check=True, capture_output=True, text=True).stdout)

    return run


def print_resident(case: Case, mode: str, storage: str) -> None:
    model = case.model(mode, storage)
    with torch.inference_mode():
        nn.Linear(8, 8, dtype=case.x.dtype)(torch.ones(8, 8, dtype=case.x.dtype))  # loads code
        print(resident_peak_of(lambda: model(case.x)))


def print_table(rows: list[Row]) -> None:
    print(f"{'model':12} {'mode':6}   rest  works   acts   peak  expected  backward  expected"
          "  saved  resident      ms  of dense  with gradients")  # fmt: skip
    for row in rows:
        sizes = [row.rest, row.working_set, row.activations, row.peak, row.expected]
        mib = [size / 2**20 for size in sizes]
        back = [row.backward_peak, row.backward_expected, row.saved_beyond_dense, row.resident or 0]
        last = [size / 2**20 for size in back]
        print(
            f"{row.model:12} {row.mode:6} {mib[0]:6.1f} {mib[1]:6.2f} {mib[2]:6.2f} {mib[3]:6.2f}"
            f"  {mib[4]:8.2f}  {last[0]:8.2f}  {last[1]:8.2f} {last[2]:6.2f}  {last[3]:8.1f}"
            f" {row.ms:7.1f}  {row.ms_of_dense:8.2f}  {row.gradient_ms:14.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows, every field")
    parser.add_argument("--resident", action="store_true", help="also in a process for each row")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--storage", default="f8_e4m3:row")
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = cases(given.width, given.tokens, given.blocks, torch.bfloat16)
    if given.only:
        name, mode = given.only.split(":")
        print_resident(next(c for c in made if c.name == name), mode, given.storage)
        return
    argv = [a for a in sys.argv[1:] if a not in ("--json", "--resident")]
    resident = in_a_process(argv) if given.resident else None
    rows = [row for case in made for row in measure(case, given.storage, given.rounds, resident)]
    if given.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{given.storage}, bf16, 1 thread, torch {torch.__version__}; MiB; peaks beyond rest")
    print_table(rows)


if __name__ == "__main__":
    main()
