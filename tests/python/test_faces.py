# SPDX-License-Identifier: Apache-2.0
"""Paths that users and pickles name stay importable, wherever the code behind them lives."""

from __future__ import annotations

import ast
import importlib
import io
import pickle
from pathlib import Path

import fresh
import pytest
import torch

import stowage

DEFINITIONS = (ast.FunctionDef, ast.ClassDef)

# What users import. A name that leaves this list breaks programs.
PUBLIC = {
    "checkpoint": "save state_dict",
    "integrations.peft": "adapting merge merge_and_unload merging unmerge",
    "loading": "load load_state_dict",
    "planning": "Comparison Plan Predicted Unit machine_key measured_links plan",
    "policy": "Choice Policy Rules Wish",
    "sharding": "StowedRows check load save state_dict",
    "skips": "AUTO DIFFUSION HEADS LANGUAGE NAMED Skip Skips",
    "tensor": "StowedTensor",
    "training": "MasterOptimizer Recipe TrainedWeight convert_float8 from_masters quantized_init",
    "views": "StowedView",
}

# What pickles of tensors and of whole models name. A name that leaves this list loses files.
PICKLED = {
    "_compute.blocks": "_close _open",
    "_model.input_cast": "_note_and_cast _restore _to_compute",
    "_model.report": "_Memory",
    "_model.rows": "Report Row",
    "_model.stowing": "Loss",
    "_shard.rows": "StowedRows _rebuild",
    "_tiers.engine": "_Signature",
    "_tiers.timing": "_Begin _End",
    "_trails": "rebuild",
    "integrations.transformers": "StowageConfig",
    "integrations.transformers.config": "Method",
    "planning": "Plan",
    "policy": "Policy",
    "tensor": "StowedTensor _rebuild",
    "training.optimizing": "MasterOptimizer",
    "training.recipes": "Recipe",
    "training.slots": "Slot",
    "training.terms": "Home",
}


def listed(paths: dict[str, str]) -> list[tuple[str, str]]:
    return [(f"stowage.{module}", name) for module in paths for name in paths[module].split()]


@pytest.mark.parametrize(("module", "name"), listed(PUBLIC))
def test_public_paths_hold(module: str, name: str) -> None:
    assert getattr(importlib.import_module(module), name) is not None


@pytest.mark.parametrize(("module", "name"), listed(PICKLED))
def test_paths_in_pickles_hold(module: str, name: str) -> None:
    """The bytes by which every protocol up to 3 names a thing; and it is named so again."""
    found = pickle.loads(f"c{module}\n{name}\n.".encode())
    assert (found.__module__, found.__qualname__) == (module, name)
    assert pickle.loads(pickle.dumps(found)) is found


def test_public_modules_are_there_without_being_imported() -> None:
    names = "checkpoint loading planning policy skips tensor views"
    text = f"import stowage\nfor name in {names.split()}: getattr(stowage, name)"
    fresh.run(text).check_returncode()


def test_faces_define_nothing() -> None:
    for module in ("checkpoint", "loading", "planning", "policy", "sharding", "skips", "views"):
        path = importlib.import_module(f"stowage.{module}").__file__
        assert path is not None
        with open(path) as file:
            kinds = {type(node) for node in ast.parse(file.read()).body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign}, module


def test_no_two_modules_have_one_name() -> None:
    """But for those that only hand names on, and the facades, whose names are their peers'."""
    root = Path(stowage.__file__).parent
    found: dict[str, list[str]] = {}
    for path in root.rglob("*.py"):
        defines = any(isinstance(n, DEFINITIONS) for n in ast.parse(path.read_text()).body)
        where = path.relative_to(root)
        if defines and "compat" not in where.parts and not path.stem.startswith("__"):
            found.setdefault(path.stem, []).append(str(where))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


@pytest.mark.parametrize("taken", ["weight", "slice"])
def test_torch_reads_weights_by_its_safe_list(taken: str) -> None:
    weight = stowage.quantize(torch.randn(64, 64), "int8:row")
    saved = weight if taken == "weight" else weight[:32]
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    again = torch.load(file, weights_only=True)
    assert type(again) is stowage.StowedTensor and torch.equal(
        again.dequantize(), saved.dequantize()
    )
