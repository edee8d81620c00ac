# SPDX-License-Identifier: Apache-2.0
"""Values of offloaded models: all of them as a state dict, or one module's on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stowage._ops import _torch
from stowage._tensor.casts import is_cast_of_itself
from stowage._tiers.disk.journal import has_places
from stowage.compat.accelerate._maps import same_device


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state dict of `model`, on the CPU, the root's parameters included. Plain weights are
    plain, and those of a disk are read when they are used; resting ones stay at rest."""
    return {name: _plain(value).to("cpu") for name, value in model.state_dict().items()}


def _plain(value: Any) -> Any:
    return value._parts()[0].detach() if is_cast_of_itself(value) else value


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: int | str | torch.device | None = "cpu",
) -> dict[str, Any]:
    """Puts the values of `module`, whose weight is called `module_name`, into `state_dict`, where
    it has their names."""
    inside = module_name.rpartition(".")[0]
    for name, value in module.state_dict().items():
        if f"{inside}.{name}" in state_dict:
            state_dict[f"{inside}.{name}"] = _plain(value).to(device_to_put_offload)
    return state_dict


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether parameters of its own rest on a disk."""
    return has_places(module) or bool(getattr(getattr(module, "_hf_hook", None), "offload", False))


@contextmanager
def align_module_device(
    module: nn.Module, execution_device: int | str | torch.device | None = None
) -> Iterator[None]:
    """Within it the module's own parameters are on `execution_device`; without one, where they are,
    which is where they can be read. What is written to them within it stays."""
    moved = {}
    for name, tensor in module.named_parameters(recurse=False):
        if execution_device is None:
            continue
        where = torch.device(execution_device)
        if not same_device(tensor.device, where):
            there = nn.Parameter(tensor.detach().to(where), requires_grad=tensor.requires_grad)
            moved[name] = (tensor, there, (_torch.version(there), there.data_ptr()))
            _torch.parameters(module)[name] = there
    try:
        yield
    finally:
        for name, (home, there, state) in moved.items():
            now = _torch.parameters(module).get(name)
            _torch.parameters(module)[name] = home
            if now is None or now.is_meta:
                continue
            if now is not there or (_torch.version(now), now.data_ptr()) != state:
                with torch.no_grad():
                    home.copy_(now)
