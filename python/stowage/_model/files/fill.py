# SPDX-License-Identifier: Apache-2.0
"""Fills a model from a source: first matches every name, shape and storage, checks that what the
source holds may go into the tensor of the model and collects all problems; then reads tensor by
tensor; then changes the model in one step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import nn

from stowage._files.ahead import ahead
from stowage._files.names import FLOAT8, Entry, in_stacks
from stowage._files.renames import Rename, Renaming
from stowage._files.sources import FileSource, Source, Wholes, is_aligned, reading
from stowage._files.stacks import put
from stowage._model.choice.selection import Selection
from stowage._model.declared import WidePlaces, may_differ
from stowage._model.reports.report import remember
from stowage._model.rest.formation import (
    Loss,
    Making,
    from_indices,
    from_parts,
    from_values,
    obstacle,
)
from stowage._model.weights import (
    LAZY,
    Choice,
    Held,
    Inventory,
    Swap,
    is_persistent,
    note_tensors,
    worth_offloading,
)
from stowage._ops.errors import StowageError
from stowage._ops.memory import new_copy, octets
from stowage._ops.storage import Storage
from stowage._shard.fragments import stand_alone
from stowage._shard.local_shards import is_spread
from stowage._shard.own_matrices import is_exact
from stowage._tensor.casts import cast_storage, stands_for_plain
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor

_WORTH_MAPPING = 65536  # bytes


@dataclass(frozen=True)
class Assignment:
    """One tensor of the model and where its value comes from."""

    held: Held
    entry: Entry
    storage: Storage | None  # to rest as; None: plain
    reason: str
    as_it_is: bool = False  # the parts are those of the file


@dataclass(frozen=True)
class Options:
    how: Making
    mmap: bool = False
    cast: bool = False  # big plain parameters rest as casts of themselves, mapped
    strict: bool = True
    rename: Rename | None = None
    then: Mapping[str, str] = field(default_factory=dict)  # what some of the new names become
    keep_dtypes: bool = False  # the model's dtypes stand, not the file's
    fills: bool = False  # the model's tensors take the values; else new ones take their place
    progress: bool = False  # a bar, on a terminal
    rests_only: bool = False  # another loader gives the model all that does not rest afterwards
    meta: bool = False  # nothing is read: tensors on the meta device, as they would rest
    stays: Callable[[Held], bool] = lambda held: False  # in memory, whatever `mmap` and `cast` say


class Filling:
    """The plan of one load. `problems` is complete before anything is read for keeps."""

    def __init__(
        self, model: nn.Module, source: Source, selection: Selection | None, options: Options
    ) -> None:
        self.problems: list[str] = []
        self.inventory, self._source, self._options = Inventory(model), source, options
        self._wide = WidePlaces(model)
        names = Renaming(options.rename, options.then)
        self._entries = in_stacks(names.entries(source.entries))
        every = (name for held in self.inventory.every for name in held.names)
        self._kept_name = names.ties(source.ties, every)
        self.problems += names.problems
        plain = {e.dtype for e in source.entries.values() if e.dtype and e.dtype.is_floating_point}
        self._ambient = plain.pop() if len(plain) == 1 else None
        self._used: set[str] = set()
        self._wholes = Wholes(source, self._entries.values())
        self._steps: list[Assignment] = []
        self._ties: list[tuple[Held, str]] = []
        self._recast: list[tuple[Held, torch.dtype]] = []
        choices = {} if selection is None else self._choices(selection)
        for held in self.inventory.parameters:
            self._match(held, choices.get(held.name), required=True)
        for held in self.inventory.buffers:
            self._match(held, None, required=is_persistent(held))
        self._leftovers()

    def _choices(self, selection: Selection) -> dict[str, Choice]:
        choices = selection.choices(self.inventory)
        self.problems.extend(selection.idle_rules(choices))
        return {choice.held.name: choice for choice in choices}

    def _match(self, held: Held, choice: Choice | None, required: bool) -> None:
        present = [name for name in held.names if name in self._entries]
        if not present:
            self._without_entry(held, required)
            return
        self._used.update(present)
        entry = self._entries[present[0]]
        for other in present[1:]:
            self._check_tie(held, entry, self._entries[other])
        self._fit(held, entry, choice)

    def _fit(self, held: Held, entry: Entry, choice: Choice | None) -> None:
        if entry.shape != tuple(held.tensor.shape) and not isinstance(held.tensor, LAZY):
            if self._options.rests_only and entry.storage is None:
                return
            self.problems.append(
                f"{held.name}: shape must be {list(held.tensor.shape)}, the file has "
                f"{list(entry.shape)}"
            )
            return
        self._decide(held, entry, choice)

    def _without_entry(self, held: Held, required: bool) -> None:
        tie = next((self._kept_name[name] for name in held.names if name in self._kept_name), None)
        if tie is not None:
            self._ties.append((held, tie))
        elif self._options.rests_only:
            pass
        elif required and self._options.strict and not self._may_lack(held.name):
            self.problems.append(f"{held.name}: must be in {self._source.where}, is missing")
        elif held.tensor.is_meta:
            self.problems.append(
                f"{held.name}: must get a value, is on the meta device and not in "
                f"{self._source.where}; pass a function that builds the model instead of the model"
            )
        elif not required and held.tensor.is_floating_point():
            self._recast_buffer(held)

    def _recast_buffer(self, held: Held) -> None:
        given = self._options.how.compute_dtype
        if given is not None and self._wide.contain(held.name):
            return
        dtype = given or self._source.buffer_dtypes.get(held.name)
        if dtype is not None and dtype != held.tensor.dtype:
            self._recast.append((held, dtype))

    def _check_tie(self, held: Held, one: Entry, other: Entry) -> None:
        same = (one.shape, one.storage, one.dtype) == (other.shape, other.storage, other.dtype)
        if same:
            each = (self._to_compare(held, entry) for entry in (one, other))
            pairs = zip(*each, strict=True)
            same = all(torch.equal(octets(a), octets(b)) for a, b in pairs)
        self._source.drop(other)
        if not same:
            self.problems.append(
                f"{held.name}: is one tensor with {', '.join(held.names[1:])} in the model; the "
                f"file has different values for {one.name} and {other.name}"
            )

    def _to_compare(self, held: Held, entry: Entry) -> list[torch.Tensor]:
        return self._tensors_of(entry, torch.float32)  # nothing is rounded

    def _tensors_of(
        self, entry: Entry, compute: torch.dtype, touched: bool = False, own: bool = False
    ) -> list[torch.Tensor]:
        if touched and entry.pieces:
            assert isinstance(self._source, FileSource)
            return self._source.stack_parts(entry)
        if entry.storage is None:
            return [self._values(entry, own)]
        if entry.pieces:
            return self._parts_of_pieces(entry, entry.storage, compute)
        if own:
            parts = self._source.parts(entry, compute, own=True)
        else:
            parts = self._wholes.parts(entry, compute, touched)
        return [entry.as_in_model(part) for part in parts]

    def _values(self, entry: Entry, own: bool = False) -> torch.Tensor:
        if not entry.pieces:
            read = self._source.copy if own else self._source.read
            return entry.as_in_model(entry.own_rows(read(entry.parts[0])))
        assert entry.dtype is not None
        made = torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        for piece in entry.pieces:
            assert piece.place is not None
            put([piece.place.values(made, piece.shape)], [self._source.read(piece.parts[0])])
            self._source.drop(piece)
        return made

    def _indices(self, entry: Entry) -> Iterator[torch.Tensor]:
        """The values of a plain stack by index of dim 0."""
        for pieces in entry.by_index():
            yield torch.cat([self._source.read(piece.parts[0]) for piece in pieces])
            for piece in pieces:
                self._source.drop(piece)

    def _parts_of_pieces(
        self, entry: Entry, storage: Storage, compute: torch.dtype
    ) -> list[torch.Tensor]:
        """Codes and scales of a stack, of each piece in their places: the one copy that is made."""
        layout = storage.layout(entry.shape)
        made = [torch.empty(sizes, dtype=dtype, device="cpu") for _, dtype, sizes in layout]
        for piece in entry.pieces:
            assert piece.place is not None and piece.storage is not None
            places = piece.place.parts(made, piece.storage, piece.shape)
            put(places, self._source.parts(piece, compute))
            self._source.drop(piece)
        return made

    def _decide(self, held: Held, entry: Entry, choice: Choice | None) -> None:
        wanted = choice.storage if choice is not None else None
        reason = choice.reason if choice is not None else "plain in the file"
        tensor = held.tensor
        if wanted is None and FLOAT8.get(tensor.dtype) == getattr(entry.storage, "name", ""):
            entry = replace(entry, dtype=tensor.dtype, storage=None)  # the model's own type
        has = entry.storage
        if wanted is None and has is None and isinstance(tensor, StowedTensor):
            wanted, reason = tensor._storage, "rested already"
        if has is not None:
            if wanted is not None and not wanted.accepts(has):
                self.problems.append(
                    f"{held.name}: storage must be {wanted.name}, the file has {has.name} (load it "
                    f"as it is, then stow(..., restow=True))"
                )
                return
            wanted, reason = has, "rests in the file" if wanted is None else reason
        elif problem := misfit(entry, tensor.dtype):
            self.problems.append(f"{held.name}: {problem}")
            return
        elif wanted is not None:
            wanted = wanted.for_values(entry.dtype)
            problem = obstacle(held.name, wanted, entry.shape)
            if not problem and entry.dtype not in VALUE_DTYPES:
                problem = f"must be f64, f32, bf16 or f16 values, the file has {entry.dtype}"
            if problem:
                self.problems.append(f"{held.name}: {problem}")
                return
        elif (
            entry.dtype
            and (entry.pieces or not entry.is_converted)
            and self._casts(held)
            and worth_offloading(held, entry.dtype)
        ):
            has = wanted = cast_storage(entry.dtype)
            reason = "as it is in the file"
        problem = self._bound(tensor, entry, rests=wanted is not None)
        if problem:
            self.problems.append(f"{held.name}: {problem}")
            return
        self._steps.append(Assignment(held, entry, wanted, reason, as_it_is=has is not None))

    def _bound(self, tensor: torch.Tensor, entry: Entry, rests: bool) -> str:
        return bound(tensor, rests)

    def _casts(self, held: Held) -> bool:
        return self._options.cast and not self._options.stays(held)

    def _is_mapped(self, step: Assignment) -> bool:
        """Whether it is left where it is in the file."""
        in_pieces = step.entry.pieces != () and not self._casts(step.held)
        stays = self._options.stays(step.held) or in_pieces
        return self._options.mmap and step.as_it_is and not stays

    def _stays_in_file(self, step: Assignment) -> bool:
        """Whether its bytes are not read now. A plain tensor is mapped so that it may be written:
        its pages are the file's until then. Of small ones the rest of a page would cost more."""
        if self._options.meta:
            return True
        if step.storage is not None:
            return self._is_mapped(step)
        return (
            self._options.mmap
            and not self._options.cast
            and not step.entry.is_converted
            and not self._options.stays(step.held)
            and step.entry.dtype == self._compute(step)
            and math.prod(step.entry.shape) * step.entry.dtype.itemsize >= _WORTH_MAPPING
        )

    def _leftovers(self) -> None:
        if not self._options.strict:
            return
        for name in sorted(self._entries.keys() - self._used):
            if not self._may_have(name):
                self.problems.append(f"{name}: must be in the model, is only in the file")

    def _may_lack(self, name: str) -> bool:
        return may_differ(self.inventory.model, "_keys_to_ignore_on_load_missing", name)

    def _may_have(self, name: str) -> bool:
        return may_differ(self.inventory.model, "_keys_to_ignore_on_load_unexpected", name)

    def resting(self) -> Iterator[nn.Module]:
        """The modules that hold a resting weight after the load."""
        for step in self._steps:
            if step.storage is not None:
                yield from (site.module for site in step.held.sites)

    def moved(self) -> dict[str, Held]:
        """The weights that rest after the load, by name in the file, in the order of the model."""
        stays = self._options.stays
        steps = (s for s in self._steps if s.storage is not None and not stays(s.held))
        return {step.entry.name: step.held for step in steps}

    def expected(self) -> list[str]:
        """Their names in the file, in the order of the model: of cuts those of the whole."""
        stays = self._options.stays
        rest = (s for s in self._steps if s.storage is not None and not stays(s.held))
        return list(dict.fromkeys(step.entry.whole.name for step in rest))

    def bytes_beside(self) -> int:
        """Of weights that count in a budget of memory, and are not left in the file."""
        return 0

    def taken(self, resting: bool = False) -> dict[str, str]:
        """The model's name for each entry of the source that it takes, and has when it is saved.
        `resting`: of those that rest."""
        steps = (s for s in self._steps if s.storage is not None or not resting)
        names = ((s, name) for s in steps if is_persistent(s.held) for name in s.held.names)
        found = ((self._entries[n], s.held) for s, n in names if n in self._entries)
        return {e.name: held.name for entry, held in found for e in entry.pieces or (entry,)}

    def execute(self) -> Callable[[], None]:
        """Reads every tensor; returns what changes the model. Values that cannot be quantized add
        to `problems`; the model must then be left alone."""
        swap = Swap()
        memories: list[tuple[Held, torch.Tensor, str, Loss | None]] = []
        made: dict[str, torch.Tensor] = {}
        steps = self._to_execute()
        self._gather(steps)
        read = [step for step in steps if not self._stays_in_file(step)]
        left = {  # each once, of which all cuts are read
            step.entry.whole.name: (step.entry.whole, self._owned(step) is None) for step in read
        }
        with (
            reading(self._source, list(left.values()), self._options.progress) as done,
            ahead(self._owned(step) for step in steps) as each,
        ):
            for step, owned in zip(steps, each, strict=True):
                if self.problems and (step.storage is None or step.as_it_is):
                    continue  # only checking values from here on
                try:
                    tensor, loss = self._make(step, owned)
                    tensor = self._placed(tensor, step)
                except StowageError as error:
                    self.problems.append(f"{step.held.name}: {error}")
                    swap, memories, made = Swap(), [], {}
                    continue
                finally:
                    self._source.drop(step.entry)
                    if step.entry.whole.name in left:
                        done(left.pop(step.entry.whole.name)[0])
                if self.problems:
                    continue
                if self._options.fills:
                    tensor = swap.fill(step.held, tensor)
                else:
                    swap.put(step.held, tensor)
                made.update(dict.fromkeys(step.held.names, tensor))
                if isinstance(tensor, nn.Parameter):
                    memories.append((step.held, tensor, step.reason, loss))
        for held, name in self._ties:
            if name in made:
                swap.put(held, made[name])
        for held, dtype in self._recast:
            swap.put(held, held.tensor.to(dtype))

        def commit() -> None:
            swap.commit()
            for memory in memories:
                remember(*memory)
            for step in steps if self._options.meta else ():
                note_tensors(step.held, len(step.entry.pieces))

        return commit

    def _to_execute(self) -> list[Assignment]:
        return [s for s in self._steps if s.storage is not None or not self._options.rests_only]

    def _placed(self, tensor: torch.Tensor, step: Assignment) -> torch.Tensor:
        return tensor  # the model gets it as it is

    def _gather(self, steps: Iterable[Assignment]) -> None:
        """Stacks that the file has in pieces, and that are left there."""
        stacks = [s.entry for s in steps if s.entry.pieces and self._is_mapped(s)]
        if stacks and not self.problems and not self._options.meta:
            assert isinstance(self._source, FileSource)
            self._source.gather(stacks)

    def _owned(self, step: Assignment) -> Callable[[], list[torch.Tensor]] | None:
        """What gives the values or parts of a step in memory of their own, if no more is done to
        them; None where they stay in the file, are in pieces, or are rows of a tensor."""
        entry, compute = step.entry, self._compute(step)
        as_it_is = entry.dtype == compute if step.storage is None else step.as_it_is
        if not as_it_is or entry.pieces or entry.cut or self._stays_in_file(step):
            return None
        return partial(self._tensors_of, entry, compute, own=True)

    def _make(
        self, step: Assignment, owned: Callable[[], list[torch.Tensor]] | None
    ) -> tuple[torch.Tensor, Loss | None]:
        entry, held, how = step.entry, step.held, self._options.how
        if is_exact(held.tensor):
            how = replace(how, exact=True)
        compute = self._compute(step)
        if self._options.meta:
            return _without_values(step, compute, how.exact), None
        if step.storage is None and owned is not None:
            return _as(owned()[0], held.tensor), None
        if step.storage is None:
            mapped = self._stays_in_file(step)
            rows = entry.cut.runs[0] if entry.cut else None
            values = self._source.private(entry.parts[0], rows) if mapped else None
            if values is None or not is_aligned(values):
                values = self._values(entry)
                own = entry.pieces and values.dtype == compute
                values = values if own else new_copy(values, compute)
            return _as(values, held.tensor), None
        if not step.as_it_is and entry.pieces and stand_alone(step.storage, entry.shape):
            indices = self._indices(entry)
            return from_indices(indices, entry.shape, step.storage, how, compute)
        if not step.as_it_is:
            return from_values(self._values(entry), step.storage, how, compute)
        if owned is not None:
            parts = owned()
        else:
            stays = self._is_mapped(step)  # where the alignment suits torch; else copied once
            in_file = entry.pieces != () or not entry.is_converted
            touched = stays and self._options.cast and in_file
            parts = self._tensors_of(entry, compute, touched)
            if not entry.pieces:
                parts = [p if stays and is_aligned(p) else new_copy(p) for p in parts]
        exact = how.exact or entry.storage is None  # plain values compute as torch does
        weight = from_parts(parts, step.storage, entry.shape, compute, exact)
        return stands_for_plain(weight) if entry.storage is None else weight, None

    def _compute(self, step: Assignment) -> torch.dtype:
        entry, held, given = step.entry, step.held, self._options.how.compute_dtype
        if self._options.keep_dtypes or not held.tensor.is_floating_point():
            return held.tensor.dtype
        if given is not None and not self._wide.contain(held.name):
            return given
        # A file that does not say what its weights compute in computes in the dtype of the rest.
        return entry.compute or entry.dtype or self._ambient or held.tensor.dtype


def _without_values(step: Assignment, compute: torch.dtype, exact: bool) -> torch.Tensor:
    """What it becomes, on the meta device."""
    if step.storage is None:
        return _as(torch.empty(step.entry.shape, dtype=compute, device="meta"), step.held.tensor)
    layout = step.storage.layout(step.entry.shape)
    parts = [torch.empty(sizes, dtype=dtype, device="meta") for _, dtype, sizes in layout]
    return from_parts(parts, step.storage, step.entry.shape, compute, exact)


def _as(values: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    is_parameter = isinstance(old, nn.Parameter)
    return nn.Parameter(values, old.requires_grad) if is_parameter else values


def misfit(entry: Entry, wanted: torch.dtype) -> str:
    """Why a plain tensor of a file cannot stand for one of a model; "" if it can. Float8 without a
    scale that we know are codes, not values."""
    found, floating = entry.dtype, wanted.is_floating_point
    alike = found is not None and found.is_floating_point == floating
    if alike and found is not None and (found == wanted or not floating or found.itemsize > 1):
        return ""
    has = "a type unknown to torch" if found is None else str(found).removeprefix("torch.")
    why = f" (beside {entry.scaled_by}, whose meaning it does not know)" if entry.scaled_by else ""
    return (
        f"must be {str(wanted).removeprefix('torch.')} values, the file has {has} that stowage "
        f"cannot read as such{why}"
    )


def bound(tensor: torch.Tensor, rests: bool) -> str:
    """Why a tensor of a model cannot be filled, or replaced by one that `rests`; "" if it can."""
    if is_spread(tensor):
        return "must be whole, is spread over processes; take stowage.sharding.load"
    if rests and not isinstance(tensor, StowedTensor) and tensor.grad is not None:
        return (
            "must not be in training, has a gradient and would rest, frozen; torch's "
            "model.load_state_dict leaves it plain, zero_grad() lets it rest"
        )
    return ""
