# SPDX-License-Identifier: Apache-2.0
"""What the resting and the gathered weight of a float8 layer have in common."""

from typing import Any

from torch import Tensor

from stowage._ops import _torch
from stowage.training.layers import Layer
from stowage.training.linear import linear


class Float8Weight(Tensor):
    """A weight that F.linear multiplies as fp8; a subclass says where its codes come from."""

    _layer: Layer
    _number: Tensor | None  # of the layer, where compiled graphs need it: recipe "delayed"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @classmethod
    def __metadata_guard__(cls, compiled: Any, other: Any) -> bool:
        """A graph holds for every layer of the recipe: its names and counts are not in it."""
        a, b = compiled[0], other[0]
        same = a.recipe == b.recipe and a.gathered_in_graph == b.gathered_in_graph
        return same and compiled[1:] == other[1:]

    def _stable_hash_for_caching(self) -> str:
        """torch's cache on disk would give what another version of this code computes."""
        raise _torch.BypassAOTAutogradCache(
            "float8 weights of stowage are traced through its own code"
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _torch.linear:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            if isinstance(weight, Float8Weight) and weight.dim() == 2:
                return linear(*args, **(kwargs or {}))
        with _torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
