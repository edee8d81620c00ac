# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that puts a facade in the place of its peer: each public name of the facade takes
the place of the peer's before the peer's own tests import it. STOWAGE_FACADE names the peer."""

from __future__ import annotations

import importlib
import os
import pkgutil
from types import ModuleType

LEAST = 50  # names; fewer mean that the modules of both have moved apart


def lay(facade: str) -> int:
    """How many names of the peer are ours now."""
    ours, laid = f"stowage.compat.{facade}", 0
    root = importlib.import_module(ours)
    for path in (ours, *(i.name for i in pkgutil.walk_packages(root.__path__, ours + "."))):
        dotted = path.removeprefix("stowage.compat.")
        if any(part.startswith("_") for part in dotted.split(".")):
            continue
        peer = importlib.import_module(dotted)
        for name, value in vars(importlib.import_module(path)).items():
            own = str(getattr(value, "__module__", "")).startswith("stowage")
            if own and not isinstance(value, ModuleType) and hasattr(peer, name):
                setattr(peer, name, value)
                laid += 1
    return laid


def pytest_configure() -> None:
    laid = lay(os.environ["STOWAGE_FACADE"])
    assert laid >= LEAST, f"the overlay must take at least {LEAST} names, took {laid}"
