# SPDX-License-Identifier: Apache-2.0
"""`resting` says how a weight rests; `storage` is torch's method, and for one release a text."""

from __future__ import annotations

import pytest
import torch

import stowage


def test_resting_is_a_text_like_any_other() -> None:
    weight = stowage.quantize(torch.ones(4, 64), "nf4")
    assert type(weight.resting) is str and weight.resting == "nf4:block64"


def test_storage_is_what_torch_calls_so() -> None:
    weight = stowage.quantize(torch.ones(4, 64), "nf4")
    assert weight.storage().data_ptr() == weight.parts["codes"].data_ptr()


@pytest.mark.parametrize("use", [str, repr, hash, "{}".format, lambda s: s == "nf4:block64"])
def test_the_older_name_says_that_it_is_one(use: object) -> None:
    weight = stowage.quantize(torch.ones(4, 64), "nf4")
    with pytest.warns(DeprecationWarning, match=r"is weight\.resting"):
        told = use(weight.storage)  # type: ignore[operator]
    assert told == use("nf4:block64")  # type: ignore[operator]
    with pytest.warns(DeprecationWarning, match=r"is weight\.resting"):
        assert not weight.storage != "nf4:block64"  # noqa: SIM202
