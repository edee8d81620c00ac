# SPDX-License-Identifier: Apache-2.0
"""Making the linear layers of a model compute in fp8, the modules themselves staying stock."""

from collections.abc import Callable
from typing import Any, Literal, TypeGuard

import torch
from torch import nn

from stowage._ops import _torch
from stowage._ops.errors import raise_problems
from stowage.training import history
from stowage.training.layers import Layer, Roster
from stowage.training.parallel import watch_modules
from stowage.training.recipes import recipe_of
from stowage.training.scale_refresh import refresh
from stowage.training.trained_weight import TrainedWeight, weight_of

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def convert_float8(
    model: nn.Module,
    recipe: str = "tensorwise",
    *,
    filter: Callable[[str, nn.Module], bool] | None = None,
    scale_mode: Literal["torchao", "te"] | None = None,
    forward: torch.dtype | None = None,
    backward: torch.dtype | None = None,
    pow2: bool | None = None,
    history_length: int | None = None,
    margin: int | None = None,
    rule: Literal["max", "most_recent"] | None = None,
    gather: Literal["fp8", "high"] | None = None,
) -> nn.Module:
    """Lets the nn.Linear modules of `model` multiply in fp8, and FSDP2 gather them as fp8 bytes.

    The modules stay; their weights become trainable tensors that keep high precision. Call it
    before `fully_shard`. A weight that another kind of module shares, such as an embedding, is left
    alone. docs/training.md has the recipes and what each argument changes.

    Args:
        model: any module.
        recipe: a name of `RECIPES`.
        filter: given the name of a module and itself, chooses among the nn.Linear modules.
        scale_mode: whose rule makes a scale from an amax.
        forward: the float8 dtype of inputs and weights.
        backward: that of the gradients of outputs.
        pow2: rounds scales down to powers of two.
        history_length: recipe "delayed": steps that are remembered.
        margin: recipe "delayed": scales are divided by 2 to this power.
        rule: recipe "delayed": which of the remembered amax values counts.
        gather: what FSDP2 sends: codes, or values that are cast then.

    Returns:
        The model.

    Raises:
        InvalidArgument: lists every problem; nothing is changed.

    Example:
        >>> def first(name, module):
        ...     return name == "0"
        >>> stowage.training.convert_float8(model, "rowwise", filter=first)
        >>> model(x).sum().backward()
        >>> model[0].weight.grad.dtype
        torch.float32
    """
    changes = {
        "scale_mode": scale_mode,
        "forward": forward,
        "backward": backward,
        "pow2": pow2,
        "history_length": history_length,
        "margin": margin,
        "rule": rule,
        "gather": gather,
    }
    rules = recipe_of(recipe, changes)
    chosen = _chosen(model, filter)
    _check(chosen)
    watch_modules()
    roster = Roster(model, refresh)
    made: dict[int, nn.Parameter] = {}
    layers: dict[int, Layer] = {}
    for name, module in chosen:
        old = module.weight
        if id(old) not in made:
            layers[id(old)] = layer = Layer(
                f"{name}.weight" if name else "weight", rules, module, roster
            )
            if rules.delayed:
                history.attach(module, rules, old.device)
            wrapped = weight_of(old.detach(), layer)
            made[id(old)] = nn.Parameter(wrapped, requires_grad=old.requires_grad)
        else:
            layers[id(old)].shared = True
        module.weight = made[id(old)]
    return model


def _chosen(
    model: nn.Module, filter: Callable[[str, nn.Module], bool] | None
) -> list[tuple[str, nn.Linear]]:
    """Linear modules by name; none of whose weights is used by another module as well."""
    modules = list(model.named_modules())
    others = {
        id(parameter)
        for name, module in modules
        if not _linear(module) or (filter is not None and not filter(name, module))
        for parameter in _torch.parameters(module).values()
    }
    return [(n, m) for n, m in modules if _linear(m) and id(m.weight) not in others]


def _linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear)


def _check(chosen: list[tuple[str, Any]]) -> None:
    problems = []
    if not chosen:
        problems.append("there must be an nn.Linear that may be converted, got none")
    for name, module in chosen:
        weight = module.weight
        if isinstance(weight, TrainedWeight):
            problems.append(f"{name}.weight must not be converted yet, it is")
        elif type(weight) is not nn.Parameter or weight.dtype not in _DTYPES:
            problems.append(
                f"{name}.weight must be a plain float32, bfloat16 or float16 parameter, got "
                f"{type(weight).__name__} of {weight.dtype}; convert before fully_shard"
            )
        elif module.weight.grad is not None:
            problems.append(f"{name}.weight must have no gradient yet, it has")
    raise_problems("convert_float8", problems)
