# SPDX-License-Identifier: Apache-2.0
"""What happens around the steps of a training loop: scalers, clipping, closures, schedules, hooks,
accelerate. Each runs any optimizer, and tells what it saw at each step."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from kept_training import Mlp, Oracle, batches
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

STEPS = 5
Model = Mlp | Oracle
Step = Iterator[Any]  # what a surrounding saw at each step


def loss_of(model: Model, at: int) -> Tensor:
    x, y = batches(torch.float32, STEPS + 1)[at]
    return F.mse_loss(model(x), y)


def in_groups(optimizer: Any) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# --- surroundings: what happens around a step -----------------------------------------------------


def plainly(model: Model, optimizer: Any) -> Step:
    for at in range(STEPS):
        loss = loss_of(model, at)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def scaled(unscale: bool = False, infinite: bool = False, clip: Any = None) -> Any:
    def run(model: Model, optimizer: Any) -> Step:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
        for at in range(STEPS):
            loss = loss_of(model, at)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if infinite and at == 1:
                model.up.weight.grad[3, 2] = torch.inf  # type: ignore[index]
            if unscale:
                scaler.unscale_(optimizer)
            norm = clip(model, optimizer) if clip else None
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield loss.item(), scaler.get_scale(), norm

    return run


def clipped(clip: Any) -> Any:
    def run(model: Model, optimizer: Any) -> Step:
        for at in range(STEPS):
            loss_of(model, at).backward()
            norm = clip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            yield norm

    return run


def by_model(model: Any, optimizer: Any) -> float:
    return clip_grad_norm_(model.parameters(), 0.05).item()


def by_groups(model: Any, optimizer: Any) -> float:
    return clip_grad_norm_(in_groups(optimizer), 0.05).item()


def values_by_groups(model: Any, optimizer: Any) -> None:
    clip_grad_value_(in_groups(optimizer), 0.01)


def accumulating(set_to_none: bool) -> Any:
    def run(model: Model, optimizer: Any) -> Step:
        for at in range(STEPS):
            for more in (0, 1):
                (loss_of(model, at + more) / 2).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            left = [None if p.grad is None else p.grad.sum().item() for p in model.parameters()]
            assert left == [None if set_to_none else 0.0] * 4
            yield left

    return run


def never_cleared(model: Model, optimizer: Any) -> Step:
    for at in range(STEPS):
        loss_of(model, at).backward()
        optimizer.step()
        yield None


def with_closure(model: Model, optimizer: Any) -> Step:
    for at in range(STEPS):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, at)  # noqa: B023
            loss.backward()
            return loss

        yield optimizer.step(closure).item()


def scheduled(make: Any) -> Any:
    def run(model: Model, optimizer: Any) -> Step:
        schedule = make(optimizer)
        for at in range(STEPS):
            loss_of(model, at).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step(*([1.0] if "Plateau" in type(schedule).__name__ else []))
            group = optimizer.param_groups[0]
            yield float(group["lr"]), group.get("betas")

    return run


def reset(model: Model, optimizer: Any) -> Step:
    """Moments looked at and thrown away, as by ReLoRA."""
    for at in range(STEPS):
        loss_of(model, at).backward()
        optimizer.step()
        seen = optimizer.state[model.up.weight]["exp_avg"].clone()
        if at == 1:
            optimizer.state.clear()
        elif at == 2:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
        yield seen.tolist()


def hooked(model: Model, optimizer: Any) -> Step:
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("after"))
    optimizer.register_state_dict_post_hook(lambda o, state: calls.append(str(len(state["state"]))))
    optimizer.register_load_state_dict_pre_hook(
        lambda o, state: calls.append(str(o.param_groups[0]["params"][0] is model.up.weight))
    )
    optimizer.register_load_state_dict_post_hook(
        lambda o: calls.append(str(sorted(o.state[model.up.weight].keys() - {"master", "casts"})))
    )
    for at in range(STEPS):
        loss_of(model, at).backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        yield list(calls)


def frozen_for_a_step(model: Model, optimizer: Any) -> Step:
    """A weight without a gradient stays, with its moments."""
    for at in range(STEPS):
        loss_of(model, at).backward()
        if at in (0, 2):
            model.down.weight.grad = None
        optimizer.step()
        optimizer.zero_grad()
        yield None


def accelerated(model: Model, optimizer: Any) -> Step:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # type: ignore[no-untyped-call, attr-defined]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    theirs, wrapped = accelerator.prepare(model, optimizer)
    for at in range(STEPS):
        for more in (0, 1):
            with accelerator.accumulate(theirs):
                accelerator.backward(loss_of(theirs, at + more))
                if at == 1 and more:
                    model.up.weight.grad[3, 2] = torch.inf  # type: ignore[index]
                norm = None
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(theirs.parameters(), 0.05).item()
                wrapped.step()
                wrapped.zero_grad()
        yield norm if at != 1 else None, wrapped.step_was_skipped, accelerator.scaler.get_scale()


SURROUNDINGS: dict[str, Any] = {
    "nothing": plainly,
    "scaler": scaled(),
    "scaler, unscaled": scaled(unscale=True),
    "scaler, infinite": scaled(infinite=True),
    "scaler, unscaled, infinite": scaled(unscale=True, infinite=True),
    "scaler, clipped": scaled(unscale=True, infinite=True, clip=by_model),
    "scaler, clipped by groups": scaled(unscale=True, clip=by_groups),
    "clipped": clipped(by_model),
    "clipped by groups": clipped(by_groups),
    "values clipped by groups": clipped(values_by_groups),
    "accumulating": accumulating(True),
    "accumulating, zeros": accumulating(False),
    "never cleared": never_cleared,
    "closure": with_closure,
    "step schedule": scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.1)),
    "one cycle": scheduled(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.01, STEPS + 1)),
    "plateau": scheduled(lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1)),
    "moments reset": reset,
    "hooks": hooked,
    "frozen for a step": frozen_for_a_step,
    "accelerate": accelerated,
}
