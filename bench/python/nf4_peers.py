# SPDX-License-Identifier: Apache-2.0
"""NF4 of ours beside bitsandbytes and torchao: quantize, dequantize, products, a step of QLoRA.

One bf16 matrix, every form of it in turn in one process, medians. With one thread times are
processor time, which other programs change less than they change the clock on the wall. Between two
runs of a form the others read more than a cache holds, so weights come from memory. Peers that are
not installed are left out, and what is compared with them is not measured. The last lines say which
goals are met; that of a whole decoder is bench/python/decoder.py's.
Run: python bench/python/nf4_peers.py [--threads 1] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from nf4_forms import Call, Form, forms
from torch import Tensor
from torch.nn import functional as F

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512, 2048)
STEP_ROWS, ERROR_ROWS = 512, 32
KEPT = "dequantize, kept"
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of mallopt


@dataclass(frozen=True)
class Row:
    section: str
    form: str
    ms: float
    beside: str  # what `ratio` compares with: its time / this time
    ratio: float | None


@dataclass(frozen=True)
class Goal:
    goal: str
    least: float
    got: float | None  # None: not measured
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.got is None:
            return "not measured"
        return "met" if self.got >= self.least else "NOT MET"


# --- measuring ------------------------------------------------------------------------------------


def interleaved(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, after one run of all that does not count. Each round begins with
    another one, so that none always follows the same."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            start = clock()
            calls[name]()
            if turn:
                times[name].append(clock() - start)
    return {name: statistics.median(found) * 1e3 for name, found in times.items()}


def rows_of(section: str, ms: dict[str, float], beside: str) -> list[Row]:
    limit = ms.get(beside)
    return [Row(section, n, t, beside, limit and limit / t) for n, t in ms.items() if n != beside]


def quantizing(made: list[Form], rounds: int) -> list[Row]:
    calls = {form.name: form.quantize for form in made if form.quantize is not None}
    return rows_of("quantize", interleaved(calls, rounds), "")


def keep_pages() -> None:
    """From here on the C heap keeps what is freed. A result of 32 MiB is new pages otherwise, and
    what the system does for those takes longer than a kernel. For good: call it last."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # the C library of GNU
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def dequantizing(section: str, made: list[Form], w: Tensor, rounds: int) -> list[Row]:
    """Beside memcpy of as many bytes, read and written, into memory of the same kind."""
    sized = {form.name: form for form in made if form.values is not None}
    ms = interleaved({name: form.values for name, form in sized.items()}, rounds)
    copy = ms.pop("dense bf16") / (2 * w.nbytes)  # a byte
    limits = {name: copy * (sized[name].rest_bytes + w.nbytes) for name in ms}
    return [Row(section, n, t, "memcpy", limits[n] / t) for n, t in ms.items()]


@torch.inference_mode()
def products(made: list[Form], m: int, columns: int, rounds: int) -> list[Row]:
    x = torch.randn(m, columns, dtype=torch.bfloat16)
    calls = {form.name: lambda form=form: form.linear(x) for form in made}
    ms = interleaved(calls, rounds)
    dense_ms = ms["dense bf16"]
    return [Row(f"linear M={m}", n, t, "dense bf16", dense_ms / t) for n, t in ms.items()]


def steps(made: list[Form], shape: torch.Size, m: int, rounds: int) -> list[Row]:
    """Forward, and backward to the input: what a frozen layer below an adapter does."""
    x = torch.randn(m, shape[1], dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(m, shape[0], dtype=torch.bfloat16)

    def step(form: Form) -> Call:
        return lambda: torch.autograd.grad(form.linear(x), x, g)

    ms = interleaved({form.name: step(form) for form in made if form.trains}, rounds)
    dense_ms = ms["dense bf16"]
    return [Row(f"step M={m}", n, t, "dense bf16", dense_ms / t) for n, t in ms.items()]


@torch.no_grad()
def errors(made: list[Form], columns: int) -> dict[str, dict[str, float]]:
    """Norm of the product's error by the norm of the fp64 product with the form's own values, and
    the same for an fp32 product of these values."""
    x, found = torch.randn(ERROR_ROWS, columns, dtype=torch.bfloat16), {}
    values: Tensor | None = None
    for form in made:
        values = form.values() if form.values is not None else values  # fused: those before it
        assert values is not None
        exact = x.double() @ values.double().t()
        got, fp32 = form.linear(x), F.linear(x.float(), values.float())
        relative = [float((y.double() - exact).norm() / exact.norm()) for y in (got, fp32)]
        found[form.name] = dict(zip(("relative_error", "of_fp32"), relative, strict=True))
    return found


# --- goals ----------------------------------------------------------------------------------------


class Times:
    """Milliseconds by section and form."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._ms = {(row.section, row.form): row.ms for row in rows}
        self.sections = list(dict.fromkeys(section for section, _ in self._ms))

    def times_faster(self, section: str, form: str, *others: str) -> float | None:
        """Than the fastest of the others that were measured."""
        theirs = [self._ms[section, o] for o in others if (section, o) in self._ms]
        return min(theirs) / self._ms[section, form] if theirs else None


def goals(times: Times) -> list[Goal]:
    bnb = ("bitsandbytes", "bitsandbytes fused")

    def goal(text: str, least: float, section: str, form: str, *others: str) -> Goal:
        known = section in times.sections
        return Goal(text, least, times.times_faster(section, form, *others) if known else None)

    found = [
        goal("quantize nf4, times bitsandbytes", 40, "quantize", "nf4", *bnb),
        goal("quantize nf4:torchao, times torchao", 100, "quantize", "torchao form", "torchao"),
        goal("dequantize nf4, times bitsandbytes", 3, "dequantize", "nf4", *bnb),
        goal("the same into pages that are there", 3, KEPT, "nf4", *bnb),
    ]
    for m, least in ((1, 1.5), (8, 3.0), (32, 2.0), (512, 1.3)):
        text = f"linear nf4, M={m}, times the better of bitsandbytes"
        found.append(goal(text, least, f"linear M={m}", "nf4", *bnb))
    for form, peers in (("nf4", bnb), ("torchao form", ("torchao",))):
        slowest = [
            (ratio, section)
            for section in times.sections
            if section.startswith("linear")
            and (ratio := times.times_faster(section, form, *peers)) is not None
        ]
        ratio, where = min(slowest, default=(None, ""))
        found.append(Goal(f"linear {form}, never slower than {peers[0]}", 1, ratio, where))
    step, peers = f"step M={STEP_ROWS}", ("bitsandbytes", "torchao")
    found.append(goal("QLoRA step nf4, times the best peer", 1.5, step, "nf4", *peers))
    return found


# --- telling --------------------------------------------------------------------------------------


def text(rows: list[Row], wrong: dict[str, dict[str, float]], told: list[Goal]) -> str:
    lines = [f"{'':16s} {'form':20s} {'ms':>10s}  beside"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:5.2f} of {row.beside}"
        lines.append(f"{row.section:16s} {row.form:20s} {row.ms:10.3f}  {ratio}")
    lines.append(f"\nrelative error of {ERROR_ROWS} rows beside fp64, and that of fp32:")
    for name, both in wrong.items():
        lines.append(f"{name:20s} {both['relative_error']:.2e} {both['of_fp32']:.2e}")
    lines.append("")
    for g in told:
        got = "" if g.got is None else f"{g.got:.2f}"
        lines.append(f"{g.verdict:12s} {g.goal:50s} {got:>8s} (at least {g.least:g}) {g.note}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print rows, errors and goals as JSON")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the matrix")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS, help="of x in products")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-peers", dest="peers", action="store_false", help="leave peers out")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    w = torch.randn(given.size, given.size).to(torch.bfloat16)
    made = forms(w, given.peers)
    rows = quantizing(made, given.rounds)
    rows += dequantizing("dequantize", made, w, given.rounds)
    for m in given.rows:
        rows += products(made, m, given.size, given.rounds * (3 if m <= 32 else 1))
    rows += steps(made, w.shape, STEP_ROWS, given.rounds)
    wrong = errors(made, given.size)
    keep_pages()
    rows += dequantizing(KEPT, made, w, given.rounds)
    told = goals(Times(rows))
    if given.json:
        every = [dataclasses.asdict(g) | {"verdict": g.verdict} for g in told]
        parts = {"rows": [dataclasses.asdict(row) for row in rows], "errors": wrong, "goals": every}
        print(json.dumps({"threads": given.threads, "size": given.size, **parts}, indent=1))
        return
    clock = "processor time" if given.threads == 1 else "wall time"
    print(f"{given.size} x {given.size} bf16, {given.threads} thread(s), {clock}, medians")
    print(text(rows, wrong, told))


if __name__ == "__main__":
    main()
