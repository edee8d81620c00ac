# SPDX-License-Identifier: Apache-2.0
"""The configurations beside weights, replaced such that a stop at any moment, or the loss of power,
leaves a folder that opens as it was, opens as it becomes, or is refused by name."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from stowage._ops.errors import FileError, InvalidArgument

CONFIG = "config.json"
# Of which nothing else is said than how weights are quantized: ModelOpt's, and AutoGPTQ's.
QUANTIZED = ("hf_quant_config.json", "quantize_config.json")
_BEFORE = ".before-save"  # what a file was, until all is written
_MARKER = {
    "quantization_config": {
        "quant_method": f"an interrupted stowage.save, which must be repeated; the configuration "
        f"before it is {CONFIG}{_BEFORE}"
    }
}


def says_quantized(text: bytes) -> bool:
    try:
        said = json.loads(text)
    except ValueError:  # of a reader that is less strict
        return b"quantization_config" in text or b"compression_config" in text
    keys = ("quantization_config", "compression_config")
    return isinstance(said, dict) and any(said.get(key) for key in keys)


def check_others(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Raises InvalidArgument where the folder has a configuration that `contents` does not replace
    and that says how weights are quantized: readers would take it for that of what is written."""
    for name in (CONFIG, *QUANTIZED):
        there = None if name in contents else _read(folder / name)
        if there is not None and (name in QUANTIZED or says_quantized(there)):
            raise InvalidArgument(
                f"stowage.save: {folder / name}: must not say how weights are quantized, beside "
                f"files that came without it; move it away or give another folder"
            )


@contextmanager
def replaced(folder: Path, contents: Mapping[str, bytes]) -> Iterator[None]:
    """Around a writing of weights: afterwards the files of `contents` are so, and others as they
    were. While weights and configuration may be of two saves config.json refuses readers, ours and
    the field's; what it was lies beside it. A writing that fails puts it back."""
    before = {name: _read(folder / name) for name in {CONFIG, *contents}}
    marker, kept = json.dumps(_MARKER).encode(), folder / (CONFIG + _BEFORE)
    if all(before[name] == content for name, content in contents.items()):
        yield
        if CONFIG in contents:
            kept.unlink(missing_ok=True)  # of a save that was killed after its last file
        return
    was = _read(kept) if before[CONFIG] == marker else before[CONFIG]  # a killed save left it
    staged = {}
    try:
        for name, content in contents.items():
            staged[name] = _staged(folder / f".{name}.new", content)
        if was is not None:
            _publish(_staged(folder / f".{CONFIG}.before", was), kept)
        _publish(_staged(folder / f".{CONFIG}.marker", marker), folder / CONFIG)
        yield
    except BaseException:
        for path in staged.values():
            path.unlink()
        _restore(folder, was, marker)
        raise
    for name in sorted(staged, key=CONFIG.__eq__):  # config.json last: it lets readers in
        _publish(staged[name], folder / name)
    if CONFIG not in staged:
        _restore(folder, was, marker)
    kept.unlink(missing_ok=True)


def _restore(folder: Path, config: bytes | None, marker: bytes) -> None:
    """Puts back what the marker stands for, if it is there."""
    kept = folder / (CONFIG + _BEFORE)
    if _read(folder / CONFIG) != marker:
        return
    if config is None:
        (folder / CONFIG).unlink()
    elif kept.exists():
        _publish(kept, folder / CONFIG)


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _publish(staged: Path, path: Path) -> None:
    os.replace(staged, path)
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _staged(path: Path, content: bytes) -> Path:
    """The file, when the disk has it."""
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise FileError(f"{path}: must be writable, got {error.strerror}") from None
    return path
