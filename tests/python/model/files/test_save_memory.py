# SPDX-License-Identifier: Apache-2.0
"""Loading takes the bytes at rest and little more: peaks of RssAnon in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage

CHILD = """
import sys, threading, torch, stowage
from torch import nn

def resident(kind):
    lines = open("/proc/self/status").read().split(kind + ":")[1]
    return int(lines.split()[0]) * 1024

def anonymous():
    return resident("RssAnon")

def build_with_a_table():
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(6)]
    return nn.Sequential(nn.Embedding(32000, 2048), *layers)

def build():
    layers = [nn.Linear(2048, 2048, bias=False) for _ in range(6)]
    return nn.Sequential(nn.Embedding(4096, 2048), *layers, nn.LayerNorm(2048))

folder, storage, mmap = sys.argv[1], sys.argv[2] or None, sys.argv[3] == "mmap"
stowage.stow(nn.Linear(64, 64), "nf4:block64:nested")  # what a first call allocates for good
before, peak, stop = anonymous(), [0], threading.Event()
def sample():
    while not stop.wait(0.001):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=sample)
thread.start()
model = stowage.load(build, folder, storage, mmap=mmap)
stop.set()
thread.join()
mapped = sum(row.rest_bytes for row in stowage.report(model).rows if row.tier == "disk")
print(max(peak[0], anonymous()) - before, stowage.report(model).rest_bytes, mapped)
"""


def child(folder: Path, storage: str = "", mmap: str = "") -> tuple[int, int, int]:
    """Growth of RssAnon to its peak, bytes at rest, and how many of them are mapped."""
    command = [sys.executable, "-c", CHILD, folder, storage, mmap]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, rest, mapped = map(int, done.stdout.split())
    return peak, rest, mapped


TABLE = (
    CHILD.split("folder, storage, mmap")[0]
    + """
folder, storage = sys.argv[1], sys.argv[2] or None
stowage.stow(nn.Linear(64, 64), "nf4:block64:nested")
before, peak, stop = resident("VmRSS"), [0], threading.Event()
def sample():
    while not stop.wait(0.0005):
        peak[0] = max(peak[0], resident("VmRSS"))
thread = threading.Thread(target=sample)
thread.start()
model = stowage.load(build_with_a_table, folder, storage)
stop.set()
thread.join()
print(peak[0] - before, stowage.report(model).rest_bytes)
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "storage", ["f8_e4m3", pytest.param("", marks=pytest.mark.nightly), "nf4:block64:nested"]
)
def test_pages_of_the_file_do_not_stay(storage: str, tmp_path: Path) -> None:
    """All that is resident counts, pages of the file too, with a table of 131 MB among the rest."""
    model = nn.Sequential(
        nn.Embedding(32000, 2048, _weight=torch.zeros(32000, 2048, dtype=torch.bfloat16)),
        *(nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16) for _ in range(6)),
    )
    stowage.save(model, tmp_path, checksums=False)
    command = [sys.executable, "-c", TABLE, tmp_path, storage]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, rest = map(int, done.stdout.split())
    assert peak <= 1.15 * rest + (16 << 20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model of 128 MiB, plain and packed."""
    folder = tmp_path_factory.mktemp("models")
    with torch.device("cpu"):
        layers = [nn.Linear(2048, 2048, bias=False) for _ in range(6)]
        model = nn.Sequential(nn.Embedding(4096, 2048), *layers, nn.LayerNorm(2048))
    stowage.save(model, folder / "plain", checksums=False)
    stowage.stow(model, "nf4:block64:nested", measure=False)
    stowage.save(model, folder / "packed", checksums=False)
    return {"plain": folder / "plain", "packed": folder / "packed"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "storage", ["", pytest.param("int8", marks=pytest.mark.nightly), "nf4:block64:nested"]
)
def test_from_a_plain_file(folders: dict[str, Path], storage: str) -> None:
    peak, rest, _ = child(folders["plain"], storage)
    assert rest <= (128 << 20) + 16384 if not storage else rest < 36 << 20
    assert peak <= rest + (32 << 20)


@pytest.mark.slow
def test_from_a_packed_file(folders: dict[str, Path]) -> None:
    peak, rest, mapped = child(folders["packed"])
    assert peak <= rest + (32 << 20) and mapped == 0
    peak, rest, mapped = child(folders["packed"], "", "mmap")
    assert mapped > 0.99 * rest
    assert peak <= rest - mapped + (4 << 20)
