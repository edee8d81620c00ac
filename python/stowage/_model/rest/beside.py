# SPDX-License-Identifier: Apache-2.0
"""Tensors that are kept beside a model, in memory or in a file of their own, until they are wanted
again: the values that weights were stowed from, the codes that an adapter was merged into."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stowage._files.names import DISK_DTYPES, DISK_NAMES
from stowage._model.writer import declared, write
from stowage._ops import library
from stowage._ops.errors import BadFile, FileError, InvalidArgument, translated

PLACES = ("ram", "disk")


class _File:
    """A safetensors file that goes with the last tensor kept in it, or with the process."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], folder: Path | None) -> None:
        self.path = _new_file(folder)
        # A child of fork() has the object too, but not the file.
        end = weakref.finalize(self, _remove, self.path, folder is None, os.getpid())
        try:
            every = [declared(name, t.dtype, t.shape) for name, t in tensors.items()]
            write(self.path, every, tensors.items())
        except BaseException:
            end()
            raise
        self._bytes = self.path.stat().st_size
        self._handle = library.file_open(str(self.path))
        weakref.finalize(self, library.file_close, self._handle)

    def read(self, name: str) -> torch.Tensor:
        """The bytes of a tensor, mapped read-only; they stay valid when the file has gone."""
        try:
            return library.file_read(self._handle, name)
        except RuntimeError as error:
            raise translated(error) from None

    def drop(self, name: str) -> None:
        library.file_drop(self._handle, name)

    def check(self) -> None:
        """Raises BadFile where the file was cut short or written since; what was read is not it."""
        try:
            library.file_check(self._handle)
        except RuntimeError as error:
            raise translated(error) from None

    def verify(self) -> None:
        """Raises BadFile where a byte is not the one that was written."""
        if self.path.exists() and self.path.stat().st_size != self._bytes:
            raise BadFile(
                f"{self.path}: must have {self._bytes} bytes, got {self.path.stat().st_size}"
            )
        try:
            library.file_verify(self._handle)
        except RuntimeError as error:
            raise translated(error) from None


def _new_file(folder: Path | None) -> Path:
    try:
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix="stowage-"))
        folder.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(".safetensors", "kept-", folder)
    except OSError as error:
        raise FileError(f"{folder or tempfile.gettempdir()}: must be writable, {error}") from error
    os.close(handle)
    return Path(path)


def _remove(path: Path, own_folder: bool, process: int) -> None:
    if os.getpid() == process:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
            if own_folder:
                path.parent.rmdir()


class Kept:
    """One tensor, read-only. A copy of the object is the object: what never changes is shared."""

    def __init__(self, tensor: torch.Tensor, file: _File | None, name: str) -> None:
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes
        self._tensor = tensor.detach().cpu() if file is None else None
        self._file, self._name, self._shared = file, name, False

    @property
    def place(self) -> str:
        """ram or disk."""
        return "ram" if self._file is None else "disk"

    @property
    def file(self) -> _File | None:
        return self._file

    def read(self) -> torch.Tensor:
        """The tensor on the CPU, to look at only: its memory is the kept one, or a mapped file."""
        if self._tensor is not None:
            return self._tensor
        assert self._file is not None
        found = self._file.read(self._name)
        return found.view(DISK_DTYPES[DISK_NAMES[self.dtype]]).reshape(self.shape)

    def take(self) -> torch.Tensor:
        """The tensor on the CPU, the caller's own. What is in memory and in no copy of the model is
        handed over, not copied: nothing may read it here afterwards."""
        if self._tensor is not None and not self._shared:
            return self._tensor
        taken = self.read().clone()
        if self._file is not None:
            self._file.check()
            self._file.drop(self._name)
        return taken

    def __copy__(self) -> Kept:
        self._shared = True
        return self

    def __deepcopy__(self, memo: Any) -> Kept:
        return self.__copy__()


class Beside(dict[str, Any]):
    """What is kept beside one module. Deep copies of a model share the tensors; pickles leave all
    of it out."""

    def __deepcopy__(self, memo: Any) -> Beside:
        return Beside({name: copy.deepcopy(value, memo) for name, value in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, ()


def keep(
    tensors: Mapping[str, torch.Tensor], place: str, folder: str | os.PathLike[str] | None
) -> dict[str, Kept]:
    """Keeps tensors under their names: "ram" holds on to the very tensors (moved to the CPU),
    "disk" writes them to a file of their own in `folder`, or in a temporary folder. Raises
    FileError."""
    if not tensors:
        return {}
    file = None
    if place == "disk":
        file = _File(tensors, None if folder is None else Path(folder))
    return {name: Kept(tensor, file, name) for name, tensor in tensors.items()}


def check_place(
    where: str, argument: str, place: str | None, folder: str | os.PathLike[str] | None
) -> None:
    if place is not None and place not in PLACES:
        raise InvalidArgument(f'{where}: {argument} must be "ram", "disk" or None, got {place!r}')
    if folder is not None and place != "disk":
        raise InvalidArgument(f'{where}: a folder must come with {argument}="disk", got {place!r}')


def verify(kept: list[Kept]) -> None:
    """Raises BadFile where a file of these was damaged. Reads each file once."""
    for file in {id(k.file): k.file for k in kept}.values():
        if file is not None:
            file.verify()
