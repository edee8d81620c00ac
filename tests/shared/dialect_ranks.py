# SPDX-License-Identifier: Apache-2.0
"""What a rank does with the files of dialects: opens, spreads, computes, gathers, writes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from dialect_models import DIALECTS, module_of, opened, weights_of
from torch.distributed.fsdp import fully_shard

import stowage


def octets(weight: Any) -> list[bytes]:
    """Those of its parts, and what it rests as."""
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    # Copies: what numpy has seen cannot be freed by FSDP2 any more.
    parts = (part.reshape(-1).view(torch.uint8).clone() for part in weight.parts.values())
    return [str(weight.resting).encode(), *(part.numpy().tobytes() for part in parts)]


def spread(mesh: Any, folders: list[str], root: str) -> list[str]:
    """The folders that went through all of it on this rank; what goes wrong names its folder."""
    for folder in folders:
        try:
            _one(mesh, folder, Path(root))
        except Exception as error:
            error.add_note(f"in {folder}")
            raise
    return folders


def _one(mesh: Any, folder: str, root: Path) -> None:
    path = root / folder
    model = opened(folder, path, compute_dtype=torch.bfloat16, mmap=True).requires_grad_(False)
    names = list(weights_of(folder))
    layers = {module: model.get_submodule(module) for module in map(module_of, names)}
    before = {name: octets(model.get_parameter(name)) for name in names}
    wanted = {name: layer(_input(layer)) for name, layer in layers.items()}
    for layer in layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stowage.sharding.check(model)
    stowage.fallbacks(clear=True)
    for name, layer in layers.items():
        got = layer(_input(layer))
        assert torch.allclose(got, wanted[name], equal_nan=True), name
    assert not stowage.fallbacks(), stowage.fallbacks()
    for name, parts in before.items():
        assert octets(model.get_parameter(name)) == parts, name
    again = root / f"again-{folder}"
    stowage.save(model, again, dialect=DIALECTS[folder])
    if mesh.get_rank() == 0:
        for file in path.iterdir():
            assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def _input(layer: Any) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(3, layer.in_features, dtype=torch.bfloat16)
