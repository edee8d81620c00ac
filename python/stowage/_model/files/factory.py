# SPDX-License-Identifier: Apache-2.0
"""Builds a model from a factory without memory for its weights, and with real buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument

# What parameters are made from when nothing is computed: random values come to the meta device, ...
_RANDOM = frozenset({torch.rand, torch.randn, torch.normal})
# ... memory without content too, once it is a parameter: before, it may become a mask.
_EMPTY = frozenset({torch.empty, torch.empty_strided})
# What initializes them. On the meta device it would do nothing, but importing torch's Python code
# for the first of these there takes 28 MiB.
_INITIALIZERS = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in ("normal", "uniform", "zero", "fill", "copy", "add", "sub", "mul", "div", "clamp")
)

_STAND_IN = "_stowage_stand_in"


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Those that have the memory of a tensor: itself, or what rests within it."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    """Those among arguments or results: themselves, or in a list or tuple, as indices are."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def _without_values(made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a call gave, on the meta device where an argument is there and has no values.

    torch computes shapes only for a call of which any argument is on the meta device; where another
    lies in memory, results are memory without content, and what should be written stays as it was.
    """
    given = list(_tensors(*args, *kwargs.values()))
    in_memory = [tensor for tensor in given if not tensor.is_meta]
    if not in_memory or len(in_memory) == len(given):
        return made
    written = _tensors(*args[:1]) if made is None else _tensors(made)
    if any(tensor is other for tensor in written for other in in_memory):
        raise RuntimeError("values are written from a tensor that has none")
    return _torch.tree_map_only(torch.Tensor, lambda t: t.to("meta"), made)


class _WithoutWeights(TorchFunctionMode):
    """Puts random tensors, and parameters that are uninitialised, on the meta device, and all else
    on the CPU, also inside `with torch.device("meta")`: buffers are mostly computed, and no file
    holds those that are not persistent (rotary frequencies, position ids, causal masks)."""

    def __init__(self) -> None:
        super().__init__()
        # By address, which is not given to another while this holds it. Memory that nobody has
        # touched takes none.
        self._empty: dict[int, torch.UntypedStorage] = {}
        self._hook: Any = None

    def __enter__(self) -> _WithoutWeights:
        self._hook = register_module_parameter_registration_hook(
            self._register  # type: ignore[arg-type]  # torch's text: it may return a new one
        )
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._hook.remove()

    def _register(self, module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
        """What takes the place of a parameter; None: nothing."""
        if not isinstance(parameter, nn.Parameter):
            return None
        made: nn.Parameter | None = parameter.__dict__.get(_STAND_IN)
        if made is None and self.is_empty(parameter):
            with _torch.DisableTorchFunction():
                made = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            made.__dict__.update(parameter.__dict__ | made.__dict__)  # its own parts stay
            parameter.__dict__[_STAND_IN] = made  # for a second place: a tie
            for part in _parts(parameter):
                self._empty.pop(part.untyped_storage().data_ptr(), None)
        return made

    def is_empty(self, tensor: torch.Tensor) -> bool:
        """Whether it lies in memory that was asked for without content, written or not."""
        if tensor.device.type != "cpu":
            return False
        parts = [part for part in _parts(tensor) if part.nbytes]
        return bool(parts) and all(p.untyped_storage().data_ptr() in self._empty for p in parts)

    def drop_unwritten(self, model: nn.Module) -> None:
        """Buffers that nobody has written have no values: they must come from the file."""
        for module in model.modules():
            for name, buffer in _torch.buffers(module).items():
                if buffer is None or buffer.is_inference():  # which does not count its writes
                    continue
                if _torch.version(buffer) == 0 and self.is_empty(buffer):
                    _torch.buffers(module)[name] = buffer.to("meta")

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in _INITIALIZERS or getattr(func, "__module__", "") == "torch.nn.init":
            target = args[0] if args else kwargs["tensor"]
            if target.is_meta:
                return target
        asked = kwargs.get("device")
        here = asked is None or torch.device(asked).type in ("cpu", "meta")
        if func in _RANDOM:
            if next(_tensors(*args, *kwargs.values()), None) is None:  # no mean, no `out`
                kwargs["device"] = "meta"
        elif func in _EMPTY and not here:
            kwargs["device"] = "meta"
        elif func in _EMPTY or (
            func in _torch.device_constructors() and here and asked is not None
        ):
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if func in _EMPTY and made.nbytes:
            self._empty[made.untyped_storage().data_ptr()] = made.untyped_storage()
        return _without_values(made, args, kwargs)


def build(factory: Callable[[], nn.Module]) -> nn.Module:
    """Calls `factory`; the parameters of the model are on the meta device, where initializing them
    costs nothing, and its computed buffers have values."""
    _torch.device_constructors()  # where a torch has none, that is no error of the factory
    try:
        with _WithoutWeights() as without:
            model = factory()
    except (NotImplementedError, RuntimeError) as error:
        raise InvalidArgument(
            "stowage.load: the factory must be able to build the model with parameters on the meta "
            f"device, got {type(error).__name__}: {error}. Build the model and pass it instead"
        ) from error
    if not isinstance(model, nn.Module):
        raise InvalidArgument(
            f"stowage.load: the factory must return a Module, got {type(model).__name__}"
        )
    without.drop_unwritten(model)
    return model
