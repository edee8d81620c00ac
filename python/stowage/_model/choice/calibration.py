# SPDX-License-Identifier: Apache-2.0
"""How far the rounding of one weight moves the output of the module that holds it, on inputs of the
caller's. The model runs as it is; behind each module its forward runs again with one weight's
dequantized candidate in place, one at a time, and the two outputs are compared."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stowage._model.choice.trials import source
from stowage._model.rest.formation import Making, from_values
from stowage._model.weights import Held, Inventory, Site
from stowage._ops import _torch
from stowage._ops._torch import tree_leaves
from stowage._ops.errors import InvalidArgument
from stowage._ops.storage import Storage
from stowage._tensor.stowed import StowedTensor

Calibration = Callable[[nn.Module], object] | Iterable[Any]
Errors = dict[tuple[str, Storage], float]  # by a weight's name and the candidate
_NO_MEASURE = Making(keep_nonfinite=True, measure=False)


@dataclass
class _Probe:
    """One weight at one place that holds it. It is measured at the module there or, where that one
    is never called (attention that reads `out_proj.weight` itself), at the nearest around it."""

    held: Held
    site: Site
    storages: list[Storage]
    level: int = 0
    ran: bool = False
    error2: dict[Storage, float] = field(default_factory=dict)
    value2: float = 0.0

    @property
    def module(self) -> nn.Module | None:
        chain = (*self.site.around, self.site.module)
        return chain[-1 - self.level] if self.level < len(chain) else None

    def error(self, storage: Storage) -> float | None:
        """None where no candidate moved the output: the inputs did not reach the weight."""
        if not any(self.error2.values()):
            return None
        return math.sqrt(self.error2[storage] / self.value2) if self.value2 else math.inf


def output_errors(
    model: nn.Module,
    weights: list[tuple[Held, list[Storage]]],
    calibrate: Calibration,
    restow: bool = False,
) -> Errors:
    """The relative error ||y' - y|| / ||y|| of the output y of the module that holds each weight,
    over all inputs, for each of its candidates; of a tied weight the worst of its places. A weight
    that no input reached is left out. y is computed with the values that the candidates are made
    from: of a resting weight its master, or with `restow` its dequantized values.

    The model runs in eval mode without gradients; afterwards, whatever was raised, modes, buffers,
    parameters, hooks and the state of torch's random numbers are what they were."""
    run = _runner(calibrate)
    probes = [
        _Probe(held, site, storages)
        for held, storages in weights
        for site in {(id(s.module), s.attribute): s for s in held.sites}.values()
    ]
    pending = probes
    while pending:
        with _undisturbed(model), _listening(pending, restow):
            run(model)
        for probe in pending:
            probe.level += not probe.ran
        pending = [probe for probe in pending if not probe.ran and probe.module is not None]
    if probes and not any(probe.ran for probe in probes):
        raise InvalidArgument("stowage: calibrate must run the model, no module of it was called")
    found: Errors = {}
    for probe in probes:
        for storage in probe.storages:
            error, key = probe.error(storage), (probe.held.name, storage)
            if error is not None:
                found[key] = max(error, found.get(key, 0.0))
    return found


def _runner(calibrate: Calibration) -> Callable[[nn.Module], object]:
    if callable(calibrate) and not isinstance(calibrate, nn.Module | type):
        return calibrate
    if isinstance(calibrate, torch.Tensor | Mapping):
        calibrate = [calibrate]
    if isinstance(calibrate, str | nn.Module | type) or not isinstance(calibrate, Iterable):
        raise InvalidArgument(
            "stowage: calibrate must be a function of the model or a sequence of its inputs, got "
            f"{type(calibrate).__name__}"
        )
    inputs = list(calibrate) if isinstance(calibrate, Iterator) else calibrate

    def run(model: nn.Module) -> None:
        for one in inputs:
            if isinstance(one, Mapping):
                model(**one)
            elif isinstance(one, tuple | list):
                model(*one)
            elif isinstance(one, torch.Tensor):
                model(one)
            else:
                raise InvalidArgument(
                    "stowage: an input of calibrate must be a tensor, a tuple of arguments or a "
                    f"mapping of named ones, got {type(one).__name__}"
                )

    return run


class _Listener:
    """Measures the probes of one module behind each of its calls."""

    def __init__(
        self, module: nn.Module, probes: list[_Probe], busy: list[bool], restow: bool
    ) -> None:
        self._module, self._probes, self._busy, self._restow = module, probes, busy, restow
        self._calls: list[tuple[Any, Any, torch.Tensor]] = []
        # A layer leaves its arguments as they are; what is made of layers may write to them.
        self._kept = copy.deepcopy if next(module.children(), None) is not None else _same

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self._busy[0]:
            self._calls.append((*self._kept((args, kwargs)), torch.get_rng_state()))

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._busy[0]:
            return
        call, now = self._calls.pop(), torch.get_rng_state()
        self._busy[0] = True  # the modules inside are called again below
        try:
            wanted = _floating(output)
            for probe in self._probes:
                self._measure(probe, call, wanted)
        finally:
            self._busy[0] = False
            torch.set_rng_state(now)

    def _measure(self, probe: _Probe, call: Any, wanted: list[torch.Tensor]) -> None:
        values, dtype = source(probe.held, self._restow), probe.held.tensor.dtype
        assert values is not None
        if isinstance(probe.held.tensor, StowedTensor):
            wanted = self._output(probe, values.to(dtype), call)
        probe.ran = True
        probe.value2 += sum(_square(y) for y in wanted)
        for storage in probe.storages:
            got = self._output(probe, _rounded(values, storage, dtype), call)
            error2 = sum(_square(_minus(a, b)) for a, b in zip(got, wanted, strict=True))
            probe.error2[storage] = probe.error2.get(storage, 0.0) + error2

    def _output(self, probe: _Probe, values: torch.Tensor, call: Any) -> list[torch.Tensor]:
        """Of the module, called again with `values` in place of one weight."""
        with _instead(probe.site, values):
            args, kwargs = self._kept(call[:2])
            torch.set_rng_state(call[2])
            return _floating(self._module.forward(*args, **kwargs))


def _rounded(values: torch.Tensor, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
    """What the values are once they have rested."""
    rested, _ = from_values(values, storage, _NO_MEASURE, dtype)
    assert isinstance(rested, StowedTensor)
    return rested.dequantize()


def _same(value: Any) -> Any:
    return value


def _floating(output: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(output)
    return [y for y in leaves if isinstance(y, torch.Tensor) and y.is_floating_point()]


def _minus(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    return a.to(wide) - b.to(wide)


def _square(y: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(y, dtype=torch.float64)) ** 2


@contextmanager
def _instead(site: Site, values: torch.Tensor) -> Iterator[None]:
    """Lets one place of the model hold `values` for a moment."""
    held = getattr(site.module, site.attribute)
    parameter = site.attribute in _torch.parameters(site.module)
    new = nn.Parameter(values, requires_grad=False) if parameter else values
    setattr(site.module, site.attribute, new)
    try:
        yield
    finally:
        setattr(site.module, site.attribute, held)


@contextmanager
def _listening(probes: list[_Probe], restow: bool) -> Iterator[None]:
    at: dict[nn.Module, list[_Probe]] = {}
    for probe in probes:
        assert probe.module is not None
        at.setdefault(probe.module, []).append(probe)
    busy = [False]
    with ExitStack() as hooks:
        for module, some in at.items():
            listener = _Listener(module, some, busy, restow)
            before = module.register_forward_pre_hook(listener.before, with_kwargs=True)
            hooks.callback(before.remove)
            after = module.register_forward_hook(listener.after, prepend=True, with_kwargs=True)
            hooks.callback(after.remove)
        yield


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode, compiled modules run as they are written; afterwards everything is as before."""
    modes = [(module, module.training) for module in model.modules()]
    kept = [h.tensor for h in Inventory(model).buffers if not isinstance(h.tensor, StowedTensor)]
    # An embedding with max_norm rescales rows of its weight in forward.
    scaled = [module for module, _ in modes if getattr(module, "max_norm", None) is not None]
    kept += [tensor for module in scaled for tensor in module.parameters(recurse=False)]
    saved = [(tensor, tensor.detach().clone()) for tensor in kept if not tensor.is_meta]
    places = [(module, dict(_torch.buffers(module))) for module, _ in modes]
    devices = {t.device for t in model.parameters() if t.device.type == "cuda"}
    compiled = any(
        type(m).__name__ == "OptimizedModule" or _torch.compiled_call(m) for m, _ in modes
    )
    try:
        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(torch.random.fork_rng(devices=list(devices)))
            if compiled:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, training in modes:
            module.training = training
        for module, held in places:
            _torch.buffers(module).update(held)
        for tensor, values in saved:
            if not torch.equal(tensor, values):
                with torch.no_grad():
                    tensor.copy_(values)
