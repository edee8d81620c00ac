# SPDX-License-Identifier: Apache-2.0
"""Models whose parameters are made on a device, or on none."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from stowage._ops import _torch
from stowage._tensor.stowed import StowedTensor

_TRUE = ("1", "true", "t", "yes", "y", "on")
_local = threading.local()  # what the current thread wants, innermost last
_lock = threading.Lock()
_patched = 0  # contexts in all threads
_register: Callable[..., None] = nn.Module.register_parameter


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Iterator[None]:
    """Within it, in this thread, parameters of new modules are on the meta device: they take no
    memory, only the address space of one while it is made. `include_buffers` puts buffers there
    too, and what constructors compute."""
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(
    device: str | int | torch.device, include_buffers: bool | None = None
) -> Iterator[None]:
    """Within it, in this thread, parameters of new modules are on `device`; with `include_buffers`
    (or ACCELERATE_INIT_INCLUDE_BUFFERS=1) all new tensors. Ties that constructors make stay."""
    if include_buffers is None:
        given = os.environ.get("ACCELERATE_INIT_INCLUDE_BUFFERS", "")
        include_buffers = given.lower() in _TRUE
    where = torch.device(device)
    if include_buffers:
        with where:
            yield
        return
    _patch(+1)
    wanted: list[torch.device] = _local.__dict__.setdefault("wanted", [])
    wanted.append(where)
    try:
        yield
    finally:
        wanted.pop()
        _patch(-1)


def _patch(step: int) -> None:
    """The first context replaces the method of nn.Module, the last one puts it back."""
    global _patched, _register
    with _lock:
        if _patched == 0:
            _register = nn.Module.register_parameter
            nn.Module.register_parameter = _register_there  # type: ignore[method-assign,assignment]
        _patched += step
        if _patched == 0:
            nn.Module.register_parameter = _register  # type: ignore[method-assign]


def _register_there(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    _register(module, name, param)
    wanted = getattr(_local, "wanted", None)
    # One that is there already may be tied: it stays the same object.
    if param is not None and wanted and param.device != wanted[-1]:
        _torch.parameters(module)[name] = _moved(param, wanted[-1])


def _moved(param: nn.Parameter, device: torch.device) -> nn.Parameter:
    facts = dict(param.__dict__)
    if type(param) is nn.Parameter or isinstance(param, StowedTensor):
        values = torch.empty_like(param, device=device) if param.is_meta else param.to(device)
        made = nn.Parameter(values.detach(), requires_grad=param.requires_grad)
        if not isinstance(param, StowedTensor):
            made.__dict__.update(facts)
        return made
    own = facts.pop("_is_hf_initialized", None)  # a mark of transformers, no constructor's argument
    kind = cast(Any, type(param))
    built: nn.Parameter = kind(param.to(device), requires_grad=param.requires_grad, **facts)
    if own is not None:
        built._is_hf_initialized = own  # type: ignore[attr-defined]
    return built
