# SPDX-License-Identifier: Apache-2.0
"""Which operators torch sends to a tensor subclass that it shards, gathers, saves and loads: seen
by a bare wrapper that passes everything on."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_iter, tree_map


class Bare(Tensor):
    seen: list[str] = []  # noqa: RUF012
    rows = 0  # that each rank sends
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Bare":
        made: Bare = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    def __init__(self, inner: Tensor) -> None:
        pass

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        Bare.seen.append(str(func))
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Bare)]
        wrappers = {id(t.inner): t for t in given}
        result = func(*tree_map(_inner, args), **tree_map(_inner, kwargs or {}))
        return tree_map(lambda t: wrappers.get(id(t), Bare(t)) if type(t) is Tensor else t, result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[Tensor, ...], None]:
        missing = Bare.rows - self.inner.shape[0]
        return (nn.functional.pad(self.inner, (0, 0, 0, max(0, missing))),), None

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: Any, *, out: Any = None
    ) -> Any:
        return None if out is not None else (Bare(outputs[0]), (outputs[0],))


def sent_unevenly() -> dict[str, list[str]]:
    """The same of one row for two ranks, and of three: operators of empty and short shards."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    for rows in (1, 3):
        Bare.rows = -(-rows // mesh.size())
        model = nn.Sequential(nn.Linear(4, rows, bias=False))
        model[0].weight = nn.Parameter(Bare(torch.randn(rows, 4)), False)
        _seen()
        fully_shard(model, mesh=mesh)
        model(torch.randn(2, 4))
        found[f"fully_shard {rows} rows"] = _seen()
        for source in (0, None):
            weight = Bare(torch.randn(rows, 4))
            distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=source).full_tensor()
            found[f"distribute_tensor {rows} rows from {source}"] = _seen()
    return found


def _inner(t: Any) -> Any:
    return t.inner if isinstance(t, Bare) else t


def _seen() -> list[str]:
    seen = list(Bare.seen)
    Bare.seen.clear()
    return seen


def sent(folder: str) -> dict[str, list[str]]:
    """By what is done with the weight, the operators in order."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    found = {}
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    model[0].weight = nn.Parameter(Bare(torch.randn(4, 4)), False)
    _seen()
    fully_shard(model, mesh=mesh)
    found["fully_shard"] = _seen()
    for name in ("forward", "second forward"):
        model(torch.randn(2, 4))
        model.reshard()  # type: ignore[operator]
        found[name] = _seen()
    weight: Any = model[0].weight
    weight.full_tensor()
    found["full_tensor"] = _seen()
    dcp.save({"weight": weight}, checkpoint_id=folder)
    found["checkpoint.save"] = _seen()
    dcp.load({"weight": weight}, checkpoint_id=folder)
    found["checkpoint.load"] = _seen()
    for place in (Shard(0), Shard(1), Replicate()):
        for source in (0, None):
            plain = Bare(torch.randn(4, 4))
            spread = distribute_tensor(plain, mesh, [place], src_data_rank=source)
            found[f"distribute_tensor {place} from {source}"] = _seen()
        other = Replicate() if place.is_shard() else Shard(0)
        spread.redistribute(placements=[other])
        found[f"redistribute {place} to {other}"] = _seen()
    return found
