# SPDX-License-Identifier: Apache-2.0
"""Model weights that rest small (fp8, NF4, int8) and compute exactly.

An import gives torch the operators of the package and the types of its tensors, and nothing else;
what works on models, files and tiers is imported when its name is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stowage._ops import composite as _composite  # noqa: F401  it completes the ops
from stowage._ops import fakes as _fakes  # noqa: F401  it completes the ops
from stowage._ops.crossover import crossover
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
from stowage._shard import collectives as _collectives  # noqa: F401  how tensors are sharded
from stowage._shard import replacement as _replacement  # noqa: F401  how tensors are sharded
from stowage._shard import sharding_calls as _sharding_calls  # noqa: F401  what modules refuse
from stowage._tensor import functions as _functions  # noqa: F401  it fills the tables of the tensor
from stowage._tensor import operators as _operators  # noqa: F401  tables
from stowage._tensor import transforms as _transforms  # noqa: F401  tables
from stowage._tensor.operators import fallbacks
from stowage._tensor.products import convolution as _convolution  # noqa: F401  tables
from stowage._tensor.products import embedding as _embedding  # noqa: F401  tables
from stowage._tensor.products import flops as _flops  # noqa: F401  it tells torch what products count
from stowage._tensor.products import linear as _linear  # noqa: F401  tables
from stowage._tensor.products import tiles as _tiles  # noqa: F401  tables
from stowage._tensor.products.grouped import grouped_linear
from stowage._tensor.quantize import quantize
from stowage.integrations import safetensors as _safetensors  # noqa: F401  it registers itself
from stowage.tensor import StowedTensor

if TYPE_CHECKING:  # the tables below, for who reads without running
    from stowage import (  # noqa: F401  public modules
        checkpoint,
        loading,
        planning,
        policy,
        sharding,
        skips,
        training,
        views,
    )
    from stowage._model.choice.policy import Policy
    from stowage._model.reports.table import Report, Row
    from stowage._model.rest.frozen import frozen_linear
    from stowage._model.rest.masters import drop_master
    from stowage._model.sizes import nbytes
    from stowage._model.stow import stow, unstow
    from stowage._tiers.budget import keep_free, rebudget
    from stowage._tiers.counts import DeviceReport, EngineReport, WeightUses
    from stowage._tiers.engine_report import engine_report, report
    from stowage._tiers.offload import offload, onload
    from stowage._tiers.plans.measurement import Measured, measured
    from stowage._tiers.trace import trace
    from stowage._tiers.uses import Uses, foresee, uses
    from stowage.checkpoint import save, state_dict
    from stowage.loading import load, load_state_dict
    from stowage.planning import Comparison, Plan, measured_links, plan

_MODULES = ["checkpoint", "loading", "planning", "policy", "sharding", "skips", "training", "views"]
_NAMES = {
    "_model.choice.policy": "Policy",
    "_model.reports.table": "Report Row",
    "_model.rest.frozen": "frozen_linear",
    "_model.rest.masters": "drop_master",
    "_model.sizes": "nbytes",
    "_model.stow": "stow unstow",
    "_tiers.budget": "keep_free rebudget",
    "_tiers.counts": "DeviceReport EngineReport WeightUses",
    "_tiers.engine_report": "engine_report report",
    "_tiers.offload": "offload onload",
    "_tiers.plans.measurement": "Measured measured",
    "_tiers.trace": "trace",
    "_tiers.uses": "Uses foresee uses",
    "checkpoint": "save state_dict",
    "loading": "load load_state_dict",
    "planning": "Comparison Plan measured_links plan",
}
_LATER = {name: module for module, names in _NAMES.items() for name in names.split()}


if not TYPE_CHECKING:  # a checker would take every name for one that it gives

    def __getattr__(name: str) -> Any:
        """A public name or module that is used for the first time."""
        if name in _MODULES:
            return import_module(f"stowage.{name}")
        if name not in _LATER:
            raise AttributeError(f"module 'stowage' has no attribute {name!r}")
        found = globals()[name] = getattr(import_module(f"stowage.{_LATER[name]}"), name)
        return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES, *(name for name in globals() if name.startswith("__"))})


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
    "Policy",
    "Report",
    "Row",
    "StowageError",
    "StowedTensor",
    "Unsupported",
    "Uses",
    "WeightUses",
    "crossover",
    "drop_master",
    "engine_report",
    "fallbacks",
    "foresee",
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
    "uses",
]
