# SPDX-License-Identifier: Apache-2.0
"""Delayed scaling: the amax values of earlier steps and the scales that come of them.

They live in one buffer of the module, `fp8_history`, and so in its state dict: int32 [3, 2 + steps]
that holds the *bits* of fp32 values, since `module.half()` would round a buffer of floats. Rows are
the roles; columns are the scale (0: none yet), the amax seen since the last refresh (-1: none) and
the amax values of earlier steps, newest first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops._torch import foreach_copy_
from stowage.training.recipes import Recipe, scale_of

INPUT, WEIGHT, GRADIENT = 0, 1, 2
BUFFER = "fp8_history"
_SCALE, _SEEN, _PAST = 0, 1, 2


def attach(module: nn.Module, recipe: Recipe, device: torch.device) -> None:
    """Gives the module an empty history."""
    state = torch.zeros(3, 2 + recipe.history_length, dtype=torch.float32, device=device)
    state[:, _SEEN] = -1
    module.register_buffer(BUFFER, state.view(torch.int32))


def clear(module: nn.Module) -> None:
    """Forgets everything: the next step takes its scales from its own data."""
    state = _state(module)
    state.zero_()
    state[:, _SEEN] = -1


def _state(module: nn.Module) -> Tensor:
    buffer = module.get_buffer(BUFFER)  # which tensor parallelism makes a DTensor, whole everywhere
    state: Tensor = _torch.local_of(buffer).view(torch.float32)
    return state


def scale_for(module: nn.Module, role: int, amax: Tensor, recipe: Recipe) -> Tensor:
    """The scale of this step, a scalar; where no step came before, that of `amax` itself."""
    target = recipe.backward if role == GRADIENT else recipe.forward
    first = scale_of(amax, target, recipe.scale_mode, margin=recipe.margin, pow2=recipe.pow2)
    scale = _state(module)[role, _SCALE]
    return torch.where(scale > 0, scale, first)


def see(module: nn.Module, role: int, amax: Tensor) -> None:
    """Notes an amax; the largest since the last refresh counts."""
    seen = _state(module)[role, _SEEN]
    seen.copy_(torch.maximum(seen, amax))


def seen(modules: Sequence[nn.Module]) -> Tensor:
    """What has been seen since the last refresh, fp32 [modules, 3]; -1 for nothing."""
    return torch.stack([_state(module)[:, _SEEN] for module in modules])


def roll(modules: Sequence[nn.Module], amax: Tensor, recipe: Recipe) -> Tensor:
    """Ends a step of modules of one recipe, for the roles whose `amax` (fp32 [modules, 3], over all
    ranks) is not -1. Returns the scales, fp32 [modules, 3]; 0 for none yet.

    An amax that is 0 in every remembered step, infinite or NaN leaves the scale as it was.
    """
    states = [_state(module) for module in modules]
    state = torch.stack(states)
    old, past = state[..., _SCALE], state[..., _PAST:]
    moved = torch.cat([amax[..., None], past[..., :-1]], -1)
    top = moved.amax(-1) if recipe.rule == "max" else amax
    facts: dict[str, Any] = {"margin": recipe.margin, "pow2": recipe.pow2}
    scale = torch.empty_like(old)
    targets = (slice(GRADIENT), recipe.forward), (slice(GRADIENT, None), recipe.backward)
    for roles, target in targets:
        scale[:, roles] = scale_of(top[:, roles], target, recipe.scale_mode, **facts)
    scale = torch.where(torch.isfinite(top) & (top > 0), scale, old)
    rolled = torch.cat([scale[..., None], torch.full_like(amax, -1)[..., None], moved], -1)
    rolled = torch.where((amax == -1)[..., None], state, rolled)
    foreach_copy_(states, [*rolled.unbind()])
    return rolled[..., _SCALE]


def reset_history(model: nn.Module) -> None:
    """Forgets the amax values of all delayed layers: the next step takes its scales from its data.

    Call it after `to_empty` of a model that was converted on the meta device.

    Args:
        model: a module that was converted.

    Example:
        >>> stowage.training.convert_float8(model, "delayed")
        >>> stowage.training.reset_history(model)
        >>> model[0].fp8_history[:, 0].tolist()  # the scales of inputs, weights and gradients: none
        [0, 0, 0]
    """
    for module in model.modules():
        if BUFFER in _torch.buffers(module):
            clear(module)
