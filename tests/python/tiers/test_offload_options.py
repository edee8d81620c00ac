# SPDX-License-Identifier: Apache-2.0
"""What the caller says of an engine: its memory locked, its waits bounded."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from offloadable import X, made
from torch import nn

import stowage


def locked() -> int:
    """Bytes of this process that cannot be swapped."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmLck:")[2].split()[0]) << 10


def test_memory_can_be_locked_and_waits_bounded(tmp_path: Path) -> None:
    model, whole, before = made("int8"), made("int8"), locked()
    stowage.offload(model, ram="1MiB", folder=tmp_path, lock=True, timeout=60, reads="buffered")
    held = stowage.engine_report(model).held
    for _ in range(2):
        assert torch.equal(model(X), whole(X))
    assert locked() - before >= stowage.engine_report(model).held > held
    stowage.onload(model)
    gc.collect()
    assert locked() == before


# A disk whose blocks are larger than a page: it refuses what begins at 4 KiB, at the first read.
LARGE_BLOCKS = r"""
#include <cerrno>
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/uio.h>

extern "C" ssize_t preadv(int descriptor, const iovec* to, int count, off_t offset) {
  if (::fcntl(descriptor, F_GETFL) & O_DIRECT) {
    errno = EINVAL;
    return -1;
  }
  static const auto read = reinterpret_cast<decltype(&::preadv)>(::dlsym(RTLD_NEXT, "preadv"));
  return read(descriptor, to, count, offset);
}
extern "C" ssize_t preadv64(int descriptor, const iovec* to, int count, off_t offset) {
  return preadv(descriptor, to, count, offset);
}
"""
CHILD = """
import sys, stowage, torch
from offloadable import X, made
from torch import nn
model, whole = made("int8"), made("int8")
stowage.offload(model, ram="256KiB", folder=sys.argv[1], reads="direct")
begun = stowage.engine_report(model).reads
assert torch.equal(model(X), whole(X))
print(begun, stowage.engine_report(model).reads, str(stowage.engine_report(model)).split()[0])
stowage.rebudget(model, "1MiB")
assert torch.equal(model(X), whole(X))
print(stowage.engine_report(model).reads)
"""


@pytest.mark.slow
@pytest.mark.parametrize("refuses", [False, True])
def test_the_report_says_how_bytes_come(refuses: bool, tmp_path: Path) -> None:
    """Direct reads of whole pages that a disk refuses: the cache serves, and the report says so."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no compiler")
    library = tmp_path / "large_blocks.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c++", "-", "-o", library, "-ldl"]
    subprocess.run(command, input=LARGE_BLOCKS, text=True, check=True)
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path, **({"LD_PRELOAD": library} if refuses else {})}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, tmp_path / "m"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    first, *later = done.stdout.split()
    if first != "direct":
        pytest.skip("this file system knows no direct reads")
    assert set(later) == ({"buffered"} if refuses else {"direct"})


def test_the_first_pass_is_fetched_ahead(tmp_path: Path) -> None:
    """In the order of the modules: none has been learnt yet."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))).eval().requires_grad_(False)
    stowage.offload(model, ram="8MiB", folder=tmp_path, reads="buffered")
    model[0](torch.zeros(1, 256))
    limit = time.monotonic() + 60
    while stowage.engine_report(model).ahead == 0 and time.monotonic() < limit:
        time.sleep(0.01)
    assert stowage.engine_report(model).ahead > 0


def test_counts_go_on_in_another_budget(tmp_path: Path) -> None:
    begun = time.perf_counter()
    model = made("int8").requires_grad_(False)
    stowage.offload(model, ram="1MiB", folder=tmp_path)
    model(X)
    before = stowage.engine_report(model)
    stowage.rebudget(model, "2MiB")
    after = stowage.engine_report(model)
    assert after.acquired == before.acquired > 0 and after.bytes_read == before.bytes_read > 0
    assert before.seconds <= after.seconds < time.perf_counter() - begun
