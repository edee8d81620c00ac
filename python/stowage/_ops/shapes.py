# SPDX-License-Identifier: Apache-2.0
"""What the arguments of each op must be: shared by fakes (sizes may be symbolic) and composite.

The compiled ops check the same in src/torch; torch.compile sees only these.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from stowage._ops import _torch
from stowage._ops.errors import fail
from stowage._ops.storage import Storage

VALUES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COMPUTE = VALUES[:3]
_IDS = (torch.int64, torch.int32)


def _wrong(where: str, rule: str, got: object) -> None:
    fail("invalid_argument", f"{where}: {rule}, got {got}")


def _check_dtype(where: str, name: str, dtype: torch.dtype, legal: Sequence[torch.dtype]) -> None:
    if dtype not in legal:
        names = ", ".join(str(d).removeprefix("torch.") for d in legal)
        _wrong(where, f"{name} must be one of {names}", str(dtype).removeprefix("torch."))


def _may_be_fetched(x: Tensor, codes: Tensor) -> bool:
    """Whether a graph may have this: when it runs, the tier of a device fetches what rests on the
    CPU, or the op says that nobody does."""
    return (
        isinstance(x, _torch.FakeTensor) and codes.device.type == "cpu" and x.device.type != "meta"
    )


def _check_fit(where: str, storage: Storage, shape: Sequence[int]) -> None:
    if storage.scale_type == "of_values":
        _wrong(where, f"{storage} must name the dtype of its parts", "none")
    if rule := storage.misfit(shape):
        _wrong(where, rule, list(shape))
    least = 0 if storage.flat else {"row": 1, "block": 1, "row2": 2}.get(storage.kind, 0)
    if len(shape) < least:
        _wrong(where, f"a weight stored as {storage} must have rank {least} or more", len(shape))


def check_weight(
    where: str,
    storage: Storage,
    shape: Sequence[int],
    codes: Tensor,
    scales: Sequence[Tensor],
    out: torch.dtype | None = None,
) -> None:
    """Codes and scales are those of a weight of this shape, on one device."""
    if out is not None:
        _check_dtype(where, "out", out, VALUES)
    _check_fit(where, storage, shape)
    layout = storage.layout(shape)
    if len(scales) + 1 != len(layout):
        _wrong(where, f"scales of {storage} must be {len(layout) - 1} tensors", len(scales))
    for (name, dtype, wanted), part in zip(layout, (codes, *scales), strict=True):
        if part.device != codes.device:
            _wrong(where, f"{name} must be on {codes.device} like codes", part.device)
        if part.dtype != dtype:
            _wrong(where, f"{name} must be {dtype}", part.dtype)
        if part.layout != torch.strided:
            _wrong(where, f"{name} must be dense", part.layout)
        if part.dim() != len(wanted) or any(
            a != b for a, b in zip(part.shape, wanted, strict=True)
        ):
            _wrong(where, f"{name} must be {list(wanted)}", list(part.shape))


def check_quantize(x: Tensor, storage: Storage) -> None:
    where = "stowage::quantize"
    _check_dtype(where, "x", x.dtype, VALUES)
    _check_fit(where, storage.for_values(x.dtype), x.shape)
    if storage.actorder:
        plain = storage.name.removesuffix(":actorder")
        _wrong(where, f"storage must have groups that values alone make, such as {plain}", storage)


def _check_matrix_product(
    where: str, name: str, x: Tensor, storage: Storage, codes: Tensor
) -> None:
    _check_dtype(where, name, x.dtype, _COMPUTE)
    if x.dim() < 1:
        _wrong(where, f"{name} must have at least 1 dimension", x.dim())
    if x.device != codes.device and not _may_be_fetched(x, codes):
        _wrong(where, f"{name} must be on {codes.device} like codes", x.device)
    if not storage.flat and codes.dim() != 2:
        _wrong(where, "codes must have 2 dimensions", codes.dim())


def check_linear(
    x: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: Storage,
    rows: int,
    bias: Tensor | None,
) -> tuple[int, int]:
    """The shape of the weight."""
    where = "stowage::linear"
    _check_matrix_product(where, "x", x, storage, codes)
    if not storage.flat and x.shape[-1] != storage.elements_of(codes.shape[1]):
        _wrong(where, f"x must be [..., {storage.elements_of(codes.shape[1])}]", list(x.shape))
    shape = (rows, x.shape[-1])
    check_weight(where, storage, shape, codes, scales)
    if bias is not None:
        _check_bias(where, x, rows, bias)
    return shape


def _check_bias(where: str, x: Tensor, rows: int, bias: Tensor) -> None:
    if bias.dtype != x.dtype:
        _wrong(where, f"bias must be {x.dtype} like x", bias.dtype)
    if bias.device != x.device:
        _wrong(where, f"bias must be on {x.device} like x", bias.device)
    if bias.dim() != 1 or bias.shape[0] != rows:
        _wrong(where, f"bias must be [{rows}]", list(bias.shape))


def check_linear_grad_input(
    g: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: Storage, columns: int
) -> tuple[int, int]:
    """The shape of the weight."""
    where = "stowage::linear_grad_input"
    _check_matrix_product(where, "g", g, storage, codes)
    if not storage.flat and g.shape[-1] != codes.shape[0]:
        _wrong(where, f"g must be [..., {codes.shape[0]}]", list(g.shape))
    shape = (g.shape[-1], columns)
    check_weight(where, storage, shape, codes, scales)
    return shape


def check_embedding(
    ids: Tensor,
    codes: Tensor,
    scales: Sequence[Tensor],
    storage: Storage,
    shape: Sequence[int],
    out: torch.dtype,
) -> None:
    where = "stowage::embedding"
    _check_dtype(where, "ids", ids.dtype, _IDS)
    if ids.device != codes.device and not _may_be_fetched(ids, codes):
        _wrong(where, f"ids must be on {codes.device} like codes", ids.device)
    if len(shape) < 1:
        _wrong(where, "a table must have at least 1 dimension", len(shape))
    check_weight(where, storage, shape, codes, scales, out)


def check_amax(values: Sequence[Tensor]) -> None:
    where = "stowage::amax"
    for one in values:
        _check_dtype(where, "x", one.dtype, VALUES)
        if one.device != values[0].device:
            _wrong(where, f"x must be on {values[0].device} like the first", one.device)


def check_measure(x: Tensor, codes: Tensor, scales: Sequence[Tensor], storage: Storage) -> None:
    where = "stowage::measure"
    _check_dtype(where, "x", x.dtype, VALUES)
    check_weight(where, storage, x.shape, codes, scales)
