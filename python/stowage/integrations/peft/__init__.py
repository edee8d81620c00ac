# SPDX-License-Identifier: Apache-2.0
"""PEFT on weights that rest: merging adapters with one rounding, and taking them out exactly.

Adapters on a stowed base need nothing from here: `peft.get_peft_model(model, config)` works as on
any model. PEFT's own `merge_adapter` adds to each weight and rounds after every adapter, and its
`unmerge_adapter` subtracts and rounds again: neither can be undone. Here the codes from before
stay.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from stowage._model.rest.beside import Kept, check_place, verify
from stowage._model.stow import unstow
from stowage._ops.errors import InvalidArgument
from stowage.integrations.peft.base import (
    check_unwritten,
    keep_layers,
    modules,
    record_of,
    restore,
    set_record,
)
from stowage.integrations.peft.deltas import install
from stowage.integrations.peft.merger import How, merge_layer

__all__ = ["adapting", "apart", "merge", "merge_and_unload", "merging", "unmerge"]

Folder = str | os.PathLike[str] | None


@contextmanager
def adapting() -> Iterator[None]:
    """Lets the copies that PEFT makes of `modules_to_save` be plain, so that they can be trained.

    The original rests on. Without it such a copy rests as well and refuses to be trained. For
    `get_peft_model`, `from_pretrained`, `load_adapter` and `add_adapter`; needed only where a rule
    stowed a head, since the defaults leave heads plain.

    Returns:
        A context manager.

    Example:
        >>> from stowage.integrations.peft import adapting
        >>> config = peft.LoraConfig(target_modules=["0"], modules_to_save=["2"], r=4)
        >>> stowage.stow(base, "nf4")
        >>> with adapting():
        ...     model = peft.get_peft_model(base, config)
        >>> model.base_model.model[2].modules_to_save["default"].weight.requires_grad
        True
    """

    def made(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if isinstance(parent, nn.ModuleDict) and child is not None:
            unstow(child)  # PEFT keeps its copies in ModuleDicts; all else in those is plain

    hook = register_module_module_registration_hook(made)
    try:
        yield
    finally:
        hook.remove()


def apart(model: nn.Module) -> list[str]:
    """Lets several active adapters of experts (`target_parameters`) work as one does: expert by
    expert, with no stack dequantized; and `torch.compile` run a model that has such adapters, with
    those layers eager.

    PEFT adds up the deltas of several adapters, each as large as the stack; here sums of products
    stay products. Merging is as before. Adapters that are added later are taken too.

    Args:
        model: a model with adapters.

    Returns:
        The names of the layers that wrap experts.

    Raises:
        InvalidArgument: the model has no adapters.

    Example:
        >>> from stowage.integrations.peft import apart
        >>> stowage.stow(base, "nf4")
        >>> apart(peft.get_peft_model(base, config))  # no experts here
        []
    """
    wrappers = {n: m for n, m in _layers(model).items() if isinstance(m, ParamWrapper)}
    for layer in wrappers.values():
        install(layer)
    return list(wrappers)


def _layers(model: nn.Module) -> dict[str, BaseTunerLayer]:
    found = {name: m for name, m in model.named_modules() if isinstance(m, BaseTunerLayer)}
    if not found:
        raise InvalidArgument("stowage.integrations.peft: the model must have adapters, has none")
    return found


def _how(rounding: str, seed: int, keep: str | None, folder: Folder) -> How:
    if rounding not in ("nearest", "stochastic"):
        raise InvalidArgument(
            f'stowage.integrations.peft: rounding must be "nearest" or "stochastic", got '
            f"{rounding!r}"
        )
    check_place("stowage.integrations.peft", "keep", keep, folder)
    return How(rounding, seed, keep or "ram", folder)


def _check_allowed(model: nn.Module) -> None:
    """PEFT's own refusals."""
    check = getattr(getattr(model, "base_model", model), "_check_merge_allowed", None)
    if check is not None:
        check()


def merge(
    model: nn.Module,
    adapter_names: list[str] | None = None,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    keep: str | None = "ram",
    folder: Folder = None,
    safe_merge: bool = False,
) -> list[str]:
    """Merges adapters into the base weights of `model`, in place, with one rounding.

    Each resting weight is dequantized to fp32, PEFT adds the deltas of all adapters, and the sum is
    quantized whole to the weight's storage, once. `stowage.report(model)` then has the error of
    each merged weight against the exact sum. While the codes from before are kept, PEFT's own
    `unmerge_adapter()` and forwards with disabled adapters restore them exactly too.

    Args:
        model: a model with adapters.
        adapter_names: which; without, the active ones.
        rounding: "nearest", or "stochastic": either neighbour of a value, the nearer one more
            often.
        seed: fixes the bytes of stochastic rounding.
        keep: where the codes and scales from before wait until `unmerge`: "ram", "disk" or None,
            nowhere.
        folder: of their file; without, a temporary one.
        safe_merge: PEFT's own check of the sums.

    Returns:
        The names of the layers that changed.

    Raises:
        InvalidArgument: arguments that do not go together, or values that are not finite; the model
            is then as it was, as after FileError and what PEFT raises.

    Example:
        >>> from stowage.integrations.peft import merge, unmerge
        >>> stowage.stow(base, "nf4")
        >>> model = peft.get_peft_model(base, config)
        >>> len(merge(model))
        2
        >>> len(unmerge(model))
        2
    """
    how, layers = _how(rounding, seed, keep, folder), _layers(model)
    _check_allowed(model)
    done: dict[str, Callable[[], None]] = {}
    with torch.inference_mode(False), torch.no_grad():
        kept: dict[str, Kept] | None = None
        if how.place == "disk":
            new = {name: layer for name, layer in layers.items() if record_of(layer) is None}
            kept = keep_layers(new, "disk", folder)
        try:
            for name, layer in layers.items():
                before = None if record_of(layer) else kept
                back = merge_layer(name, layer, how, adapter_names, safe_merge, before)
                if back is not None:
                    done[name] = back
        except BaseException:
            for back in reversed(done.values()):
                back()
            raise
    for name in done if keep is None else ():
        set_record(layers[name], None)
    return list(done)


def unmerge(model: nn.Module) -> list[str]:
    """Takes the adapters that `merge` merged out of `model`.

    The codes and scales are those from before, bit for bit, and so are plain weights and biases.

    Args:
        model: a model whose adapters were merged.

    Returns:
        The names of the layers.

    Raises:
        InvalidArgument: a weight was written since, or nothing was kept; nothing is changed then.
        BadFile: the kept file was damaged; nothing is changed then.

    Example:
        >>> from stowage.integrations.peft import merge, unmerge
        >>> stowage.stow(base, "nf4")
        >>> codes = base[0].weight.parts["codes"].clone()
        >>> model = peft.get_peft_model(base, config)
        >>> merge(model), unmerge(model)
        >>> torch.equal(model.base_model.model[0].base_layer.weight.parts["codes"], codes)
        True
    """
    layers = _layers(model)
    merged = {name: layer for name, layer in layers.items() if layer.merged}
    lost = [name for name, layer in merged.items() if record_of(layer) is None]
    records = [(n, m, r) for n, m in reversed(merged.items()) if (r := record_of(m)) is not None]
    covered = {id(m) for _, layer, _ in records for m in modules(layer)}
    lost = [name for name in lost if id(merged[name]) not in covered]
    if lost:
        raise InvalidArgument(
            "stowage.integrations.peft.unmerge: the codes from before must be kept, they are not "
            f"for {', '.join(lost)}; PEFT's own unmerge_adapter() subtracts and rounds again"
        )
    with torch.inference_mode(False), torch.no_grad():
        check_unwritten(records)
        verify([kept for _, _, r in records for was in r.was.values() for kept in was.kept])
        for _, layer, record in records:
            restore(layer, record)
    return [name for name, _, _ in reversed(records)]


def merge_and_unload(
    model: nn.Module,
    adapter_names: list[str] | None = None,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    safe_merge: bool = False,
) -> nn.Module:
    """`merge` for good, then PEFT's `unload`: the base model with its weights at rest.

    Args:
        model: a model with adapters; those that are merged already stay merged.
        adapter_names: as in `merge`.
        rounding: as in `merge`.
        seed: as in `merge`.
        safe_merge: as in `merge`.

    Returns:
        The base model, without adapters.

    Raises:
        InvalidArgument: as `merge`.

    Example:
        >>> from stowage.integrations.peft import merge_and_unload
        >>> stowage.stow(base, "nf4")
        >>> merged = merge_and_unload(peft.get_peft_model(base, config))
        >>> type(merged[0]).__name__, merged[0].weight.resting
        ('Linear', 'nf4:block64')
    """
    merge(model, adapter_names, rounding=rounding, seed=seed, keep=None, safe_merge=safe_merge)
    for layer in _layers(model).values():
        set_record(layer, None)
    unloaded: nn.Module = model.unload()  # type: ignore[operator]
    return unloaded


@contextmanager
def merging(
    model: nn.Module,
    *,
    rounding: str = "nearest",
    seed: int = 0,
    keep: str | None = "ram",
    folder: Folder = None,
) -> Iterator[None]:
    """Lets PEFT's own `merge_adapter` and `merge_and_unload` merge as `merge` does.

    They go layer by layer; no class is patched. What was merged can be taken out at any time later.

    Args:
        model: a model with adapters.
        rounding: as in `merge`.
        seed: as in `merge`.
        keep: as in `merge`.
        folder: as in `merge`.

    Returns:
        A context manager.

    Raises:
        InvalidArgument: arguments that do not go together.

    Example:
        >>> from stowage.integrations.peft import merging
        >>> stowage.stow(base, "nf4")
        >>> model = peft.get_peft_model(base, config)
        >>> with merging(model):
        ...     model.merge_adapter()
    """
    how, layers = _how(rounding, seed, keep, folder), _layers(model)
    for name, layer in layers.items():
        layer.__dict__["merge"] = partial(_merge_one, name, layer, how, keep is None)
    try:
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("merge", None)


def _merge_one(
    name: str,
    layer: BaseTunerLayer,
    how: How,
    for_good: bool,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> None:
    with torch.inference_mode(False), torch.no_grad():
        merge_layer(name, layer, how, adapter_names, safe_merge)
    if for_good:
        set_record(layer, None)
