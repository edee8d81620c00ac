# SPDX-License-Identifier: Apache-2.0
"""The texts of ops become exceptions that callers expect."""

import pytest

from stowage import (
    BadFile,
    FileError,
    InvalidArgument,
    OutOfMemory,
    StowageError,
    Unsupported,
    ops,
)
from stowage._errors import translated


@pytest.mark.parametrize(
    ("code", "cls", "builtin"),
    [
        ("invalid_argument", InvalidArgument, ValueError),
        ("bad_file", BadFile, ValueError),
        ("io", FileError, OSError),
        ("unsupported", Unsupported, NotImplementedError),
        ("out_of_memory", OutOfMemory, MemoryError),
        ("cuda", StowageError, RuntimeError),
    ],
)
def test_each_code(code: str, cls: type, builtin: type) -> None:
    error = translated(RuntimeError(f"[{code}] where: rule, got [3] ] x"))
    assert type(error) is cls and isinstance(error, builtin) and isinstance(error, StowageError)
    assert str(error) == "where: rule, got [3] ] x"


@pytest.mark.parametrize("text", ["", "plain", "[other] x", "[invalid_argument]x", "x [io] y"])
def test_other_errors_pass(text: str) -> None:
    error = RuntimeError(text)
    assert translated(error) is error


def test_a_real_one() -> None:
    with pytest.raises(RuntimeError) as caught:
        ops.file_open("/no/such/file.safetensors")
    error = translated(caught.value)
    assert isinstance(error, FileError) and "/no/such/file.safetensors" in str(error)
