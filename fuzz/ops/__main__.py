# SPDX-License-Identifier: Apache-2.0
"""Fuzzes torch.ops.stowage: right calls, and the same with a few arguments bent by the types of the
op's schema. Usage: python fuzz/ops [--calls N] [--seconds S] [--seed N] [--first I] [--op NAME]

Call I of a seed depends on nothing else, so that what it prints is replayed by --first I --calls 1.
Findings: the process dies or hangs; a right call fails; an error without a code of ours that is not
torch's; a result whose shape or dtype the fake does not say. Exits 1 at the first.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import mmap
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

CODES = r"\[(invalid_argument|bad_file|io|unsupported|out_of_memory|cuda)\] "
# Texts of other libraries that came through one of our ops.
FOREIGN = re.compile(r"json\.exception|std::|vector::|basic_string|::at\b|__n \(which|bad_\w+$")
HANG = 120  # seconds without a call that ends
FAKES = {"quantize", "dequantize", "linear", "linear_grad_input", "embedding", "amax", "measure"}


class Finding(Exception):
    pass


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10**9)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--op", default="")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--report", default="", help="write counts of calls by op there, as JSON")
    return parser.parse_args()


def shown(value: Any) -> str:
    import torch

    if isinstance(value, torch.Tensor):
        strides = list(value.stride()) if value.layout == torch.strided else value.layout
        return f"Tensor({value.dtype}, {list(value.shape)}, {strides}, {value.device})"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return repr(value)[:2000]


def check_fake(name: str, called: Any, given: tuple[Any, ...], got: Any) -> None:
    import torch
    from torch._subclasses import FakeTensorMode
    from torch.utils import _pytree as pytree

    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = pytree.tree_map_only(torch.Tensor, mode.from_tensor, given)
        said = called(*fake)
    pairs = zip(pytree.tree_leaves(said), pytree.tree_leaves(got), strict=True)
    for a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Finding(f"the fake says {shown(a)}, the op gives {shown(b)}")


def call(name: str, called: Any, given: tuple[Any, ...], bent_at: set[int], random: Random) -> bool:
    """Whether the op took it."""
    import torch
    from samples import NEVER_RIGHT

    with torch.no_grad():
        try:
            got = called(*given)
        except Exception as error:
            text = str(error).split("\nException raised from ")[0]  # not its C++ stack
            if FOREIGN.search(text) and not re.match(CODES, text):
                raise Finding(f"an error that is not ours: {text[:500]}") from error
            if not bent_at and name not in NEVER_RIGHT:
                raise Finding(f"a right call fails: {text[:500]}") from error
            if isinstance(error, SystemError | AssertionError | IndexError | AttributeError):
                raise Finding(f"an error by accident: {type(error).__name__}: {text}") from error
            return False
        if name in FAKES and random.random() < 0.1:
            check_fake(name, called, given, got)
    return True


def tensors_of(given: Any) -> list[Any]:
    import torch
    from torch.utils import _pytree as pytree

    return [t for t in pytree.tree_leaves(given) if isinstance(t, torch.Tensor)]


def has_memory(t: Any) -> bool:
    import torch

    if t.layout is not torch.strided or t.is_meta:
        return True
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return (t.storage_offset() + last + 1) * t.element_size() <= t.untyped_storage().nbytes()


def is_long(name: str, given: list[Any]) -> bool:
    """Whether torch's own product of it takes minutes: a transposed convolution whose result is
    nearly all gaps, but fits memory."""
    if not name.startswith("_convolution") or not any(one is True for one in given):
        return False
    options = (n for one in given if isinstance(one, list) for n in one if isinstance(n, int))
    return any(1 << 16 < n < 1 << 32 for n in options)


def run_one(index: int, options: argparse.Namespace, counts: Counter[str]) -> None:
    import torch
    from bending import bent
    from samples import IN_PYTHON, KEPT, SAMPLES
    from scenes import Scene

    random = Random(f"{options.seed} {index}")
    # That of other devices alone costs more than a call.
    torch.default_generator.manual_seed(random.getrandbits(62))
    right = index < len(SAMPLES)  # one right call of each op first
    name = options.op or (
        list(SAMPLES)[index] if right else random.choices(list(SAMPLES), weights(SAMPLES))[0]
    )
    scene = Scene(random)
    called = getattr(torch.ops.stowage, name).default
    given = list(SAMPLES[name](scene))
    names = [a for a in called._schema.arguments if a.name not in KEPT.get(name, ())]
    free = [i for i, a in enumerate(called._schema.arguments) if a in names and i < len(given)]
    how_many = 0 if right else random.choice((0, 1, 1, 1, 2, 3))
    bent_at = set(random.sample(free, min(len(free), how_many)))
    for i in bent_at:
        given[i] = bent(str(called._schema.arguments[i].real_type), given[i], random)
    if name in IN_PYTHON and any(t.numel() and not has_memory(t) for t in tensors_of(given)):
        return  # torch's own ops read what is not there
    if is_long(name, given):
        return
    if options.calls == 1:
        print(f"{name}({', '.join(map(shown, given))})", flush=True)
    try:
        took = call(name, called, tuple(given), bent_at, random)
        counts[f"{name} taken" if took else f"{name} refused"] += 1
    except Finding as found:
        print(f"{name}({', '.join(map(shown, given))})\n  {found}", file=sys.stderr)
        raise
    finally:
        scene.close()


def weights(names: Any) -> list[int]:
    """Ops on weights have the most ways to be called."""
    return [20 if n in FAKES or n == "_linear" else 5 if n[0] == "_" else 2 for n in names]


def table(counts: Counter[str]) -> dict[str, tuple[int, int, bool]]:
    """By op: calls that it took, those that it refused, and whether a call can be right."""
    from samples import NEVER_RIGHT, SAMPLES

    return {n: (counts[f"{n} taken"], counts[f"{n} refused"], n not in NEVER_RIGHT)
            for n in SAMPLES}  # fmt: skip


def child(options: argparse.Namespace) -> int:
    import torch
    from scenes import prepare

    if "libasan" not in os.environ.get("LD_PRELOAD", ""):  # the sanitizer bounds allocations itself
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (8 << 30), resource.RLIM_INFINITY))
    torch.set_num_threads(2)
    prepare()
    counts: Counter[str] = Counter()
    began = time.monotonic()
    with open(options.child, "r+b") as file, mmap.mmap(file.fileno(), 32) as place:
        for index in range(options.first, options.first + options.calls):
            if index % 64 == 0:
                faulthandler.dump_traceback_later(HANG, exit=True)
                if time.monotonic() - began > options.seconds:
                    break
            place[:20] = f"{index:020}".encode()
            try:
                run_one(index, options, counts)
            except Finding:
                return 1
    if options.report:
        Path(options.report).write_text(json.dumps(table(counts)))
    print(f"{sum(counts.values())} calls in {time.monotonic() - began:.0f} s, no finding")
    return 0


def main() -> int:
    options = arguments()
    if options.child:
        return child(options)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "place")
        place.write_bytes(bytes(32))
        # In a folder of their own: a handle of the process that dies leaves files behind.
        env = os.environ | {"STOWAGE_LINKS": f"{folder}/links.json", "TMPDIR": folder}
        command = [sys.executable, __file__, *sys.argv[1:], "--seed", str(options.seed)]
        status = subprocess.run([*command, "--child", str(place)], env=env).returncode
        if status == 0:
            return 0
        index = int(place.read_bytes()[:20] or 0)
    again = f"--seed {options.seed} --first {index} --calls 1"
    only = f" --op {options.op}" if options.op else ""
    print(f"ended with {status}; again: python fuzz/ops {again}{only}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
