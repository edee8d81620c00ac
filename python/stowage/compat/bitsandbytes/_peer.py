# SPDX-License-Identifier: Apache-2.0
"""Names of bitsandbytes that have no meaning here (LLM.int8, 8-bit optimizers and their maps): its
own objects where it is installed, else classes that say so when they are called."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, NoReturn

from stowage._ops.errors import Unsupported


class _Absent(type):
    """Classes that cannot be called; `isinstance` with them is False."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise Unsupported(
            f"stowage.compat.bitsandbytes: {cls.__name__} must come from bitsandbytes itself, "
            "which is not there; for 8-bit weights call stowage.stow(model, 'int8')"
        )


def peers(module: str, name: str) -> Any:
    """`name` of the bitsandbytes module `module`, such as "bitsandbytes.nn". Raises AttributeError
    where bitsandbytes is installed and lacks it."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return _Absent(name, (), {})
    return _Absent(name, (), {}) if is_ours(found) else getattr(found, name)


def is_ours(module: ModuleType | None) -> bool:
    """Whether a module that is known as one of bitsandbytes is of this package: somebody has put
    the facade in its place."""
    return str(getattr(module, "__name__", "")).startswith(__package__)


def forwarded(module: str, names: frozenset[str], name: str) -> Any:
    """What `__getattr__` of a module of the facade gives for `name`."""
    if name in names:
        return peers(module, name)
    raise AttributeError(f"module 'stowage.compat.{module}' has no attribute {name!r}")
