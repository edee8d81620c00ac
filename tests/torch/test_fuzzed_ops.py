# SPDX-License-Identifier: Apache-2.0
"""No argument ends the process: fuzz/ops in a process of its own, and every op is in it.

`tools/fuzz` runs the same under the sanitizers, for longer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stowage
import stowage.training
from stowage._ops import library
from stowage._ops.library import composite_forced
from stowage._ops.storage import Storage

FUZZ = Path(__file__).resolve().parents[2] / "fuzz" / "ops"
CALLS = {"short": 2500, "long": 100_000}

pytestmark = pytest.mark.skipif(composite_forced(), reason="the ops of stock torch are no target")


def every_op() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {n.removeprefix("stowage::") for n in names if n.startswith("stowage::")}


@pytest.mark.slow
@pytest.mark.parametrize("size", ["short", pytest.param("long", marks=pytest.mark.nightly)])
def test_no_argument_ends_the_process(size: str, tmp_path: Path) -> None:
    seed = os.environ.get("STOWAGE_FUZZ_SEED", "7" if size == "short" else str(os.getpid()))
    counts = tmp_path / "counts.json"
    command = [sys.executable, FUZZ, "--seed", seed, "--calls", str(CALLS[size])]
    run = subprocess.run([*command, "--report", counts], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-1000:] + run.stderr[-4000:]
    seen = json.loads(counts.read_text())
    missing = every_op() - set(seen)
    assert not missing, f"ops without a sample in fuzz/ops/samples.py: {sorted(missing)}"
    deaf = {name for name, (taken, _, right) in seen.items() if right and not taken}
    assert not deaf, f"ops that took no call: {sorted(deaf)}"


KIND = Storage("int8:row")


@pytest.mark.parametrize("rank", [8, 9, 12, 64, 65, 200])
def test_x_has_any_rank(rank: int) -> None:
    layer = torch.nn.Linear(6, 4)
    stowage.stow(layer, KIND.name)
    x = torch.randn(*[1] * (rank - 2), 3, 6, requires_grad=True)
    y = layer(x)
    assert torch.equal(y.reshape(3, 4), layer(x.reshape(3, 6)))
    (gx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert gx.shape == x.shape
    codes, *scales = layer.weight.parts.values()
    ids = torch.zeros([1] * rank, dtype=torch.int64)
    rows = library.embedding(ids, codes, scales, KIND.key, (4, 6), torch.float32)
    assert rows.shape == (*ids.shape, 6)


def test_errors_show_any_rank() -> None:
    codes, *scales = library.quantize(torch.randn(4, 6), KIND.key)
    ones = [1] * 8
    with pytest.raises(RuntimeError, match=re.escape(f"x must be [..., 6], got {[*ones, 7]}")):
        library.linear(torch.randn(*ones, 7), codes, scales, KIND.key, 4, None)
    deep = codes.reshape(*ones, 4, 6)
    with pytest.raises(RuntimeError, match=r"codes must have 2 dimensions, got 10"):
        library.linear(torch.randn(3, 6), deep, scales, KIND.key, 4, None)


def test_a_storage_that_was_cut_is_refused() -> None:
    """Not only one that is gone: the tensor's last element must lie in it."""
    x = torch.randn(4, 6)
    codes, *scales = library.quantize(torch.randn(5, 6), KIND.key)
    spread, half = x.t().contiguous().t(), x[:2]
    for t in (x, spread):
        t.untyped_storage().resize_(48)
    for given in (x, spread):
        with pytest.raises(RuntimeError, match="x must have its memory"):
            library.linear(given, codes, scales, KIND.key, 5, None)
    assert library.linear(half, codes, scales, KIND.key, 5, None).shape == (2, 5)


@pytest.mark.parametrize("rows", ["[", "[]", "null", '{"weight": "1"}', '{"weight": 1.5}'])
def test_rows_that_are_no_numbers(rows: str, tmp_path: Path) -> None:
    stowage.save(torch.nn.Linear(4, 4), tmp_path / "m.safetensors")
    file = library.file_open(str(tmp_path / "m.safetensors"))
    rule = r"^\[invalid_argument\] stowage::engine_open: by_rows must be a JSON object of numbers"
    with pytest.raises(RuntimeError, match=rule):
        library.engine_open(file, 1 << 20, "buffered", 0, 0.0, False, "[]", rows)
    library.file_close(file)


@pytest.mark.parametrize("names", ["{", "[1]", "{}", "null", '["a", null]', ""])
def test_names_that_are_no_list(names: str, tmp_path: Path) -> None:
    layer = torch.nn.Linear(64, 64)
    stowage.stow(layer, "int8")
    stowage.save(layer, tmp_path / "m.safetensors")
    file = library.file_open(str(tmp_path / "m.safetensors"))
    engine = library.engine_open(file, 1 << 20, "buffered", 0)
    rule = r"^\[invalid_argument\] stowage::engine_\w+: names must be a JSON list of strings, got '"
    for call in (
        lambda: library.engine_expect(engine, names),
        lambda: library.engine_keep(engine, names, 1 << 20, 0),
        lambda: library.engine_open(file, 1 << 20, "buffered", 0, 0.0, False, names),
    ):
        with pytest.raises(RuntimeError, match=rule):
            call()
    library.engine_close(engine)
    library.file_close(file)
