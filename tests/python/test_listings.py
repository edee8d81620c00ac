# SPDX-License-Identifier: Apache-2.0
"""Every Python listing of docs/ is run: here, or by the test that is named for it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path

import fresh
import pytest
import torch
from torch import nn

import stowage

ROOT = Path(__file__).resolve().parents[2]
HERE = "test_listings.py"

# Page: the file that runs each listing, in their order. The card's listing and those of sharding
# name what a single process lacks, and Flux's a published file; what they call is run by the named
# tests, on other models.
RUN_BY = {
    "adapters": [HERE, HERE],
    "choosing": [HERE],
    "compat": [HERE] * 1 + ["../model/test_flux_files.py"] + [HERE] * 6,
    "cuda": [HERE],
    "diffusers": [HERE],
    "kept-init": ["training/test_kept_sharded.py"],
    "loops": [HERE, HERE, "integrations/test_torchtitan.py"],
    "modules": ["../model/test_other_loaders.py"],
    "offload": ["test_offload.py", HERE, "../pretend/test_offloading.py"],
    "planning": [HERE, HERE],
    "recipes": ["test_recipes.py", "../pretend/test_recipes.py"],
    "serving": ["test_examples.py"],
    "sharding": ["test_sharding.py", "test_sharded_reads.py"]
    + ["../model/test_expert_parallel.py"] * 2,
    "tensor": [HERE],
    "transformers": [HERE],
    "working": [HERE],
}


def listings(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / f"docs/{page}.md").read_text(), re.S | re.M)


def test_every_listing_has_a_test() -> None:
    counts = {page.stem: len(listings(page.stem)) for page in ROOT.glob("docs/*.md")}
    assert {page: n for page, n in counts.items() if n} == {p: len(t) for p, t in RUN_BY.items()}
    tests = {name for names in RUN_BY.values() for name in names}
    assert not [name for name in tests if not any((ROOT / "tests/python").rglob(name))]


def test_the_listings_of_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one in C++ as far as a compiler checks it."""
    exec(listings("cuda")[0], {})
    assert capsys.readouterr().out == "{}\n"
    code = re.search(r"^```cpp\n(.*?)^```", (ROOT / "docs/cuda.md").read_text(), re.S | re.M)
    assert code is not None
    (tmp_path / "widen.cpp").write_text(code[1])
    command = ["g++", "-std=c++20", "-fsyntax-only", f"-I{ROOT}/include", "widen.cpp"]
    subprocess.run(command, cwd=tmp_path, check=True)


@pytest.mark.slow
def test_the_listings_of_plans(tmp_path: Path) -> None:
    """In one process: the rates of the machine are measured once."""
    code = listings("offload")[1] + "".join(listings("planning"))
    around = {**os.environ, "STOWAGE_LINKS": str(tmp_path / "links.json")}
    done = fresh.run(code, cwd=tmp_path, env=around)
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout
    assert 0.2 < float(done.stdout.splitlines()[-1]) < 0.5  # as the rates of the moment have it
    assert (tmp_path / "plan.html").exists() and (tmp_path / "experts.html").exists()


def test_the_listing_of_tensors() -> None:
    (code,) = listings("tensor")
    names = {"stowage": stowage, "torch": torch, "tensor": torch.randn(64, 64)}
    exec(code, names)
    weight = names["w"]
    assert isinstance(weight, stowage.StowedTensor)
    assert weight.resting == "nf4:block64" and set(weight.parts) == {"codes", "absmax"}


def test_the_listing_of_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = listings("choosing")

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(5)))

    names = {"stowage": stowage, "torch": torch, "Path": Path, "build": build}
    names |= {"model": build(), "plain": build()}
    exec(code, names)
    assert stowage.report(names["model"])["4.weight"].storage is None
    assert names["loaded"][2].weight.resting == "int8:row"


def test_the_listing_of_blocks() -> None:
    class DecoderLayer(nn.Sequential):
        pass

    model = nn.ModuleDict(
        {
            "transformer_blocks": nn.ModuleList([nn.Linear(32, 32)]),
            "vision": nn.ModuleList([nn.Linear(32, 32)]),
            "decoder": DecoderLayer(nn.Linear(32, 32)),
        }
    )
    (code,) = listings("working")
    exec(code, {"stowage": stowage, "model": model, "DecoderLayer": DecoderLayer})
    report = stowage.report(model)
    working = {row.name: row.working for row in report.rows if row.name.endswith("weight")}
    assert working["decoder.0.weight"] == working["vision.0.weight"] == "block"


@pytest.mark.slow
def test_the_listings_of_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peft = pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    stowage.stow(model, "nf4")
    config = peft.LoraConfig(target_modules=["0", "2"], r=4, init_lora_weights=False)
    names = {"peft": peft, "model": model, "config": config}
    for code in listings("adapters"):
        exec(code, names)
    assert not [n for n, _ in names["plain_base"].named_parameters() if "lora" in n]


def test_what_a_facade_is_imported_as_is_there() -> None:
    """The lines marked `# after`: their modules, and the names that they take out of them."""
    found = 0
    for code in listings("compat"):
        for line in re.findall(r"^(.*?)  # after$", code, re.M):
            found += 1
            module, names = re.fullmatch(
                r"(?:from|import) (stowage\.compat[\w.]+)(?: as \w+| import (.*))", line
            ).groups()  # type: ignore[union-attr]
            loaded = importlib.import_module(module)
            assert not [n for n in (names or "").split(", ") if n and not hasattr(loaded, n)]
    assert found == 6


@pytest.mark.parametrize("page", ["transformers", "diffusers"])
def test_the_listings_of_other_libraries(tmp_path: Path, page: str) -> None:
    (code,) = listings(page)
    around = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = fresh.run(code, cwd=tmp_path, env=around)
    assert done.returncode == 0, done.stderr
    assert "int8:row" in done.stdout


@pytest.mark.parametrize("which", [0, 1])
def test_the_listings_of_loops(tmp_path: Path, which: int) -> None:
    around = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = fresh.run(listings("loops")[which], cwd=tmp_path, env=around)
    assert done.returncode == 0, done.stderr
    assert any((tmp_path / name).exists() for name in ("state", "state.ckpt"))
