# SPDX-License-Identifier: Apache-2.0
"""StowedTensor: a weight that rests small and computes exactly, as one tensor subclass.

A traceable wrapper: the outer tensor has the logical shape and the *compute* dtype but no memory of
its own; the codes and scales are inner tensors, `_` + the part's name. Stock modules hold it as
their nn.Parameter. What functions and operators do with it: functions.py, operators.py, writes.py.
"""

import copy
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from stowage._ops import _torch, library
from stowage._ops.errors import InvalidArgument, translated
from stowage._ops.memory import copied, sent
from stowage._ops.storage import Storage, StorageName, check_parts
from stowage._tensor import tables, trails

MATRIX_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # what linear computes in
VALUE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_OWN = frozenset(
    {"_storage", "_dt", "_exact", "_matrix", "_stack", "_root", "_trail", "_of", "_carried"}
    | {"_origin", "_prepared", "_given"}
)
# Of a matrix, what products take: codes, scales, storage key, rows, exact, compute dtype, and last
# the scales where they are one tensor and exact is False, which has an op of its own.
Matrix = tuple[Tensor, list[Tensor], int, int, bool, torch.dtype, Tensor | None]
# Of a stack on the CPU whose matrices rest by themselves, what products with them take: codes,
# scales, storage key, shape.
Stack = tuple[Tensor, list[Tensor], int, tuple[int, ...]]
_handler_of = tables.FUNCTIONS.get
# A kernel that is handed the empty memory of a wrapper must raise, not write to address 0.
_guard_memory = _torch.set_throw_on_mutable_data_ptr


def wrap(
    parts: Sequence[Tensor],
    storage: Storage,
    shape: Sequence[int],
    dtype: torch.dtype,
    exact: bool = False,
    requires_grad: bool = False,
    offset: int | torch.SymInt = 0,
) -> "StowedTensor":
    """A stowed tensor around `parts`, unchecked."""
    if tables.unregistered:
        tables.register()
    w: StowedTensor = _torch.make_wrapper_subclass(
        StowedTensor,
        shape,
        strides=_contiguous_strides(shape) if offset else None,
        storage_offset=offset or None,
        dtype=dtype,
        device=parts[0].device,
        requires_grad=requires_grad,
    )
    w._storage, w._dt, w._exact = storage, dtype, exact
    w._set_parts(parts, shape)
    _guard_memory(w)
    return w


@functools.cache
def _has_matrices(storage: int, shape: tuple[int, ...]) -> bool:
    return bool(library.storage_has_matrices(storage, shape))


def lying(w: "StowedTensor") -> "StowedTensor":
    """The stack [E, O, K] that a weight [E, K, O] which lies transposed lies as: the same parts."""
    e, k, o = w.shape
    return wrap(w._parts(), w._storage.lying, (e, o, k), w._dt, w._exact)


class StowedTensor(Tensor):
    """A weight at rest. Make one with `stowage.quantize`, or from parts that are at hand.

    Args:
        parts: codes and scales in the order and shapes of the storage's layout.
        storage: what the codes mean.
        shape: of the values.
        dtype: the compute dtype: what a reader sees, gradients flow in and results come in.
        exact: as in `stowage.quantize`.
        requires_grad: as of any tensor.

    Raises:
        InvalidArgument: the parts are not those of such a weight.

    Example:
        >>> codes = torch.randint(-127, 128, (2, 3), dtype=torch.int8).view(torch.uint8)
        >>> scale = torch.ones(2, 1)
        >>> weight = stowage.StowedTensor([codes, scale], "int8:row", (2, 3), torch.float32)
        >>> torch.equal(weight.dequantize(), codes.view(torch.int8).float())
        True
    """

    _storage: Storage
    _dt: torch.dtype
    _exact: bool
    _matrix: Matrix | None
    _stack: Stack | None
    _stays: bool = False
    _plain: bool = False  # was a plain parameter, and is pickled as one
    _root: "StowedTensor | None" = None  # of a slice: the weight that it is a slice of ...
    _trail: tuple[Any, ...] = ()  # ... and the view ops that lead here (views.Step)
    _of: "StowedTensor | None" = None  # what this is an alias of, through detach() or .data
    _carried: Mapping[str, Any] | None = None  # notes of others, for the next alias alone
    _prepared: str | None = None  # by sharding.prepare: its name; chunks are rows that travel
    _given: bool = False  # rows that a DTensor gave as a tensor: a copy, to which writes are lost
    _origin: Any = None  # of a weight made to be trained: training.origin.Origin; aliases share it

    def __new__(
        cls,
        parts: "Sequence[Tensor] | Mapping[str, Tensor] | Tensor",
        storage: str | Storage | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        exact: bool = False,
        requires_grad: bool = False,
    ) -> Any:
        if isinstance(parts, Tensor):  # libraries rebuild parameters as type(p)(value, ...)
            if storage is None:
                return torch.nn.Parameter(parts, requires_grad)
            raise InvalidArgument("StowedTensor: parts must be a list of tensors, got one tensor")
        if storage is None or shape is None or dtype is None:
            raise InvalidArgument("StowedTensor: storage, shape and dtype must be given")
        kind = Storage(storage)
        given = list(parts.values()) if isinstance(parts, Mapping) else list(parts)
        check_parts(given, kind, shape, dtype)
        return wrap(given, kind, tuple(shape), dtype, exact, requires_grad)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _set_parts(self, parts: Sequence[Tensor], shape: Sequence[int]) -> None:
        """Puts other inner tensors in: the one way to move a weight that is in use."""
        for name, part in zip(self._storage.part_names, parts, strict=True):
            setattr(self, "_" + name, part)
        self._matrix = None
        if len(shape) == 2 and self._dt in MATRIX_DTYPES:
            codes, *scales = parts  # one attribute: each look-up costs the hot path 50 ns
            only = scales[0] if len(scales) == 1 and not self._exact else None
            facts = (self._storage.key, shape[0], self._exact, self._dt)
            self._matrix = (codes, scales, *facts, only)
        self._stack = None
        if len(shape) == 3 and self._dt in MATRIX_DTYPES and not self._exact:
            here = all(type(part) is Tensor and part.is_cpu for part in parts)
            if here and _has_matrices(self._storage.key, tuple(shape)):
                self._stack = (parts[0], list(parts[1:]), self._storage.key, tuple(shape))

    def stay(self) -> None:
        """Marks a module's buffer, so that `module.to(dtype)` leaves it stowed.

        It then changes the compute dtype only, as it does with an nn.Parameter.
        """
        self._stays = True

    def _parts(self) -> list[Tensor]:
        return [getattr(self, "_" + name) for name in self._storage.part_names]

    def _like(
        self,
        parts: Sequence[Tensor] | None = None,
        dtype: torch.dtype | None = None,
        shape: Sequence[int] | None = None,
    ) -> "StowedTensor":
        """The same weight with something else in place of its parts, dtype or shape."""
        size = self.shape if shape is None else shape
        return wrap(
            self._parts() if parts is None else parts,
            self._storage,
            size,
            dtype or self._dt,
            self._exact,
        )

    # --- what a user asks ---------------------------------------------------------------------

    @property
    def resting(self) -> str:
        """How the values rest, such as "nf4:block64"."""
        return self._storage.name

    @property
    def storage(self) -> StorageName:
        """torch's method; as a text the older name of `resting`, deprecated."""
        name = StorageName(self._storage.name)
        name._codes = weakref.ref(self._parts()[0])
        return name

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """The inner tensors by name, codes first. They are the weight: write to it, not to them."""
        return MappingProxyType(dict(zip(self._storage.part_names, self._parts(), strict=True)))

    @property
    def nbytes_at_rest(self) -> int:
        """Bytes of codes and scales; `nbytes` is what the plain tensor would take."""
        return sum(part.numel() * part.itemsize for part in self._parts())  # in graphs, too

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of the values.

        Args:
            dtype: what they are rounded to, once; without, the compute dtype.

        Returns:
            Values in the weight's shape, in new memory on the same device.
        """
        out = dtype or self._dt
        if self._origin is not None and (exact := self._origin.shown(self)) is not None:
            return exact.to(out, copy=True)
        direct = out if out in VALUE_DTYPES else torch.float32
        codes, *scales = self._parts()
        try:
            values = library.dequantize(codes, scales, self._storage.key, self.shape, direct)
        except RuntimeError as error:
            raise translated(error) from None
        return values if out is direct else values.to(out)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        trained = ", requires_grad=True" if self.requires_grad else ""
        return (
            f"StowedTensor({list(self.shape)}, {self._storage.name!r}, {self._dt}, "
            f"{self.device}, {self.nbytes_at_rest} bytes at rest{trained})"
        )

    # --- sharing and copying ------------------------------------------------------------------

    def _use_count(self) -> int:
        """What torch.utils.swap_tensors, by which module.to() puts a weight in another's place,
        asks for holders that would go on seeing the old one. Graphs that keep a frozen weight are
        to see it: it is what they computed with."""
        return super()._use_count() if self.requires_grad else 1  # type: ignore[misc]

    def share_memory_(self) -> "StowedTensor":
        """Moves codes and scales to memory that other processes can map, as of any tensor.

        Returns:
            The weight itself.
        """
        for part in self._parts():
            part.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether codes and scales lie in memory that other processes can map.

        Returns:
            True where all parts do.
        """
        return all(part.is_shared() for part in self._parts())

    def _extras(self) -> dict[str, Any]:
        """Attributes that others have set; `_is_param` of nn.Parameter is one."""
        inner = {"_" + name for name in self._storage.part_names}
        return {k: v for k, v in self.__dict__.items() if k not in _OWN and k not in inner}

    def __deepcopy__(self, memo: dict[int, Any]) -> "StowedTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support deepcopy")
        if self._root is None:
            result = self._like([copied(part, memo) for part in self._parts()])
        else:  # it shares memory and scales with the copy of its weight, as it does with the weight
            result = trails.followed(copy.deepcopy(self._root, memo), trails.steps(self._trail))
        memo[id(self)] = result
        result.requires_grad_(self.requires_grad)  # before it is known for a parameter
        result.__dict__.update(copy.deepcopy(self._extras(), memo))
        result._origin, result._prepared = copy.deepcopy(self._origin, memo), self._prepared
        if self.grad is not None:
            result.grad = copy.deepcopy(self.grad, memo)
        return result

    def __reduce_ex__(
        self, protocol: Any, given: Callable[[Tensor], Any] = Tensor.detach
    ) -> tuple[Any, ...]:
        facts = (self._storage.name, tuple(self.shape), self._dt, self._exact, self.requires_grad)
        parts = [given(part) for part in self._parts()]
        if self._plain:  # torch.save (2) keeps ties; a copy.copy (4) must not be an alias
            own = protocol > 2 or self._parts()[0].dtype is not self._dt
            return torch.nn.Parameter, (self.dequantize() if own else parts[0], self.requires_grad)
        if self._root is not None:
            steps = trails.steps(self._trail)
            return trails.rebuild, (self._root, steps, self.requires_grad, self._extras())
        return _rebuild, (parts, *facts, self._extras())

    # --- the protocols of torch ---------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, bool]]:
        names = ["_" + name for name in self._storage.part_names]
        return names, (self._storage.name, self._dt, self._exact)

    def _stable_hash_for_caching(self) -> str:
        """For the caches of compiled graphs: what a graph may depend on, and no value."""
        facts = [repr(self.__tensor_flatten__()), f"{self.shape} {self.requires_grad}"]
        facts += [f"{p.device} {p.shape} {p.storage_offset()}" for p in self._parts()]
        return "; ".join(facts)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> "StowedTensor":
        storage, dtype, exact = Storage(context[0]), context[1], context[2]
        parts = [inner["_" + name] for name in storage.part_names]
        return wrap(parts, storage, size, dtype, exact)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        handler = _handler_of(func)
        if handler is not None:
            result = handler(*args, **kwargs) if kwargs else handler(*args)
            if result is not NotImplemented:
                return result
        with _torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return tables.dispatch(func, args, kwargs or {})


StowedTensor.__module__ = "stowage.tensor"  # pickles name it


# What queues, pipes and processes that are spawned pickle with; it asks by type.
ForkingPickler.register(StowedTensor, lambda weight: weight.__reduce_ex__(2, sent))


def _rebuild(
    parts: list[Tensor],
    storage: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    exact: bool,
    requires_grad: bool,
    extras: dict[str, Any],
) -> StowedTensor:
    """What pickles of a stowed tensor call. Files depend on it: keep its name and arguments."""
    for part in parts:
        part._stowage_writable = True  # type: ignore[attr-defined]  # see _slices.row_slice
    result = wrap(parts, Storage(storage), shape, dtype, exact, requires_grad)
    result.__dict__.update(extras)
    return result


_rebuild.__module__ = "stowage.tensor"  # pickles name it


def _contiguous_strides(shape: Sequence[int]) -> list[int]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * shape[dim]
    return strides


def initialising(weight: Any) -> bool:
    """Whether writes go to the exact value of a weight, or of rows of one, from which the resting
    form is made."""
    return weight._origin is not None and weight._origin.initialising


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """Indices of dim 0, and the elements below one."""
    return (shape[0] if len(shape) else 1), math.prod(shape[1:])


torch.serialization.add_safe_globals([StowedTensor, _rebuild])
