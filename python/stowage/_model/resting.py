# SPDX-License-Identifier: Apache-2.0
"""Why a tensor of a model cannot rest, whatever the rules say. What is found here is told when the
model is stowed, so that no later forward has to fail."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.spectral_norm import SpectralNorm

from stowage._model.weights import LAZY, Held, Site
from stowage._ops import _torch
from stowage._ops.storage import Storage

# Scales of an 8-bit weight are worth their bytes from this rank on.
_LEAST_RANK = {"row": 2, "row2": 2, "block": 1}


def cannot_rest(held: Held) -> str:
    """Why no rule can let this tensor rest; "" if one can."""
    tensor = held.tensor
    if isinstance(tensor, LAZY):
        return ""  # a problem to be told, not a reason to pass over it
    if not tensor.is_floating_point():
        return f"{str(tensor.dtype).removeprefix('torch.')} values"
    if _torch.in_flat_parameter(tensor):
        return "FullyShardedDataParallel keeps it in a flat parameter of its own"
    return next(filter(None, map(_forbidden, held.sites)), "")


def _forbidden(site: Site) -> str:
    """What the module that holds the tensor would do to it."""
    module, attribute = site.module, site.attribute
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted or traced module takes plain tensors only"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
        return "each forward writes it (max_norm)"
    if isinstance(module, _torch.NormBase) and attribute.startswith("running_"):
        return "a forward in training writes it (running statistics)"
    if attribute in _torch.buffers(module) and _iterates(module, attribute):
        return "a forward in training writes it (spectral norm)"
    return ""


def _iterates(module: nn.Module, buffer: str) -> bool:
    """Whether it is a vector of a power iteration, of the old or the new spectral norm."""
    if isinstance(module, _torch.SpectralNorm):
        return True
    hooks = _torch.pre_hooks(module).values()
    names = [hook.name for hook in hooks if isinstance(hook, SpectralNorm)]
    return buffer in {f"{name}_{vector}" for name in names for vector in "uv"}


def is_narrow(held: Held) -> bool:
    """Fewer than two dimensions: biases, norms, scalars."""
    return not isinstance(held.tensor, LAZY) and held.tensor.dim() < 2


def too_narrow(held: Held, storage: Storage) -> str:
    """Why `storage` is not for a tensor of so few dimensions; "" if it is."""
    if not is_narrow(held) or storage.bits != 8:
        return ""
    if held.tensor.dim() >= _LEAST_RANK.get(storage.kind, 0):
        return ""
    return f"fewer than two dimensions: {storage.name} would have a scale for each value"
