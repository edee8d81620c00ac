# SPDX-License-Identifier: Apache-2.0
"""What goes on around a load: bytes are asked for ahead and within a window, and a bar is shown
on a terminal, and only there."""

from __future__ import annotations

import gc
import os
import pty
import termios
import threading
from pathlib import Path

import fresh
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stowage
from stowage._files import sources
from stowage._files.sources import Extent, FileSource, Prefetch
from stowage._ops import library


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_it_asks_for_all_shards_in_order_within_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[int, str, int, int]] = []
    reached = threading.Event()

    def populate(file: int, name: str, begin: int, size: int, mapped: bool) -> None:
        assert mapped == (name == "a")
        asked.append((file, name, begin, size))
        if sum(size for *_, size in asked) >= reach[0]:
            reached.set()

    dropped: list[tuple[int, str]] = []
    swept = threading.Event()

    def drop(file: int, name: str) -> None:
        dropped.append((file, name))
        if len(dropped) > len(asked):  # more than one for each piece
            swept.set()

    monkeypatch.setattr(library, "file_populate", populate)
    behind: list[tuple[int, str]] = []
    monkeypatch.setattr(library, "file_drop", drop)
    monkeypatch.setattr(library, "file_drop_behind", lambda *of: behind.append(of))
    monkeypatch.setattr(sources, "WINDOW", (7 << 20) - 1)
    reach = [5 << 20]  # a piece more would be beyond the window
    extents = [Extent(1, "a", 5 << 20), Extent(2, "b", 9 << 20, mapped=False)]
    with Prefetch(extents) as reader:
        assert reached.wait(10)
        assert swept.wait(10)  # while it waits, the pages of what is being read go
        assert dropped[-1] == (1, "a") and sum(size for *_, size in asked) == 5 << 20
        reached.clear()
        reach[0] = 14 << 20
        reader.use(8 << 20)
        assert reached.wait(10)
    assert asked[0] == (1, "a", 0, 2 << 20) and asked[-1] == (2, "b", 8 << 20, 1 << 20)
    # Pages wait in the page cache, not in the process; of what is read past it none are there.
    assert set(dropped) == {(1, "a")} and len(dropped) >= 3
    assert behind == [(1, "a"), (-1, ""), (-1, "")]  # at first, of what is read past it, at the end
    assert "stowage-ahead" not in names()


def test_a_load_asks_for_all_that_it_reads_and_a_state_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Extent] = []
    used: list[int] = []

    class Asked(Prefetch):
        def __enter__(self) -> Prefetch:
            asked.extend(self.extents)
            return super().__enter__()

        def use(self, count: int) -> None:
            used.append(count)
            super().use(count)

    monkeypatch.setattr(sources, "Prefetch", Asked)
    model = nn.Linear(64, 64)
    stowage.save(model, tmp_path)
    stowage.load_state_dict(model, model.state_dict())
    assert not asked and not used
    stowage.load(model, tmp_path)
    assert {extent.name for extent in asked} == {"weight", "bias"}
    assert sum(extent.bytes for extent in asked) == sum(used) == (64 + 1) * 64 * 4


def test_advice_that_fails_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4 << 20)}, path)
    source = FileSource(path)
    os.truncate(path, 1 << 20)
    with Prefetch(source.extents(source.entries["a"])) as reader:
        reader.use(5)
    with pytest.raises(stowage.BadFile, match="keep its size"):
        source.check()
    source.close()
    assert "stowage-ahead" not in names()


def test_a_load_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].weight.data[3, 3] = torch.nan
    stowage.save(model, tmp_path)
    handles = []
    for _ in range(4):  # the first opens what stays open
        with pytest.raises(stowage.InvalidArgument):
            stowage.load(nn.Sequential(nn.Linear(64, 64)), tmp_path, "int8")
        gc.collect()  # closes files of other tests too
        handles.append(len(os.listdir("/proc/self/fd")))
    assert "stowage-ahead" not in names()
    assert handles[-1] <= handles[0]


CHILD = """
import sys, torch, stowage
from stowage._files import sources as reading
reading._SOON = 0
stowage.load(torch.nn.Linear(64, 64), sys.argv[1], progress=sys.argv[2] == "yes")
"""


@pytest.mark.parametrize(("progress", "shown"), [("yes", True), ("no", False)])
def test_a_bar_on_a_terminal(progress: str, shown: bool, tmp_path: Path) -> None:
    stowage.save(nn.Linear(64, 64), tmp_path)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    try:
        fresh.run(CHILD, tmp_path, progress, stderr=os.ttyname(theirs)).check_returncode()
        os.set_blocking(ours, False)
        try:
            text = os.read(ours, 10_000).decode()
        except BlockingIOError:
            text = ""
    finally:
        os.close(ours), os.close(theirs)
    assert ("loading: 100%" in text) == shown
    assert fresh.run(CHILD, tmp_path, progress).stderr == ""


def mapped_here(path: Path) -> int:
    """Bytes of a file's mapping that are in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if not first.endswith(":"):
            inside = line.endswith(str(path))
        elif inside and first == "Rss:":
            total += int(line.split()[1]) * 1024
    return total


def test_what_was_read_leaves_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4 << 20)}, path)
    source = FileSource(path)
    assert source.read("a").sum() == 4 << 20
    assert mapped_here(path) >= 16 << 20
    source.drop(source.entries["a"])
    assert mapped_here(path) <= 5 << 20  # a large page at either end
    source.close()
