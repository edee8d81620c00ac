# SPDX-License-Identifier: Apache-2.0
"""What is about to be used of stacks of matrices that rest in a file, or elsewhere than they are
used, said at once: all of it is read, or copied, together, and what does not fit yet as room
becomes free."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from stowage._ops import library
from stowage._ops.lenders import lender_of
from stowage._tensor.slices import matrix_parts
from stowage._tensor.stowed import StowedTensor


def in_file(weight: Tensor) -> TypeGuard[StowedTensor]:
    """Whether codes lie in memory that torch did not allocate, as those of files do."""
    return isinstance(weight, StowedTensor) and _lies_in_file(weight._parts()[0])


def _lies_in_file(codes: Tensor) -> bool:
    return type(codes) is Tensor and codes.is_cpu and not codes.untyped_storage().resizable()


def fetch_to(device: torch.device, weight: Tensor, indices: Sequence[int]) -> list[int] | None:
    """Those matrices of a stack [E, O, K] that rests on the CPU are used on `device` next: where
    the tier of a device has the model, their copies begin together. The order in which to use them,
    first what is there; None where no such stack is fetched."""
    if isinstance(weight, StowedTensor) and not torch.compiler.is_compiling():
        codes = weight._parts()[0]
        lender = lender_of(codes, device)
        if lender is not None:
            return lender.want(weight, codes, list(indices), matrix_parts)
    return None


def used_together(stacks: Sequence[Tensor]) -> None:
    """Matrices of the same number of these stacks are used one after the other: who uses some of
    one is taken to use those of the stacks behind it."""
    found = [weight._parts()[0] for weight in stacks if in_file(weight)]
    if len(found) > 1:
        library.engine_together(found)


def expect(
    stacks: Sequence[Tensor],
    indices: Sequence[int],
    *,
    one_by_one: bool = False,
    after: bool = False,
) -> bool | None:
    """Those matrices of stacks [E, O, K] are used next: in the order of `indices` of the first
    stack, then of the next, or `one_by_one` all of the first index, then of the next; `after` what
    was said before, as guesses are. Whether some are not in memory yet; None where nothing was
    said: while a graph is traced, and of one matrix, which is asked for at once."""
    if torch.compiler.is_compiling():
        return None
    every = [weight._parts()[0] for weight in stacks if isinstance(weight, StowedTensor)]
    found = [codes for codes in every if _lies_in_file(codes)]
    if len(indices) * len(found) < (1 if after else 2):
        return None
    comes: bool = library.engine_want(found, indices, one_by_one, after)
    return comes
