# SPDX-License-Identifier: Apache-2.0
"""float8 layers under tensor parallelism: what a DTensor does not do by itself.

`parallelize_module` makes the weight a DTensor around a float8 weight. torch would split F.linear
of DTensors into a transpose and a product of plain values, so that nothing would be fp8. A module
whose weight has been distributed gets a forward that multiplies the local pieces and says how the
result is placed. Every amax is that of the whole: DTensor's cut goes along as `Cut`.
"""

from __future__ import annotations

import types
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument, Unsupported
from stowage._shard.groups import shard_dim
from stowage._shard.local_shards import is_spread
from stowage.training.cuts import Cut
from stowage.training.gathered_weight import Float8Weight
from stowage.training.operands import linear
from stowage.training.trained_weight import TrainedWeight


def _registered(module: nn.Module, name: str, parameter: Any) -> None:
    """Looks at each parameter that a module is about to hold: what tensor parallelism has made of
    the weight of a float8 layer prepares its module. FSDP2's, which rests padded, needs nothing."""
    if parameter is None or not is_spread(parameter):
        return
    local, old = _torch.local_tensor(parameter), _torch.parameters(module).get(name)
    if isinstance(local, Float8Weight):
        if type(local) is TrainedWeight and local._padded is None:
            _prepare(module, local._layer, parameter)
    elif isinstance(_torch.local_of(old), Float8Weight):
        raise Unsupported(
            f"stowage: {name} of {type(module).__name__} in fp8 must stay so where it is spread "
            f"over processes, got a DTensor of plain {local.dtype} values"
        )


def _prepare(module: nn.Module, layer: Any, parameter: Any) -> None:
    """Raises Unsupported, naming the weight, for what cannot work."""
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        raise Unsupported(
            f"stowage: weight {layer.name} in fp8 must be distributed over one dimension of a "
            f'mesh, got {mesh.ndim}; take mesh["tp"], and fully_shard for the others'
        )
    if layer.shared:
        raise Unsupported(
            f"stowage: weight {layer.name} in fp8 must belong to one module to be distributed, "
            "several share it and would not afterwards; give each its own, or leave it whole"
        )
    place = parameter.placements[0]
    dim = shard_dim(place)
    if place.is_partial() or (dim is not None and dim not in (0, 1)):
        raise Unsupported(
            f"stowage: weight {layer.name} in fp8 must be distributed as Shard(0), Shard(1) or "
            f"Replicate, got {place}"
        )
    layer.cut = Cut(dim, mesh.get_group())
    module.forward = types.MethodType(_forward, module)


@cache
def watch_modules() -> None:
    """From the first float8 layer of a process on."""
    register_module_parameter_registration_hook(_registered)


@torch.compiler.disable(reason="tensor-parallel float8 layers run between graphs")
def _forward(module: nn.Linear, input: Tensor) -> Tensor:
    weight: Any = module.weight
    if hasattr(_torch.local_of(weight), "_layer"):
        return distributed_linear(input, weight, module.bias)
    return nn.functional.linear(input, weight, module.bias)


def distributed_linear(input: Any, weight: Any, bias: Any) -> Tensor:
    """x W^T + bias of DTensors over one mesh: [.., N], cut along N where the weight's rows are,
    Partial where its columns are. The bias is added in high precision."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    layer = _torch.local_tensor(weight)._layer
    mesh, (place,) = weight.device_mesh, weight.placements
    if not isinstance(input, DTensor) or input.device_mesh != mesh:
        raise InvalidArgument(
            f"stowage: the input of {layer.name} must be a DTensor over the mesh of the weight, "
            f"got {type(input).__name__}; ColwiseParallel and RowwiseParallel make it one"
        )
    last = input.dim() - 1
    x_place, g_place, y_place = {
        0: (Replicate(), Partial(), Shard(last)),
        1: (Shard(last), Shard(last), Partial()),
        None: (Replicate(), Replicate(), Replicate()),
    }[shard_dim(place)]
    x = input.redistribute(placements=[x_place]).to_local(grad_placements=[g_place])
    # in inference mode a view of the local weight, which to_local() takes, would be plain values
    w = weight.to_local() if torch.is_grad_enabled() else _torch.local_tensor(weight)
    y = linear(x, w, cut=layer.cut)
    shape = torch.Size([*input.shape[:-1], weight.shape[0]])
    stride = torch.empty(shape, device="meta").stride()
    result = DTensor.from_local(y, mesh, [y_place], run_check=False, shape=shape, stride=stride)
    return result if bias is None else result + bias.to(result.dtype)
