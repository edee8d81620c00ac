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
    """The exact value that a weight was initialised with, in the dtype of the init.

    As often as you like; do not write to it.

    Args:
        parameter: a weight that was made inside `quantized_init`.

    Returns:
        A tensor [its shape], or [the local rows] of a weight that is spread.

    Raises:
        InvalidArgument: it is not kept, or not any more; says what became of it.

    Example:
        >>> with stowage.training.quantized_init("int8", preserve_init=True):
        ...     layer = nn.Linear(64, 64)
        >>> stowage.training.init_value(layer.weight).dtype
        torch.float32
    """
    return _needed(parameter).get()


def has_init_value(parameter: Any) -> bool:
    """Whether `init_value` would give one.

    Args:
        parameter: any tensor.

    Returns:
        True or False.

    Example:
        >>> stowage.training.has_init_value(model[0].weight)
        False
    """
    origin = origin_of(parameter)
    return origin is not None and origin.state == KEPT


def take_init_value(parameter: Any) -> Tensor:
    """The exact init value, moved out: it is the caller's own, and the weight keeps nothing.

    Args:
        parameter: a weight that was made inside `quantized_init`.

    Returns:
        A tensor in the shape that `init_value` gives.

    Raises:
        InvalidArgument: it is not kept; so says the second call.

    Example:
        >>> with stowage.training.quantized_init("int8", preserve_init=True):
        ...     layer = nn.Linear(64, 64)
        >>> exact = stowage.training.take_init_value(layer.weight)
        >>> stowage.training.has_init_value(layer.weight)
        False
    """
    return _needed(parameter).take()


def clear_init_value(parameter: Any) -> None:
    """Frees the exact init value of a weight. Does nothing where there is none.

    Args:
        parameter: any tensor.

    Example:
        >>> with stowage.training.quantized_init("int8", preserve_init=True):
        ...     layer = nn.Linear(64, 64)
        >>> stowage.training.clear_init_value(layer.weight)
        >>> stowage.training.has_init_value(layer.weight)
        False
    """
    origin = origin_of(parameter)
    if origin is not None:
        origin.clear("by clear_init_value()")


class InitValue(NamedTuple):
    """What is kept of one parameter: an item of `init_values`.

    Example:
        >>> stowage.training.InitValue("0.weight", "kept", "ram", 16384).nbytes
        16384
    """

    name: str  # of the parameter
    state: str  # kept, unset, absent, taken, cleared, invalid
    place: str  # ram, disk, or none
    nbytes: int  # of what is kept here


def init_values(model: nn.Module) -> list[InitValue]:
    """What is kept of each parameter that was made inside `quantized_init`; tied ones once.

    Args:
        model: any module.

    Returns:
        One item for each.

    Example:
        >>> with stowage.training.quantized_init("int8", preserve_init=True):
        ...     model = nn.Sequential(nn.Linear(64, 64))
        >>> stowage.training.init_values(model)
        [InitValue(name='0.weight', state='kept', place='ram', nbytes=16384)]
    """
    found = []
    for name, parameter in model.named_parameters():
        origin = origin_of(parameter)
        if origin is not None:
            kept = origin.nbytes if origin.state == KEPT else 0
            found.append(InitValue(name, origin.state, origin.place if kept else "none", kept))
    return found
