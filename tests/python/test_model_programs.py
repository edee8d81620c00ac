# SPDX-License-Identifier: Apache-2.0
"""Random programs over a stowed model and its dense twin: forwards, gradients, steps, state dicts,
copies, casts, files, offload and forks in any order, under any mode.

STOWAGE_PROGRAM_STEPS=100000 runs that many steps (`make test-all`); a failure prints the program
and how to run it again.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from program_models import (
    IDS,
    Net,
    built,
    copied,
    dense_twin,
    forked,
    look,
    near,
    put_to_rest,
    resting,
    write_under_graphs,
)
from programs import EXACT_MODES, MODES, bytes_of, run, same_bytes
from torch import nn

import stowage

STEPS = int(os.environ.get("STOWAGE_PROGRAM_STEPS", "300"))
STORAGES = [
    "bf16", "f8_e4m3", "f8_e5m2:tensor", "f8_e4m3:row", "f8_e4m3:block32", "int8", "int8:tensor",
    "nf4:block32", "nf4", "fp4", "nf4:block64:nested", "nf4:torchao:block32:scaler4",
]  # fmt: skip
SEEDS = st.integers(0, 1000)
EXACT = st.sampled_from(EXACT_MODES)
FORWARD = st.sampled_from(sorted({*EXACT_MODES} - {"device meta"}))


class Models(RuleBasedStateMachine):
    """A stowed model; its twin is made from it again whenever something is compared."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="programs-"))
        self.folders = 0

    def teardown(self) -> None:
        self.__dict__.pop("model", None)
        gc.collect()
        shutil.rmtree(self.folder, ignore_errors=True)

    @initialize(
        seed=SEEDS,
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
        storage=st.sampled_from(STORAGES),
        exact=st.booleans(),
        buffers=st.booleans(),
    )
    def begin(
        self, seed: int, dtype: torch.dtype, storage: str, exact: bool, buffers: bool
    ) -> None:
        self.made = (seed, dtype, storage, exact, buffers)
        self.exact, self.offloaded, self.written = exact, False, False
        self._take(built(*self.made))
        self.optimizer = torch.optim.SGD(self._trained(), lr=1e-3)

    def _take(self, model: Net) -> None:
        """Goes on with this model; the bytes that it has now are those that it must have."""
        self.model = model
        self.held = {name: bytes_of(weight) for name, weight in resting(model).items()}

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    # --- use ----------------------------------------------------------------------------------

    @rule(mode=FORWARD)
    def forward(self, mode: str) -> None:
        twin = dense_twin(self.model)
        with MODES[mode]():
            got, wanted = self.model(IDS), twin(IDS)
        near(got, wanted, self.exact, "outputs")

    @rule()
    def forward_by_autocast(self) -> None:
        with MODES["autocast"]():
            got = self.model(IDS)
        if got.dtype == torch.float32:
            near(got, dense_twin(self.model)(IDS).float(), False, "outputs")

    @rule(mode=st.sampled_from(["plain", "functions", "default device", "anomaly", "saved hooks"]))
    def gradients(self, mode: str) -> None:
        twin = dense_twin(self.model)
        self.model.zero_grad()
        with MODES[mode]():
            self.model(IDS).float().square().mean().backward()
            twin(IDS).float().square().mean().backward()
        wanted = dict(twin.named_parameters())
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                near(parameter.grad, wanted[name].grad, False, f"gradients of {name}")
            else:
                assert parameter.grad is None

    @rule(scaled=st.booleans(), clip=st.booleans())
    def step(self, scaled: bool, clip: bool) -> None:
        twin = dense_twin(self.model)
        other = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=1e-3)
        for model, optimizer in ((self.model, self.optimizer), (twin, other)):
            scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=8.0)
            optimizer.zero_grad()
            scaler.scale(model(IDS).float().square().mean()).backward()
            scaler.unscale_(optimizer)
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            scaler.step(optimizer)
        wanted = dict(twin.named_parameters())
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                near(parameter.detach(), wanted[name].detach(), False, f"{name} after a step")

    @rule(mode=FORWARD)
    def functional(self, mode: str) -> None:
        state = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        with MODES[mode]():
            got = torch.func.functional_call(self.model, state, (IDS,))
        near(got, dense_twin(self.model)(IDS), self.exact, "outputs of functional_call")

    @rule()
    def stale_graph(self) -> None:
        """A backward whose weight was written since must raise, as it does on dense weights."""
        if self.offloaded:
            return
        write_under_graphs(self.model)
        self._take(self.model)

    # --- state --------------------------------------------------------------------------------

    @rule(seed=SEEDS, mode=EXACT, strict=st.booleans())
    def load_floats(self, seed: int, mode: str, strict: bool) -> None:
        """Float values go into the weights: the bytes of quantizing them, in the same objects."""
        if self.offloaded:
            return
        torch.manual_seed(seed)
        source = Net().to(self.model.norm.weight.dtype)
        source.load_state_dict(
            {k: v * 2.0 ** (seed % 3 - 1) for k, v in source.state_dict().items()}
        )
        before = [id(p) for p in self.model.parameters()]
        with MODES[mode]():
            self.model.load_state_dict(source.state_dict(), strict=strict)
        assert before == [id(p) for p in self.model.parameters()]
        values = dict([*source.named_parameters(), *source.named_buffers()])
        for name, weight in resting(self.model).items():
            wanted = stowage.quantize(values[name].detach(), weight.storage)
            assert same_bytes(bytes_of(weight), bytes_of(wanted)), name
        self._take(self.model)

    @rule(how=st.sampled_from(["torch", "stowage", "assign"]))
    def own_state(self, how: str) -> None:
        """A model's own state dict changes nothing."""
        before = [id(p) for p in self.model.parameters()]
        if how == "stowage":
            if self.offloaded:
                return
            stowage.load_state_dict(self.model, stowage.state_dict(self.model))
        else:
            state = self.model.state_dict()
            self.model.load_state_dict(state, assign=how == "assign")
        if how != "assign":
            assert before == [id(p) for p in self.model.parameters()]
        else:
            self.model.head.weight = self.model.embed.weight  # torch assigns each name by itself
            self.optimizer = torch.optim.SGD(self._trained(), lr=1e-3)

    @rule(how=st.sampled_from(["deepcopy", "pickle", "torch.save", "file"]))
    def copied(self, how: str) -> None:
        """The program goes on with a copy, whose twin is the same."""
        wanted = dense_twin(self.model)(IDS)
        hooks = len(self.model._forward_hooks)
        kept = self.model
        where = self._folder()
        self._take(copied(self.model, how, where, built(*self.made)))
        hooks = 0 if how == "file" else hooks
        assert self.model.head.weight is self.model.embed.weight, f"{how} unties"
        assert len(self.model._forward_hooks) == hooks
        near(self.model(IDS), wanted, self.exact, f"outputs after {how}")
        self.offloaded = self.offloaded and how == "deepcopy"
        self.optimizer = torch.optim.SGD(self._trained(), lr=1e-3)
        del kept

    def _folder(self) -> Path:
        self.folders += 1
        return self.folder / str(self.folders)

    @rule(dtype=st.sampled_from([torch.float32, torch.bfloat16]), how=st.booleans())
    def cast(self, dtype: torch.dtype, how: bool) -> None:
        """The compute dtype changes, the codes do not."""
        if self.offloaded:
            return
        for parameter in self.model.parameters():
            parameter.note = "mine"
        self.model.to(dtype) if how else self.model.type(dtype)
        for name, weight in resting(self.model).items():
            assert weight.dtype == dtype, name
        assert all(p.note == "mine" for p in self.model.parameters()), "attributes vanished"
        self.optimizer = torch.optim.SGD(self._trained(), lr=1e-3)

    @rule()
    def thaw(self) -> None:
        """What is refused changes nothing."""
        before = [p.requires_grad for p in self.model.parameters()]
        try:
            self.model.requires_grad_(True)
        except stowage.StowageError:
            assert before == [p.requires_grad for p in self.model.parameters()]
        else:
            raise AssertionError("weights that rest must refuse to be trained")

    @rule()
    def hook(self) -> None:
        if len(self.model._forward_hooks) < 2:
            self.model.register_forward_hook(look)

    # --- tiers --------------------------------------------------------------------------------

    @precondition(lambda self: not self.offloaded)
    @rule(reads=st.sampled_from(["mapped", "buffered", "automatic"]))
    def offload(self, reads: str) -> None:
        wanted = self.model(IDS)
        try:
            stowage.offload(self.model, ram="128KiB", folder=self._folder(), reads=reads)
        except stowage.InvalidArgument as error:
            assert "ram" in str(error)  # too little for this storage
            return
        self.offloaded = True
        near(self.model(IDS), wanted, self.exact, "outputs after offload")

    @precondition(lambda self: self.offloaded)
    @rule()
    def onload(self) -> None:
        stowage.onload(self.model)
        self.offloaded = False

    @precondition(lambda self: self.offloaded)
    @rule(ram=st.sampled_from(["96KiB", "256KiB", "1MiB"]))
    def rebudget(self, ram: str) -> None:
        stowage.rebudget(self.model, ram)

    @rule()
    def fork(self) -> None:
        """A child computes the same."""
        wanted = self.model(IDS).detach()
        child = forked(self.model, wanted)
        assert os.waitpid(child, 0)[1] == 0, "a forked child failed"

    @rule()
    def rest_again(self) -> None:
        """Plain and at rest again: fp32 values give their codes back."""
        if self.offloaded or self.model.norm.weight.dtype != torch.float32:
            return
        before = {name: bytes_of(weight) for name, weight in resting(self.model).items()}
        values = {name: w.dequantize() for name, w in resting(self.model).items()}
        stowage.unstow(self.model)
        plain = dict([*self.model.named_parameters(), *self.model.named_buffers()])
        assert all(torch.equal(plain[name], value) for name, value in values.items())
        put_to_rest(self.model, self.made[2], *self.made[3:])
        assert before.keys() == resting(self.model).keys()
        self._take(self.model)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "model"):
            return
        now = resting(self.model)
        assert now.keys() == self.held.keys()
        for name, weight in now.items():
            assert same_bytes(bytes_of(weight), self.held[name]), f"bytes of {name} changed"
        assert self.model.head.weight is self.model.embed.weight


@pytest.mark.slow
@pytest.mark.timeout(0 if STEPS > 1000 else 300)
def test_random_programs_over_models() -> None:
    run(Models, STEPS)
