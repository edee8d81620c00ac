# SPDX-License-Identifier: Apache-2.0
"""torchao.float8.float8_linear: the class that code asks for with isinstance."""

from typing import Any

from torch import nn

from stowage._ops import _torch
from stowage.compat.torchao.float8.config import Float8LinearConfig
from stowage.compat.torchao.float8.float8_linear_utils import convert_to_float8_training
from stowage.training.gathered_weight import Float8Weight

__all__ = ["Float8Linear"]


class _Converted(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        weight = getattr(instance, "weight", None)
        local = _torch.local_of(weight)
        return isinstance(instance, nn.Linear) and isinstance(local, Float8Weight)


class Float8Linear(nn.Linear, metaclass=_Converted):
    """Every nn.Linear whose weight was converted is an instance; none is made of this class."""

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> nn.Linear:
        """The module itself, converted."""
        if not isinstance(mod, cls):
            convert_to_float8_training(mod, config=config)
        return mod
