# SPDX-License-Identifier: Apache-2.0
"""What writing real values and loading a folder of transformers hold: peaks of RssAnon in processes
of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

pytest.importorskip("transformers")
from transformers import AutoModelForCausalLM, LlamaConfig

pytestmark = pytest.mark.slow
CHILD = """
import sys, threading, torch, stowage
from pathlib import Path
from transformers import AutoConfig, AutoModelForCausalLM

def anonymous():
    lines = open("/proc/self/status").read().split("RssAnon:")[1]
    return int(lines.split()[0]) * 1024

def peak_of(call):
    before, peak, stop = anonymous(), [0], threading.Event()
    def sample():
        while not stop.wait(0.001):
            peak[0] = max(peak[0], anonymous())
    thread = threading.Thread(target=sample)
    thread.start()
    result = call()
    stop.set()
    thread.join()
    return result, max(peak[0], anonymous()) - before

source, target, storage = sys.argv[1:4]
def build():
    config = AutoConfig.from_pretrained(source)
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
small = torch.nn.Linear(64, 64)
stowage.stow(small, rules={"weight": storage})
stowage.save(small, Path(target) / "small", dtype=torch.bfloat16)
build()  # what a first call imports and keeps
model, loading = peak_of(lambda: stowage.load(build, source, storage))
rest = stowage.report(model).rest_bytes
_, saving = peak_of(lambda: stowage.save(model, target, dtype=torch.bfloat16, shard_bytes=40 << 20))
largest = max(p.numel() for p in model.parameters()) * 2
print(loading, saving, rest, largest, sum(p.numel() for p in model.parameters()) * 2)
"""


@pytest.mark.parametrize("storage", [pytest.param("f8_e4m3:row", marks=pytest.mark.nightly), "nf4"])
def test_loading_holds_the_rest_and_saving_one_tensor(storage: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=4096,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "source", max_shard_size="20MB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 3
    command = [sys.executable, "-c", CHILD, tmp_path / "source", tmp_path / "target", storage]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loading, saving, rest, largest, whole = map(int, done.stdout.splitlines()[-1].split())
    assert whole > 100 << 20 and rest < 0.55 * whole
    assert loading < rest + (16 << 20)
    assert saving < largest + (4 << 20)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype="auto")
    assert sum(p.numel() for p in opened.parameters()) * 2 == whole
