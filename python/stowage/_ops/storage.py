# SPDX-License-Identifier: Apache-2.0
"""Storages: what the codes of a weight mean. One object for each string, interned."""

import json
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.errors import InvalidArgument, translated

_WIDE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_TYPES = {**_WIDE, "f64": torch.float64}
_PARTS = {"f32": torch.float32, "u8": torch.uint8, "i8": torch.int8, "i32": torch.int32}
NESTED_BLOCK = 256  # block scales of bitsandbytes that share one scale of their own

Part = tuple[str, torch.dtype, tuple[int, ...]]


class StorageName(str):
    """What a weight has where torch's tensors have the method `storage()`. Writers of checkpoints
    call it: it tells them which tensors have their memory in common. For one release it is also the
    storage string, which is `resting`."""

    __slots__ = ("_codes",)
    _codes: Any  # a weak reference to the codes of the weight that was asked, or None
    asked: ClassVar[list[Callable[[], None]]] = []  # called before an answer is given

    def __call__(self) -> "Identity":
        codes = getattr(self, "_codes", lambda: None)()
        if codes is None:
            name = str.__str__(self)
            raise InvalidArgument(f"stowage: the weight that rests as {name} must be alive")
        for prepare in self.asked:
            prepare()
        return Identity(codes.data_ptr(), codes.numel())

    def __eq__(self, other: object) -> bool:
        return str.__eq__(_warned(self), other)

    def __ne__(self, other: object) -> bool:
        return str.__ne__(_warned(self), other)

    def __hash__(self) -> int:
        return str.__hash__(_warned(self))

    def __str__(self) -> str:
        return str.__str__(_warned(self))

    def __repr__(self) -> str:
        return str.__repr__(_warned(self))

    def __format__(self, how: str) -> str:
        return str.__format__(_warned(self), how)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str.__str__(self),)


def _warned(name: StorageName) -> StorageName:
    told = "the storage string of a weight is weight.resting; storage becomes torch's method alone"
    warnings.warn(f"stowage: {told}", DeprecationWarning, stacklevel=3)
    return name


class Identity(NamedTuple):
    """Of a weight's memory, to be compared. What lies there are codes, not values."""

    address: int
    elements: int

    def data_ptr(self) -> int:
        return self.address

    def size(self) -> int:
        return self.elements


class Storage:
    """A storage string, parsed: `Storage("nf4") is Storage("nf4:block64")`. Immutable.

    "nf4:torchao" takes the dtype of the values that it is made from (`for_values`): what rests is
    "nf4:torchao:bf16" and so on. Raises InvalidArgument (a ValueError) that lists the legal
    strings.
    """

    name: str  # canonical
    key: int  # what ops take
    codes: str
    powers: str  # of scales that are powers of two: ceil, floor
    codec: str  # whose arithmetic makes it: cast, amax, bitsandbytes, torchao, ggml
    dialect: str
    kind: str  # none, tensor, row, row2, block, block2, column
    packing: str  # of codes in bytes: whole, high_first, low_first (two, the first in that half),
    #   dense (eight in as many bytes as a code has bits)
    bits: int  # of a code
    flat: bool  # codes and blocks run on across rows: one may begin in the middle of either
    block: int  # 0 unless kind is block, block2 or column
    rows: int  # M of block2, whose blocks are M rows by `block` columns; else 0
    nested: bool
    zero: str = ""  # what each scale has beside it that stands for 0: code, sum, rounded
    actorder: bool = False  # the last part names the group of each column
    transposed: bool = False  # matrices of a stack [E, K, O] lie as [E, O, K], blocks too
    scaler_block: int = 0  # nf4:torchao: block scales that share a factor; else 0
    scale_type: str = "f32"  # or bf16, f16, e8m0, e4m3, super, absmax; nf4:torchao: f64, of_values
    scale_code: str  # how scales are kept: plain, mapped, affine, q4_k, q6_k, absmax, or as below
    factor: float  # of each product with a scale, in turn: 1 / divisor of absmax; else 1
    record: int = 0  # bytes that a block has instead of a scale, in a dimension of their own
    under_one: bool  # e4m3, each under a number: product, product_bf16 (both rounded), quotient
    outer_kind: str  # and which of them under one: tensor (all), row, row2; else ""
    least: float  # what codes reach: values over their scale are clamped to it
    largest: float
    divisor: float  # a scale is amax / divisor; with zeros, the span of the values / divisor
    values: tuple[float, ...]  # where there are sixteen, by code
    together: int  # codes that fill bytes: no row and no group begins between them
    part_names: tuple[str, ...]  # codes first
    of_groups: int  # parts behind the codes that have one number for each group
    in_rows: int  # parts, the first ones, that rows have something of; the others are of all rows
    codes_dtype: torch.dtype
    outer: int  # scales that share a number of their own; 0: none do
    _parts: tuple[tuple[str, str, str], ...]  # name, extent (_sizes) and dtype of each

    _known: dict[str, "Storage"] = {}  # noqa: RUF012  by every spelling seen
    _by_key: dict[int, "Storage"] = {}  # noqa: RUF012

    def __new__(cls, text: "str | Storage") -> "Storage":
        if isinstance(text, Storage):
            return text
        found = cls._known.get(text)
        if found is None:
            try:
                found = cls.from_key(library.storage_key(text))
            except RuntimeError as error:
                raise translated(error) from None
            cls._known[text] = found
        return found

    @classmethod
    def parse(cls, text: "str | Storage") -> "Storage":
        return cls(text)

    @classmethod
    def from_key(cls, key: int) -> "Storage":
        found = cls._by_key.get(key)
        if found is None:
            found = cls._by_key.setdefault(key, cls._describe(key))
        return found

    @classmethod
    def _describe(cls, key: int) -> "Storage":
        facts: dict[str, Any] = json.loads(library.storage_describe(key))
        self = object.__new__(cls)
        for field in cls.__annotations__:
            if field in facts:
                object.__setattr__(self, field, facts[field])
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "values", tuple(facts.get("values", ())))
        object.__setattr__(self, "together", {"whole": 1, "dense": 8}.get(self.packing, 2))
        object.__setattr__(self, "_parts", tuple(map(tuple, facts["parts"])))
        object.__setattr__(self, "part_names", tuple(name for name, _, _ in facts["parts"]))
        of_groups = sum(extent == "scales" for _, extent, _ in facts["parts"])
        object.__setattr__(self, "of_groups", of_groups)
        object.__setattr__(self, "codes_dtype", _WIDE.get(self.codes, torch.uint8))
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Storage: {name} must not change")

    def __reduce__(self) -> tuple[type["Storage"], tuple[str]]:
        return Storage, (self.name,)

    def __copy__(self) -> "Storage":
        return self

    def __deepcopy__(self, memo: object) -> "Storage":
        return self

    def __repr__(self) -> str:
        return f"Storage({self.name!r})"

    def __str__(self) -> str:
        return self.name

    @property
    def holds_values(self) -> bool:
        """Whether codes are numbers that values are given in too: f32, bf16, f16."""
        return self.codes in _WIDE

    @property
    def byte_codes(self) -> bool:
        """Whether codes have a byte each, in the weight's shape."""
        return self.packing == "whole" and not self.holds_values

    @property
    def numbers_together(self) -> str:
        """Which numbers of elements fill bytes, in words."""
        return "an even number of" if self.together == 2 else f"a multiple of {self.together}"

    def bytes_of(self, elements: int) -> int:
        """What codes have in a row for so many elements, which fill it; may be symbolic."""
        return elements if self.packing == "whole" else elements * self.bits // 8

    def elements_of(self, of_codes: int) -> int:
        """The way back."""
        return of_codes if self.packing == "whole" else of_codes * 8 // self.bits

    @property
    def type_dtype(self) -> torch.dtype:
        """Of the scales. Raises InvalidArgument where only values will tell it."""
        if self.scale_type not in _TYPES:
            every = ", ".join(f"{self.name}:{name}" for name in _TYPES)
            raise InvalidArgument(
                f"a weight stored as {self.name} must name the dtype of its parts where no values "
                f"give it, got none of {every}"
            )
        return _TYPES[self.scale_type]

    def for_values(self, dtype: torch.dtype | None) -> "Storage":
        """What a weight made from values of this dtype rests as: this one, but for nf4:torchao."""
        if self.scale_type != "of_values":
            return self
        name = next((name for name, known in _TYPES.items() if known == dtype), None)
        return self if name is None else Storage(f"{self.name}:{name}")

    def accepts(self, resting: "Storage") -> bool:
        """Whether a weight that rests as `resting` is what this storage asks for."""
        return resting is self or self.for_values(_TYPES.get(resting.scale_type)) is resting

    @property
    def under_one_of_all(self) -> bool:
        """Whether scales of all rows stand under one number."""
        return self.outer_kind == "tensor"

    @property
    def under_rows(self) -> bool:
        """Whether scales of each row stand under numbers of their own, in a part behind theirs."""
        return self.outer_kind in ("row", "row2")

    def under(self, kind: str) -> "Storage":
        """The same with e4m3 scales under numbers of this kind: tensor, row, row2."""
        of_all = self.name.removesuffix(":" + self.outer_kind)
        return Storage(of_all if kind == "tensor" else f"{of_all}:{kind}")

    @property
    def by_columns(self) -> bool:
        """Whether groups are of one column, and each has rows all over it: every row needs scales
        that others need too, and some rows are no weight of their own."""
        return self.kind == "column"

    @property
    def lying(self) -> "Storage":
        """Of [E, O, K], how a weight [E, K, O] lies that lies transposed; others as they are."""
        return Storage(self.name.removesuffix(":transposed"))

    def of_kind(self, kind: str) -> "Storage":
        """The same with this scaling, which is no block."""
        return Storage(":".join([self.codes, kind, *self.name.split(":")[2:]]))

    def misfit(self, shape: Sequence[int]) -> str:
        """The rule that this shape breaks, of those that few storages have; "" for none."""
        if self.transposed and (len(shape) != 3 or shape[1] % self.block):
            return (
                f"a weight stored as {self.name} must have 3 dimensions, the second a multiple of "
                f"{self.block}"
            )
        if self.actorder and len(shape) != 2:
            return f"a weight stored as {self.name} must have 2 dimensions"
        if self.kind == "block2" and len(shape) not in (2, 3):
            return f"a weight stored as {self.name} must have 2 or 3 dimensions"
        if self.by_columns and (len(shape) != 2 or shape[0] % self.block):
            return (
                f"a weight stored as {self.name} must have 2 dimensions, the first a multiple of "
                f"{self.block}"
            )
        if self.outer_kind == "row2" and (len(shape) < 3 or math.prod(shape[2:]) % self.block):
            return (
                f"a weight stored as {self.name} must have at least 3 dimensions, and for each "
                f"pair of indices a multiple of {self.block} elements"
            )
        if self.together > 1 and not self.flat:
            least = 3 if self.kind == "row2" else 2
            if len(shape) < least:
                return f"a weight stored as {self.name} must have at least {least} dimensions"
            line = shape[-1:] if self.kind == "block2" else shape[least - 1 :]
            if math.prod(line) % self.together:
                return (
                    f"a weight stored as {self.name} must have {self.numbers_together} elements in "
                    "each row"
                )
        if self.dialect == "standard":
            return ""
        step = self.block * self.scaler_block
        if len(shape) <= 2 and math.prod(shape) % step == 0:
            return ""
        return (
            f"a weight stored as {self.name} must have at most 2 dimensions and a multiple of "
            f"{step} elements (block {self.block} x scaler block {self.scaler_block})"
        )

    def rows_together(self, shape: Sequence[int]) -> int:
        """So many indices of dim 0 have the same scales, where not all have: of a matrix in blocks
        of rows those of a block, in groups of columns all. A stack has scales for each index."""
        if self.by_columns:
            return max(shape[0], 1)
        return self.rows if self.rows and len(shape) == 2 else 1

    def gives_indices(self, shape: Sequence[int]) -> bool:
        """Whether each index of dim 0 has bytes of its own, but for what all share."""
        each = math.prod(shape[1:])
        if self.flat:
            return each % (self.block * (self.outer or 1)) == 0
        return self.rows_together(shape) == 1

    def layout(self, shape: Sequence[int]) -> tuple[Part, ...]:
        """Name, dtype and shape of each part of a weight of this shape; sizes may be symbolic."""
        return tuple(
            (name, self._dtype(dtype), self._sizes(extent, shape))
            for name, extent, dtype in self._parts
        )

    def _dtype(self, name: str) -> torch.dtype:
        if name == "codes":
            return self.codes_dtype
        return self.type_dtype if name == "own" else _PARTS[name]

    def _sizes(self, extent: str, shape: Sequence[int]) -> tuple[int, ...]:
        match extent:
            case "weight":
                return tuple(shape)
            case "pairs":
                return ((math.prod(shape) + 1) // 2, 1)
            case "packed":
                return (shape[0], self.bytes_of(math.prod(shape[1:])))
            case "scales":
                return self._scales(shape)
            case "outers":
                if self.outer_kind:
                    return _of_kind(self.outer_kind, shape)
                return ((math.prod(self._scales(shape)) + self.outer - 1) // self.outer,)
            case "columns":
                return (math.prod(shape[1:]),)
        return {"one": (), "values": (16,), "map": (256,)}[extent]

    def _scales(self, shape: Sequence[int]) -> tuple[int, ...]:
        match self.kind:
            case "block" if self.flat:
                return ((math.prod(shape) + self.block - 1) // self.block,)
            case "block2":
                m, n = self.rows, self.block
                return (*shape[:-2], (shape[-2] + m - 1) // m, (shape[-1] + n - 1) // n)
            case "column":
                return (shape[0] // self.block, shape[1])
            case "block":
                blocks = (math.prod(shape[1:]) + self.block - 1) // self.block
                return (shape[0], blocks, *((self.record,) if self.record else ()))
        return _of_kind(self.kind, shape)


def _of_kind(kind: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Of numbers of the whole weight, of each row or of each pair of indices."""
    kept = {"row": 1, "row2": 2}.get(kind, 0)
    return (*shape[:kept], *(1 for _ in shape[kept:])) if kept else ()


def check_parts(
    parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], dtype: torch.dtype
) -> None:
    """Raises InvalidArgument where the parts are not those of such a weight."""
    if not dtype.is_floating_point:
        raise InvalidArgument(f"StowedTensor: dtype must be floating, got {dtype}")
    if rule := storage.misfit(shape):
        raise InvalidArgument(f"StowedTensor: {rule}, got {list(shape)}")
    layout = storage.layout(shape)
    if len(parts) != len(layout):
        names = ", ".join(storage.part_names)
        raise InvalidArgument(f"StowedTensor: parts must be {names}, got {len(parts)} tensors")
    for part, (name, wanted, sizes) in zip(parts, layout, strict=True):
        if part.dtype is not wanted or tuple(part.shape) != sizes or not part.is_contiguous():
            raise InvalidArgument(
                f"StowedTensor: {name} of {storage} {list(shape)} must be contiguous {wanted} "
                f"{list(sizes)}, got {part.dtype} {list(part.shape)}"
            )
