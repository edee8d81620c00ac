# SPDX-License-Identifier: Apache-2.0
"""What op tests share: the storages they sample, and values that hit every rule of rounding."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from stowage._ops.library import composite_forced

STORAGES = (
    "f32",
    "bf16",
    "f16",
    "f8_e4m3",
    "f8_e5m2",
    "f8_e4m3:tensor",
    "f8_e4m3:row",
    "f8_e5m2:row2",
    "f8_e4m3:block32",
    "f8_e4m3:block32:e8m0",
    "f8_e5m2:tensor:f16",
    "f8_e4m3:row:bf16",
    "int8:row2:f16",
    "int8:block32:bf16",
    "int8:tensor:zero",
    "int8:row:bf16:zero",
    "int8:row2:zero",
    "int8:block5:zero",
    "int8:tensor",
    "int8:row",
    "int8:block5",
    "nf4",
    "f4_e2m1:row",
    "mxfp4",
    "nvfp4",
    "int4:row:bf16",
    "int4:block6:zero",
    "nf4:block128:nested",
    "fp4:block32",
    "fp4:block32:nested",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "storage" in metafunc.fixturenames:
        metafunc.parametrize("storage", STORAGES)
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def _make(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= 2.0 ** torch.randint(-12, 12, shape, generator=generator)
    flat = x.view(-1)
    # Zeros of both signs, ties of several formats, saturation, subnormals of several formats.
    odd = (0.0, -0.0, 17.0, 19.0, 464.0, 500.0, -61440.0, 65520.0, 2.0**-10, 3 * 2.0**-17)
    odd += (2.0**-133, -(2.0**-149), 1e-40, 1 + 2.0**-24, 1 + 2.0**-8 + 2.0**-40)
    for i, value in enumerate(odd[: flat.numel() // 3]):
        flat[(i * 37) % flat.numel()] = value
    return x.clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype)


@pytest.fixture
def kernels(device: str) -> None:
    """For tests of what only our own kernels promise."""
    if device != "cpu" or composite_forced():
        pytest.skip("needs the kernels")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def values() -> Callable[..., Tensor]:
    """values(shape, dtype, seed=0)."""
    return _make
