# SPDX-License-Identifier: Apache-2.0
"""Steps of random programs that move a model between memory and disk, and into other processes."""

from __future__ import annotations

import os
import re

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule
from program_models import IDS, ModelProgram, forked, near

import stowage
from stowage.planning import machine_key

_CODES = ("f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "int8", "nf4", "fp4")
LINKS = {
    "key": machine_key(),
    "disk": 1e9,
    "cached": 2e9,
    "memcpy": 1e10,
    "linear": {codes: {"read": 1e9, "multiply": 1e10} for codes in _CODES},
    "accelerators": {},
}
RAM = st.sampled_from(["80KiB", "96KiB", "128KiB", "256KiB", "1MiB"])


class Tiers(ModelProgram):
    """The values are the same wherever the weights rest."""

    @precondition(lambda self: not self.offloaded)
    @rule(reads=st.sampled_from(["mapped", "buffered", "automatic"]))
    def offload(self, reads: str) -> None:
        wanted = self.model(IDS)
        try:
            stowage.offload(self.model, ram="128KiB", folder=self.new_folder(), reads=reads)
        except stowage.InvalidArgument as error:
            assert "ram" in str(error)  # too little for this storage
            return
        self.offloaded = True
        near(self.model(IDS), wanted, self.exact, "outputs after offload")

    @precondition(lambda self: not self.offloaded)
    @rule(ram=RAM, rows=st.sampled_from([1, 64]))
    def offload_by_plan(self, ram: str, rows: int) -> None:
        """What a plan says can be carried out."""
        wanted = self.model(IDS)
        try:
            plan = stowage.plan(self.model, ram=ram, rows=rows, links=LINKS, folder=self.folder)
        except stowage.InvalidArgument as error:
            assert "ram must be at least" in str(error)
            return
        plan.check(self.model)
        where = self.new_folder()
        plan.save(where.with_suffix(".json"))
        stowage.offload(self.model, plan=where.with_suffix(".json"), folder=where)
        self.offloaded = True
        near(self.model(IDS), wanted, self.exact, "outputs after offload by a plan")

    @precondition(lambda self: self.offloaded)
    @rule()
    def onload(self) -> None:
        stowage.onload(self.model)
        self.offloaded = False

    @precondition(lambda self: self.offloaded)
    @rule(ram=RAM)
    def rebudget(self, ram: str) -> None:
        """A budget that is too small is refused, and changes nothing."""
        try:
            stowage.rebudget(self.model, ram)
        except stowage.InvalidArgument as error:
            assert re.search(r"ram must be at least|budget must hold", str(error))

    @rule()
    def fork(self) -> None:
        """A child computes the same."""
        wanted = self.model(IDS).detach()
        child = forked(self.model, wanted)
        assert os.waitpid(child, 0)[1] == 0, "a forked child failed"
