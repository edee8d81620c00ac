# SPDX-License-Identifier: Apache-2.0
"""The files of a peer's dialect that a model was loaded from, but for its weights: what `save`
needs to write them again, with the same names and the same bytes where nothing was changed."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from stowage._files.in_common import NotInCommon
from stowage._files.names import DISK_DTYPES, ROUNDED, WHOLE, Entry, flatten
from stowage._files.row_cuts import Piece, joined
from stowage._files.sources import FileSource
from stowage._model.files.configs import CONFIG, QUANTIZED, check_others, replaced
from stowage._model.weights import Held
from stowage._model.writer import write
from stowage._ops import library
from stowage._ops.errors import InvalidArgument, translated
from stowage._ops.memory import new_copy, octets
from stowage._ops.storage import Storage
from stowage._tensor.casts import is_plain, plain_values
from stowage._tensor.stowed import StowedTensor

_SMALL = 65536  # bytes: what the model has no place for is kept up to here
_INDEX = ".index.json"


@dataclass(frozen=True)
class Template:
    """Headers, configurations, and the tensors that tell readers of the dialect something but are
    no weights: numbers for activations, tables, states, markers."""

    dialect: str
    file: str  # the name of the file, or that of the index without its ending
    forms: list[dict[str, Any]]  # of each file: name, header, bytes
    index: str  # its text
    configs: dict[str, bytes]
    dtypes: dict[str, torch.dtype]  # of tensors
    entries: list[Entry]
    names: dict[str, str]  # the model's, of each entry that it took
    kept: dict[str, torch.Tensor]  # by the name in the file

    @classmethod
    def of(cls, source: FileSource, names: Mapping[str, str], dialect: str) -> Template:
        """`names`: the model's name for each entry of the source that it has taken."""
        folder = os.path.dirname(source.index or source.paths[0])
        whole = bool(source.index) or os.path.isdir(source.where)  # else its header says it all
        facts = source.tensors().values()
        return cls(
            dialect,
            os.path.basename(source.index.removesuffix(_INDEX) or source.paths[0]),
            [
                {
                    "name": os.path.relpath(path, folder or "."),
                    "header": source.header(i),
                    "bytes": os.stat(path).st_size,
                }
                for i, path in enumerate(source.paths)
            ],
            Path(source.index).read_text() if source.index else "",
            {
                name: Path(folder, name).read_bytes()
                for name in (CONFIG, *QUANTIZED)
                if whole and Path(folder, name).is_file()
            },
            {t["name"]: DISK_DTYPES.get(t["dtype"], torch.uint8) for t in facts},
            list(source.entries.values()),
            dict(names),
            {name: new_copy(source.read(name)) for name in _companions(source, names)},
        )


def _companions(source: FileSource, names: Mapping[str, str]) -> Iterator[str]:
    """Tensors whose bytes the model does not have, or not all of them."""
    yield from source.markers
    for entry in source.entries.values():
        if entry.name not in names:
            if source.size(entry) <= _SMALL:
                yield from entry.members
            continue
        if entry.storage is None and source.size(entry) <= _SMALL:
            yield from entry.members
        yield from entry.beside
        for i, member in enumerate(entry.parts):
            if member in _states(entry) or (entry.forms and entry.forms[i] == ROUNDED):
                yield member


def _states(entry: Entry) -> tuple[str, ...]:
    """The tensor of a nested weight whose text has a part of it, the offset."""
    if entry.storage is None:
        return ()
    layout = entry.storage.layout(entry.shape)
    pairs = zip(entry.parts, layout, strict=True)
    return tuple(member for member, (part, _, _) in pairs if part == "nested_offset")


_templates: weakref.WeakKeyDictionary[nn.Module, Template] = weakref.WeakKeyDictionary()


def remember_template(model: nn.Module, template: Template) -> None:
    _templates[model] = template


def template_of(model: nn.Module, dialect: str) -> Template | None:
    """None for a model that was not loaded from files of this dialect."""
    found = _templates.get(model)
    return found if found is not None and found.dialect == dialect else None


def differences(template: Template, every: Iterable[Held]) -> list[str]:
    """Every reason why the files cannot be written again from these tensors of the model."""
    problems, known = [], set(template.names.values())
    held = {name: one for one in every for name in one.names}
    for entry in template.entries:
        one = held.get(template.names.get(entry.name, ""))
        if one is not None:
            storage, shape = _resting(one), tuple(one.tensor.shape)
            if (storage, shape) != entry.in_model:
                had, has = _kind(*entry.in_model), _kind(storage, shape)
                problems.append(f"{one.name}: must be {had} as in its files, is {has}")
        elif entry.cut or not all(member in template.kept for member in entry.members):
            problems.append(f"{entry.name}: must be in the model, is only in its files")
    return list(dict.fromkeys(problems)) + [
        f"{one.name}: must be in the files that the model came from, is only in the model"
        for one in dict.fromkeys(held.values())
        if not known & set(one.names)
    ]


def _resting(held: Held) -> Storage | None:
    tensor = held.tensor
    rests = isinstance(tensor, StowedTensor) and not is_plain(tensor)
    return tensor._storage if rests and isinstance(tensor, StowedTensor) else None


def _kind(storage: Storage | None, shape: tuple[int, ...]) -> str:
    return f"{storage.name if storage else 'plain'} {list(shape)}"


def write_again(template: Template, every: Iterable[Held], folder: Path, requantize: bool) -> None:
    """Files without `differences`. Raises InvalidArgument for parts that a write has made such that
    the tensors of the dialect cannot hold them, and for a folder whose configuration contradicts
    them. `requantize`: where rows have other scales than one another, and a tensor has one for all,
    their values are quantized to one."""
    check_others(folder, template.configs)
    for form in template.forms:
        (folder / form["name"]).parent.mkdir(parents=True, exist_ok=True)
    with replaced(folder, template.configs):
        stream = _stream(template, {n: one for one in every for n in one.names}, requantize)
        write(folder / template.file, [], stream, like=template.forms, index=template.index)


def _stream(
    template: Template, held: Mapping[str, Held], requantize: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    taken: dict[str, Taken] = {}
    for entry in template.entries:
        if entry.name in template.names:
            one = held[template.names[entry.name]]
            whole = entry.whole
            taken.setdefault(whole.name, Taken(whole, [], requantize)).by.append((entry, one))
    parts: dict[str, list[tuple[Taken, int]]] = {}
    for each in taken.values():
        for i, member in enumerate(each.entry.parts):
            parts.setdefault(member, []).append((each, i))
    for name in template.dtypes:
        if name in parts:
            made, *others = (_tensor(template, name, *part) for part in parts[name])
            for other in others:  # of records that have several parts, each 0 where others are
                if other.numel() > 0:  # a number that is 1 has no bytes
                    made |= other
            yield name, made
        else:
            yield name, template.kept[name]


class Taken(NamedTuple):
    """An entry of a file, and who has it: a tensor of the model, or several its rows."""

    entry: Entry
    by: list[tuple[Entry, Held]]
    requantizes: bool

    def values(self) -> torch.Tensor:
        """Of a plain one, as a model has them; of one that rests, in float32."""
        pieces: list[Piece] = []
        for entry, held in self.by:
            values = _values(held.tensor, entry)
            pieces += [(0, [values])] if entry.cut is None else entry.cut.pieces(values.detach())
        if len(pieces) == 1:
            return pieces[0][1][0].detach()
        return joined(self.entry.name, self._owners(), pieces, 0, "")

    def part(self, i: int) -> torch.Tensor:
        """Of one that rests. Raises NotInCommon."""
        storage = self.entry.storage
        assert storage is not None
        if self.requantizes:
            try:
                for shared in range(storage.in_rows, len(storage.part_names)):
                    self._part(shared)
            except NotInCommon:
                return library.quantize(self.values().contiguous(), storage.key)[i]
        return self._part(i)

    def _part(self, i: int) -> torch.Tensor:
        storage, pieces = self.entry.storage, []
        assert storage is not None
        for entry, held in self.by:
            assert isinstance(held.tensor, StowedTensor)
            parts = [part.detach() for part in held.tensor.parts.values()]
            if entry.place is not None:
                parts = entry.place.taken(entry.name, parts, storage, entry.shape)
            pieces += [(0, parts)] if entry.cut is None else entry.cut.pieces_of(parts, storage)
        if len(pieces) == 1:
            return pieces[0][1][i]
        in_common = "" if i < storage.in_rows else storage.part_names[i]
        return joined(self.entry.name, self._owners(), pieces, i, in_common)

    def _owners(self) -> list[str]:
        return [held.name for _, held in self.by]


def _values(tensor: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Of an entry that has a tensor, or lies in it."""
    if entry.storage is None and isinstance(tensor, StowedTensor):
        tensor = plain_values(tensor)
    if entry.place is not None:
        tensor = entry.place.values(tensor.detach(), entry.shape)
    return tensor.dequantize(torch.float32) if isinstance(tensor, StowedTensor) else tensor


def _tensor(template: Template, name: str, taken: Taken, i: int) -> torch.Tensor:
    """A tensor of the dialect from the part of a weight that it has become, or from a plain one."""
    entry, tensor, dtype = taken.entry, taken.by[0][1].tensor, template.dtypes[name]
    if entry.storage is None:
        values = taken.values()
        return _unchanged(template, name, entry, values, values.dtype).to(dtype)
    assert isinstance(tensor, StowedTensor)
    part = entry.as_in_file(taken.part(i))
    if name in _states(entry):
        if float(part) == entry.nested_offset:
            return template.kept[name]
        return _state(name, template.kept[name].numel(), flatten(entry.name, tensor)[name])
    form = entry.forms[i] if entry.forms else WHOLE
    if form == ROUNDED:
        return _unchanged(template, name, entry, part, tensor.dtype)
    return part if form == WHOLE else formed(name, part, form)


def formed(name: str, part: torch.Tensor, form: int) -> torch.Tensor:
    try:
        return library.tensor_of_part(part.cpu(), form)
    except RuntimeError as error:
        raise InvalidArgument(f"stowage.save: {name}: {translated(error)}") from None


def _unchanged(
    template: Template, name: str, entry: Entry, values: torch.Tensor, rounded_to: torch.dtype
) -> torch.Tensor:
    """The file's tensor where these are its values, rounded to a dtype; else these in its order."""
    original = template.kept.get(name)
    if original is not None:
        cast = entry.as_in_model(original).to(rounded_to).to(values.dtype).reshape(values.shape)
        if torch.equal(octets(cast), octets(values.cpu())):
            return original
    return entry.as_in_file(values)


def _state(name: str, room: int, text: torch.Tensor) -> torch.Tensor:
    """A quant state with another offset in the bytes of the one that was there: what its writers
    make has room for every one without their spaces, or with the nine digits that say a float32."""
    said = bytes(text.cpu().numpy()).rstrip()
    facts = json.loads(said)
    for offset in (facts["nested_offset"], float(f"{facts['nested_offset']:.9g}")):
        if len(said) > room:
            made = json.dumps(facts | {"nested_offset": offset}, separators=(",", ":"))
            said = made.encode()
    if len(said) <= room:
        return torch.frombuffer(bytearray(said.ljust(room)), dtype=torch.uint8)
    raise InvalidArgument(
        f"stowage.save: {name}: must fit the {room} bytes that the file has for it, a write has "
        f"made it {len(said)} long; without dialect it is written"
    )
