# SPDX-License-Identifier: Apache-2.0
"""`stowage pack`, killed at any moment: the target is then whole, or nothing that a reader takes
for a model, and packing again makes it whole and leaves nothing else."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = Path(sysconfig.get_path("scripts")) / "stowage"
KILLS = int(os.environ.get("STOWAGE_KILLS", "10"))  # `make test-all` sets 100


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    tensors = {f"layers.{i}.up.weight": torch.randn(512, 1024) for i in range(8)}
    save_file(tensors | {"norm.weight": torch.ones(512)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 512}))
    return folder


def command(source: Path, target: Path, *more: str) -> list[str | Path]:
    return [PROGRAM, "pack", source, target, "--storage", "nf4", "--compute", "bf16", *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.mark.parametrize("more", [(), ("--shard-size", "600KB")], ids=["one file", "shards"])
def test_a_folder_is_whole_or_packed_anew(
    source: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    whole, target = tmp_path / "whole", tmp_path / "target"
    began = time.monotonic()
    subprocess.run(command(source, whole, *more), check=True, capture_output=True)
    longest = 1.2 * (time.monotonic() - began)
    wanted, ends = contents(whole), {"whole": 0, "not": 0}
    chance = random.Random(3)
    for _ in range(KILLS):
        shutil.rmtree(target, ignore_errors=True)
        with subprocess.Popen(
            command(source, target, *more), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as writer:
            time.sleep(chance.uniform(0, longest))
            writer.kill()
        if (target / "config.json").exists() and contents(target) == wanted:
            ends["whole"] += 1
            continue
        ends["not"] += 1
        opened = subprocess.run([PROGRAM, "verify", target], capture_output=True, text=True)
        if opened.returncode == 0:  # the weights are there, a file of the model's may not be
            mine = {k: v for k, v in contents(target).items() if "safetensors" in k}
            assert mine == {k: v for k, v in wanted.items() if "safetensors" in k}
        again = subprocess.run(command(source, target, *more), capture_output=True, text=True)
        assert again.returncode == 0, again.stderr
        assert contents(target) == wanted
    assert ends["not"] > 0


def test_two_at_once_do_not_mix(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    writers = [
        subprocess.Popen(
            command(source, target), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    told = [writer.communicate()[1] for writer in writers]
    codes = sorted(writer.returncode for writer in writers)
    assert codes in ([0, 0], [0, 1]), told
    if codes == [0, 1]:
        assert any("must" in text for text in told), told
    checked = subprocess.run([PROGRAM, "verify", target], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert not any(name.startswith(".") for name in os.listdir(target))
