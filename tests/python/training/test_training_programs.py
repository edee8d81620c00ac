# SPDX-License-Identifier: Apache-2.0
"""Random programs over a model whose weights rest while MasterOptimizer trains them, and over plain
fp32 masters that torch's own optimizer steps: gradients, masters and bytes are equal after all.

STOWAGE_PROGRAM_STEPS=100000 runs that many steps (`make test-all`).
"""

from __future__ import annotations

import copy
import os
import pickle
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from kept_training import Mlp, batches, resting
from programs import MODES, bytes_of, run, same_bytes
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import stowage
from stowage.training import MasterOptimizer

STEPS = int(os.environ.get("STOWAGE_PROGRAM_STEPS", "160"))
STORAGES = [
    "f8_e4m3:tensor",
    "f8_e4m3:row",
    "f8_e5m2:row",
    "int8:row",
    "int8:block48",
    "nf4:block64",
]
STORAGES += ["nf4:block32:nested", "bf16", "f8_e4m3"]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda make, given: make(torch.optim.SGD)(given, lr=0.05),
    "momentum": lambda make, given: make(torch.optim.SGD)(given, lr=0.02, momentum=0.9),
    "adamw": lambda make, given: make(torch.optim.AdamW)(given, lr=2e-3, foreach=False),
    "foreach": lambda make, given: make(torch.optim.AdamW)(given, lr=2e-3, foreach=True),
    "fused": lambda make, given: make(torch.optim.AdamW)(given, lr=2e-3, fused=True),
}
AROUND = st.sampled_from(["plain", "functions", "default device", "anomaly", "saved hooks"])
LOADED = st.sampled_from(["model first", "optimizer first"])
WEIGHTS = ("up.weight", "down.weight")


def by_ours(kind: Any, via: torch.dtype | None) -> Any:
    return lambda params, **options: MasterOptimizer(kind, params, via=via, **options)


class Masters(torch.nn.Module):
    """Plain fp32 masters, and the values that the forward sees: those that rest."""

    def __init__(self, model: Mlp, kept: bool) -> None:
        super().__init__()
        self.seen: dict[str, Tensor] = {}
        self.held: dict[str, list[Tensor]] = {}
        for name, weight in model.named_parameters():
            value = weight.detach()
            if name in WEIGHTS:
                self.rest(name, weight)
                value = stowage.training.init_value(weight).clone() if kept else self.seen[name]
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(value.clone()))

    def master(self, name: str) -> Any:
        return self.get_parameter(name.replace(".", "_"))

    def rest(self, name: str, weight: Any) -> None:
        self.held[name] = bytes_of(weight)
        self.seen[name] = weight.dequantize()

    def loss(self, x: Tensor, y: Tensor, scale: float) -> float:
        """Adds the gradients of the scaled loss to the masters' own, as autograd would."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.seen.items()}
        hidden = F.linear(x, leaves["up.weight"], self.master("up.bias"))
        out = F.linear(torch.tanh(hidden), leaves["down.weight"], self.master("down.bias"))
        loss = F.mse_loss(out, y)
        (loss * scale).backward()
        for name, leaf in leaves.items():
            master, grad = self.master(name), leaf.grad
            if master.requires_grad:
                master.grad = grad if master.grad is None else master.grad + grad
        return loss.item()


class Trainings(RuleBasedStateMachine):
    """What becomes of masters, moments and the weights that are made from them."""

    @initialize(
        storage=st.sampled_from(STORAGES),
        kind=st.sampled_from(sorted(OPTIMIZERS)),
        kept=st.booleans(),
        via=st.sampled_from([None, torch.bfloat16]),
    )
    def begin(self, storage: str, kind: str, kept: bool, via: torch.dtype | None) -> None:
        self.storage, self.via, self.at = storage, via, 0
        self.model = resting(storage, preserve_init=kept)
        self.plain = Masters(self.model, kept)
        self.optimizer = OPTIMIZERS[kind](lambda made: by_ours(made, via), self.model.parameters())
        given = [self.plain.master(name) for name, _ in self.model.named_parameters()]
        self.other = OPTIMIZERS[kind](lambda made: made, given)
        self.stale: set[str] = set()  # weights that somebody wrote since their masters were made
        self.loaded: set[str] = (
            set()
        )  # whose masters count until the next cast, whatever is written

    def batch(self) -> tuple[Tensor, Tensor]:
        self.at = (self.at + 1) % 8
        return batches(torch.float32, 9)[self.at]

    def cast(self) -> None:
        """What a step makes of the masters."""
        for name in WEIGHTS:
            master = self.plain.master(name)
            if master.grad is None:
                continue
            master = master.detach()
            seen = master if self.via is None else master.to(self.via)
            made = stowage.quantize(seen, self.storage, compute_dtype=torch.float32)
            self.plain.rest(name, made)

    def refresh(self) -> None:
        """Before a step: the masters of weights that were written are made again."""
        for name in self.stale:
            with torch.no_grad():
                self.plain.master(name).copy_(self.plain.seen[name])
        self.stale.clear()

    # --- steps --------------------------------------------------------------------------------

    @rule(around=AROUND, scale=st.sampled_from([1.0, 2.0**12]))
    def accumulate(self, around: str, scale: float) -> None:
        x, y = self.batch()
        with MODES[around]():
            loss = F.mse_loss(self.model(x), y)
            (loss * scale).backward()
        assert loss.item() == self.plain.loss(x, y, scale)

    @rule(scaled=st.booleans(), clip=st.booleans(), infinite=st.booleans(), none=st.booleans())
    def step(self, scaled: bool, clip: bool, infinite: bool, none: bool) -> None:
        x, y = self.batch()
        scaler, twin = (
            torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**10) for _ in range(2)
        )
        scaler.scale(F.mse_loss(self.model(x), y)).backward()
        self.plain.loss(x, y, 2.0**10 if scaled else 1.0)
        twin.scale(torch.zeros(()))
        infinite = infinite and scaled
        for model, name, optimizer, its in (
            (self.model, "up.bias", self.optimizer, scaler),
            (self.plain, "up_bias", self.other, twin),
        ):
            if infinite:
                model.get_parameter(name).grad[0] = torch.inf
            its.unscale_(optimizer)
            if clip:
                clip_grad_norm_(model.parameters(), 0.01)
        self.same_gradients()
        if not infinite:
            self.refresh()
        scaler.step(self.optimizer)
        twin.step(self.other)
        if not infinite:
            self.cast()
            self.loaded = False
        self.optimizer.zero_grad(set_to_none=none)
        self.other.zero_grad(set_to_none=none)

    @rule(none=st.booleans())
    def zero_grad(self, none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=none)
        self.other.zero_grad(set_to_none=none)

    @rule(rate=st.sampled_from([0.5, 1.5]))
    def schedule(self, rate: float) -> None:
        for optimizer in (self.optimizer, self.other):
            for group in optimizer.param_groups:
                group["lr"] *= rate

    @rule()
    def broken_step(self) -> None:
        """A step whose masters would not be finite raises, and the weights that rest stay. What a
        checkpoint holds gives back the others."""
        if not self.model.down.weight.requires_grad:
            return
        self.refresh()
        saved = copy.deepcopy(self.optimizer.state_dict())
        x, y = self.batch()
        F.mse_loss(self.model(x), y).backward()
        self.model.down.weight.grad[0, 0] = torch.nan
        try:
            self.optimizer.step()
        except stowage.StowageError:
            pass
        else:
            raise AssertionError("a master that is not finite must be refused")
        self.optimizer.load_state_dict(saved)
        self.loaded = True
        for name, parameter in self.model.named_parameters():
            if name not in WEIGHTS:
                with torch.no_grad():
                    parameter.copy_(self.plain.master(name))
        self.zero_grad(True)

    # --- state --------------------------------------------------------------------------------

    @rule(seed=st.integers(0, 100))
    def write(self, seed: int) -> None:
        """Somebody else gives the weights values."""
        torch.manual_seed(seed)
        source = Mlp()
        self.model.load_state_dict(source.state_dict())
        for name, value in source.named_parameters():
            if name in WEIGHTS:
                made = stowage.quantize(value.detach(), self.storage)
                self.plain.rest(name, made)
                if not self.loaded:
                    self.stale.add(name)
            else:
                with torch.no_grad():
                    self.plain.master(name).copy_(value)

    @rule(order=LOADED, again=st.booleans())
    def go_back(self, order: str, again: bool) -> None:
        """A checkpoint, steps, and the checkpoint again."""
        self.refresh()
        weights = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        state = copy.deepcopy(self.optimizer.state_dict())
        plain = copy.deepcopy((self.plain.state_dict(), self.other.state_dict()))
        held = dict(self.plain.held), dict(self.plain.seen)
        if again:
            self.step(False, False, False, True)
        for what in (order, "model first" if order == "optimizer first" else "optimizer first"):
            if what == "model first":
                self.model.load_state_dict(weights)
            else:
                self.optimizer.load_state_dict(state)
        self.plain.load_state_dict(plain[0])
        self.other.load_state_dict(plain[1])
        self.plain.held, self.plain.seen = held
        self.stale, self.loaded = set(), True

    @rule(how=st.sampled_from(["deepcopy", "pickle"]))
    def copied(self, how: str) -> None:
        self.zero_grad(True)  # copies of plain parameters have none
        both = (self.model, self.optimizer)
        if how == "deepcopy":
            self.model, self.optimizer = copy.deepcopy(both)
        else:
            self.model, self.optimizer = pickle.loads(pickle.dumps(both))

    @rule(name=st.sampled_from(WEIGHTS))
    def freeze(self, name: str) -> None:
        """Out of training, with its gradient, or back in."""
        weight, master = self.model.get_parameter(name), self.plain.master(name)
        weight.requires_grad_(not weight.requires_grad)
        master.requires_grad_(weight.requires_grad)
        weight.grad = master.grad = None

    # --- what holds ---------------------------------------------------------------------------

    def same_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            got, wanted = parameter.grad, self.plain.master(name).grad
            assert (got is None) == (wanted is None), f"gradient of {name}"
            assert got is None or torch.equal(got.nan_to_num(), wanted.nan_to_num()), name

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "model"):
            return
        for name, weight in self.model.named_parameters():
            if name in WEIGHTS:
                assert same_bytes(bytes_of(weight), self.plain.held[name]), f"bytes of {name}"
            else:
                assert torch.equal(weight, self.plain.master(name)), name
            master = self.optimizer.state.get(weight, {}).get("master")
            if master is not None and name not in self.stale:
                assert torch.equal(master, self.plain.master(name)), f"master of {name}"
        self.same_gradients()


@pytest.mark.slow
@pytest.mark.timeout(0 if STEPS > 1000 else 300)
def test_random_programs_over_training() -> None:
    run(Trainings, STEPS)
