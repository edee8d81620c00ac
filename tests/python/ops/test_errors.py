# SPDX-License-Identifier: Apache-2.0
"""The texts of ops become exceptions that callers expect."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage
from stowage import (
    BadFile,
    FileError,
    InvalidArgument,
    OutOfMemory,
    OutOfRange,
    StowageError,
    Unsupported,
)
from stowage._ops import composite, library
from stowage._ops.errors import _CLASSES, translated


@pytest.mark.parametrize(
    ("code", "cls", "builtin"),
    [
        ("invalid_argument", InvalidArgument, ValueError),
        ("bad_file", BadFile, ValueError),
        ("io", FileError, OSError),
        ("unsupported", Unsupported, NotImplementedError),
        ("out_of_memory", OutOfMemory, MemoryError),
        ("cuda", StowageError, RuntimeError),
        ("out_of_range", OutOfRange, IndexError),
        ("out_of_range", OutOfRange, ValueError),
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
        library.file_open("/no/such/file.safetensors")
    error = translated(caught.value)
    assert isinstance(error, FileError) and "/no/such/file.safetensors" in str(error)


def test_every_code_of_the_core_has_a_class() -> None:
    header = Path(__file__).resolve().parents[3] / "include/stowage/error.h"
    listed = re.search(r"enum class Code \{([^}]*)\}", header.read_text())
    assert listed is not None
    codes = [code.strip() for code in listed.group(1).split(",") if code.strip()]
    assert sorted(codes) == sorted(_CLASSES) and "out_of_range" in codes


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("wrong", [8, -1, 2**40])
def test_ids_that_name_no_row_are_out_of_range(make: type[nn.Module], wrong: int) -> None:
    table, ids = make(8, 64), torch.tensor([[1, wrong]])
    stowage.stow(table, rules={"weight": "int8"})
    codes, scale = table.weight.parts.values()
    key = table.weight._storage.key
    for call in (
        lambda: table(ids),
        lambda: nn.functional.embedding(ids, table.weight),
        lambda: composite.embedding(ids, codes, [scale], key, [8, 64], torch.float32),
    ):
        with pytest.raises(RuntimeError) as caught:
            call()
        error = translated(caught.value)
        assert type(error) is stowage.OutOfRange and isinstance(error, IndexError)
        assert f"got {wrong}" in str(error)
