# SPDX-License-Identifier: Apache-2.0
"""Low-rank deltas of experts that are not formed: of several active adapters PEFT adds them up and
gives the sum to the stack. Sums of products are products of longer factors, which a resting stack
takes as it takes those of one adapter."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor

from stowage._ops import _torch
from stowage._shard.rows import rests
from stowage._tensor.products.folded import OF_WRAPPERS, Unformed
from stowage._tensor.tables import function


class Delta(Unformed):
    """alpha lhs rhs, [E, O, K], summed over terms; nobody makes one by hand. A stack that rests
    takes the factors, another Delta adds its own; all else is asked of a plain tensor.

    Args:
        terms: for each adapter lhs, [E, O, R], rhs, [E, R, K], and alpha.
    """

    _terms: tuple[tuple[Tensor, Tensor, float], ...]

    @staticmethod
    def __new__(cls, terms: Sequence[tuple[Tensor, Tensor, float]]) -> Delta:
        lhs, rhs, _ = terms[0]
        shape = (*lhs.shape[:2], rhs.shape[2])
        delta: Delta = _torch.make_wrapper_subclass(cls, shape, dtype=lhs.dtype, device=lhs.device)
        delta._terms = tuple(terms)
        return delta

    def __init__(self, *args: Any) -> None:
        pass

    def factors(self) -> tuple[Tensor, Tensor, float]:
        """lhs, rhs and alpha of the whole sum."""
        alphas = {alpha for _, _, alpha in self._terms}
        alpha = alphas.pop() if len(alphas) == 1 else 1.0
        lhs = [one if scale == alpha else one * scale for one, _, scale in self._terms]
        return torch.cat(lhs, -1), torch.cat([one for _, one, _ in self._terms], -2), alpha

    def dequantize(self) -> Tensor:
        """The sum."""
        lhs, rhs, alpha = self.factors()
        return torch.bmm(lhs, rhs) * alpha

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in OF_WRAPPERS:
            with _torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _SUMS and not kwargs and len(args) == 2 and all(type(t) is Delta for t in args):
            return Delta([*args[0]._terms, *args[1]._terms])
        args, kwargs = _torch.tree_map_only(Delta, Delta.dequantize, (args, kwargs or {}))
        return func(*args, **kwargs)


_SUMS = (torch.add, Tensor.add, Tensor.__add__)


@function(*_SUMS)
def _add(input: Any, other: Any, **kwargs: Any) -> Any:
    """Of a stack that rests."""
    if type(other) is not Delta or kwargs:
        return NotImplemented
    lhs, rhs, alpha = other.factors()
    with torch.autocast(input.device.type, enabled=False):  # the sum has the stack's dtype
        return torch.baddbmm(input, lhs, rhs, alpha=alpha)


_running = threading.local()  # `forward`: whether a wrapper's is


class Apart:
    """Stands in for methods of one wrapper of experts: in a forward of a stack that rests, sums
    with it are not formed, and stand in its place without a parametrization, whose swap of tensors
    torch refuses where a graph refers to one."""

    def __init__(self, layer: ParamWrapper) -> None:
        self._layer: Any = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not rests(self._layer.get_param()):
            return type(self._layer).forward(self._layer, *args, **kwargs)
        return self._resting(*args, **kwargs)

    @torch.compiler.disable  # a graph would have the sum whole
    def _resting(self, *args: Any, **kwargs: Any) -> Any:
        before, _running.forward = getattr(_running, "forward", False), True
        try:
            return type(self._layer).forward(self._layer, *args, **kwargs)
        finally:
            _running.forward = before

    def _is_inside(self) -> bool:
        return getattr(_running, "forward", False) and rests(self._layer.get_param())

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        layer = self._layer
        if self._is_inside() and layer.num_experts > 1:
            return Delta([layer.get_delta_factors(adapter_name)])
        formed: Tensor = type(layer).get_delta_weight(layer, adapter_name, *args, **kwargs)
        return formed

    @contextmanager
    def activate(self, active_adapters: Sequence[str]) -> Iterator[None]:
        layer = self._layer
        adapters = [adapter for adapter in active_adapters if adapter in layer.lora_A]
        if not adapters or not self._is_inside():
            with type(layer)._activate_lora(layer, active_adapters):
                yield
            return
        deltas = map(layer.get_delta_weight, adapters)
        attributes, name = layer.get_base_layer().__dict__, layer.parameter_name
        attributes[name] = layer.get_param() + reduce(add, deltas)  # before the parameter's place
        try:
            yield
        finally:
            attributes.pop(name, None)


def install(layer: ParamWrapper) -> None:
    stand_in = Apart(layer)
    layer.__dict__["forward"] = stand_in.forward
    layer.__dict__["get_delta_weight"] = stand_in.get_delta_weight
    layer.__dict__["_activate_lora"] = stand_in.activate
