# SPDX-License-Identifier: Apache-2.0
"""Plain values as resting weights: casts of themselves, whose codes are the values. That is how a
plain parameter can rest where only resting weights can.
"""

import torch

from stowage._ops.storage import Storage
from stowage._tensor.stowed import StowedTensor

_CODES = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def cast_storage(dtype: torch.dtype) -> Storage:
    """The storage whose codes are values of `dtype`: f32, bf16 or f16."""
    return Storage.parse(_CODES[dtype])


def is_cast_of_itself(weight: torch.Tensor) -> bool:
    """Whether a resting weight is no more than plain values: its codes are what it shows, and
    products are those of plain values."""
    if not isinstance(weight, StowedTensor) or not weight._exact:
        return False
    return _CODES.get(weight.dtype) == weight.resting


def stands_for_plain(weight: torch.Tensor) -> torch.Tensor:
    """Marks a cast of itself as what a plain parameter became: it is plain again when it is fetched
    back, saved or pickled. Copies have the mark too."""
    weight._plain = True  # type: ignore[attr-defined]
    return weight


def is_plain(weight: torch.Tensor) -> bool:
    """Whether a resting weight is so marked, and still a cast. Its compute dtype may be another one
    by now: that of the plain parameter after `model.to(dtype)`."""
    return (
        isinstance(weight, StowedTensor)
        and weight._plain
        and weight._exact
        and weight.resting in _CODES.values()
    )


def plain_values(weight: StowedTensor) -> torch.Tensor:
    """What the plain parameter would hold; its codes themselves where they are that."""
    codes = weight._parts()[0]
    return codes if codes.dtype is weight.dtype else weight.dequantize()
