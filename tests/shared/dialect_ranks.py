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


def same_parameters(model: Any, whole: Any) -> int:
    """Holds those of a model that may be spread to those of one that is whole, bytes at rest and
    values; how many rest."""
    resting = 0
    for name, wanted in whole.named_parameters():
        mine = model.get_parameter(name)
        if isinstance(wanted, stowage.StowedTensor):
            resting += 1
            assert octets(mine) == octets(wanted), name
        else:
            found = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
            assert torch.equal(found, wanted), name
    return resting


def spread(mesh: Any, folders: list[str], root: str) -> list[str]:
    """The folders that went through all of it on this rank; what goes wrong names its folder."""
    return _each(mesh, folders, root, _one)


def read_by_rows(mesh: Any, folders: list[str], root: str) -> list[str]:
    """The same for models that are spread without values, of which this process reads its rows: the
    bytes and the outputs of the model that was loaded whole, and the files again."""
    return _each(mesh, folders, root, _read_by_rows)


def _each(mesh: Any, folders: list[str], root: str, one: Any) -> list[str]:
    for folder in folders:
        try:
            one(mesh, folder, Path(root))
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


def _read_by_rows(mesh: Any, folder: str, root: Path) -> None:
    path = root / folder
    whole = opened(folder, path, compute_dtype=torch.bfloat16).requires_grad_(False)
    model = opened(folder, path, compute_dtype=torch.bfloat16, device="meta")
    model.requires_grad_(False)
    assert all(tensor.is_meta for tensor in model.parameters())
    modules = dict.fromkeys(map(module_of, weights_of(folder)))
    for module in modules:
        fully_shard(model.get_submodule(module), mesh=mesh)
    fully_shard(model, mesh=mesh)
    stowage.sharding.load(model, path)
    stowage.sharding.check(model)
    for module in modules:
        layer: Any = model.get_submodule(module)
        got, want = layer(_input(layer)), whole.get_submodule(module)(_input(layer))
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), module
        layer.reshard()
    same_parameters(model, whole)
    again = root / f"read-{folder}"
    stowage.save(model, again, dialect=DIALECTS[folder])
    if mesh.get_rank() == 0:
        for file in path.iterdir():
            assert (again / file.name).read_bytes() == file.read_bytes(), file.name


def _input(layer: Any) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(3, layer.in_features, dtype=torch.bfloat16)
