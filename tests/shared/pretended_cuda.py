# SPDX-License-Identifier: Apache-2.0
"""A CUDA device that is the host: a library that looks like the driver and like NVRTC, and runs the
texts of the kernels as the host's compiler made them. The C++ tests build it."""

from functools import cache
from pathlib import Path

import torch

from stowage._ops.device_kernels import DeviceKernels
from stowage._ops.storage import Storage

_BUILDS = Path(__file__).parent.parent.parent / "build"


def library() -> Path | None:
    """Of the tree that the wheel was built in, whose kernels are those of the package."""
    return next(iter(_BUILDS.glob("py3-*/tests/device/libfake_cuda.so")), None)


@cache
def kernels(folder: str = "/proc/none") -> DeviceKernels:
    """Its kernels, for tensors of the CPU; kept in a folder, or nowhere."""
    path = str(library())
    options = {"driver": path, "compilers": [path], "folder": folder}
    return DeviceKernels(torch.device("cpu"), options)


def kernels_of(device: torch.device, storage: Storage | None = None) -> DeviceKernels | None:
    """In the place of stowage._ops.device_kernels.kernels_of."""
    return None if storage is not None and storage.scale_type == "f64" else kernels()
