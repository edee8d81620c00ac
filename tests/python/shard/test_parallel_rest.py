# SPDX-License-Identifier: Apache-2.0
"""Resting weights under tensor parallelism and FSDP2 at once: losses, bytes and checkpoints."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import parallel_rest
import pytest
from parallel_rest import COLUMNS
from ranks import on_ranks

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/tensor_parallel.py"
SIZES = (256, 256, 64)
LARGE = (4096, 8, 16)  # of scales of scales: a rank's rows begin with a group of 256 blocks
EITHER = ("nf4", "fp4", "int8:row", "f8_e4m3", "f8_e4m3:row", "f8_e4m3:block64", "bf16")
COLUMN = ("nf4:nested", "nf4:torchao")


def check(world: int, cases: list[Any], folder: Path) -> list[str]:
    found = on_ranks(world, parallel_rest.everything, cases, str(folder), seconds=300)
    for wrong, _, counted in found:
        assert wrong == [] and counted
    return found[0][1]


def test_pieces_on_two_dimensions_of_a_mesh(tmp_path: Path) -> None:
    cases = [(storage, (2, 2), True, SIZES, None) for storage in ("nf4", "int8:row", "f8_e4m3")]
    cases += [("nf4", (2, 2), False, SIZES, None), ("nf4:nested", (2, 2), True, LARGE, COLUMNS)]
    cases += [("int8:row", (2, 2), True, (34, 12, 5), None)]  # uneven rows
    columns, nested, block, group, master = check(4, cases, tmp_path)
    assert "down.weight: a resting weight can be sharded along dim 1 only where" in columns
    assert "must have whole blocks of 64 columns, got 48" in columns
    assert "scales of scales run on across rows; use Shard(0)" in nested
    assert "up.weight: rows 3 to 5 of a resting weight" in block
    assert "must begin with a block of 64, got element 99" in block
    assert "from_masters: 0: must have all of its columns here" in master
    assert "must begin with a group of 256 block scales, got block 64" in group


@pytest.mark.slow
def test_the_example() -> None:
    command = [sys.executable, "-W", "ignore", EXAMPLE]
    threads = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=threads, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    for line, what in zip(
        lines, ("frozen_nf4: 18432 of 73728", "fp8: 131072 of 524288"), strict=True
    ):
        assert line.startswith(f"{what} bytes of up.weight on each rank, losses within ")
        # a difference of one rounding may move an fp8 code of a gradient
        assert float(line.split("within ")[1].split()[0]) < 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
def test_every_storage_on_every_mesh(tmp_path: Path, shape: tuple[int, int]) -> None:
    cases: list[Any] = [(s, shape, f, SIZES, None) for s in EITHER for f in (False, True)]
    if shape[1] < 4:
        cases += [(s, shape, f, LARGE, COLUMNS) for s in COLUMN for f in (False, True)]
        cases += [("nf4", shape, True, (64, 6, 5), COLUMNS)]
    check(4, cases, tmp_path)
