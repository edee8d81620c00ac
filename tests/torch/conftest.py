# SPDX-License-Identifier: Apache-2.0
"""What op tests share: the storages they sample, and values that hit every rule of rounding."""

from collections.abc import Callable

import pytest
import torch
from storages import codec, covering, flat_shapes
from torch import Tensor

from stowage._ops.library import composite_forced

STORAGES = covering(codec, flat_shapes)
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
