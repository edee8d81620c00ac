# SPDX-License-Identifier: Apache-2.0
"""Many resting weights from their masters, with one reduction for all scales that ranks share.

Each rank puts the largest magnitudes of its parts into one vector, and who has a value that is not
finite; the maximum over the ranks answers for all of them, so that every rank raises alike and no
weight is changed where one is refused. The bytes are those of casting whole masters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stowage._ops import _torch
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._ops.numbers.stochastic import key_of
from stowage._shard.fragments import (
    Fragment,
    amax_count,
    amaxes,
    largest_of,
    quantized,
    row_parts,
    rows_fragment,
    whole_parts,
)
from stowage._shard.groups import groups_of
from stowage._shard.initialisation import put
from stowage._shard.rows import StowedRows, rests
from stowage._tensor.requantize import Change
from stowage._tensor.stowed import StowedTensor

Weights = nn.Module | Mapping[str, Tensor] | Sequence[Tensor]
Masters = Mapping[str, Tensor] | Sequence[Tensor | None]


class Job(NamedTuple):
    """One weight to be made from a master, or from the part of it that this process has."""

    name: str
    weight: StowedTensor | StowedRows
    master: Tensor  # plain
    start: int | None  # of a flat part; None for all values, or for the rows that are here
    groups: tuple[Any, ...]  # of processes, whose maxima are taken one after the other
    via: torch.dtype | None = None
    key: int | None = None  # of stochastic rounding

    def fragment(self) -> Fragment:
        values = self.master if self.via is None else self.master.to(self.via)
        if isinstance(self.weight, StowedRows):
            whole = self.weight._whole
            empty = self.weight.first is None or not self.weight.shape[0]
            first = whole.shape[0] if empty else int(self.weight.first or 0)
            return rows_fragment(whole.storage, whole.shape, first, values)
        shape, storage = tuple(self.weight.shape), self.weight._storage
        values = values.detach().to(torch.float32).contiguous()
        return Fragment(storage, shape, self.start or 0, values, self.start is None)


def from_masters(
    weights: Weights,
    masters: Masters,
    start_offsets: Sequence[int | None] | None = None,
    group: Any = None,
    *,
    via: torch.dtype | None = None,
    seed: int | None = None,
) -> None:
    """Writes every resting weight anew from its master, with one reduction for all of them.

    Args:
        weights: a model (its resting parameters, in order), or weights, by name or in a list.
        masters: likewise, in floating dtypes. A weight that FSDP2 spreads takes the master of its
            local rows, as DTensor or plain; its mesh tells who has the others.
        start_offsets: makes each master the part [offset, offset + numel) of its weight, counted
            flat, that this process of `group` updates (None for no part): scales become right on
            every process, codes inside the part; gathering the codes is the caller's. Parts of
            4-bit weights must begin on a byte.
        group: the processes that have the other parts.
        via: casts the masters first: torch.bfloat16 is a bf16 weight that is quantized in forward.
        seed: rounds codes stochastically, by seed and name alone.

    Raises:
        InvalidArgument: on all processes alike where values are not finite; nothing is changed.

    Example:
        >>> stowage.stow(model, "int8:row")
        >>> masters = [model[0].weight.dequantize() + 1, model[2].weight.dequantize()]
        >>> stowage.training.from_masters(model, masters)
        >>> model[0].weight.dequantize().mean() > 0.9
        tensor(True)
    """
    named, given = _pairs(weights, masters)
    offsets = [0] * len(named) if start_offsets is None else list(start_offsets)
    problems = []
    if len(given) != len(named) or len(offsets) != len(named):
        problems.append(
            f"there must be one master{' and offset' if start_offsets else ''} for each of "
            f"{len(named)} weights, got {len(given)} and {len(offsets)}"
        )
        raise_problems("from_masters", problems)
    jobs = []
    for (name, weight), master, offset in zip(named, given, offsets, strict=True):
        local = _torch.local_of(weight)
        if not rests(weight):
            problems.append(f"{name} must rest, got {type(local).__name__}")
            continue
        start = None if start_offsets is None else (0 if offset is None else offset)
        if master is None or offset is None:
            master = torch.empty(0)
        groups = groups_of(weight) if weight is not local else ()
        if start is not None and group is not None:
            groups = (group,)
        key = None if seed is None else key_of(seed, name)
        job = Job(name, local, _torch.local_of(master).detach(), start, groups, via, key)
        problems += _misfits(job)
        jobs.append(job)
    raise_problems("from_masters", problems)
    cast(jobs)


def _pairs(weights: Weights, masters: Masters) -> tuple[list[tuple[str, Any]], list[Any]]:
    named: list[tuple[str, Any]]
    if isinstance(weights, nn.Module):
        named = [(name, p) for name, p in weights.named_parameters() if rests(p)]
    elif isinstance(weights, Mapping):
        named = list(weights.items())
    else:
        named = [(str(i), weight) for i, weight in enumerate(weights)]
    if not isinstance(masters, Mapping):
        return named, list(masters)
    unknown = sorted(masters.keys() - {name for name, _ in named})
    if unknown:
        raise InvalidArgument(f"from_masters: masters must be of resting weights, got {unknown}")
    named = [(name, weight) for name, weight in named if name in masters]
    return named, [masters[name] for name, _ in named]


def _misfits(job: Job) -> list[str]:
    weight, master, start = job.weight, job.master, job.start
    if not master.is_floating_point():
        return [f"{job.name}: the master must be floating, got {master.dtype}"]
    if start is None:
        if master.shape != weight.shape:
            return [f"{job.name}: must be {list(weight.shape)}, got {list(master.shape)}"]
        return []
    if isinstance(weight, StowedRows):
        return [f"{job.name}: start_offsets are for weights that every process has whole"]
    stop, total = start + master.numel(), math.prod(weight.shape)
    if not 0 <= start <= stop <= total:
        return [f"{job.name}: the part must lie within {total} elements, got [{start}, {stop})"]
    each, bits = weight._storage.together, weight._storage.bits
    if start % each or (stop % each and stop != total):
        return [
            f"{job.name}: a part of {bits}-bit codes must begin and end on a byte, got [{start}, "
            f"{stop})"
        ]
    return []


@torch.no_grad()
def cast(jobs: Sequence[Job]) -> None:
    """Carries the jobs out: one reduction for those of one group of processes."""
    if not jobs:
        return
    raise_problems(
        "from_masters",
        [
            f"{job.name}: must have all of its columns here, tensor parallelism has cut them; use "
            "ColwiseParallel, or leave it whole"
            for job in jobs
            if isinstance(job.weight, StowedRows) and job.weight._whole.total is not None
        ],
    )
    wrong, largest = _maxima(jobs)
    reach: dict[tuple[Any, ...], list[int]] = {}
    for i, job in enumerate(jobs):
        if job.groups:
            reach.setdefault(job.groups, []).append(i)
    for groups, members in reach.items():
        joined = torch.cat([wrong[members], *(largest[i] for i in members)])
        for group in groups:
            dist.all_reduce(joined, dist.ReduceOp.MAX, group=group)
        wrong[members], *pieces = joined.split([len(members), *(len(largest[i]) for i in members)])
        for i, piece in zip(members, pieces, strict=True):
            largest[i] = piece
    problems = []
    for job, rank in zip(jobs, wrong.tolist(), strict=True):
        if rank:
            where = f" on rank {int(rank) - 1}" if job.groups else ""
            problems.append(f"the master of {job.name} must be finite, got inf or NaN{where}")
    raise_problems("from_masters", problems)
    for job, maxima in zip(jobs, largest, strict=True):
        _write(job, maxima.to(job.master.device))


def _maxima(jobs: Sequence[Job]) -> tuple[Tensor, list[Tensor]]:
    """Rank + 1 for each job where a value is not finite, else 0, fp32 [jobs]; and for each job the
    magnitudes that processes compare. All on the device of the first."""
    device, maxima, more = jobs[0].master.device, [], {}
    counts = []
    for i, job in enumerate(jobs):
        fragment = job.fragment()
        shared = bool(job.groups) or isinstance(job.weight, StowedRows)
        counts.append(amax_count(fragment) if shared else 0)
        maxima.append(largest_of(fragment.values).to(device))
        if counts[i] > 1:
            more[i] = amaxes(fragment).to(device)
    every = torch.cat(maxima)
    finite = every.isfinite()
    ranks = [dist.get_rank() + 1 if job.groups else 1 for job in jobs]
    wrong = torch.where(finite, 0.0, torch.tensor(ranks, dtype=torch.float32, device=device))
    every = torch.where(finite, every, torch.zeros_like(every))
    largest = [every[i : i + 1][:count] for i, count in enumerate(counts)]
    for i, found in more.items():
        largest[i] = found.nan_to_num(0.0, 0.0)
    return wrong, largest


def _write(job: Job, largest: Tensor) -> None:
    fragment, weight = job.fragment(), job.weight
    if isinstance(weight, StowedRows):
        put(weight, *row_parts(fragment, largest, job.key))
        if weight._origin is not None:
            weight._origin.written()
        return
    if fragment.is_whole:
        values = fragment.values.view(fragment.shape)
        Change(weight, quantized(values, fragment.storage, job.key)).commit()
        return
    if not job.groups:  # one process alone: only its own part counts
        largest = amaxes(fragment)
    codes, *scales = whole_parts(fragment, largest, job.key)
    kept = weight._parts()[0].clone()
    each, of = fragment.storage.together, fragment.storage.bytes_of
    span = slice(of(fragment.start), of(-(-fragment.stop // each) * each))
    kept.view(-1)[span] = codes.view(-1)[span]
    Change(weight, [kept, *scales]).commit()
