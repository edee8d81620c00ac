# SPDX-License-Identifier: Apache-2.0
"""`engine_report`: what brought an offloaded model's weights, and how well; `report` with it."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from stowage._errors import InvalidArgument
from stowage._model import report as rows
from stowage._model.rows import Report
from stowage._tiers.counting import EngineReport
from stowage._tiers.devices import devices_of
from stowage._tiers.engine import engine_of
from stowage._tiers.timing import kept_plan


def engine_report(model: nn.Module) -> EngineReport:
    """What the engine of an offloaded model did since `offload` or `load(ram=)`, and with
    `.since(earlier)` since an earlier report: of one pass, say. `.device` is the same of the link
    to the device that the model computes on; of a model without a folder all else is zero.

    Raises InvalidArgument for a model that has neither.
    """
    engine, devices = engine_of(model), devices_of(model)
    if engine is None and devices is None:
        raise InvalidArgument(
            "stowage.engine_report: the model must be offloaded (stowage.offload, or stowage.load "
            "with ram=), got one that is not"
        )
    if engine is not None:
        engine.settle(model)
    return _told(model)


def report(model: nn.Module) -> Report:
    """Describes every parameter of `model`, and its buffers that rest, as they are now, and what
    brought them where it is offloaded. Changes nothing."""
    told = rows.report(model)
    if engine_of(model) is None and devices_of(model) is None:
        return told
    return replace(told, engine=str(_told(model)))


def _told(model: nn.Module) -> EngineReport:
    engine, devices = engine_of(model), devices_of(model)
    told = EngineReport() if engine is None else engine.report()
    kept = kept_plan(model)
    if kept is not None:
        told = replace(told, probe=kept.plan.facts["machine"]["links"]["disk"])
    tier = None if devices is None else devices.tier
    return told if tier is None else replace(told, device=tier.report())
