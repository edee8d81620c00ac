# SPDX-License-Identifier: Apache-2.0
"""Random programs over a stowed model and its dense twin: forwards, gradients, steps, state dicts,
copies, casts, files, offload, plans, forks, compiled graphs and torch.func, in any order and mode.

STOWAGE_PROGRAM_STEPS=100000 runs that many steps (`make test-all`); a failure prints the program
and how to run it again.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from program_graphs import Graphs
from program_models import (
    EXACT,
    FORWARD,
    IDS,
    Net,
    built,
    copied,
    dense_twin,
    look,
    near,
    put_to_rest,
    resting,
    write_under_graphs,
)
from program_tiers import Tiers
from programs import MODES, bytes_of, run, same_bytes

import stowage

STEPS = int(os.environ.get("STOWAGE_PROGRAM_STEPS", "240"))
STORAGES = [
    "bf16", "f8_e4m3", "f8_e5m2:tensor", "f8_e4m3:row", "f8_e4m3:block32", "int8", "int8:tensor",
    "nf4:block32", "nf4", "fp4", "nf4:block64:nested", "nf4:torchao:block32:scaler4",
    "mxfp4", "nvfp4", "int4:block32:zero", "int4:row:bf16", "f8_e4m3:block8x16:e8m0",
]  # fmt: skip
SEEDS = st.integers(0, 1000)


class Models(Tiers, Graphs):
    """What becomes of a model's values."""

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
        self.exact, self.offloaded = exact, False
        self.take(built(*self.made))
        self.make_optimizer()

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
        self.check_gradients(mode, self.model)

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

    @rule()
    def stale_graph(self) -> None:
        """A backward whose weight was written since must raise, as it does on dense weights."""
        if self.offloaded:
            return
        write_under_graphs(self.model)
        self.take(self.model)

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
            wanted = stowage.quantize(values[name].detach(), weight.resting)
            assert same_bytes(bytes_of(weight), bytes_of(wanted)), name
        self.take(self.model)

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
            self.make_optimizer()

    @rule(how=st.sampled_from(["deepcopy", "pickle", "torch.save", "file"]))
    def copied(self, how: str) -> None:
        """The program goes on with a copy, whose twin is the same."""
        wanted = dense_twin(self.model)(IDS)
        hooks = len(self.model._forward_hooks)
        kept = self.model
        where = self.new_folder()
        self.take(copied(self.model, how, where, built(*self.made)))
        hooks = 0 if how == "file" else hooks
        assert self.model.head.weight is self.model.embed.weight, f"{how} unties"
        assert len(self.model._forward_hooks) == hooks
        near(self.model(IDS), wanted, self.exact, f"outputs after {how}")
        self.offloaded = self.offloaded and how == "deepcopy"
        self.make_optimizer()
        del kept

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
        self.make_optimizer()

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
        self.take(self.model)

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
