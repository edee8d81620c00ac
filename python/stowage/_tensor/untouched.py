# SPDX-License-Identifier: Apache-2.0
"""Groups that a write does not touch: what they had, put into what was made of whole rows."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from stowage._ops.storage import Storage


def with_groups_of(
    parts: Sequence[Tensor], fresh: list[Tensor], written: Tensor, storage: Storage
) -> list[Tensor]:
    """Fresh parts of some rows, but those that rows had for groups that were not written: whoever
    made their scales may have made others than quantizing what was read would. Not of scales that
    stand under a number of others too, which may be another now."""
    if storage.by_columns:
        return _with_columns_of(parts, fresh, written, storage)
    alone = storage.kind in ("row", "row2") or (storage.kind == "block" and not storage.flat)
    if (
        not alone
        or storage.under_one
        or storage.actorder
        or storage.transposed
        or written.all()
        or not written.numel()
    ):
        return fresh
    rows = fresh[1].numel() if storage.kind == "row2" else len(fresh[0])
    lines = written.reshape(rows, -1)
    length, width = lines.shape[1], storage.block or lines.shape[1]
    stays = ~pad(lines, (0, -length % width)).view(rows, -1, width).any(2)
    together = storage.together
    of_bytes = stays.repeat_interleave(width, 1)[:, :length:together]
    masks = [of_bytes.repeat_interleave(storage.bytes_of(together), 1)]
    masks += [stays] * storage.of_groups
    made = list(fresh)
    for i, mask in enumerate(masks):
        ours, old = (p.reshape(*mask.shape, -1) for p in (fresh[i], parts[i]))
        made[i] = torch.where(mask[..., None], old, ours).reshape(fresh[i].shape)
    return made


def _with_columns_of(
    parts: Sequence[Tensor], fresh: list[Tensor], written: Tensor, storage: Storage
) -> list[Tensor]:
    """The same of groups of one column, two of which are in a byte."""
    stays = ~written.view(storage.block, *fresh[1].shape).any(0)
    of_bytes = stays[:, ::2] * 15 + stays[:, 1::2] * 240
    mask = of_bytes.to(torch.uint8).repeat(storage.block, 1)
    numbers = [torch.where(stays, *each) for each in zip(parts[1:], fresh[1:], strict=True)]
    return [parts[0] & mask | fresh[0] & ~mask, *numbers]
