# SPDX-License-Identifier: Apache-2.0
"""The exceptions of the package, and how the texts of our ops become them.

An op can raise only RuntimeError; its text starts with the code in brackets. Every entry point in
Python turns it into the class below that is also the built-in exception a caller would expect.
"""

from collections.abc import Sequence
from typing import NoReturn


class StowageError(RuntimeError):
    """Everything that the package raises on purpose.

    Example:
        >>> try:
        ...     stowage.quantize(torch.randn(4, 4), "int7")
        ... except stowage.StowageError as error:
        ...     print(type(error).__name__)
        InvalidArgument
    """


class InvalidArgument(StowageError, ValueError):
    """An argument that breaks a rule; a ValueError too.

    Example:
        >>> stowage.quantize(torch.tensor([[float("nan")]]), "int8")
        Traceback (most recent call last):
        stowage._ops.errors.InvalidArgument: quantize: values must be finite in int8:row, ...
    """


class OutOfRange(InvalidArgument, IndexError):
    """An index that names nothing; an IndexError too.

    Example:
        >>> weight = stowage.quantize(torch.randn(4, 4), "int8")
        >>> torch.nn.functional.embedding(torch.tensor([4]), weight)
        Traceback (most recent call last):
        stowage._ops.errors.OutOfRange: embedding: ...
    """


class BadFile(StowageError, ValueError):
    """A file that is not what it says, by path, tensor and byte offset; a ValueError too.

    Example:
        >>> _ = open("model.safetensors", "wb").write(bytes(8))
        >>> stowage.load(model, "model.safetensors")
        Traceback (most recent call last):
        stowage._ops.errors.BadFile: model.safetensors: ...
    """


class FileError(StowageError, OSError):
    """The system could not read or write; an OSError too.

    Example:
        >>> stowage.load(model, "nowhere.safetensors")
        Traceback (most recent call last):
        stowage._ops.errors.FileError: nowhere.safetensors: ...
    """


class Unsupported(StowageError, NotImplementedError):
    """Legal, but not in this build or on this device; a NotImplementedError too.

    Example:
        >>> issubclass(stowage.Unsupported, NotImplementedError)
        True
    """


class OutOfMemory(StowageError, MemoryError):
    """No memory left, here or on a device; a MemoryError too.

    Example:
        >>> issubclass(stowage.OutOfMemory, MemoryError)
        True
    """


_CLASSES: dict[str, type[StowageError]] = {
    "invalid_argument": InvalidArgument,
    "bad_file": BadFile,
    "io": FileError,
    "unsupported": Unsupported,
    "out_of_memory": OutOfMemory,
    "cuda": StowageError,
    "out_of_range": OutOfRange,
}


def translated(error: RuntimeError) -> RuntimeError:
    """The exception that `error`, raised by one of our ops, stands for; else `error` itself."""
    text = str(error)
    code, bracket, message = text.partition("] ")
    if not bracket or not code.startswith("[") or code[1:] not in _CLASSES:
        return error
    # The dispatcher may add a trace of C++ frames to the text of an exception.
    return _CLASSES[code[1:]](message.partition("\nException raised from ")[0])


def fail(code: str, message: str) -> NoReturn:
    """Raises as an op does: RuntimeError whose text starts with `[code] `."""
    raise RuntimeError(f"[{code}] {message}")


def raise_problems(where: str, problems: Sequence[str]) -> None:
    """Raises one InvalidArgument for all `problems`; nothing for none."""
    if len(problems) == 1:
        raise InvalidArgument(f"{where}: {problems[0]}; nothing was changed")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise InvalidArgument(f"{where}: {len(problems)} problems, nothing was changed:{lines}")
