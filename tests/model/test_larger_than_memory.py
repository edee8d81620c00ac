# SPDX-License-Identifier: Apache-2.0
"""Published mixtures of real width, on a disk, in a quarter of the memory that they take; nightly
in a control group, so that nothing else helps, and 20 GB each. In the short form all is smaller."""

from __future__ import annotations

import functools
import json
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import control_group
import fresh
import large_checkpoints
import pytest
import streamed_layers
import torch
from links_here import give_links
from safetensors import safe_open

import stowage
from stowage._ops.library import composite_forced

pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

BENCH = Path(large_checkpoints.__file__).with_name("larger_than_memory.py")
FAMILIES = list(large_checkpoints.FAMILIES)
BESIDE = 1.1e9  # bytes of the interpreter, torch, activations and scratch
_FEW = {"hidden_size": 256, "vocab_size": 1031, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALLER: dict[str, dict[str, Any]] = {
    "qwen3": {**_FEW, "moe_intermediate_size": 128, "num_experts": 16, "head_dim": 64},
    "deepseek": {
        **_FEW, "num_key_value_heads": 4, "moe_intermediate_size": 128, "n_routed_experts": 16,
        "intermediate_size": 384, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 4, "topk_group": 2,
    },
    "gpt-oss": {**_FEW, "intermediate_size": 160, "num_local_experts": 16, "head_dim": 64},
    "mixtral": {**_FEW, "intermediate_size": 160, "num_local_experts": 16},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_files_are_what_they_say(family: str, tmp_path: Path) -> None:
    """By safetensors' own reader; any range of a tensor's values is known without the file."""
    size = large_checkpoints.write(family, 2, tmp_path, **SMALLER[family])
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    seen = 0
    for tensor in large_checkpoints.tensors(family, 2, **SMALLER[family]):
        with safe_open(tmp_path / where[tensor.name], "pt") as file:
            values = file.get_tensor(tensor.name)
        assert values.shape == tensor.shape and values.nbytes == tensor.bytes, tensor.name
        count = math.prod(tensor.shape)
        begin, end = count // 3, count - count // 5
        of_file = values.flatten()[begin:end].view(torch.uint8)
        assert torch.equal(of_file, tensor.values(begin, end).view(torch.uint8)), tensor.name
        seen += values.nbytes
    assert seen == size


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_those_in_memory(family: str, tmp_path: Path) -> None:
    size = large_checkpoints.write(family, 3, tmp_path, **SMALLER[family])
    found = streamed_layers.streamed(family, 3, SMALLER[family], tmp_path, size // 4)
    assert abs(found["bytes"] - size) <= 0.01 * size  # what rests is what the file has
    assert found["report"]["peak"] <= size // 4 and len(found["calls"]) == 3
    assert streamed_layers.differing(family, SMALLER[family], tmp_path, found) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_keeps_experts_of_published_files(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_links(monkeypatch)
    size = large_checkpoints.write(family, 3, tmp_path, **SMALLER[family])
    make = functools.partial(large_checkpoints.build, family, 3, **SMALLER[family])
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        wanted = stowage.load(make, tmp_path, ram=10 * size)(ids).logits
        ram = stowage.plan(tmp_path, ram=20 * size).predicted.peak["ram"] * 3 // 4
        plan = stowage.plan(tmp_path, ram=ram)
        assert plan.predicted.hits is not None and 0.3 < plan.predicted.hits < 0.8
        model = stowage.load(make, tmp_path, plan=plan)
        for _ in range(3):
            assert torch.equal(model(ids).logits, wanted)
    report = stowage.engine_report(model)
    assert report.peak <= ram and report.borrowed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3", ["--share", "0.3"]),
        ("qwen3", ["--peer", "mmap"]),
        ("mixtral", ["--peer", "accelerate"]),
    ],
)
def test_the_bench_runs_in_a_short_form(family: str, how: list[str]) -> None:
    asked = [family, "--bytes", "3e6", "--smaller", json.dumps(SMALLER[family]), "--beside", "0"]
    ran = fresh.script(BENCH, *asked, "--free", "--tokens", "3", "--json", *how)
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(ran.stdout)
    assert row["layers"] >= 2 and row["bytes"] >= 3e6 and row["token"] > 0 and row["held"] > 0
    assert ("read" in row) == (how[0] == "--share")
    if "read" in row:
        assert row["peak_of_ram"] <= 1 and 0 < row["hits"] <= 1


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quarter_of_the_weights_is_enough(family: str, tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    if free < 32e9:
        pytest.skip(f"{tmp_path} has {free / 1e9:.0f} GB free, 32 are needed")
    layers = large_checkpoints.layers_for(family, 20e9)
    size = large_checkpoints.write(family, layers, tmp_path)
    to, ram = tmp_path / "found", int(size // 4 - BESIDE)
    with ExitStack() as ending:
        ending.callback(shutil.rmtree, tmp_path)  # pytest would keep it
        try:
            group = ending.enter_context(control_group.limited(size // 4))
        except OSError as error:
            pytest.skip(f"no control group can be made here: {error}")
        script = Path(streamed_layers.__file__)
        asked = (family, str(layers), "{}", str(tmp_path), str(ram), str(to))
        ran = control_group.run(group, script, *asked)
        assert ran.returncode == 0, ran.stderr
        assert control_group.peak(group) <= size // 4
        found = torch.load(to, weights_only=False)
        assert found["report"]["peak"] <= ram and found["report"]["borrowed"] == 0
        assert len(found["calls"]) == layers
        assert streamed_layers.differing(family, {}, tmp_path, found) == []
