# SPDX-License-Identifier: Apache-2.0
"""Lightning Fabric: a precision plugin. `Fabric(plugins=StowagePrecision("nf4"))`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning_fabric.plugins.precision import Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from stowage._model.choice.policy import Policy
from stowage._model.choice.selection import Rules, Wish
from stowage._model.choice.skips import Skip
from stowage._model.stow import stow
from stowage._ops.errors import InvalidArgument
from stowage._tensor.stowed import VALUE_DTYPES

__all__ = ["StowagePrecision"]


class StowagePrecision(Precision):
    """Lets the weights of modules rest when `Fabric.setup` takes them, and works in one dtype.

    The weights that rest are frozen: what trains are adapters and whatever stays plain. Modules
    whose weights rest already, loaded by `stowage.load` or `from_pretrained`, stay as they are.

    Args:
        storage: as in `stowage.stow`; a `stowage.Policy` has `rules` and `skip`.
        rules: as in `stowage.stow`.
        skip: as in `stowage.stow`.
        dtype: what modules work in, and inputs become, bf16 without one in the policy; outputs come
            in torch's default dtype.

    Raises:
        InvalidArgument: a misspelt storage, or a dtype that is none to work in.

    Example:
        >>> from lightning_fabric import Fabric
        >>> from stowage.integrations.fabric import StowagePrecision
        >>> fabric = Fabric(accelerator="cpu", plugins=StowagePrecision("int8"))
        >>> fabric.setup_module(model).module[0].weight.resting
        'int8:row'
    """

    def __init__(
        self,
        storage: Wish | Policy = None,
        *,
        rules: Rules | None = None,
        skip: Skip = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        policy = Policy.of(storage, "StowagePrecision", rules=rules, skip=skip)
        self.dtype = dtype or policy.compute_dtype or torch.bfloat16
        if self.dtype not in VALUE_DTYPES:
            raise InvalidArgument(
                f"StowagePrecision: dtype must be one to work in, got {self.dtype}"
            )
        self.policy = replace(policy, compute_dtype=self.dtype)

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Puts a module to rest.

        Args:
            module: any.

        Returns:
            The same module.

        Raises:
            As `stowage.stow` does.
        """
        stow(module, self.policy)
        return module

    def tensor_init_context(self) -> AbstractContextManager[None]:
        """In which new tensors have the dtype.

        Returns:
            The context.
        """
        return self._in_dtype()

    def module_init_context(self) -> AbstractContextManager[None]:
        """In which new modules have the dtype; they rest from `Fabric.setup` on.

        Returns:
            The context.
        """
        return self._in_dtype()

    def forward_context(self) -> AbstractContextManager[None]:
        """Around a forward.

        Returns:
            The context.
        """
        return self._in_dtype()

    @contextmanager
    def _in_dtype(self) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def convert_input(self, data: Any) -> Any:
        """Floating tensors of an input in the dtype.

        Args:
            data: any collection.

        Returns:
            The same with them.
        """
        return _cast(data, self.dtype)

    def convert_output(self, data: Any) -> Any:
        """Floating tensors of an output in torch's default dtype.

        Args:
            data: any collection.

        Returns:
            The same with them.
        """
        return _cast(data, torch.get_default_dtype())


def _cast(data: Any, dtype: torch.dtype) -> Any:
    return apply_to_collection(
        data,
        dtype=Tensor,
        function=lambda each: each.to(dtype) if each.is_floating_point() else each,
    )
