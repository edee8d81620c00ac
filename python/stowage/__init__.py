# SPDX-License-Identifier: Apache-2.0
"""Model weights that rest small (fp8, NF4, int8) and compute exactly."""

from stowage import composite, fakes  # noqa: F401  they complete the ops
from stowage import functions as _functions  # noqa: F401  it fills the tables of the tensor
from stowage._compute import bags, convolution, gathers, joining, transforms  # noqa: F401  tables
from stowage._compute.grouped import grouped_linear
from stowage._errors import (
    BadFile,
    FileError,
    InvalidArgument,
    OutOfMemory,
    StowageError,
    Unsupported,
)
from stowage._info import info
from stowage._model.frozen import frozen_linear
from stowage._model.masters import drop_master
from stowage._model.report import Report, Row, report
from stowage._model.sizes import nbytes
from stowage._quantize import quantize
from stowage._tiers.counting import EngineReport
from stowage._tiers.engine import engine_report
from stowage._tiers.offloading import offload, onload
from stowage._tiers.tracing import trace
from stowage.checkpoint import save, state_dict
from stowage.dispatch import fallbacks
from stowage.loading import load, load_state_dict
from stowage.modules import stow, unstow
from stowage.tensor import StowedTensor

__all__ = [
    "BadFile",
    "EngineReport",
    "FileError",
    "InvalidArgument",
    "OutOfMemory",
    "Report",
    "Row",
    "StowageError",
    "StowedTensor",
    "Unsupported",
    "drop_master",
    "engine_report",
    "fallbacks",
    "frozen_linear",
    "grouped_linear",
    "info",
    "load",
    "load_state_dict",
    "nbytes",
    "offload",
    "onload",
    "quantize",
    "report",
    "save",
    "state_dict",
    "stow",
    "trace",
    "unstow",
]
