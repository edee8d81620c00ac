# SPDX-License-Identifier: Apache-2.0
"""FSDP2's gathers inside compiled graphs: one opaque node before each block, one behind it.

torch excludes the hooks of FSDP2 from compiled graphs, so that each module with hooks ends a graph.
Here the modules below the root lose those hooks, and call two operators in their forward that run
them; a third one, in the backward graph, gathers again. A graph reads parameters where it begins,
so the root lets the blocks hold their gathered ones before, of which only the memory is missing.
Gradients are reduced when the whole backward pass is done, in FSDP2's own last callback.
"""

import itertools
import types
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument, Unsupported

_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def opaque_hooks(model: nn.Module) -> nn.Module:
    """Lets compiled graphs of `model` hold the gathers of the modules in it that FSDP2 shards.

    Call it once, after `fully_shard` of the modules and of `model`, and before `torch.compile`.
    Each of these modules must take a tensor first, which what it computes depends on, and return
    one tensor.

    Args:
        model: the outermost module that is sharded.

    Returns:
        The model.

    Raises:
        InvalidArgument: `model` or nothing in it is sharded.
        Unsupported: modules were sharded as one group, or torch has changed what this stands on.

    Example:
        >>> for module in (model[0], model[2], model):
        ...     fully_shard(module, mesh=mesh)
        >>> compiled = torch.compile(stowage.training.opaque_hooks(model))
    """
    sharded: list[Any] = [m for m in model.modules() if _torch.fsdp_state(m) is not None]
    states = [(module, _torch.fsdp_state(module)) for module in sharded]
    if not states or states[0][0] is not model or len(states) < 2:
        raise InvalidArgument("opaque_hooks: model and modules in it must be sharded, they are not")
    for module, state in states:
        for needed in (_torch.pre_forward_handle, _torch.post_forward_handle):
            needed(state)
        if (count := len(_torch.fsdp_modules(state))) != 1:
            name = type(module).__name__
            raise Unsupported(
                f"opaque_hooks: {name} must be sharded alone, got a group of {count} modules"
            )
    inner = states[1:]
    for module, state in inner:
        _replace_hooks(module, state)
    before = torch.compiler.disable(lambda *_: _hold_gathered(inner))
    behind = torch.compiler.disable(lambda *_: _hold_shards(inner))
    model.register_forward_pre_hook(before)
    model.register_forward_hook(behind, always_call=True)
    return model


def _replace_hooks(module: Any, state: Any) -> None:
    _torch.pre_forward_handle(state).remove()
    _torch.post_forward_handle(state).remove()
    for parameter in (p for group in _torch.fsdp_groups(state) for p in group.fsdp_params):
        if (layer := getattr(_torch.sharded_local_tensor(parameter), "_layer", None)) is not None:
            layer.gathered_in_graph = True
    number = next(_numbers)
    _modules[number] = module
    # a tensor, so that one graph serves all equal blocks
    module._opaque_number = torch.tensor(number, device="cpu")
    policy, forward = _torch.mp_policy(state), type(module).forward
    cast = policy.param_dtype if policy.cast_forward_inputs else None

    def hooked(self: Any, first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if cast is not None:
            first, args, kwargs = _torch.tree_map(
                lambda x: x.to(cast) if isinstance(x, Tensor) and x.is_floating_point() else x,
                (first, args, kwargs),
            )
        first = torch.ops.stowage.before_block(first, self._opaque_number)
        result: Tensor = forward(self, first, *args, **kwargs)
        if not isinstance(result, Tensor):
            name = type(self).__name__
            raise InvalidArgument(
                f"opaque_hooks: {name} must return one tensor, got {type(result)}"
            )
        result = torch.ops.stowage.behind_block(result, self._opaque_number)
        return result if policy.output_dtype is None else result.to(policy.output_dtype)

    module.forward = types.MethodType(hooked, module)


def _hold_gathered(inner: list[Any]) -> None:
    """The modules hold the parameters that a gather fills, which takes one the first time."""
    for module, state in inner:
        for parameter in (p for group in _torch.fsdp_groups(state) for p in group.fsdp_params):
            if not _torch.was_gathered(parameter):
                module.unshard()
                module.reshard()
            _torch.set_on_modules(parameter)(_torch.unsharded_param(parameter))


def _hold_shards(inner: list[Any]) -> None:
    """Modules that were not called hold their shards again."""
    for group in (group for _, state in inner for group in _torch.fsdp_groups(state)):
        if not group.is_unsharded:
            for parameter in group.fsdp_params:
                _torch.set_on_modules(parameter)(parameter.sharded_param)


# --- the nodes: what they return is a copy, since results of operators must not be their inputs ---


def _state(number: Tensor) -> tuple[nn.Module, Any]:
    module: Any = _modules[int(number)]
    return module, _torch.fsdp_state(module)


@torch.library.custom_op("stowage::before_block", mutates_args=())
def _before_block(first: Tensor, module: Tensor) -> Tensor:
    found, state = _state(module)
    with torch.no_grad():
        _torch.pre_forward(state)(found, (), {})
    return first.clone()


@torch.library.custom_op("stowage::behind_block", mutates_args=())
def _behind_block(result: Tensor, module: Tensor) -> Tensor:
    found, state = _state(module)
    with torch.no_grad():
        _torch.post_forward(state)(found, (), None)
    return result.clone()


@torch.library.custom_op("stowage::before_backward_of_block", mutates_args=())
def _before_backward(gradient: Tensor, module: Tensor) -> Tensor:
    _torch.pre_backward(_state(module)[1])(gradient)
    return gradient.clone()


def _same(given: Tensor, module: Tensor) -> Tensor:
    return torch.empty_like(given)


for _op in (_before_block, _behind_block, _before_backward):
    _op.register_fake(_same)


def _keep_number(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.number = inputs[1]


def _gather_again(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return torch.ops.stowage.before_backward_of_block(gradient, ctx.number), None


_before_block.register_autograd(lambda ctx, gradient: (gradient, None))
_behind_block.register_autograd(_gather_again, setup_context=_keep_number)
