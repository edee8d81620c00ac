# SPDX-License-Identifier: Apache-2.0
"""What random programs do to stowed weights, and how to tell that each step did that and no more.

A `World` holds weights with the bytes that each must have, and views of them with the chains of
view functions that lead to them. The oracle is plain: a dense tensor of the weight's values, the
same functions on it, and for a write that covers a weight the bytes of quantizing the result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from modes import Below, Passing, default_device, default_dtype, deterministic
from torch import Tensor

import stowage
from stowage import StowedTensor
from stowage._ops.storage import Storage

View = Callable[[Tensor], Tensor]
STEPS = 30  # of one program
EVERY_DAY = 1000  # steps, at most: the same programs in each run, where more are drawn anew
# The code whose value is 1, so that a weight of nothing else shows each element's scale.
_ONE = {"f8_e4m3": 0x38, "f8_e5m2": 0x3C, "int8": 1, "nf4": 0xFF, "fp4": 0x33}
# Relative and absolute (times the scale) error of the nearest code: half a step at most.
_NEAREST = {
    "f32": (0.0, 0.0),
    "bf16": (2.0**-8, 0.0),
    "f16": (2.0**-11, 2.0**-24),
    "f8_e4m3": (2.0**-4, 2.0**-9),
    "f8_e5m2": (2.0**-3, 2.0**-16),
    "int8": (0.0, 0.5001),
    "nf4": (0.0, 0.1525),
    "fp4": (0.0, 0.167),
}


# --- modes that may be on around any step ---------------------------------------------------------


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "plain": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device cpu": lambda: torch.device("cpu"),
    "device meta": lambda: torch.device("meta"),
    "default device": lambda: default_device("cpu"),
    "default dtype": default_dtype,
    "functions": Passing,
    "dispatched": Below,
    "deterministic": deterministic,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "saved hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
}
EXACT_MODES = tuple(name for name in MODES if name != "autocast")  # products are as outside


# --- the oracle -----------------------------------------------------------------------------------


def bytes_of(weight: StowedTensor) -> list[Tensor]:
    return [part.detach().clone() for part in weight.parts.values()]


def same_bytes(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and torch.equal(_raw(x), _raw(y))
        for x, y in zip(a, b, strict=True)
    )


def _raw(part: Tensor) -> Tensor:
    return part.reshape(-1).view(torch.uint8)


def nearest(weight: StowedTensor, wanted: Tensor) -> Tensor:
    """How far values may lie from `wanted` under the scales that `weight` has."""
    storage = Storage(weight.resting)
    relative, absolute = _NEAREST[weight.resting.split(":")[0]]
    scale = torch.ones(weight.shape)
    if len(weight.parts) > 1:
        codes, *scales = weight.parts.values()
        ones = torch.full_like(codes, _ONE[weight.resting.split(":")[0]])
        scale = StowedTensor([ones, *scales], weight.resting, weight.shape, torch.float32)
        scale = scale.dequantize().abs()
    allowed = relative * wanted.abs() + absolute * scale
    if storage.nested:  # a scale of few bits may be smaller than what it scales
        allowed += (wanted.abs() - scale).clamp(min=0) + 0.1 * scale + 0.02 * scale.max()
    return allowed


@dataclass
class Cell:
    """A weight, and what it must hold."""

    weight: StowedTensor
    held: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.held = bytes_of(self.weight)

    def values(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.weight.dequantize(dtype)


@dataclass
class Alias:
    """A view of a cell, and the function that makes the same view of a dense tensor."""

    tensor: Tensor
    cell: Cell
    view: View
    counted: bool = True  # whether it shares the count of writes: copies of views do not


class World:
    """Weights and views that live, each checked after every step."""

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.aliases: list[Alias] = []

    def add(self, weight: StowedTensor) -> Cell:
        cell = Cell(weight)
        self.cells.append(cell)
        return cell

    def check(self) -> None:
        for cell in self.cells:
            assert same_bytes(bytes_of(cell.weight), cell.held), f"bytes of {cell.weight!r} changed"
            assert cell.weight.nbytes_at_rest == sum(part.nbytes for part in cell.held)
        for alias in self.aliases:
            seen = alias.tensor.dequantize()
            wanted = alias.view(alias.cell.values(seen.dtype))
            assert seen.shape == wanted.shape and torch.equal(seen, wanted), (
                f"{alias.tensor!r} shows other values than its weight"
            )

    def read(self, target: Alias, function: Callable[[Tensor], object]) -> None:
        """The same result, or an error of the same type, as on a dense tensor."""
        dense = target.view(target.cell.values(target.tensor.dtype))
        wanted, got = _outcome(function, dense), _outcome(function, target.tensor)
        if isinstance(wanted, Exception):
            assert isinstance(got, Exception), f"must raise {wanted!r}, gave {got!r}"
            same = isinstance(got, type(wanted)) or isinstance(wanted, RuntimeError)
            assert same, f"must raise {wanted!r}, raised {got!r}"
            return
        if isinstance(got, Exception):
            raise got
        _assert_same(got, wanted)

    def write(
        self, target: Alias, function: Callable[[Tensor], object], whole: bool, moves: bool = True
    ) -> bool:
        """Writes, and checks what came of it; returns whether the write was carried out. `whole`:
        it names every element and reads none, so that all scales must be made again."""
        cell = target.cell
        old, dtype = cell.values(), cell.weight.dtype
        dense = old.clone()
        function(target.view(dense))
        version = cell.weight._version
        try:
            function(target.tensor)
        except stowage.StowageError:
            assert same_bytes(bytes_of(cell.weight), cell.held), "a refused write changed bytes"
            return False
        got = cell.values()
        changed = not same_bytes(bytes_of(cell.weight), cell.held)
        if moves and changed and target.counted:
            assert cell.weight._version > version, "a write did not move the version"
        if whole and target.view(torch.ones(old.shape)).numel() == old.numel() > 0:  # else no write
            exactly = stowage.quantize(dense, cell.weight.resting, compute_dtype=dtype)
            assert same_bytes(bytes_of(cell.weight), bytes_of(exactly)), (
                "a whole write must give what quantizing its values gives"
            )
        self._near(cell, old, dense, got)
        cell.held = bytes_of(cell.weight)
        return True

    @staticmethod
    def _near(cell: Cell, old: Tensor, wanted: Tensor, got: Tensor) -> None:
        """Values written are as near as codes allow; rows without any keep theirs."""
        plain = len(cell.weight.parts) == 1
        if plain:
            largest = Storage(cell.weight.resting).largest
            wanted = wanted.float().clamp(-largest, largest)
        wanted, got, old = wanted.float(), got.float(), old.float()
        allowed = nearest(cell.weight, wanted) + 2.0**-7 * wanted.abs()  # of the compute dtype
        assert bool(((got - wanted).abs() <= allowed + 1e-30).all()), (
            f"{cell.weight!r}: a written value is off by "
            f"{float(((got - wanted).abs() - allowed).max())} more than its code allows"
        )


def _outcome(function: Callable[[Tensor], object], given: Tensor) -> object:
    try:
        return function(given)
    except Exception as error:
        return error


def _assert_same(got: object, wanted: object) -> None:
    if isinstance(wanted, (tuple, list)):
        assert isinstance(got, (tuple, list)) and len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            _assert_same(one, other)
    elif isinstance(wanted, Tensor):
        assert isinstance(got, Tensor) and got.dtype == wanted.dtype, f"{got!r}, not {wanted!r}"
        values = got.dequantize() if hasattr(got, "dequantize") and not got.is_quantized else got
        plain = values if type(values) is Tensor else values.detach()
        assert plain.shape == wanted.shape, f"{plain.shape}, not {wanted.shape}"
        assert torch.equal(plain.nan_to_num(), wanted.detach().nan_to_num())
    else:
        assert got == wanted, f"{got!r}, not {wanted!r}"


def run(machine: type[RuleBasedStateMachine], steps: int) -> None:
    """Runs programs of this machine, about so many steps in all. A failure is shown as it was
    found: to shrink one takes minutes and `@reproduce_failure` does that where it is wanted."""
    limits = settings(
        derandomize=steps <= EVERY_DAY,
        max_examples=max(1, steps // STEPS),
        stateful_step_count=STEPS,
        deadline=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=limits)
