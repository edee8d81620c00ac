# SPDX-License-Identifier: Apache-2.0
"""GGUF files as transformers' models: their names, and the rows and norms that llama.cpp's
converter changes. Which names mean the same, the package `gguf` knows, by the format's owners."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from stowage._files.names import Entry
from stowage._files.renames import Rename, Renaming
from stowage._files.sources import FileSource
from stowage._ops.errors import BadFile, InvalidArgument

DIALECT = "gguf"
_ATTENTION = re.compile(r"blk\.\d+\.attn_([qk])\.(weight|bias)")
_NORM = "norm.weight"
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


@dataclass(frozen=True)
class _Architecture:
    """What the converter does to the values of one."""

    turns_heads: bool = False  # rows of q and k: pairs of one from each half of a head
    norms_have_one_more: bool = False


_ARCHITECTURES = {
    "llama": _Architecture(turns_heads=True),  # mistral's too
    "qwen2": _Architecture(),
    "qwen3": _Architecture(),
    "gemma": _Architecture(norms_have_one_more=True),
    "gemma2": _Architecture(norms_have_one_more=True),
    "gemma3": _Architecture(norms_have_one_more=True),
    "t5": _Architecture(),
    "t5encoder": _Architecture(),
}


def adopt(source: FileSource, names: Iterable[str], rename: Rename | None) -> Rename | None:
    """The rename for a model with tensors of these names, `rename` where it is given. Entries that
    get another name than the file's have a transformers model's values from now on; where the model
    has the names of the file, it takes what is there.

    Raises InvalidArgument without the package, and for an architecture whose values are not known
    here; BadFile for metadata that contradict the tensors.
    """
    known = set(names)
    if rename is None:
        if not source.entries.keys() - known:
            return None
        rename = _names(source, known)
    new_name = Renaming(rename)
    source.entries = {
        name: entry if new_name(name) in (name, None) else _as_converted(source, entry)
        for name, entry in source.entries.items()
    }
    return rename


def _names(source: FileSource, model: set[str]) -> Callable[[str], str | None]:
    architecture = source.metadata.get("general.architecture", "")
    if architecture not in _ARCHITECTURES:
        raise InvalidArgument(
            f"stowage.load: {source.where}: general.architecture must be one of "
            f"{', '.join(_ARCHITECTURES)}, got {architecture!r}; with rename= the values are taken "
            f"as the file has them"
        )
    try:
        package = importlib.import_module("gguf")
    except ImportError:
        raise InvalidArgument(
            f"stowage.load: {source.where}: the names of a GGUF file must be given by rename=, or "
            f"by the package gguf, which is not installed (pip install gguf)"
        ) from None
    counts = (f"{architecture}.{which}block_count" for which in ("", "decoder_"))
    blocks = max(_count(source, key, 0) for key in counts)
    if blocks > len(source.entries):
        raise BadFile(f"{source.where}: block_count must be of blocks in the file, got {blocks}")
    numbers = {name: number for number, name in package.MODEL_ARCH_NAMES.items()}
    table = package.get_tensor_name_map(numbers[architecture], blocks)
    found: dict[str, str] = {}
    for name in model:
        stem, dot, last = name.rpartition(".")
        if known := table.get_name(stem):
            found[f"{known}{dot}{last}"] = name
    return lambda name: None if name in _COMPUTED else found.get(name, name)


def _as_converted(source: FileSource, entry: Entry) -> Entry:
    architecture = source.metadata.get("general.architecture", "")
    does = _ARCHITECTURES.get(architecture, _Architecture())
    attention = _ATTENTION.fullmatch(entry.name)
    if does.turns_heads and attention:
        heads = _heads(source, entry, f"{architecture}.attention.head_count", attention[1])
        return replace(entry, heads=heads)
    if does.norms_have_one_more and entry.name.endswith(_NORM):
        if entry.storage is not None:
            raise BadFile(f"{source.where}: tensor '{entry.name}': a norm must be plain values")
        return replace(entry, more=1.0)
    return entry


def _heads(source: FileSource, entry: Entry, key: str, which: str) -> int:
    """Of how many heads the rows of q or of k are. k has those of q where the metadata have no
    number for it; that they have a list is seen by heads of another width."""
    heads = queries = _count(source, key, 0)
    if which == "k":
        heads = _count(source, key := f"{key}_kv", heads)
    rows = entry.shape[0] if entry.shape else 1
    if heads < 1 or rows % (2 * heads) != 0:
        raise BadFile(
            f"{source.where}: tensor '{entry.name}': rows must be pairs of {key} heads, got "
            f"{list(entry.shape)} for {heads}"
        )
    of_q = source.entries.get(entry.name.replace("attn_k", "attn_q"))
    if of_q is not None and of_q.shape[0] * heads != rows * queries:
        raise BadFile(
            f"{source.where}: tensor '{entry.name}': {key} must give heads as wide as those of "
            f"'{of_q.name}', got {rows} rows for {heads}, {of_q.shape[0]} for {queries}"
        )
    return heads


def _count(source: FileSource, key: str, default: int) -> int:
    """A number of the metadata; lists, one for each block, are not among them."""
    said = source.metadata.get(key, str(default))
    if not said.isdecimal():
        raise BadFile(f"{source.where}: {key} must be a count, got {said!r}")
    return int(said)
