# SPDX-License-Identifier: Apache-2.0
"""accelerate's Accelerator over a base that `from_pretrained` has put to rest."""

from __future__ import annotations

from pathlib import Path

import accelerated
import pytest
from ranks import on_ranks
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(accelerated.written(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_steps_are_those_of_the_plain_base(folder: str, tmp_path: Path, precision: str) -> None:
    state = str(tmp_path / "state")
    losses, again, _ = accelerated.trained(folder, state, precision, exact=True)
    assert losses[-1] < losses[0] and all(again)
    dense, _, _ = accelerated.trained(folder, str(tmp_path / "dense"), precision, dense=True)
    assert losses == dense
    held = load_file(tmp_path / "state/model.safetensors")  # ordinary values under ordinary names
    assert all(tensor.is_floating_point() for tensor in held.values())


def test_two_processes_take_the_steps_of_one(folder: str, tmp_path: Path) -> None:
    alone, _, _ = accelerated.trained(folder, str(tmp_path / "one"))
    both = on_ranks(2, accelerated.trained, folder, str(tmp_path / "two"))
    for losses, again, kind in both:
        assert kind == "DistributedDataParallel" and all(again)
        assert losses == pytest.approx(alone, rel=1e-5)
