# SPDX-License-Identifier: Apache-2.0
"""What is loaded for the disk is never in memory whole: the peak of RssAnon in a child process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import save_file
from torch import nn

CHILD = """
import sys, threading, torch
from torch import nn
from stowage.compat import accelerate

def anonymous():
    lines = open("/proc/self/status").read().split("RssAnon:")[1]
    return int(lines.split()[0]) * 1024

with accelerate.init_empty_weights():
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48)))
x = torch.ones(1, 1024)
nn.Linear(1024, 1024)(x)  # what a first product allocates for good
before, peak, stop = anonymous(), [0], threading.Event()
def sample():
    while not stop.wait(0.001):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=sample)
thread.start()
places = {"": "disk", "0": "cpu"}
accelerate.load_checkpoint_and_dispatch(model, sys.argv[1], places, offload_folder=sys.argv[2])
with torch.inference_mode():
    for _ in range(2):
        model(x)
stop.set()
thread.join()
print(max(peak[0], anonymous()) - before)
"""


@pytest.mark.slow
def test_a_checkpoint_for_the_disk_is_read_as_it_is_used(tmp_path: Path) -> None:
    layer = 1024 * 1024 * 4
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(48)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    command = [sys.executable, "-c", CHILD, str(tmp_path), str(tmp_path / "rest")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # One layer stays, an eighth of the others may be in memory, and what loading takes: a third.
    assert int(done.stdout) < 48 * layer // 3
    assert not list((tmp_path / "rest").glob("*"))
