# SPDX-License-Identifier: Apache-2.0
"""`load` and `load_state_dict`: models from safetensors files and from tensors; `RestingLoad`: only
what rests, for another loader."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from stowage._files import experts
from stowage._files.names import Entry
from stowage._files.renames import Rename, Renaming
from stowage._files.sources import DictSource, FileSource, Source
from stowage._model.choice.policy import Policy
from stowage._model.choice.selection import Rules, Selection
from stowage._model.choice.skips import Skip
from stowage._model.files.adoption import adopt
from stowage._model.files.factory import build
from stowage._model.files.fill import Filling, Options
from stowage._model.files.template import Template, remember_template
from stowage._model.reports.report import remember_formed
from stowage._model.rest.formation import Making
from stowage._model.rest.granularity import Blocks, Granularity, InputCast
from stowage._model.sizes import byte_count
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._ops.storage import Storage
from stowage._tiers.disk.engine import Engine, EngineOptions, attach, engine_of, suited
from stowage._tiers.plans.execution import (
    Planned,
    carried_by_engine,
    check_alone,
    keep_to,
    read_plan,
)
from stowage._tiers.plans.plan import Plan

# What `load` has of a policy.
_TAKEN = (
    *("storage", "rules", "skip", "allow_unmatched"),
    *("compute_dtype", "exact", "keep_nonfinite", "measure", "working", "blocks", "input_cast"),
)


def load(
    model: nn.Module | Callable[[], nn.Module],
    folder: str | os.PathLike[str],
    storage: str | Storage | Policy | None = None,
    *,
    rules: Rules | None = None,
    skip: Skip = None,
    allow_unmatched: bool = False,
    compute_dtype: torch.dtype | None = None,
    exact: bool = False,
    keep_nonfinite: bool = False,
    mmap: bool = False,
    device: str | torch.device | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    verify: bool = False,
    measure: bool = True,
    working: str | None = None,
    blocks: Blocks = None,
    input_cast: InputCast = None,
    ram: int | str | None = None,
    plan: Planned | None = None,
    reads: str = "automatic",
    route_ahead: bool = False,
    progress: bool = True,
) -> nn.Module:
    """Fills a model from a file, a shard index or a folder that holds either.

    Weights that rest in the file rest in the model; with `storage` or `rules` its plain weights are
    quantized on the way, tensor by tensor from the mapped file. A module's parameters stay the
    objects that they are, but with `mmap`, `ram` or `plan`. Memory beyond the model's own at rest
    stays below 32 MiB.

    Args:
        model: a module, or a function that builds one: it is called so that parameters take no
            memory (on the meta device) and computed buffers have values.
        folder: a safetensors or GGUF file, an index, or the folder of one.
        storage: how plain weights of the file are to rest; as in `stow`, but one, or a
            `stowage.Policy`.
        rules: as in `stow`.
        skip: as in `stow`.
        allow_unmatched: as in `stow`.
        compute_dtype: what weights work in; without, the file's dtypes.
        exact: as in `stow`.
        keep_nonfinite: as in `stow`.
        mmap: leaves weights in the mapped file until they are written to.
        device: "meta" gives weights no values: they rest there as they would. After
            `fully_shard` each process reads its rows of them by `sharding.load`.
        strict: refuses missing and unexpected names.
        rename: gives a weight of the file the model's name for it, or None to leave it out: a
            function, or patterns such as {"model.*": "*", "*.aux": None}. Without, names of a
            GGUF file become transformers' names, for which the package `gguf` must be installed.
            Rows and names of Flux, as its authors lay it out, become those of diffusers' model.
        verify: compares checksums first.
        measure: as in `stow`.
        working: as in `stow`.
        blocks: as in `stow`.
        input_cast: as in `stow`.
        ram: bytes of weights ("2GiB") that are in memory at a time; the others are read when they
            are used, as by `offload`.
        plan: of `stowage.plan` for this folder, or the path of one: which weights stay in memory.
        reads: with `ram` or `plan`, as in `offload`.
        route_ahead: likewise.
        progress: shows a bar on a terminal, after a second.

    Returns:
        The model, which may be new; `stowage.report` says of it what `stow` and `offload` return.

    Raises:
        InvalidArgument: lists everything missing, unexpected, of wrong shape, dtype or storage, or
            not finite; the model is then as it was.
        BadFile: the file is damaged.
        FileError: the file cannot be read.

    Example:
        >>> stowage.stow(model, "nf4")
        >>> stowage.save(model, "packed")
        >>> def build():
        ...     return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> stowage.load(build, "packed")[0].weight.resting
        'nf4:block64'
    """
    plan = None if plan is None else read_plan(plan)
    engine = _engine_options(folder, ram, plan, reads)
    if engine is not None:
        engine = replace(engine, route_ahead=route_ahead)
    elif route_ahead:
        raise InvalidArgument("stowage.load: route_ahead must come with ram or plan, got neither")
    policy = Policy.of(
        storage,
        "stowage.load",
        rules=rules,
        skip=skip,
        allow_unmatched=allow_unmatched,
        compute_dtype=compute_dtype,
        exact=exact,
        keep_nonfinite=keep_nonfinite,
        measure=measure,
        working=working,
        blocks=blocks,
        input_cast=input_cast,
    )
    selection, how = _selection(policy, resting := engine is not None), policy.making
    mapped, meta = mmap or resting, _is_meta(device, mmap or resting)
    options = Options(how, mapped, resting, strict, rename, progress=progress, meta=meta)
    options = replace(options, fills=not (mapped or meta))
    source = FileSource(folder)
    try:
        if verify:
            source.verify()
        made = _load(model, source, selection, options, policy.grain, engine)
        remember_formed(made, *source.formed)
    finally:
        source.close()
    keep_to(made, plan)
    return made


def _is_meta(device: str | torch.device | None, mapped: bool) -> bool:
    if device is not None and str(device) != "meta":
        raise InvalidArgument(
            f"stowage.load: device must be None or 'meta', got {device} (load the model, then move "
            "it with model.to)"
        )
    if device is not None and mapped:
        raise InvalidArgument(
            "stowage.load: device='meta' must come without mmap, ram and plan: nothing is read"
        )
    return device is not None


def _engine_options(
    folder: str | os.PathLike[str], ram: int | str | None, plan: Plan | None, reads: str
) -> EngineOptions | None:
    check_alone("stowage.load", plan, {"ram": ram})
    if plan is not None:
        plan.check(folder)
        return replace(carried_by_engine("stowage.load", plan), reads=reads)
    if ram is not None:
        return EngineOptions(byte_count(ram, "ram"), reads)
    if reads != "automatic":
        raise InvalidArgument(
            f"stowage.load: reads must come with ram or plan, got reads={reads!r} alone"
        )
    return None


def _load(
    model: nn.Module | Callable[[], nn.Module],
    source: FileSource,
    selection: Selection | None,
    options: Options,
    grain: Granularity,
    given: EngineOptions | None,
    agree: Callable[[], None] = lambda: None,
    kind: type[Filling] = Filling,
) -> nn.Module:
    """`agree` is called before the first change, when only reading can still fail."""
    target = model if isinstance(model, nn.Module) else build(model)
    adopted = adopt(source, target, options.rename, options.strict)
    options = replace(options, rename=adopted.rename, then=adopted.then)
    filling = _filled(target, source, selection, options, grain, given, agree, kind)
    if adopted.dialect:
        remember_template(target, Template.of(source, filling.taken(), adopted.dialect))
    return target


def _filled(
    target: nn.Module,
    source: FileSource,
    selection: Selection | None,
    options: Options,
    grain: Granularity,
    given: EngineOptions | None,
    agree: Callable[[], None] = lambda: None,
    kind: type[Filling] = Filling,
) -> Filling:
    engine: list[Engine] = []

    def open_engine(filling: Filling) -> None:
        if given is not None:
            if engine_of(target) is not None:
                raise InvalidArgument(
                    "stowage.load: the model must not be offloaded, onload it first"
                )
            how = suited(given, source, filling.moved())
            if not how.keep_by_model:  # a plan has counted them
                how = replace(how, beside=filling.bytes_beside())
            engine.append(Engine(source, how))
        agree()

    filling = _fill(target, source, selection, options, "load", grain, open_engine, kind)
    if engine:
        moved = filling.moved()
        engine[0].expect(filling.expected())
        attach(target, engine[0], moved.values())
    return filling


def load_spread(
    model: nn.Module,
    folder: str | os.PathLike[str],
    ram: int | str | None,
    plan: Planned | None,
    reads: str,
    rename: Rename | None,
    strict: bool,
    agree: Callable[[], None],
    kind: type[Filling],
) -> None:
    """As `load` of a model that is spread over processes, whose compute dtypes stay. `agree` is
    called before the first change. A plan is one for what is here of the model."""
    check_alone("stowage.sharding.load", plan, {"ram": ram})
    plan = None if plan is None else read_plan(plan)
    if plan is None:
        given = EngineOptions(byte_count(0 if ram is None else ram, "ram"), reads)
    else:
        plan.check(model)
        given = carried_by_engine("stowage.sharding.load", plan)
        given = replace(given, reads=reads, keep_by_model=True)
    options = Options(Making(), True, True, strict, rename, keep_dtypes=True)
    source = FileSource(folder)
    try:
        grain = Granularity.parse(None, None, None, False)
        made = _load(model, source, None, options, grain, given, agree, kind)
        remember_formed(made, *source.formed)
    finally:
        source.close()
    keep_to(model, plan)


class RestingLoad:
    """Those weights of a model that rest in a file, for another loader, which does the rest.

    Args:
        model: one of transformers, on the meta device.
        source: the file.
        rename: the model's names for those of the file.

    Raises:
        InvalidArgument: experts that cannot lie in one stack.
    """

    def __init__(self, model: nn.Module, source: FileSource, rename: Rename) -> None:
        self._model, self._source, self._rename = model, source, rename
        self._then = experts.adopt(source, model, rename)

    def sizes(self) -> dict[str, int]:
        """Bytes of each, by the model's name."""
        found: dict[str, int] = {}
        names = Renaming(self._rename, self._then)
        for entry in self._source.entries.values():
            if entry.in_model[0] is not None:
                name = names(entry.name) if entry.place is None else entry.place.stack
                if name is not None:
                    found[name] = found.get(name, 0) + self._size(entry)
        return found

    def _size(self, entry: Entry) -> int:
        whole = self._source.size(entry)
        return whole if entry.cut is None else whole * entry.shape[0] // entry.cut.shape[0]

    def fill(
        self,
        *,
        compute_dtype: torch.dtype | None = None,
        exact: bool = False,
        ram: int | str | None = None,
        plan: Planned | None = None,
    ) -> dict[str, str]:
        """Gives them to the model.

        Args:
            compute_dtype: as in `load`.
            exact: as in `load`.
            ram: as in `load`.
            plan: as in `load`.

        Returns:
            The model's name for each tensor of the file that a resting weight is made of.

        Raises:
            As `load` does.
        """
        model, source = self._model, self._source
        plan = None if plan is None else read_plan(plan)
        engine = _engine_options(source.where, ram, plan, "automatic")
        how, mapped = Making(compute_dtype, exact), engine is not None
        options = Options(
            how, mapped, mapped, False, self._rename, self._then, progress=False, rests_only=True
        )
        grain = Granularity.parse(None, None, None, exact)
        filling = _filled(model, source, None, options, grain, engine)
        remember_formed(model, *source.formed)
        if source.dialect:
            remember_template(model, Template.of(source, filling.taken(), source.dialect))
        keep_to(model, plan)
        taken = filling.taken(resting=True)
        entries = (source.entries[name] for name in taken)
        return {member: taken[entry.name] for entry in entries for member in entry.members}


def _selection(policy: Policy, resting: bool) -> Selection | None:
    """None: what is plain in the file stays plain."""
    policy.only("stowage.load", *_TAKEN)
    if policy.selection.empty:
        if policy.skip is not None:
            raise InvalidArgument("stowage.load: skip must come with storage or rules")
        return None
    if resting:
        raise InvalidArgument(
            "stowage.load: ram and plan must come without storage and rules: what is quantized now "
            "is not in the file (save the model, then load it with ram)"
        )
    if policy.compares:
        raise InvalidArgument("stowage.load: storage must be one, only stow chooses of several")
    return policy.selection


def _fill(
    model: nn.Module,
    source: Source,
    selection: Selection | None,
    options: Options,
    where: str,
    grain: Granularity | None = None,
    before_change: Callable[[Filling], None] = lambda filling: None,
    kind: type[Filling] = Filling,
) -> Filling:
    with torch.inference_mode(False), torch.no_grad():
        filling = kind(model, source, selection, options)
        commit = filling.execute()
        source.check()  # before the problems: values that were lost make some of their own
        if grain is not None:
            filling.problems.extend(grain.problems(filling.inventory, filling.resting()))
        raise_problems(f"stowage.{where}: {source.where}", filling.problems)
        before_change(filling)
        commit()
        if grain is not None:
            grain.apply(filling.inventory)
    return filling


def load_state_dict(
    model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True
) -> None:
    """Fills `model` with copies of the tensors of `state`.

    Weights that rest in the state rest in the model, in its storage; a plain value for a weight
    that rests in the model is quantized to its storage; dtypes are the model's, as in torch.
    Parameters and buffers stay the objects that they are, so that an optimizer made before goes on.
    Only a plain one whose weight rests in the state, and one on the meta device, are replaced, by a
    frozen parameter as `stow` makes it.

    Args:
        model: any module.
        state: what `state_dict` of this package or of torch gave, or both mixed.
        strict: refuses missing and unexpected names.

    Raises:
        InvalidArgument: lists every problem, before any change; a plain parameter that has a
            gradient cannot be replaced.

    Example:
        >>> stowage.stow(model, "int8")
        >>> state = stowage.state_dict(model)
        >>> stowage.load_state_dict(model, state)
    """
    options = Options(Making(), strict=strict, keep_dtypes=True, fills=True)
    _fill(model, DictSource(state), None, options, "load_state_dict")
