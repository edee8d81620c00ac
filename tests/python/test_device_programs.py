# SPDX-License-Identifier: Apache-2.0
"""Code of the kernels of CUDA devices, compiled without one: as good as it was, and with no
operation that has other numbers."""

import json
import re
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from storages import codec, covering

ROOT = Path(__file__).parent.parent.parent
SLACK = 1.1
QUICK = [("f8_e4m3:row", 75), ("nf4", 90)]


@cache
def tool() -> ModuleType:
    loader = SourceFileLoader("device_programs", str(ROOT / "tools/device_programs"))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


pytestmark = pytest.mark.skipif(
    tool().compiler() is None, reason="needs NVRTC of PyPI, which make setup installs"
)


def kept() -> dict[tuple[str, str, int], dict[str, float]]:
    rows = json.loads(tool().KEPT.read_text())
    return {(row["storage"], row["kernel"], row["architecture"]): row for row in rows}


def check(storage: str, architecture: int) -> None:
    rows = tool().measured(storage, architecture, tuple(tool().VALUE_BYTES))
    kernels = {kernel for of, kernel, on in kept() if (of, on) == (storage, architecture)}
    assert {row.kernel for row in rows} == kernels
    assert len(kernels) >= (2 if architecture < 80 else 4)  # tensor cores since 80
    for row in rows:
        was = kept()[storage, row.kernel, architecture]
        assert row.stack == 0, row  # nothing is spilled
        assert row.wide_loads >= 1, row  # codes come by 16 bytes
        for name in ("registers", "shared", "instructions"):
            assert getattr(row, name) <= was[name] * SLACK, (row, was)


@pytest.mark.parametrize(("storage", "architecture"), QUICK)
def test_code_is_as_good_as_it_was(storage: str, architecture: int) -> None:
    check(storage, architecture)


@pytest.mark.nightly
def test_all_code_is_as_good_as_it_was() -> None:
    for storage in tool().STORAGES:
        for architecture in tool().ARCHITECTURES:
            check(storage, architecture)


def modules(storage: str, architecture: int) -> list[str]:
    text = tool().ptx(storage, architecture)
    return [f".version{part}" for part in text.split("\n.version")[1:]]


def check_numbers(storage: str, architecture: int) -> None:
    for text in modules(storage, architecture):
        assert ".ftz" not in text and "div.full" not in text and ".approx" not in text
        if "stowage_linear" not in text:  # where products are fused, and say so
            assert not re.search(r"\bfma\.", text), storage


@pytest.mark.parametrize("storage", ["nf4:block64:nested"])
def test_bytes_come_of_no_fused_flushed_or_approximate_operation(storage: str) -> None:
    check_numbers(storage, 90)


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_every_storage_compiles_for_every_architecture() -> None:
    for storage in covering(codec, lambda s: s.scale_type != "f64"):
        for architecture in tool().ARCHITECTURES:
            check_numbers(storage, architecture)


def test_the_page_has_the_rows_that_are_kept() -> None:
    rows = [tool().Row(**row) for row in json.loads(tool().KEPT.read_text())]
    assert tool().tables(rows) in tool().PAGE.read_text()
