# SPDX-License-Identifier: Apache-2.0
"""Modes of torch that a user may have on around anything."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Passing(TorchFunctionMode):
    """A user's mode, with frames of its own."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._pass(func, args, kwargs or {})

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


class Below(TorchDispatchMode):
    """The same below autograd."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._pass(func, args, kwargs or {})

    def _pass(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)


@contextlib.contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
