# SPDX-License-Identifier: Apache-2.0
"""StowedRows: consecutive rows of a resting weight, as records: what a process holds of a weight
that is spread over many, and what the others get of it.

Its operators are in row_operators.py; it becomes a StowedTensor again where all rows are together.
"""

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.errors import Unsupported
from stowage._ops.storage import Storage, StorageName
from stowage._shard.pieces import Whole, rows_misfit, shared_of
from stowage._shard.records import decode, encode
from stowage._shard.reshard_check import check_resharding
from stowage._tensor import tables
from stowage._tensor.stowed import StowedTensor, wrap

_preserve_versions = _torch.unsafe_preserve_version_counter


class Room(NamedTuple):
    """Of which weight the rows are that memory was made for."""

    codes: weakref.ref[Tensor]  # of the weight that it is, or that it is a slice of
    offset: int  # of its first element there

    @staticmethod
    def of(weight: StowedTensor) -> "Room":
        root = weight if weight._root is None else weight._root
        return Room(weakref.ref(root._parts()[0]), int(weight.storage_offset()))


class Place:
    """Where rows are from: one object for what was allocated as one and all views of it."""

    def __init__(
        self,
        first: int | None = None,
        name: str = "",
        misfit: tuple[int, int] | None = None,
    ) -> None:
        self.first = first  # row of the weight; None: nobody has told yet
        self.name = name  # of the weight, for messages
        # Of the pieces that the weight was cut into, the first that is no weight of its own.
        self.misfit = misfit
        self.room: Room | None = None  # has got no rows yet
        self.origin: Any = None  # training.init.origin.Origin of these rows
        self.gathered = False  # at least once, so that it is known how

    def at(self, first: int | None) -> "Place":
        """Of other memory for rows of the same piece."""
        return Place(first, self.name, self.misfit)


class StowedRows(Tensor):
    """Rows [first, first + n) of a resting weight, as FSDP2 and DTensor hold them in a process.

    They are uint8 records [n, length], and parts that all rows share. The outer tensor shows the
    shape of those rows and the compute dtype. `first` is None for rows whose place nobody has told
    yet, which can travel but not be decoded.

    Args:
        records: uint8 [n, length]; None: made from `source` when they are asked for.
        shared: the parts that all rows share.
        whole: of which weight the rows are.
        place: where in it they stand.
        skip: rows from the place's first to the first one here.
        source: the weight that the records are made of.
        count: how many rows, without records.

    Example:
        >>> weight = stowage.sharding.prepare(stowage.quantize(torch.randn(4, 64), "nf4"))
        >>> rows = weight.chunk(2)[1]
        >>> rows.first, rows.shape, rows.nbytes_at_rest
        (2, torch.Size([2, 64]), 72)
    """

    _held: Tensor | None  # None until somebody asks for the records
    _source: StowedTensor | None  # what they are then made of
    _parent: Any = None  # the origin of the weight that they were cut from
    _whole: Whole
    _place: Place
    _skip: int  # rows from the place's first to the first one here

    @staticmethod
    def __new__(
        cls,
        records: Tensor | None,
        shared: Sequence[Tensor],
        whole: Whole,
        place: Place,
        skip: int = 0,
        source: StowedTensor | None = None,
        count: int = 0,
    ) -> "StowedRows":
        given = source if records is None else records
        assert given is not None
        rows: StowedRows = _torch.make_wrapper_subclass(
            cls,
            (count if records is None else records.shape[0], *whole.shape[1:]),
            dtype=whole.dtype,
            device=given.device,
        )
        rows._held, rows._source, rows._whole = records, source, whole
        rows._place, rows._skip = place, skip
        for name, part in zip(whole.shared_names, shared, strict=True):
            setattr(rows, "_" + name, part)
        return rows

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def resting(self) -> str:
        """How the values rest, such as "nf4:block64"."""
        return self._whole.storage.name

    @property
    def storage(self) -> StorageName:
        """The older name of `resting`, deprecated."""
        return StorageName(self._whole.storage.name)

    @property
    def first(self) -> int | None:
        """The row of the weight that is row 0 here."""
        start = self._place.first
        return None if start is None else start + self._skip

    @property
    def _origin(self) -> Any:
        return self._place.origin

    @property
    def _records(self) -> Tensor:
        if self._held is None:
            assert self._source is not None and self.first is not None
            whole, last = self._whole, self.first + self.shape[0]
            parts = self._source._parts()
            self._held = encode(parts, whole.storage, whole.shape, self.first, last)
            self._source = None
        return self._held

    @property
    def records(self) -> Tensor:
        """uint8 [rows, length]. They are the weight: write to it, not to them."""
        return self._records

    @property
    def nbytes_at_rest(self) -> int:
        """Bytes of the records that are here, and of what all rows share."""
        parts = [self._records, *self._shared()]
        return sum(part.numel() * part.itemsize for part in parts)  # in graphs, too

    def _shared(self) -> list[Tensor]:
        return [getattr(self, "_" + name) for name in self._whole.shared_names]

    def _like(self, records: Tensor, first: int | None) -> "StowedRows":
        """Other records of the same weight, in memory of their own, from row `first` on."""
        return StowedRows(records, self._shared(), self._whole, self._place.at(first))

    def _is_all(self) -> bool:
        return self.first == 0 and self.shape[0] == self._whole.shape[0]

    def stowed(self) -> StowedTensor:
        """The weight in its flat form.

        Returns:
            The whole weight.

        Raises:
            Unsupported: rows are missing.
        """
        if not self._is_all():
            raise Unsupported(
                f"stowage: all {self._whole.shape[0]} rows of a weight must be together for its "
                f"flat form, got {self.shape[0]}; take full_tensor() of the DTensor"
            )
        return self._flat(torch.empty)

    def piece(self) -> StowedTensor | None:
        """The rows that are here as a weight of their own.

        Returns:
            A weight of these rows; None where blocks do not let them be one.
        """
        first, whole = self.first, self._whole
        if first is None or not self.shape[0]:
            return None
        last = first + self.shape[0]
        if last > whole.shape[0]:  # filled up for a collective
            return None
        if rows_misfit(whole.storage, whole.shape, first, last) is not None:
            return None
        shape = (self.shape[0], *whole.shape[1:])
        layout = whole.storage.layout(shape)[: whole.storage.in_rows]
        parts = [torch.empty(s, dtype=dtype, device=self.device) for _, dtype, s in layout]
        decode(self._records, whole.storage, shape, parts)
        shared = shared_of(self._shared(), whole.storage, whole.shape, first, last)
        return wrap([*parts, *shared], whole.storage, shape, whole.dtype, whole.exact)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of these rows. Takes the flat form of the whole weight meanwhile.

        Args:
            dtype: what they are rounded to; without, the compute dtype.

        Returns:
            Values [rows here, the weight's other dimensions], in new memory.

        Raises:
            Unsupported: nobody has told where in their weight the rows stand.
        """
        if self._origin is not None and (exact := self._origin.shown(self)) is not None:
            return exact.to(dtype or self.dtype, copy=True)
        if (piece := self.piece()) is not None:
            return piece.dequantize(dtype)
        if self._place.room is not None:
            return torch.zeros(self.shape, dtype=dtype or self.dtype, device=self.device)
        first = self.first if self.shape[0] else 0
        if first is None:
            raise Unsupported(
                "stowage: rows must know where in their weight they are to be decoded, got records "
                "of unknown place; take full_tensor() of the DTensor"
            )
        flat = self._flat(torch.zeros)
        return flat.dequantize(dtype)[first : first + self.shape[0]]

    def _flat(self, make: Any) -> StowedTensor:
        whole = self._whole
        layout = whole.storage.layout(whole.shape)[: whole.storage.in_rows]
        parts = [make(sizes, dtype=dtype, device=self.device) for _, dtype, sizes in layout]
        decode(self._records, whole.storage, whole.shape, parts, self.first or 0)
        return wrap([*parts, *self._shared()], whole.storage, whole.shape, whole.dtype, whole.exact)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"StowedRows({list(self.shape)} of {list(self._whole.shape)}, {self.resting!r}, "
            f"{self.dtype}, first row {self.first}, {self.nbytes_at_rest} bytes at rest)"
        )

    # --- what FSDP2 calls ---------------------------------------------------------------------

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], "StowedRows"]:
        """What goes over the wire: as many records as the first process has, the last ones zero.

        FSDP2 accepts two signatures. The other one demands inputs of the parameter's own shape.
        """
        if not self._place.gathered:
            check_resharding()
        first, last = self._whole.rows
        missing = -(-(last - first) // mesh.size()) - self.shape[0]
        records = self._records
        if missing > 0:
            records = torch.nn.functional.pad(records, (0, 0, 0, missing))
        return (records,), self

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: "StowedRows",
        param_dtype: torch.dtype,
        *,
        out: Any = None,
    ) -> Any:
        """All rows have come: a StowedTensor in its flat form, whose parts FSDP2 frees and
        allocates again; `out` is that tensor from the second time on."""
        whole, (first, last) = metadata._whole, metadata._whole.rows
        shape = (last - first, *whole.shape[1:])
        shared = shared_of(metadata._shared(), whole.storage, whole.shape, first, last)
        records = outputs[0][: last - first]
        if out is None:
            layout = whole.storage.layout(shape)[: whole.storage.in_rows]
            parts = [records.new_empty(sizes, dtype=dtype) for _, dtype, sizes in layout]
            weight = wrap([*parts, *shared], whole.storage, shape, param_dtype, whole.exact)
        else:
            out = _torch.local_of(out)  # a DTensor under tensor parallelism
            parts = out._parts()[: whole.storage.in_rows]
            out._set_parts([*parts, *shared], out.shape)  # a load or a move may have replaced these
        # Graphs that have saved the parts see the very bytes that they have saved.
        with _preserve_versions(tuple(parts)):
            decode(records, whole.storage, shape, parts)
        outputs[0].untyped_storage().resize_(0)  # FSDP2 would keep the records beside the parts
        return None if out is not None else (weight, tuple(parts))

    # --- the protocols of torch ---------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = ["_records", *("_" + name for name in self._whole.shared_names)]
        storage, *facts = self._whole
        return names, (storage.name, *facts, self.first)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Sequence[int], stride: Sequence[int]
    ) -> "StowedRows":
        name, *facts, first = context
        whole = Whole(Storage(name), *facts)
        shared = [inner["_" + name] for name in whole.shared_names]
        return StowedRows(inner["_records"], shared, whole, Place(first))

    def __deepcopy__(self, memo: dict[int, Any]) -> "StowedRows":
        if id(self) in memo:
            return memo[id(self)]
        made: Any = self.detach().clone()
        memo[id(self)] = made
        made._place.origin = copy.deepcopy(self._origin, memo)
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        storage, *facts = self._whole
        facts = [*facts[:3], self.first, *facts[3:]]
        return _rebuild, (self._records, self._shared(), storage.name, *facts)

    __torch_function__ = _torch.disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return tables.dispatch(func, args, kwargs or {}, tables.ROW_OPS)


RESTING = (StowedTensor, StowedRows)


def rests(tensor: Any) -> bool:
    """Whether it is a resting weight, whole or in rows, or a DTensor of one."""
    return isinstance(_torch.local_of(tensor), RESTING)


def rows_of(
    weight: StowedTensor, first: int, last: int, misfit: tuple[int, int] | None = None
) -> StowedRows:
    """Rows [first, last) of `weight`, made when they are asked for: who shards a weight cuts it for
    all processes and takes one piece. The records are new memory; shared parts are the weight's."""
    whole = Whole(weight._storage, tuple(weight.shape), weight._dt, weight._exact)
    shared = weight._parts()[whole.storage.in_rows :]
    place = Place(first, weight._prepared or "", misfit)
    rows = StowedRows(None, shared, whole, place, source=weight, count=last - first)
    rows._parent = weight._origin
    return rows


def rows_that_fit(size: Sequence[int], like: Sequence[int]) -> int | None:
    """How many rows a tensor of this size has, if its rows are those of a weight shaped `like`."""
    if tuple(size) == (0,):  # how FSDP2 asks for no rows
        return 0
    if len(size) != len(like) or tuple(size[1:]) != tuple(like[1:]):
        return None
    return int(size[0])


def _rebuild(
    records: Tensor,
    shared: list[Tensor],
    storage: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    exact: bool,
    first: int | None,
    span: tuple[int, int] | None = None,
    total: int | None = None,
) -> StowedRows:
    whole = Whole(Storage(storage), shape, dtype, exact, span, total)
    return StowedRows(records, shared, whole, Place(first))


torch.serialization.add_safe_globals([StowedRows, _rebuild])
