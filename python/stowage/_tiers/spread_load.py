# SPDX-License-Identifier: Apache-2.0
"""`sharding.load`: models that are spread over processes, filled in memory, or left in the file
with a budget of each process."""

from __future__ import annotations

import os
from contextlib import ExitStack

import torch
from torch import nn

from stowage._files.renames import Rename
from stowage._model.files import sharded
from stowage._model.files.save import reshard
from stowage._model.files.spread import Wanted, check_alike, in_step
from stowage._model.files.spread_in_file import SpreadInFile
from stowage._ops.errors import InvalidArgument
from stowage._tiers.load import load_spread
from stowage._tiers.plans.execution import Planned


def load(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    rename: Rename | None = None,
    strict: bool = True,
    keep_nonfinite: bool = False,
    ram: int | str | None = None,
    plan: Planned | None = None,
    reads: str = "automatic",
) -> None:
    """Fills `model` from what `save` wrote, with any number of processes, or from a file in any
    dialect that `stowage.load` takes. All of them must call it.

    Each process reads its own rows. Tensors on the meta device get memory where their mesh is:
    after `stowage.load(..., device="meta")` and `fully_shard` no process ever has the whole model.
    Plain values of a file come to rest as the model does, where those of some rows depend on no
    others.

    Args:
        model: a module that is spread as it is to be; its compute dtypes stay.
        folder: of the checkpoint; or a safetensors or GGUF file, an index, or the folder of one.
        rename: as in `stowage.load`, for such a file.
        strict: refuses missing and unexpected names, of such a file.
        keep_nonfinite: as in `stowage.stow`, of its plain values that come to rest.
        ram: bytes of weights ("2GiB") that this process has in memory at a time, of such a file.
            The others are read when they are used, as by `stowage.load(ram=)`: of stacks that
            DTensor cuts along dim 0, such as the experts of this rank, its own alone. What else is
            spread stays in memory, and counts.
        plan: of `stowage.plan` for this model, or the path of one, instead of `ram`: it is one for
            what this process has, and says which of its experts stay in memory.
        reads: with `ram` or `plan`, as in `stowage.offload`.

    Raises:
        BadFile: names each tensor of a checkpoint whose storage, shape or dtype differs; nothing is
            changed then. Or the file is damaged.
        InvalidArgument: lists the same of a file, in every process; what was on the meta device
            stays there. Or a weight is spread so that it cannot rest in a file, or the budget is
            too small, or not every process was given one; nothing is changed then.
        FileError: the file cannot be read.

    Example:
        >>> stowage.stow(model, "nf4")
        >>> fully_shard(model, mesh=mesh)
        >>> stowage.sharding.save(model, "checkpoint")
        >>> stowage.sharding.load(model, "checkpoint")
    """
    in_file = ram is not None or plan is not None
    check_alike("stowage.sharding.load: ram or plan must be given", in_file)
    if not in_file and reads != "automatic":
        raise InvalidArgument(
            f"stowage.sharding.load: reads must come with ram or plan, got reads={reads!r} alone"
        )
    if not in_file:
        sharded.load(model, folder, Wanted(rename, strict, keep_nonfinite))
        return
    with ExitStack() as step:  # which ends in all processes before the first change in any
        step.enter_context(in_step())
        if sharded.is_checkpoint(folder) or keep_nonfinite:
            raise InvalidArgument(
                "stowage.sharding.load: ram and plan must come with a file that is left as it is, "
                f"{folder} is a checkpoint of stowage.sharding.save, or keep_nonfinite was given"
            )
        reshard(model)
        with torch.device("cpu"):  # whatever the caller's default is
            load_spread(model, folder, ram, plan, reads, rename, strict, step.close, SpreadInFile)
