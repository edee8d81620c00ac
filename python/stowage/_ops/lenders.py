# SPDX-License-Identifier: Apache-2.0
"""Where ops meet the tier of a device: parts that rest on the CPU, asked for by their memory, are
lent on the device where the activations are. This is only the door; tiers enter themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor


class Lender(Protocol):
    """The tier of one model on one device."""

    device: torch.device
    has_room: bool  # for all weights of its model

    def holds(self, codes: Tensor) -> bool:
        """Whether these are codes of its model, as far as it knows."""
        ...

    def refresh(self) -> None:
        """Looks at the model anew."""
        ...

    def lend(self, parts: Sequence[Tensor]) -> AbstractContextManager[list[Tensor]]:
        """The parts on the device, for the block."""
        ...

    def want(
        self,
        stack: Any,
        codes: Tensor,
        indices: list[int],
        parts_of: Callable[[Any, int], list[Tensor] | None],
    ) -> list[int] | None:
        """Those matrices of a stack with these codes are lent next. The same in another order: what
        is here comes first. None of what is no stack of matrices that are used one by one."""
        ...


_lenders: weakref.WeakSet[Any] = weakref.WeakSet()


def enter(lender: Lender) -> None:
    """Makes a tier known for as long as it lives."""
    _lenders.add(lender)


def lender_of(codes: Tensor, device: torch.device) -> Lender | None:
    """Who fetches `codes`, which rest on the CPU, to `device`."""
    if codes.device.type != "cpu" or device.type in ("cpu", "meta") or not _lenders:
        return None
    there: list[Lender] = [lender for lender in _lenders if lender.device == device]
    for lender in there:
        if lender.holds(codes):
            return lender
    for lender in there:  # after a write, a copy of the model, or a load
        lender.refresh()
        if lender.holds(codes):
            return lender
    return None


def stays_on(device: torch.device, codes: Tensor) -> bool:
    """Whether `codes`, which rest on the CPU, stay on `device` once they have been fetched."""
    lender = lender_of(codes, device)
    return lender is not None and lender.has_room


@contextmanager
def fetched(parts: Sequence[Tensor], device: torch.device) -> Iterator[Sequence[Tensor]]:
    """The parts of a weight on `device`, for the block; where nobody fetches them, as they are."""
    lender = lender_of(parts[0], device)
    if lender is None:
        yield parts
        return
    with lender.lend(parts) as there:
        yield there


def where_x_is(at: int = 1) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For ops (x, ..., codes, scales, ...) with codes at position `at`: they run where x is, and
    have the parts there."""

    def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run)
        def call(*args: Any) -> Any:
            device, codes, scales = args[0].device, args[at], args[at + 1]
            if codes.device == device:
                return run(*args)
            single = isinstance(scales, Tensor)
            with fetched([codes, *([scales] if single else scales)], device) as parts:
                rest = parts[1] if single else list(parts[1:])
                return run(*args[:at], parts[0], rest, *args[at + 2 :])

        return call

    return decorate


def accelerator_of(tree: Sequence[Any]) -> torch.device | None:
    """The device other than the CPU that plain tensors among arguments are on."""
    for leaf in tree:
        if type(leaf) is Tensor and leaf.device.type not in ("cpu", "meta") and leaf.dim():
            return leaf.device
    return None
