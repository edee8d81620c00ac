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

from stowage._errors import InvalidArgument, Unsupported

_modules: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_NEEDED = ("_pre_forward_hook_handle", "_post_forward_hook_handle", "_fsdp_param_groups")


def opaque_hooks(model: nn.Module) -> nn.Module:
    """Lets compiled graphs of `model` hold the gathers of the modules in it that FSDP2 shards.

    Call it once, after `fully_shard` of the modules and of `model`, and before `torch.compile`.
    Each of these modules must take a tensor first, which what it computes depends on, and return
    one tensor. Raises InvalidArgument where `model` or nothing in it is sharded, Unsupported where
    torch has changed what this stands on.
    """
    sharded: list[Any] = [m for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    states = [(module, module._get_fsdp_state()) for module in sharded]
    if not states or states[0][0] is not model or len(states) < 2:
        raise InvalidArgument("opaque_hooks: model and modules in it must be sharded, they are not")
    for module, state in states:
        if not all(hasattr(state, name) for name in _NEEDED) or len(state._modules) != 1:
            raise Unsupported(
                f"opaque_hooks: {type(module).__name__} must be sharded alone, by the FSDP2 of "
                f"torch 2.13, got torch {torch.__version__}"
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
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for parameter in (p for group in state._fsdp_param_groups for p in group.fsdp_params):
        if (layer := getattr(parameter._sharded_local_tensor, "_layer", None)) is not None:
            layer.gathered_in_graph = True
    number = next(_numbers)
    _modules[number] = module
    # a tensor, so that one graph serves all equal blocks
    module._opaque_number = torch.tensor(number, device="cpu")
    policy, forward = state._mp_policy, type(module).forward
    cast = policy.param_dtype if policy.cast_forward_inputs else None

    def hooked(self: Any, first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if cast is not None:
            first, args, kwargs = torch.utils._pytree.tree_map(
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
        for parameter in (p for group in state._fsdp_param_groups for p in group.fsdp_params):
            if not hasattr(parameter, "_unsharded_param"):
                module.unshard()
                module.reshard()
            parameter._setattr_on_modules(parameter._unsharded_param)


def _hold_shards(inner: list[Any]) -> None:
    """Modules that were not called hold their shards again."""
    for group in (group for _, state in inner for group in state._fsdp_param_groups):
        if not group.is_unsharded:
            for parameter in group.fsdp_params:
                parameter._setattr_on_modules(parameter.sharded_param)


# --- the nodes: what they return is a copy, since results of operators must not be their inputs ---


def _state(number: Tensor) -> tuple[nn.Module, Any]:
    module: Any = _modules[int(number)]
    return module, module._get_fsdp_state()


@torch.library.custom_op("stowage::before_block", mutates_args=())
def _before_block(first: Tensor, module: Tensor) -> Tensor:
    found, state = _state(module)
    with torch.no_grad():
        state._pre_forward(found, (), {})
    return first.clone()


@torch.library.custom_op("stowage::behind_block", mutates_args=())
def _behind_block(result: Tensor, module: Tensor) -> Tensor:
    found, state = _state(module)
    with torch.no_grad():
        state._post_forward(found, (), None)
    return result.clone()


@torch.library.custom_op("stowage::before_backward_of_block", mutates_args=())
def _before_backward(gradient: Tensor, module: Tensor) -> Tensor:
    _state(module)[1]._pre_backward(gradient)
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
