# SPDX-License-Identifier: Apache-2.0
"""`engine_report`: what fetched an offloaded model's weights, and how well; `report` with it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from stowage._model.reports import report as rows
from stowage._model.reports.table import Report
from stowage._ops.errors import InvalidArgument
from stowage._tiers.counts import EngineReport
from stowage._tiers.device.placement import Devices, devices_of
from stowage._tiers.disk.engine import Engine, engine_of
from stowage._tiers.plans.execution import kept_plan


def engine_report(model: nn.Module) -> EngineReport:
    """What the engine of an offloaded model did since `offload` or `load(ram=)`.

    Args:
        model: a module that is offloaded.

    Returns:
        Counts since the engine began; `.since(earlier)` gives those since an earlier report: of one
        pass, say. `.device` is the same of the link to the device that the model computes on; of a
        model without a folder all else is zero.

    Raises:
        InvalidArgument: the model is not offloaded.

    Example:
        >>> stowage.stow(model, "int8")
        >>> stowage.offload(model, ram="64KiB", folder="weights")
        >>> before = stowage.engine_report(model)
        >>> y = model(x)
        >>> stowage.engine_report(model).since(before).acquired
        2
    """
    engine, devices = engine_of(model), devices_of(model)
    if engine is None and devices is None:
        raise InvalidArgument(
            "stowage.engine_report: the model must be offloaded (stowage.offload, or stowage.load "
            "with ram=), got one that is not"
        )
    if engine is not None:
        engine.settle(model)
    return _told(model, engine, devices)


def report(model: nn.Module) -> Report:
    """Describes every parameter of `model`, and its buffers that rest, as they are now.

    Args:
        model: any module; nothing is changed.

    Returns:
        One row for each, and what fetched them where the model is offloaded. `print` shows a table.

    Example:
        >>> stowage.stow(model, "int8")
        >>> len(stowage.report(model).stowed)
        2
    """
    told, engine, devices = rows.report(model), engine_of(model), devices_of(model)
    if engine is None and devices is None:
        return told
    return replace(told, engine=str(_told(model, engine, devices)))


def _told(model: nn.Module, engine: Engine | None, devices: Devices | None) -> EngineReport:
    told = EngineReport() if engine is None else engine.report()
    kept = kept_plan(model)
    if kept is not None:
        told = told._replace(probe=kept.plan.facts["machine"]["links"]["disk"])
    tier = None if devices is None else devices.tier
    return told if tier is None else told._replace(device=tier.report())
