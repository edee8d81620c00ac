# SPDX-License-Identifier: Apache-2.0
"""Scales of delayed layers, of which compiled graphs hold one opaque node each.

Such a scale is read from the layer's history, and what it is asked for is noted there. A graph that
serves every layer of a recipe cannot name one: it gets the number of the layer as a tensor, and the
operator finds the layer when it runs. So training or evaluation, and what was loaded meanwhile,
count as they do without a compiler.
"""

import itertools
import weakref

import torch
from torch import Tensor

from stowage.training import history
from stowage.training.layers import Layer

_layers: weakref.WeakValueDictionary[int, Layer] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number_of(layer: Layer) -> Tensor:
    """int64, a scalar on the CPU, by which a graph finds `layer`."""
    if layer.number is None:
        number = next(_numbers)
        _layers[number] = layer
        layer.number = torch.tensor(number, device="cpu")
    return layer.number


def layer_of(number: Tensor) -> Layer:
    """Raises RuntimeError where the layer is gone."""
    layer = _layers.get(int(number))
    if layer is None:
        raise RuntimeError(f"stowage: the float8 layer {int(number)} must exist, it is gone")
    return layer


def scale(layer: Layer, number: Tensor, role: int, amax: Tensor) -> Tensor:
    """The scale of an input or a gradient whose largest magnitude is `amax`, which is noted."""
    if torch.compiler.is_compiling():
        found: Tensor = torch.ops.stowage.delayed_scale(amax, number, role)
        return found
    return _scale(layer, role, amax)


def _scale(layer: Layer, role: int, amax: Tensor) -> Tensor:
    scale = history.scale_for(layer.module, role, amax, layer.recipe)
    if layer.module.training:
        history.see(layer.module, role, amax)
        if role == history.INPUT and layer.amax is not None:  # a weight counts once it is used
            history.see(layer.module, history.WEIGHT, layer.amax)
    return scale


@torch.library.custom_op("stowage::delayed_scale", mutates_args=())
def _delayed_scale(amax: Tensor, layer: Tensor, role: int) -> Tensor:
    return _scale(layer_of(layer), role, amax)


@_delayed_scale.register_fake
def _(amax: Tensor, layer: Tensor, role: int) -> Tensor:
    return torch.empty_like(amax)
