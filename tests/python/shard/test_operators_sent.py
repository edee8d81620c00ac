# SPDX-License-Identifier: Apache-2.0
"""The operators that FSDP2, DTensor and torch's checkpoints send to a weight, as this release knows
them. A torch that sends others fails here, by name, and not in a user's run."""

from collections.abc import Sequence
from pathlib import Path

import operators_sent
import pytest
import torch
from ranks import on_ranks

SENT = {
    "fully_shard": "split.Tensor new_zeros slice.Tensor copy_ view slice.Tensor detach "
    "split.Tensor",
    "forward": "view as_strided detach t mm",
    "second forward": "t mm",
    "full_tensor": "all_gather_into_tensor _wrap_tensor_autograd",
    "checkpoint.save": "view is_pinned view detach",
    "checkpoint.load": "view detach copy_",
    "distribute_tensor S(0) from 0": "detach split.Tensor empty_like scatter_",
    "distribute_tensor S(0) from None": "detach split.Tensor clone",
    "redistribute S(0) to R": "all_gather_into_tensor _wrap_tensor_autograd",
    "distribute_tensor S(1) from 0": "detach split.Tensor clone clone empty_like scatter_",
    "distribute_tensor S(1) from None": "detach split.Tensor clone",
    "redistribute S(1) to R": "all_gather_into_tensor _wrap_tensor_autograd",
    "distribute_tensor R from 0": "detach broadcast_",
    "distribute_tensor R from None": "detach",
    "redistribute R to S(0)": "split.Tensor clone",
}
VERSION = "2.13"  # of torch, that the list is of


SENT_UNEVENLY = {  # by any rank, in the order of the alphabet
    "fully_shard 1 rows": "as_strided copy_ detach mm new_empty new_zeros slice.Tensor "
    "split.Tensor t view",
    "distribute_tensor 1 rows from 0": "_wrap_tensor_autograd all_gather_into_tensor "
    "constant_pad_nd detach empty_like new_zeros slice.Tensor split.Tensor scatter_",
    "distribute_tensor 1 rows from None": "_wrap_tensor_autograd all_gather_into_tensor clone "
    "constant_pad_nd detach new_zeros split.Tensor",
    "fully_shard 3 rows": "as_strided copy_ detach mm new_zeros slice.Tensor split.Tensor t view",
    "distribute_tensor 3 rows from 0": "_wrap_tensor_autograd all_gather_into_tensor "
    "constant_pad_nd detach empty_like slice.Tensor split.Tensor scatter_",
    "distribute_tensor 3 rows from None": "_wrap_tensor_autograd all_gather_into_tensor clone "
    "constant_pad_nd detach split.Tensor",
}


def _words(names: Sequence[str]) -> str:
    return " ".join(map(_short, names))


def _short(name: str) -> str:
    for prefix in ("aten.", "c10d.", "_c10d_functional."):
        name = name.removeprefix(prefix)
    return name.removesuffix(".default").split("::")[-1]


def test_operators_of_sharding_are_those_that_are_known(tmp_path: Path) -> None:
    if torch.__version__ < VERSION:
        pytest.skip(f"the list is of torch {VERSION}, this is {torch.__version__}")
    for found in on_ranks(2, operators_sent.sent, str(tmp_path)):
        got = {what: _words(names) for what, names in found.items()}
        assert got == SENT, f"torch {torch.__version__} shards by other operators than {VERSION}"


def test_operators_of_short_and_empty_shards_are_those_that_are_known() -> None:
    if torch.__version__ < VERSION:
        pytest.skip(f"the list is of torch {VERSION}, this is {torch.__version__}")
    ranks = on_ranks(2, operators_sent.sent_unevenly)
    got = {what: _words(sorted({n for rank in ranks for n in rank[what]})) for what in ranks[0]}
    assert got == SENT_UNEVENLY, f"torch {torch.__version__} shards by others than {VERSION}"
