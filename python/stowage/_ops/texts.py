# SPDX-License-Identifier: Apache-2.0
"""Small files of text that users name, with errors that name them."""

import os
from pathlib import Path

from stowage._ops.errors import FileError


def read_text(path: str | os.PathLike[str]) -> str:
    """What it holds; bytes that are no UTF-8 are replaced. Raises FileError."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise FileError(f"{path}: must be readable, got {error.strerror}") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Raises FileError."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: must be writable, got {error.strerror}") from None
