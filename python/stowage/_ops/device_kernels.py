# SPDX-License-Identifier: Apache-2.0
"""The kernels of CUDA devices, for tensors that lie there.

They are compiled by NVRTC, which stands beside torch in its CUDA builds, when an op first meets a
storage, and kept on the disk. Where they cannot be had, stock torch ops do the work, and `info()`
says why. Nothing here is asked for on a machine without such a device.
"""

from __future__ import annotations

import importlib.util
import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.storage import Storage

MOST_ROWS = 16  # of x, that all kernels take at a time
_NOT_FINITE = 0x7F800000  # from these bits on a largest magnitude is none


class Looks:
    """What quantize() refused meanwhile, seen by one wait for all of it. Where a look is open, ops
    give parts at once; who opened it asks `refused` before anyone reads them."""

    def __init__(self) -> None:
        self._words: list[tuple[Any, Tensor]] = []
        self.of: Any = None  # what is quantized now, as `refused` names it

    def __enter__(self) -> Self:
        self._before, _looks.open = _looks.open, self
        return self

    def __exit__(self, *_: object) -> None:
        _looks.open = self._before

    def note(self, word: Tensor) -> None:
        self._words.append((self.of, word.clone()))  # its memory is for others

    def refused(self) -> list[Any]:
        """What was quantized from values, or to scales, that are not finite."""
        found = []
        for device in {word.device for _, word in self._words}:
            own = [(of, word) for of, word in self._words if word.device == device]
            said = torch.cat([word for _, word in own]).tolist()
            found += [of for (of, _), word in zip(own, said, strict=True) if _refuses(word)]
        return found


class _Open(threading.local):
    open: Looks | None = None


_looks = _Open()


def _refuses(word: int) -> bool:  # as CudaOps::refused
    return word == 1 or word % (1 << 32) >= _NOT_FINITE


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def _compilers() -> list[str]:
    """Where NVRTC may be: in the packages that torch's wheels need, newest first, and wherever the
    loader looks."""
    spec = importlib.util.find_spec("nvidia")
    folders = spec.submodule_search_locations if spec is not None else None
    found = [
        str(path)
        for folder in folders or ()
        for path in Path(folder).glob("*/lib/libnvrtc.so.[0-9]*")
    ]
    return [
        *sorted(found, key=lambda path: path.rpartition(".")[2], reverse=True),
        "libnvrtc.so.13",
        "libnvrtc.so.12",
    ]


class _Weight:
    """A weight on the device as ops name it: addresses, storage and shape; the memory is kept."""

    def __init__(self, parts: Sequence[Tensor], storage: Storage, shape: Sequence[int]) -> None:
        self.held = [part.contiguous() for part in parts]
        addresses = [part.data_ptr() for part in self.held]
        self.arguments = (addresses, storage.key, list(shape))


class DeviceKernels:
    """The ops on one device. Arguments have been checked; results are of torch's allocator, on its
    current stream."""

    def __init__(self, device: torch.device, options: dict[str, object] | None = None) -> None:
        self.device = device
        self.index = device.index or 0
        given = {"compilers": _compilers()} if options is None else options
        said = library.device_start(self.index, json.dumps(given))
        self.facts: dict[str, object] = json.loads(library.text(said))
        self._most_rows: dict[tuple[object, ...], int] = {}

    def _stream(self) -> int:
        if self.device.type != "cuda":  # a pretended device
            return 0
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def _may_wait(self) -> bool:
        return self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def quantize(
        self, x: Tensor, storage: Storage, keep_nonfinite: bool = False
    ) -> list[Tensor] | None:
        """None where values, or their scales, are not finite, unless `Looks` are open; while a
        graph is captured, which must not wait, and where the storage keeps what is not finite,
        nobody looks."""
        x = x.contiguous()
        shape = list(x.shape)
        parts = [
            torch.empty(sizes, dtype=dtype, device=x.device)
            for _, dtype, sizes in storage.layout(shape)
        ]
        size = library.device_working(storage.key, shape)
        working = torch.empty(size, dtype=torch.uint8, device=x.device)
        stream = self._stream()
        library.device_quantize(
            self.index,
            stream,
            x.data_ptr(),
            _NAMES[x.dtype],
            storage.key,
            shape,
            [part.data_ptr() for part in parts],
            working.data_ptr(),
        )
        keeps = storage.codec in ("cast", "bitsandbytes") and not storage.nested
        if not self._may_wait() or (keep_nonfinite and keeps):
            return parts
        if _looks.open is not None:
            _looks.open.note(working[:4].view(torch.int32))
        elif library.device_refused(self.index, stream, working.data_ptr()):
            return None
        return parts

    def dequantize(
        self, parts: Sequence[Tensor], storage: Storage, shape: Sequence[int], out: torch.dtype
    ) -> Tensor:
        weight = _Weight(parts, storage, shape)
        made = torch.empty(tuple(shape), dtype=out, device=self.device)
        library.device_dequantize(
            self.index, self._stream(), *weight.arguments, made.data_ptr(), _NAMES[out]
        )
        return made

    def embedding(
        self,
        ids: Tensor,
        parts: Sequence[Tensor],
        storage: Storage,
        shape: Sequence[int],
        out: torch.dtype,
    ) -> Tensor | None:
        """None where an id is of no row."""
        weight, ids = _Weight(parts, storage, shape), ids.contiguous()
        made = torch.empty((*ids.shape, *shape[1:]), dtype=out, device=self.device)
        word = torch.empty(1, dtype=torch.int32, device=self.device)
        stream = self._stream()
        library.device_embedding(
            self.index,
            stream,
            *weight.arguments,
            ids.data_ptr(),
            ids.dtype == torch.int64,
            ids.numel(),
            made.data_ptr(),
            _NAMES[out],
            word.data_ptr(),
        )
        if self._may_wait() and library.device_refused(self.index, stream, word.data_ptr()):
            return None
        return made

    def takes(self, x: Tensor, storage: Storage, shape: Sequence[int]) -> bool:
        """Whether rows of x are so few that linear() is better than dequantizing; each matrix and
        dtype has its number, which is asked for once."""
        if storage.transposed:
            return False
        asked = (storage.key, *shape, x.dtype)
        most = self._most_rows.get(asked)
        if most is None:
            name = _NAMES[x.dtype]
            most = library.device_most_rows(self.index, storage.key, list(shape), name)
            self._most_rows[asked] = most
        return x.numel() <= most * shape[1]

    def linear(
        self,
        x: Tensor,
        parts: Sequence[Tensor],
        storage: Storage,
        shape: Sequence[int],
        bias: Tensor | None,
    ) -> Tensor:
        weight, x = _Weight(parts, storage, shape), x.contiguous()
        bias = None if bias is None else bias.contiguous()
        made = torch.empty((*x.shape[:-1], shape[0]), dtype=x.dtype, device=self.device)
        library.device_linear(
            self.index,
            self._stream(),
            *weight.arguments,
            x.data_ptr(),
            math.prod(x.shape[:-1]),
            0 if bias is None else bias.data_ptr(),
            made.data_ptr(),
            _NAMES[x.dtype],
        )
        return made

    def grouped_linear(
        self,
        x: Tensor,
        parts: Sequence[Tensor],
        storage: Storage,
        shape: Sequence[int],
        ends: Tensor,
    ) -> Tensor:
        """x [S, K] by a weight [E, O, K]. Nobody waits for the ends, or looks at them."""
        weight, x = _Weight(parts, storage, shape), x.contiguous()
        ends = ends.to(self.device, torch.int32).contiguous()
        made = torch.empty((len(x), shape[1]), dtype=x.dtype, device=self.device)
        library.device_grouped_linear(
            self.index,
            self._stream(),
            *weight.arguments,
            x.data_ptr(),
            len(x),
            ends.data_ptr(),
            0,  # no bias
            made.data_ptr(),
            _NAMES[x.dtype],
        )
        return made

    def amax(self, values: Sequence[Tensor]) -> Tensor:
        held = [x.contiguous() for x in values]
        most = torch.empty(len(held), dtype=torch.float32, device=self.device)
        library.device_amax(
            self.index,
            self._stream(),
            [x.data_ptr() for x in held],
            " ".join(_NAMES[x.dtype] for x in held),
            [x.numel() for x in held],
            most.data_ptr(),
        )
        return most


_of_devices: dict[torch.device, DeviceKernels | str] = {}


def known() -> dict[str, object]:
    """What is known of each device that was asked for: its kernels, or why there are none."""
    return {
        str(device): made if isinstance(made, str) else made.facts
        for device, made in _of_devices.items()
    }


def kernels_of(device: torch.device, storage: Storage | None = None) -> DeviceKernels | None:
    """The kernels for tensors of a device, if they serve a storage; None where stock torch ops must
    do it."""
    if device.type != "cuda" or library.composite_forced() or torch.version.hip is not None:
        return None
    if storage is not None and storage.scale_type == "f64":
        return None
    made = _of_devices.get(device)
    if made is None:
        try:
            made = DeviceKernels(device)
        except RuntimeError as error:
            made = str(error)
        _of_devices[device] = made
    return None if isinstance(made, str) else made
