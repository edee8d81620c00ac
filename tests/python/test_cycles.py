# SPDX-License-Identifier: Apache-2.0
"""Loads, failures and unloads, again and again: memory, descriptors, mappings and threads stay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHILD = """
import copy, ctypes, gc, json, os, sys, torch, stowage
from torch import nn

torch.set_num_threads(1)
folder, cycles = sys.argv[1], int(sys.argv[2])

def build():
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

def fails(run):
    try:
        run()
    except stowage.StowageError:
        return
    raise AssertionError("must fail")

def counted():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = open("/proc/self/status").read().splitlines()
    facts = dict(line.split(":", 1) for line in lines)
    maps = open("/proc/self/maps").read().count("safetensors")
    return {"anonymous": int(facts["RssAnon"].split()[0]) * 1024, "maps": maps,
            "threads": int(facts["Threads"]), "descriptors": len(os.listdir("/proc/self/fd"))}

torch.manual_seed(0)
model = build()
stowage.save(model, folder + "/plain")
stowage.stow(model, "int8")
stowage.save(model, folder + "/int8")
other = nn.Sequential(nn.Linear(3, 3))
x = torch.ones(1, 512)
ram = 3 << 20
del model

def cycle(number):
    reads = ("mapped", "buffered", "direct")[number % 3]
    loaded = stowage.load(build, folder + "/int8", ram=ram, reads=reads)
    loaded(x)
    fails(lambda: stowage.load(build, folder + "/int8", ram=5000))
    fails(lambda: stowage.load(other, folder + "/int8"))
    fails(lambda: stowage.load(build, folder + "/plain", rules={"nothing": "int8"}))
    fails(lambda: stowage.offload(loaded, ram=ram, folder=folder + "/none"))
    twin = copy.deepcopy(loaded)
    with torch.no_grad():
        twin[1].weight.mul_(0.5)
    twin(x)
    stowage.onload(loaded)
    loaded(x)
    plain = stowage.load(build, folder + "/plain", "nf4")
    fails(lambda: stowage.offload(plain, ram=ram, folder=folder + "/int8"))
    fails(lambda: stowage.offload(plain, ram=100, folder=folder + "/none"))
    stowage.offload(plain, ram=ram, folder=folder + "/nf4")
    try:
        plain(x[:, :7])
    except RuntimeError:
        pass
    plain(x)

seen = []
for number in range(cycles):
    cycle(number)
    seen.append(counted())
print(json.dumps(seen))
"""


@pytest.mark.parametrize(
    "cycles",
    [pytest.param(24, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.nightly)],
)
def test_cycles_are_flat(cycles: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(cycles)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    early, late = seen[4:8], seen[-4:]
    for name in ("maps", "threads", "descriptors"):
        assert max(s[name] for s in late) <= max(s[name] for s in early), name
    most = max(s["anonymous"] for s in early)
    assert min(s["anonymous"] for s in late) <= most + (192 << 10), [s["anonymous"] for s in seen]
    assert not (tmp_path / "none").exists()
