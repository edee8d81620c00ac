# SPDX-License-Identifier: Apache-2.0
"""Every private name of torch that the package uses, and what it says where a torch lacks one.

What the core needs is looked up at once, so that a torch without it fails at `import stowage`; what
a corner needs when it is first read as `_torch.name`, so that only that corner fails. Operators are
no private names: torch keeps their schemas.
"""

import sys
from collections.abc import Callable, Container
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad, profiler
from torch.compiler import is_dynamo_compiling

from stowage._ops.errors import Unsupported

# A name's own path, and what the package does by it. Here it is called without `_` before it.
_CORE = {
    "torch.Tensor._make_wrapper_subclass": "a weight that rests is a tensor",
    "torch._C.DispatchKey": "calls that nothing watches go to the kernel",
    "torch._C.DispatchKeySet": "calls that nothing watches go to the kernel",
    "torch._C.DisableTorchFunction": "functions run on the tensors they are given",
    "torch._C.DisableTorchFunctionSubclass": "functions run on the tensors they are given",
    "torch._C._ExcludeDispatchKeyGuard": "a gradient is computed below views",
    "torch._C._are_functorch_transforms_active": "transforms of torch.func are known",
    "torch._C._disabled_torch_function_impl": "rows of a weight take functions as plain tensors do",
    "torch._C._dispatch_has_kernel_for_dispatch_key": "operators are known that decompose",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "a compiler that watches is known",
    "torch._C._functorch.is_functorch_wrapped_tensor": "what a transform wrapped is known",
    "torch._C._RestorePythonTLSSnapshot": "slices and results are what they are to autograd",
    "torch._C._get_tracing_state": "a tracer is known",
    "torch._C._is_any_autocast_enabled": "autocast is known",
    "torch._C._is_tracing": "a tracer is known",
    "torch._C._jit_get_schemas_for_operator": "operators are known that are registered already",
    "torch._C._len_torch_dispatch_stack": "modes are known that watch operators",
    "torch._C._nn.linear": "linear is known when it is called",
    "torch._C._set_throw_on_mutable_data_ptr": "a write to a weight without memory raises",
    "torch._foreach_norm": "largest magnitudes are found",
    "torch._functionalize_unsafe_set": "a view shows what a compiled graph wrote",
    "torch._grouped_mm": "grouped products are known when they are called",
    "torch._has_compatible_shallow_copy_type": "a parameter moves with what was noted on it",
    "torch._prims_common.suggest_memory_format": "a convolution knows the layout of its input",
    "torch._subclasses.FakeTensor": "tensors of a tracer are known",
    "torch.autograd._unsafe_preserve_version_counter": "a gather counts as no write",
    "torch.nn.modules.batchnorm._NormBase": "running statistics are known",
    "torch.nn.modules.conv._ConvNd": "convolutions are known",
    "torch.nn.utils.parametrizations._SpectralNorm": "vectors of a power iteration are known",
    "torch.utils._pytree.tree_iter": "tensors among arguments are found",
    "torch.utils._pytree.tree_leaves": "tensors among arguments are found",
    "torch.utils._pytree.tree_map": "tensors among arguments are replaced",
    "torch.utils._pytree.tree_map_only": "tensors among arguments are replaced",
}
_CORNERS = {
    "torch.Tensor._make_subclass": "bitsandbytes' parameters are tensors",
    "torch._C._functorch.get_unwrapped": "texts are read under torch.func",
    "torch._C._nn._parse_to": "arguments of `to` are read",
    "torch._foreach_copy_": "scales of delayed scaling are kept",
    "torch._functorch._aot_autograd.autograd_cache.BypassAOTAutogradCache": (
        "compiled float8 training stays out of caches"
    ),
    "torch._scaled_mm": "float8 is multiplied on a device",
    "torch.distributed._composable_state._module_state_mapping": "FSDP2's modules are found",
    "torch.distributed.fsdp._common_utils.FSDP_FLATTENED": "parameters of FSDP1 are known",
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": (
        "the place of a shard is known"
    ),
    "torch.nn.Module._apply": "moves of a bitsandbytes layer are followed",
    "torch.nn.Module._load_from_state_dict": "a bitsandbytes layer reads its state",
    "torch.nn.Module._save_to_state_dict": "a bitsandbytes layer writes its state",
    "torch.utils._device._device_constructors": "factories of tensors are known",
}
_NAMES = _CORE | _CORNERS
_PATHS = {path.rpartition(".")[2].lstrip("_"): path for path in _NAMES}
_READERS: dict[str, str] = {}  # private attributes of torch's objects, and what is done by each


def lacks(name: str, what: str) -> Unsupported:
    return Unsupported(
        f"stowage: torch {torch.__version__} has no {name}, by which {what}; "
        "take a torch that this release names"
    )


def __getattr__(name: str) -> Any:
    """The name of torch that is needed for the first time."""
    if (path := _PATHS.get(name)) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = _found(path)
    return found


def _found(path: str) -> Any:
    """What torch has at `path`, whose first part is a module or some, and the rest attributes."""
    found: Any = torch
    seen = "torch"
    for part in path.split(".")[1:]:
        seen += f".{part}"
        try:
            found = getattr(found, part) if hasattr(found, part) else import_module(seen)
        except ModuleNotFoundError as error:
            if error.name is None or not seen.startswith(error.name):
                raise  # of a package that torch wants, not of torch
            raise lacks(path, _NAMES[path]) from None
    return found


for _name in [n for n, path in _PATHS.items() if path in _CORE]:
    __getattr__(_name)


def overrides(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a method of a module that torch calls by a private name."""
    __getattr__(method.__name__.lstrip("_"))
    return method


# --- private attributes of objects ----------------------------------------------------------------


def _reader(name: str, what: str) -> Callable[[Any], Any]:
    _READERS[name] = what

    def read(holder: Any) -> Any:
        try:
            return getattr(holder, name)
        except AttributeError:
            raise lacks(f"{type(holder).__name__}.{name}", what) from None

    return read


# of tensors and operators
version = _reader("_version", "writes to a tensor are counted")
cdata = _reader("_cdata", "tensors are known that share memory")
schema = _reader("_schema", "the arguments are known that an operator writes")
overload_name = _reader("_overloadname", "operators are known that accumulate")
can_decompose = _reader("_can_decompose", "operators are known that decompose")
op_of_key = _reader("_op_dk", "an operator decomposes")
handle = _reader("_handle", "calls that nothing watches go to the kernel")
destroy = _reader("_destroy", "operators of bitsandbytes make room for the peer's")
IS_PARAMETER = "_is_param"  # set on a tensor of another class that is a Parameter


def mark_parameter(tensor: Tensor) -> None:
    """Lets a tensor be a Parameter itself; nn.Parameter would make another."""
    setattr(tensor, IS_PARAMETER, True)
    if not isinstance(tensor, nn.Parameter):
        raise lacks(f"Tensor.{IS_PARAMETER}", "a copy of a Parameter is one")


# of modules
parameters = _reader("_parameters", "the parameters of a module are held")
buffers = _reader("_buffers", "the buffers of a module are held")
non_persistent = _reader("_non_persistent_buffers_set", "buffers are known that are not saved")
pre_hooks = _reader("_forward_pre_hooks", "something runs before a forward")
pre_hooks_with_kwargs = _reader("_forward_pre_hooks_with_kwargs", "something runs before a forward")
hooks = _reader("_forward_hooks", "something runs behind a forward")
hooks_always_called = _reader("_forward_hooks_always_called", "something runs behind a forward")
compiled_call = _reader("_compiled_call_impl", "compiled modules are known")
# of DTensor and FSDP2
local_tensor = _reader("_local_tensor", "the shard is known that a process holds")
get_fsdp_state = _reader("_get_fsdp_state", "modules are known that FSDP2 shards")
sharded_local_tensor = _reader("_sharded_local_tensor", "shards are known that FSDP2 holds")
unsharded_param = _reader("_unsharded_param", "parameters are known that FSDP2 gathered")
set_on_modules = _reader("_setattr_on_modules", "graphs hold gathered parameters")
use_post_forward_mesh = _reader("_use_post_forward_mesh", "the mesh is known between passes")
mp_policy = _reader("_mp_policy", "dtypes are known that FSDP2 casts to")
fsdp_modules = _reader("_modules", "modules are known that FSDP2 shards together")
pre_forward = _reader("_pre_forward", "compiled graphs gather")
post_forward = _reader("_post_forward", "compiled graphs free what they gathered")
pre_backward = _reader("_pre_backward", "compiled graphs gather")
pre_forward_handle = _reader("_pre_forward_hook_handle", "graphs are not ended by FSDP2's hooks")
post_forward_handle = _reader("_post_forward_hook_handle", "graphs are not ended by FSDP2's hooks")
_param_groups = _reader("_fsdp_param_groups", "the parameters are known that FSDP2 gathers")
fsdp_mesh_info = _reader("mesh_info", "it is known over how many processes FSDP2 spreads")


def local_of(tensor: Any) -> Any:
    """What this process holds: of a DTensor its local tensor, of all others the tensor itself.
    Asked without importing DTensor, which takes a second."""
    found = getattr(tensor, "_local_tensor", None)
    if found is not None:
        return found
    is_spread = hasattr(tensor, "placements") and hasattr(tensor, "full_tensor")
    return local_tensor(tensor) if is_spread else tensor


def fsdp_state(module: nn.Module) -> Any:
    """The state that FSDP2 gave a module which it shards; None of all others."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    return get_fsdp_state(module)()


def fsdp_groups(state: Any) -> list[Any]:
    """What FSDP2 gathers together: torch 2.11 has at most one group, later ones any number. Without
    a state nothing is."""
    if state is None:
        return []
    if not hasattr(state, "_fsdp_param_groups") and hasattr(state, "_fsdp_param_group"):
        return [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(_param_groups(state))


def let_go(state: Any, ids: Container[int]) -> None:
    """FSDP2 gathers the sharded parameters with these ids no more."""
    for group in fsdp_groups(state):
        group.fsdp_params[:] = [p for p in group.fsdp_params if id(p.sharded_param) not in ids]
        if not group.fsdp_params:  # torch 2.11 has one group, or none
            if hasattr(state, "_fsdp_param_groups"):
                state._fsdp_param_groups.remove(group)
            else:
                state._fsdp_param_group = None


def is_replica(module: nn.Module) -> bool:
    """Whether `nn.parallel.replicate` has made it."""
    return "_is_replica" in module.__dict__


def was_gathered(parameter: Any) -> bool:
    """Whether FSDP2 has made the tensor that a gather of this parameter fills."""
    return hasattr(parameter, "_unsharded_param")


def in_flat_parameter(tensor: Tensor) -> bool:
    """Whether FSDP1 keeps it in a flat parameter of its own, or it is one."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return False
    if isinstance(tensor, fsdp.FlatParameter):
        return True
    mark: str = globals().get("FSDP_FLATTENED") or __getattr__("FSDP_FLATTENED")
    return bool(getattr(tensor, mark, False))


# --- the hot path: what is asked before each product, without a call of ours in between ----------

functorch_active = _found("torch._C._are_functorch_transforms_active")
len_torch_dispatch_stack = _found("torch._C._len_torch_dispatch_stack")
is_tracing = _found("torch._C._is_tracing")
for _module, _attribute in ((forward_ad, "_current_level"), (profiler, "_is_profiler_enabled")):
    if not hasattr(_module, _attribute):
        raise lacks(f"{_module.__name__}.{_attribute}", "a mode is known that watches products")


def transforming() -> bool:
    """Under torch.func, or inside forward_ad.dual_level()."""
    return functorch_active() or forward_ad._current_level >= 0


def unseen(x: Tensor) -> bool:
    """Nothing above the CPU kernel would see an op on x, except autograd."""
    return (
        not is_dynamo_compiling()
        and type(x) is Tensor
        and x.is_cpu
        and not functorch_active()
        and forward_ad._current_level < 0
        and not len_torch_dispatch_stack()
        and not profiler._is_profiler_enabled
        and not is_tracing()
    )
