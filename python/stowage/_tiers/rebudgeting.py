# SPDX-License-Identifier: Apache-2.0
"""`rebudget`: another budget for a model that is in use."""

from __future__ import annotations

from torch import nn

from stowage._model.sizes import byte_count
from stowage._ops.errors import InvalidArgument
from stowage._tiers.carrying import carried_by_engine
from stowage._tiers.engine import engine_of
from stowage._tiers.timing import forget_plan, keep_to, kept_plan


def rebudget(model: nn.Module, ram: int | str) -> None:
    """Gives an offloaded model another budget of memory ("1GiB"), because others need it or have
    given it back: its weights stay where they are, and what is in memory by the new budget is read
    again when it is used. A model that keeps to a plan is planned anew within `ram`, with the rates
    of its plan: what saves least for its bytes goes first.

    Raises InvalidArgument for a model whose weights do not rest on a disk, and where `ram` is below
    the largest weight or no plan keeps it; nothing has changed then. Uses that are running end in
    the memory that they have, which is given back then.
    """
    engine = engine_of(model)
    if engine is None:
        raise InvalidArgument(
            "stowage.rebudget: the model must rest on a disk (stowage.offload, or stowage.load "
            "with ram= or plan=), got one that does not"
        )
    kept = kept_plan(model)
    if kept is None:
        engine.rebudget(byte_count(ram, "ram"), (), 0)
        return
    if kept.plan.facts["limits"]["accelerators"]:
        raise InvalidArgument(
            "stowage.rebudget: the plan must be without accelerators, got one with; onload the "
            "model and offload it by another plan"
        )
    plan = kept.plan.within(ram)
    how = carried_by_engine("stowage.rebudget", plan)
    engine.rebudget(how.ram, how.keep, how.ring)
    forget_plan(model)
    keep_to(model, plan)
