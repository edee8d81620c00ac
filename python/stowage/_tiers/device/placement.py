# SPDX-License-Identifier: Apache-2.0
"""A model that computes on devices while its weights rest elsewhere: which tensors go there for
good, which are fetched when they are used, and how all of it is undone."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import cache, partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from stowage._model.sizes import memory, nbytes
from stowage._model.weights import Held, Inventory, Swap, is_fetched_whole
from stowage._ops import _torch
from stowage._ops.eager import eagerly
from stowage._ops.errors import OutOfMemory, Unsupported
from stowage._ops.lenders import enter
from stowage._ops.memory import is_borrowed, new_copy
from stowage._tensor.slices import matrix_parts
from stowage._tensor.stowed import StowedTensor
from stowage._tiers.device.activations import compute_anywhere, compute_on, device_given
from stowage._tiers.device.link import padded, pinned_together
from stowage._tiers.device.ring import DeviceTier, Rests, unit_bytes
from stowage._tiers.disk.engine import signature_of
from stowage._tiers.places import CPU, Places

_ATTRIBUTE = "_stowage_devices"

_registered = 0  # modules, parameters and buffers that any module was given


def _note(*_: Any) -> None:
    global _registered
    if not torch.compiler.is_compiling():  # a graph would be guarded by the count
        _registered += 1


@cache
def _watch_modules() -> None:
    """From the first model on that computes on a device."""
    torch_modules.register_module_module_registration_hook(_note)
    torch_modules.register_module_parameter_registration_hook(_note)
    torch_modules.register_module_buffer_registration_hook(_note)


class Devices:
    """Of one model and its copies: the tier of the device that it computes on, and what is known of
    the tensors that are there."""

    def __init__(self, places: Places, ring: int) -> None:
        _watch_modules()
        self.home = places.home
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.registered = -1
        self.tier: DeviceTier | None = None
        if self.home != CPU:
            try:
                self.tier = DeviceTier(self.home, ring, partial(_resting, self.models))
            except RuntimeError as error:
                rule = f"{self.home} must have {ring} bytes for its ring"
                raise OutOfMemory(f"stowage.offload: {rule}, got: {error}") from None
            enter(self.tier)

    def __deepcopy__(self, memo: dict[int, Any]) -> Devices:
        return self  # copies of a model share the ring

    def __reduce__(self) -> NoReturn:
        raise Unsupported(
            "stowage: a model that computes on a device while its weights rest elsewhere cannot be "
            "pickled; take stowage.save(model, folder), or stowage.onload(model) first"
        )


def _resting(models: Iterable[nn.Module]) -> list[Rests]:
    """Every weight that rests on the CPU."""
    return [
        _rests(held, held.tensor._parts())
        for model in list(models)
        for held in Inventory(model).every
        if isinstance(held.tensor, StowedTensor) and held.tensor.device.type == "cpu"
    ]


def _rests(held: Held, parts: list[Tensor]) -> Rests:
    if not is_fetched_whole(held):
        return Rests(parts, is_expected=False, room=0, matrix=0)
    each, room = _room(held)
    return Rests(parts, is_expected=each == room, room=room, matrix=each if each < room else 0)


def _room(held: Held) -> tuple[int, int]:
    """Bytes in a ring of what is used at a time, one matrix of a stack, and of all."""
    tensor, count = held.tensor, held.tensor.shape[0] if held.is_stack else 1
    size = unit_bytes(memory(tensor))
    if count < 2:
        return size, size
    if not isinstance(tensor, StowedTensor):
        each = padded(-(-nbytes(tensor) // count))
        return each, each * count
    kind = (tensor._storage.key, tuple(tensor.shape))
    if kind not in _matrix_bytes:  # sliced once: tiers look at models in the midst of ops
        one = matrix_parts(tensor, 0)
        _matrix_bytes[kind] = None if one is None else unit_bytes(one)
    found = _matrix_bytes[kind]
    return (size, size) if found is None else (found, found * count)


# By storage and shape of a stack; None where blocks reach over several matrices.
_matrix_bytes: dict[tuple[int, tuple[int, ...]], int | None] = {}


# --- before anything changes ----------------------------------------------------------------------


def ring_bytes(every: list[Held], places: Places, limit: int | None) -> tuple[int, list[str]]:
    """Bytes of the ring on `home`, and why there can be none."""
    if places.home == CPU:
        return 0, []
    stay = sum(
        nbytes(held.tensor)
        for held in every
        if places.work(held.name) == places.home and not places.fetches(held)
    )
    whole = (held for held in every if is_fetched_whole(held) and places.fetches(held))
    fetched = {held.name: _room(held) for held in whole}
    if not fetched:
        wrong = limit is not None and limit < stay
        told = f"accelerator must hold {stay} bytes of modules and tensors that stay, got {limit}"
        return 0, [told] if wrong else []
    largest = max(fetched, key=lambda name: fetched[name][0])
    least = stay + fetched[largest][0]
    if limit is None or limit < least:
        beside = f" beside {stay} bytes that stay" if stay else ""
        return 0, [
            f"accelerator must be at least {least} bytes, for the largest weight, {largest} of "
            f"{fetched[largest][0]}{beside}, got {limit}"
        ]
    return min(limit - stay, sum(room for _, room in fetched.values())), []


# --- attaching ------------------------------------------------------------------------------------


def attach_devices(inventory: Inventory, devices: Devices, places: Places, pin: int) -> None:
    """Moves what stays on devices, and makes activations come to the weights' modules. Nothing is
    changed where a device has no room."""
    swap = Swap()
    plain: list[tuple[Tensor, Tensor]] = []
    try:
        for held in inventory.every:
            device = places.work(held.name)
            if device == CPU or places.fetches(held):
                continue
            _move(held, device, swap, plain)
    except RuntimeError as error:
        raise OutOfMemory(f"stowage.offload: {error}") from None
    swap.commit()
    for tensor, there in plain:
        _replace(tensor, there)
    if devices.tier is not None:
        _pin(inventory, places, pin)
    _hook(inventory, devices, places)
    inventory.model.__dict__[_ATTRIBUTE] = devices
    devices.models.add(inventory.model)


def _move(held: Held, device: torch.device, swap: Swap, plain: list[tuple[Tensor, Tensor]]) -> None:
    tensor = held.tensor
    if not isinstance(tensor, StowedTensor):
        plain.append((tensor, tensor.detach().to(device)))
        return
    there = tensor._like([part.to(device) for part in tensor._parts()])
    there.__dict__.update({k: v for k, v in tensor._extras().items() if k != _torch.IS_PARAMETER})
    swap.put(held, there if held.is_buffer else nn.Parameter(there, tensor.requires_grad))


def _replace(tensor: Tensor, values: Tensor) -> None:
    """Gives a plain parameter or buffer other memory; its object stays, so that optimizers and ties
    go on holding it."""
    grad, tensor.grad = tensor.grad, None
    if _torch.has_compatible_shallow_copy_type(tensor, values):
        tensor.data = values
    else:  # as Module.to() does for devices that torch does not know
        if isinstance(tensor, nn.Parameter):
            values = nn.Parameter(values, tensor.requires_grad)
        values.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, values)
    if grad is not None:
        tensor.grad = grad.to(tensor.device)


def _hook(inventory: Inventory, devices: Devices, places: Places) -> None:
    """Every module that computes elsewhere than its surroundings moves its inputs; where there are
    several devices, so do the modules between them. Elements of a Sequential or ModuleList leave
    their outputs where they are, for the next one; others give them back."""
    model, modules = inventory.model, inventory.modules
    _torch.pre_hooks(model)[_ATTRIBUTE] = _Begin(devices)
    _torch.pre_hooks_with_kwargs(model)[_ATTRIBUTE] = True
    mapped = [n for name in places.mapped() if name in modules for n in _called(name, modules)]
    inside = tuple(f"{name}." for name in mapped)
    for name, part in modules.items() if mapped else ():
        if name and not name.startswith(inside) and name not in mapped:
            compute_on(part, places.home, "never")
    for name in mapped:
        chain = isinstance(modules[name.rpartition(".")[0]], nn.Sequential | nn.ModuleList)
        compute_on(modules[name], places.work(name), "never" if chain else "always")
    compute_on(model, places.work(""), "cpu")


def _called(name: str, modules: dict[str, nn.Module]) -> list[str]:
    """The modules that are called in place of one that has no forward, and never the root."""
    if not isinstance(modules[name], nn.ModuleList | nn.ModuleDict):
        return [name] if name else []
    children = [f"{name}.{child}" if name else child for child, _ in modules[name].named_children()]
    return [inner for child in children for inner in _called(child, modules)]


class _Begin:
    """A forward pre-hook of the whole model."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            eagerly(self._begin, module, args, kwargs)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        devices = self._devices
        if devices.registered != _registered or module not in devices.models:
            devices.models.add(module)
            devices.registered = _registered
            place_new(module, devices.home)
            if devices.tier is not None:
                devices.tier.refresh()
        if devices.tier is not None:
            devices.tier.set_signature(signature_of(args, kwargs))


def place_new(module: nn.Module, device: torch.device) -> None:
    """Moves plain tensors that came to a model later, as adapters do, to where they compute."""
    device = device_given(module) or device
    if device != CPU:
        for tensor in (*_torch.parameters(module).values(), *_torch.buffers(module).values()):
            plain = tensor is not None and not isinstance(tensor, StowedTensor)
            if plain and tensor is not None and tensor.device == CPU:
                _replace(tensor, tensor.detach().to(device))
    for child in module.children():
        place_new(child, device)


def _pin(inventory: Inventory, places: Places, most: int) -> None:
    """Puts resting parts that are fetched into pinned memory, in the order of the model, up to
    `most` bytes."""
    for held in inventory.every:
        fetched = is_fetched_whole(held) and places.fetches(held)
        if not isinstance(held.tensor, StowedTensor) or not fetched:
            continue
        parts = [part for part in held.tensor._parts() if not is_borrowed(part)]
        most -= unit_bytes(parts)
        if most < 0:
            return
        for part, pinned in zip(parts, pinned_together(parts) if parts else (), strict=True):
            part.data = pinned


# --- undoing --------------------------------------------------------------------------------------


def detach_devices(model: nn.Module) -> None:
    """Fetches everything back to the CPU."""
    devices = devices_of(model)
    assert devices is not None
    swap = Swap()
    plain: list[tuple[Tensor, Tensor]] = []
    for held in Inventory(model).every:
        if held.tensor.device.type not in ("cpu", "meta"):
            _move(held, CPU, swap, plain)
        elif isinstance(held.tensor, StowedTensor):
            for part in held.tensor._parts():
                if not is_borrowed(part) and part.is_pinned():
                    part.data = new_copy(part)
    swap.commit()
    for tensor, here in plain:
        _replace(tensor, here)
    compute_anywhere(model)
    pre: tuple[Any, Any] = _torch.pre_hooks(model), _torch.pre_hooks_with_kwargs(model)
    for hooks in pre:
        hooks.pop(_ATTRIBUTE, None)
    del model.__dict__[_ATTRIBUTE]
    devices.models.discard(model)


def devices_of(model: nn.Module) -> Devices | None:
    found: Devices | None = model.__dict__.get(_ATTRIBUTE)
    return found
