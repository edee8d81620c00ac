# SPDX-License-Identifier: Apache-2.0
"""Configurations beside weights: a save that is stopped at any step leaves the folder as it was, or
as it becomes, or one that names the reason why it is not opened; nobody's file is lost."""

from __future__ import annotations

import json
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dialect_models import copied, opened

import stowage
from stowage._model import writer
from stowage._model.files import configs
from stowage._ops import library

OLD, NEW = "fp8-block-f32", "ct-fp8-channel"
CONFIG, KEPT = "config.json", "config.json.before-save"


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def killed_at(step: int, save: Callable[[], object]) -> bool:
    """Whether a process that saves was ended ahead of this step of it, or else had no more."""
    child = os.fork()
    if child == 0:
        left = step

        def counted(wrapped: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return wrapped(*arguments, **named)

            return call

        os.replace, os.unlink = counted(os.replace), counted(os.unlink)
        finish = {"writer_finish": counted(library.writer_finish)}
        names = {name: getattr(library, name) for name in dir(library)}
        setattr(writer, "library", SimpleNamespace(**names | finish))  # noqa: B010
        try:
            save()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def test_a_killed_save_loses_no_configuration(tmp_path: Path) -> None:
    new = copied(NEW, tmp_path)
    old, whole = contents(copied(OLD, tmp_path)), contents(new)
    model = opened(NEW, new)
    seen = set()
    for step in range(20):
        folder = copied(OLD, tmp_path / str(step))
        killed = killed_at(step, lambda: stowage.save(model, folder, dialect="compressed-tensors"))  # noqa: B023
        left = contents(folder)
        weights = "old" if left["model.safetensors"] == old["model.safetensors"] else "new"
        if left[CONFIG] in (old[CONFIG], whole[CONFIG]):
            config = "old" if left[CONFIG] == old[CONFIG] else "new"
            assert weights == config
            opened(OLD if config == "old" else NEW, folder)
        else:
            config = "refused"
            assert left[KEPT] == old[CONFIG]
            with pytest.raises(stowage.BadFile, match=r"an interrupted stowage\.save"):
                opened(NEW, folder)
        seen.add((weights, config))
        stowage.save(model, folder, dialect="compressed-tensors")
        assert {n: t for n, t in contents(folder).items() if n in whole or n == KEPT} == whole
        if not killed:
            break
    assert not killed
    assert seen == {("old", "old"), ("old", "refused"), ("new", "refused"), ("new", "new")}


def test_a_failed_save_brings_the_configuration_back(tmp_path: Path) -> None:
    folder = copied(OLD, tmp_path)
    before = contents(folder)
    with pytest.raises(KeyError), configs.replaced(folder, {CONFIG: b"{}", "more.json": b"1"}):
        assert contents(folder)[KEPT] == before[CONFIG]
        raise KeyError
    assert contents(folder) == before
    with pytest.raises(KeyError), configs.replaced(tmp_path, {CONFIG: b"{}"}):
        raise KeyError
    assert not list(tmp_path.glob("*.json*"))


@pytest.mark.parametrize("there", [None, b'{"mine": 1}'])
@pytest.mark.parametrize("written", [{CONFIG: b"{}", "more.json": b"1"}, {"more.json": b"1"}])
def test_files_are_replaced_and_config_last(
    there: bytes | None, written: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one that a configuration is not part of it comes back. Each is on the disk before it has
    its name, and then its name."""
    before = {} if there is None else {CONFIG: there}
    for name, content in before.items():
        (tmp_path / name).write_bytes(content)
    steps: list[object] = []
    replace, fsync, open_now = os.replace, os.fsync, len(os.listdir("/proc/self/fd"))

    def replaced(old: Path, new: Path) -> None:
        assert (old.stat().st_ino, old.stat().st_size) in steps, "not on the disk"
        replace(old, new)
        steps.append(new.name)

    def synced(handle: int) -> None:
        fsync(handle)
        facts = os.fstat(handle)
        steps.append("folder" if stat.S_ISDIR(facts.st_mode) else (facts.st_ino, facts.st_size))

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(os, "fsync", synced)
    with configs.replaced(tmp_path, written):
        now = contents(tmp_path)
        assert b"an interrupted stowage.save" in now[CONFIG] and now.get(KEPT) == there
        assert "more.json" not in now
    assert contents(tmp_path) == before | written
    names = [step for step in steps if isinstance(step, str)]
    assert all(step == "folder" for step in names[1::2])
    assert names[-2] == (CONFIG if CONFIG in before | written else "more.json")
    assert len(os.listdir("/proc/self/fd")) == open_now


def test_a_disk_that_is_full_has_no_more_files_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / CONFIG).write_bytes(b"mine")
    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(stowage.FileError, match="must be writable, got No space left"),
        configs.replaced(tmp_path, {CONFIG: b"{}"}),
    ):
        raise AssertionError("nothing is to be written")
    assert contents(tmp_path) == {CONFIG: b"mine"}


def test_a_failed_save_leaves_what_was_written_since_a_killed_one(tmp_path: Path) -> None:
    """Beside the copy that the killed one left, which is older."""
    (tmp_path / KEPT).write_bytes(b"older")
    (tmp_path / CONFIG).write_bytes(b"mine")
    (tmp_path / f".{CONFIG}.new").mkdir()  # cannot be written
    with pytest.raises(stowage.FileError), configs.replaced(tmp_path, {CONFIG: b"{}"}):
        raise AssertionError("nothing is to be written")
    assert (tmp_path / CONFIG).read_bytes() == b"mine"


def test_configurations_of_others_stay(tmp_path: Path) -> None:
    model = opened("comfy-fp8", copied("comfy-fp8", tmp_path) / "flux_fp8.safetensors")
    folder = tmp_path / "out"
    folder.mkdir()
    mine = {CONFIG: b'{"mine": 1}'}
    (folder / CONFIG).write_bytes(mine[CONFIG])
    stowage.save(model, folder, dialect="comfyui")
    assert mine.items() < contents(folder).items()
    before = contents(folder)
    for name, said in (
        (CONFIG, {"quantization_config": {"quant_method": "fp8"}}),
        *((name, {}) for name in configs.QUANTIZED),
    ):
        (folder / name).write_text(json.dumps(said))
        with pytest.raises(stowage.InvalidArgument, match=f"{name}: must not say how weights"):
            stowage.save(model, folder, dialect="comfyui")
        (folder / name).unlink()
    assert contents(folder) == {n: t for n, t in before.items() if n != CONFIG}


@pytest.mark.parametrize(
    ("said", "quantized"),
    [
        (b'{"quantization_config": {"a": 1},}', True),  # not strictly JSON
        (b'{"compression_config": {"a": 1},}', True),
        (b'{"mine": 1,}', False),
        (b'["quantization_config"]', False),
        (b'{"quantization_config": null}', False),
        (b'{"compression_config": {"a": 1}}', True),
    ],
)
def test_what_says_how_weights_are_quantized(said: bytes, quantized: bool) -> None:
    assert configs.says_quantized(said) == quantized


def test_a_model_without_values_touches_nothing(tmp_path: Path) -> None:
    path = copied(NEW, tmp_path)
    before = contents(path)
    model = opened(NEW, path)
    model.to("meta")
    with pytest.raises(stowage.InvalidArgument, match=r"up_proj\.weight: must hold values"):
        stowage.save(model, path, dialect="compressed-tensors")
    assert contents(path) == before
