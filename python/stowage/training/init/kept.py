# SPDX-License-Identifier: Apache-2.0
"""What there is to do with kept init values: look, take, clear, count."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument
from stowage.training.init.origin import KEPT, Origin


def origin_of(parameter: Any) -> Origin | None:
    """The origin of a weight; of one that is spread over processes, that of the rows here."""
    local = _torch.local_of(parameter)
    found = getattr(local, "_origin", None)
    return found if isinstance(found, Origin) else None


def _needed(parameter: Any) -> Origin:
    origin = origin_of(parameter)
    if origin is None:
        raise InvalidArgument(
            "stowage: no init value: the weight must have been made inside quantized_init (copies "
            f"by clone() and pickles leave it out), got {type(parameter).__name__}"
        )
    return origin


def init_value(parameter: Any) -> Tensor:
    """The exact value that the weight was initialised with, [its shape] or [the local rows], in the
    dtype of the init. As often as you like; do not write to it.

    Raises InvalidArgument that says what became of it, where it is not kept (any more)."""
    return _needed(parameter).get()


def has_init_value(parameter: Any) -> bool:
    """Whether `init_value` would give one."""
    origin = origin_of(parameter)
    return origin is not None and origin.state == KEPT


def take_init_value(parameter: Any) -> Tensor:
    """The same, moved out: it is the caller's own, and the weight keeps nothing. The second time
    raises InvalidArgument."""
    return _needed(parameter).take()


def clear_init_value(parameter: Any) -> None:
    """Frees it. Does nothing where there is none."""
    origin = origin_of(parameter)
    if origin is not None:
        origin.clear("by clear_init_value()")


class InitValue(NamedTuple):
    """What is kept of one parameter."""

    name: str
    state: str  # kept, unset, absent, taken, cleared, invalid
    place: str  # ram, disk, or none
    nbytes: int


def init_values(model: nn.Module) -> list[InitValue]:
    """One line for each parameter that was made inside `quantized_init`; tied ones once."""
    found = []
    for name, parameter in model.named_parameters():
        origin = origin_of(parameter)
        if origin is not None:
            kept = origin.nbytes if origin.state == KEPT else 0
            found.append(InitValue(name, origin.state, origin.place if kept else "none", kept))
    return found
