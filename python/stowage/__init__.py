# SPDX-License-Identifier: Apache-2.0
"""Model weights that rest small (fp8, NF4, int8) and compute exactly."""

from stowage import policy, skips, views  # noqa: F401  public modules
from stowage._model.reports.table import Report, Row
from stowage._model.resting.frozen import frozen_linear
from stowage._model.resting.masters import drop_master
from stowage._model.sizes import nbytes
from stowage._model.stow import stow, unstow
from stowage._ops import composite, fakes  # noqa: F401  they complete the ops
from stowage._ops.errors import (
    BadFile,
    FileError,
    InvalidArgument,
    OutOfMemory,
    OutOfRange,
    StowageError,
    Unsupported,
)
from stowage._ops.info import info
from stowage._shard import (  # they tell tensors how to be sharded, and modules what to refuse
    replacement,  # noqa: F401
    sharding_calls,  # noqa: F401
)
from stowage._tensor import functions as _functions  # noqa: F401  it fills the tables of the tensor
from stowage._tensor import (
    operators,  # noqa: F401  tables
    transforms,  # noqa: F401  tables
)
from stowage._tensor.operators import fallbacks
from stowage._tensor.products import (
    convolution,  # noqa: F401  tables
    embedding,  # noqa: F401  tables
    linear,  # noqa: F401  tables
    tiles,  # noqa: F401  tables
)
from stowage._tensor.products import flops as _flops  # noqa: F401  it tells torch what products count
from stowage._tensor.products.grouped import grouped_linear
from stowage._tensor.quantize import quantize
from stowage._tiers.budget import keep_free, rebudget
from stowage._tiers.counts import DeviceReport, EngineReport
from stowage._tiers.engine_report import engine_report, report
from stowage._tiers.offload import offload, onload
from stowage._tiers.plans.measured import Measured, measured
from stowage._tiers.tracing import trace
from stowage.checkpoint import save, state_dict
from stowage.integrations import safetensors as _safetensors  # noqa: F401  it registers itself
from stowage.loading import load, load_state_dict
from stowage.planning import Comparison, Plan, measured_links, plan
from stowage.tensor import StowedTensor

__all__ = [
    "BadFile",
    "Comparison",
    "DeviceReport",
    "EngineReport",
    "FileError",
    "InvalidArgument",
    "Measured",
    "OutOfMemory",
    "OutOfRange",
    "Plan",
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
    "keep_free",
    "load",
    "load_state_dict",
    "measured",
    "measured_links",
    "nbytes",
    "offload",
    "onload",
    "plan",
    "quantize",
    "rebudget",
    "report",
    "save",
    "state_dict",
    "stow",
    "trace",
    "unstow",
]
