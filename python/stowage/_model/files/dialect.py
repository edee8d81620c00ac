# SPDX-License-Identifier: Apache-2.0
"""A model as files of a peer's dialect, whatever files it came from. What the tensors of a dialect
are is the core's to say (include/stowage/dialect.h); the codes and scales are the model's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stowage._files.names import DISK_DTYPES, DISK_NAMES, ROUNDED, WHOLE, flatten
from stowage._model.files.configs import CONFIG, check_others, replaced
from stowage._model.files.real_values import config_files
from stowage._model.files.template import formed
from stowage._model.weights import Held
from stowage._model.writer import declared, write
from stowage._ops import library
from stowage._ops.errors import InvalidArgument, raise_problems, translated
from stowage._tensor.casts import is_plain, plain_values
from stowage._tensor.stowed import StowedTensor


@dataclass(frozen=True)
class DialectFiles:
    """Tensors of the weights that rest, by the name of each, and what readers are told of all."""

    weights: dict[str, list[dict[str, Any]]]
    markers: list[dict[str, Any]]
    metadata: dict[str, str]
    config: dict[str, Any]  # keys of config.json
    files: dict[str, bytes]  # beside it


def files_of(every: Sequence[Held], dialect: str) -> DialectFiles:
    """Raises InvalidArgument where the dialect has no form for a weight, or none for all, and where
    its readers would take one for the matrix of another module."""
    resting = {held.name: weight for held in every if (weight := _resting(held)) is not None}
    problems = [_misread(held) for held in every if held.name in resting]
    raise_problems("stowage.save", [problem for problem in problems if problem])
    model = {
        "weights": [
            {
                "name": name,
                "storage": weight.resting,
                "shape": list(weight.shape),
                "parts": [],
                "compute": DISK_NAMES[weight.dtype],
            }
            for name, weight in resting.items()
        ],
        "others": [
            declared(held.name, held.tensor.dtype, held.tensor.shape)
            for held in every
            if held.name not in resting
        ],
    }
    try:
        said = json.loads(library.text(library.dialect_files(dialect, json.dumps(model))))
    except RuntimeError as error:
        raise InvalidArgument(f"stowage.save: {translated(error)}") from None
    files = DialectFiles(
        dict(zip(resting, said["weights"], strict=True)),
        said["markers"],
        said["metadata"],
        {key: json.loads(value) for key, value in said["config"].items()},
        {name: text.encode() for name, text in said["files"].items()},
    )
    for name, weight in resting.items():
        _check_rounded(name, weight, files.weights[name], dialect)
    return files


def _resting(held: Held) -> StowedTensor | None:
    tensor = held.tensor
    return tensor if isinstance(tensor, StowedTensor) and not is_plain(tensor) else None


def _misread(held: Held) -> str:
    """Readers take each matrix for that of a Linear module: why this one is none, or ""."""
    for site in held.sites:
        for kind in type(site.module).__mro__:
            # transformers' Conv1D, known by name as that package need not be there, lies [in, out].
            if kind is nn.Embedding or kind.__name__ == "Conv1D":
                return (
                    f"{site.name}: must be of a Linear module, for which readers of dialects take "
                    f"it, got {kind.__name__}"
                )
    return ""


def _check_rounded(
    name: str, weight: StowedTensor, tensors: Sequence[dict[str, Any]], dialect: str
) -> None:
    """Scales that the dialect's readers round must come back as they are."""
    for tensor in tensors:
        if tensor.get("form") != ROUNDED:
            continue
        scale = list(weight.parts.values())[tensor["part"]].detach()
        if not torch.equal(scale.to(torch.bfloat16).to(scale.dtype), scale):
            raise InvalidArgument(
                f"stowage.save: {name}: must have a scale that bf16 holds, as {dialect} rounds "
                f"it, got {float(scale.reshape(-1)[0]):.9g}"
            )


def write_anew(model: nn.Module, files: DialectFiles, every: Sequence[Held], path: Path) -> None:
    """Raises InvalidArgument for a folder whose configuration contradicts the files."""
    contents = dict(files.files)
    if files.config:
        made = config_files(model, None)
        facts = json.loads(made.get(CONFIG, b"{}")) | files.config
        made[CONFIG] = (json.dumps(facts, indent=2, sort_keys=True) + "\n").encode()
        contents |= made
    check_others(path.parent, contents)
    tensors = [facts for weight in files.weights.values() for facts in weight] + files.markers
    plain = [held for held in every if held.name not in files.weights]
    with replaced(path.parent, contents):
        write(
            path,
            [{key: facts[key] for key in ("name", "dtype", "shape")} for facts in tensors]
            + [declared(held.name, held.tensor.dtype, held.tensor.shape) for held in plain],
            _stream(files, every),
            metadata=files.metadata,
            manifest=False,
        )


def _stream(files: DialectFiles, every: Sequence[Held]) -> Iterator[tuple[str, torch.Tensor]]:
    for held in every:
        tensor = held.tensor
        if held.name in files.weights:
            assert isinstance(tensor, StowedTensor)
            yield from _weight(held.name, tensor, files.weights[held.name])
        else:
            plain = plain_values(tensor) if isinstance(tensor, StowedTensor) else tensor.detach()
            yield held.name, plain
    for marker in files.markers:
        yield marker["name"], _octets(marker)


def _weight(
    name: str, weight: StowedTensor, tensors: Sequence[dict[str, Any]]
) -> Iterator[tuple[str, torch.Tensor]]:
    parts = list(weight.parts.values())
    for tensor in tensors:
        if "octets" in tensor:
            yield tensor["name"], _octets(tensor)
        elif "part" not in tensor:  # the quant state
            yield tensor["name"], flatten(name, weight)[tensor["name"]]
        else:
            part, form = parts[tensor["part"]].detach(), tensor["form"]
            whole = form in (WHOLE, ROUNDED)
            yield tensor["name"], part if whole else formed(tensor["name"], part, form)


def _octets(tensor: dict[str, Any]) -> torch.Tensor:
    made = torch.tensor(tensor["octets"], dtype=torch.uint8, device="cpu")
    return made.view(DISK_DTYPES[tensor["dtype"]]) if made.numel() else made
