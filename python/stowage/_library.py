# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled ops, once, and says what to install where that cannot work."""

import importlib.util
import os

import torch

from stowage import _torch

_OLDEST_TORCH = (2, 11)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _find() -> str:
    # Not by __file__: an editable install keeps the Python files and the binary in two places.
    spec = importlib.util.find_spec("stowage.stowage_torch")
    if spec is None or spec.origin is None:
        raise ImportError(
            "stowage: the compiled part (stowage_torch.so) is missing. Install the package with "
            "`pip install torch-stowage`, or from a checkout with "
            "`pip install --no-build-isolation .`"
        )
    return os.path.realpath(spec.origin)


def _registered() -> bool:
    return bool(_torch.jit_get_schemas_for_operator("stowage::storage_key"))


def load() -> None:
    """Registers the ops of namespace `stowage` with torch. Raises ImportError."""
    if _torch_version() < _OLDEST_TORCH:
        raise ImportError(
            f"stowage: torch 2.11 or newer must be installed, got {torch.__version__}. "
            "Install it with `pip install 'torch>=2.11'`"
        )
    path = _find()
    if _registered():
        # A second registration of the same ops ends the process inside dlopen, without a text.
        if path in torch.ops.loaded_libraries:
            return
        loaded = sorted(torch.ops.loaded_libraries)
        raise ImportError(
            f"stowage: the ops of {path} cannot be loaded, another copy of them is loaded already "
            f"(loaded libraries: {loaded}). Keep one installation on sys.path"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"stowage: {path} cannot be loaded ({error.__cause__ or error}). Reinstall the "
            "package with `pip install --force-reinstall torch-stowage`"
        ) from error


def composite_forced() -> bool:
    """True when STOWAGE_FORCE_ISA asks for stock torch ops instead of our kernels."""
    return os.environ.get("STOWAGE_FORCE_ISA") == "composite"


load()
