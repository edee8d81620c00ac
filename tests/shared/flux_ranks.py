# SPDX-License-Identifier: Apache-2.0
"""What a rank does with a file of Flux: opens, spreads, computes, writes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flux_models import answer, built
from torch.distributed.fsdp import fully_shard

import stowage


def spread(mesh: Any, file: str, dialect: str) -> str:
    """The name of the file that was written again from all ranks."""
    path = Path(file)
    model = stowage.load(built, path, mmap=True, compute_dtype=torch.float32, progress=False)
    model.requires_grad_(False)
    wanted = answer(model)
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stowage.sharding.check(model)
    assert torch.allclose(answer(model), wanted, rtol=1e-4, atol=1e-4)
    again = path.parent / f"again-{path.name}"
    stowage.save(model, again, dialect=dialect)
    if mesh.get_rank() == 0:
        assert (again / path.name).read_bytes() == path.read_bytes()
    return path.name
