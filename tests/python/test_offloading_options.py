# SPDX-License-Identifier: Apache-2.0
"""What the caller says of an engine: its memory locked, its waits bounded."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from offloadable import X, made

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
