# SPDX-License-Identifier: Apache-2.0
"""What every test may ask for."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where op tests put their tensors: cpu, cuda")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    return str(request.config.getoption("--device"))
