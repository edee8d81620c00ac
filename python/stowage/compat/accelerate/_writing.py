# SPDX-License-Identifier: Apache-2.0
"""Files that appear whole or not at all, and the index beside them."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from stowage._ops.errors import BadFile, FileError


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Writes a file under another name and renames it. Raises FileError, with the bytes that the
    disk lacks where it is full; no part of the file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < len(data):
        raise FileError(
            errno.ENOSPC,
            f"stowage: the disk must have {len(data)} bytes free, has {free}",
            str(path),
        )
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        raise FileError(error.errno, f"stowage: {error.strerror}", str(path)) from None
    finally:
        unfinished.unlink(missing_ok=True)


def link_or_copy(existing: Path, name: Path) -> None:
    """A second name for a file: a hard link where the file system has them."""
    name.parent.mkdir(parents=True, exist_ok=True)
    name.unlink(missing_ok=True)
    try:
        os.link(existing, name)
    except OSError:
        shutil.copyfile(existing, name)


def read_index(path: Path) -> dict[str, Any]:
    """Raises BadFile where it is no JSON object, FileError where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(error.errno, error.strerror, str(path)) from None
    except ValueError as error:
        raise BadFile(f"stowage: {path}: must be a whole JSON file: {error}") from None
    if not isinstance(found, dict):
        raise BadFile(f"stowage: {path}: must hold a JSON object, got {type(found).__name__}")
    return found


def write_index(path: Path, index: dict[str, Any]) -> None:
    write_whole(path, json.dumps(index, indent=2).encode())
