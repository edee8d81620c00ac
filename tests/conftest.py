# SPDX-License-Identifier: Apache-2.0
"""What every test may ask for."""

import gc
import os
from collections.abc import Iterator

# Processes of tests and threads of torch share the cores: a thread that waits for work must sleep,
# since spinning takes the time of the other process. Read when torch loads, in children too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where op tests put their tensors: cpu, cuda")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only what waits for something outside the test is tried again, and says for what."""
    for item in items:
        for mark in item.iter_markers("waits"):
            if not mark.kwargs.get("reason"):
                raise pytest.UsageError(f"{item.nodeid}: waits(reason=...) must say for what")
            item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=1))


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays to the end. To look through it for garbage, again and
    again while it comes and then in each test that collects, takes longer than most tests."""
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _imports_stay() -> Iterator[None]:
    """So does what tests import as they run, compilers above all: between the tests of two files
    nothing else is alive."""
    if len(gc.get_objects()) > 50_000:
        gc.collect()
        gc.freeze()
    yield


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))


@pytest.fixture(autouse=True)
def _compilers_stay() -> Iterator[None]:
    """PEFT's BOFT names gcc in CXX for the whole process, and CMake then links C++ as C."""
    before = {name: os.environ.get(name) for name in ("CC", "CXX")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
