# SPDX-License-Identifier: Apache-2.0
"""The calls of docs/coming-from.md: those of ours take these arguments, and those of `stow` run."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage
from stowage.integrations.transformers import StowageConfig

PAGE = (Path(__file__).resolve().parents[2] / "docs/coming-from.md").read_text()
CALLS = list(dict.fromkeys(re.findall(r"`((?:stowage|StowageConfig)\.?[\w.]*\([^`]*\))`", PAGE)))
RUN = [
    call
    for call in CALLS
    if call.startswith(("stowage.stow", "stowage.quantize", "StowageConfig("))
]


def make_model() -> nn.Module:
    """With the names that the page has."""
    attention = nn.ModuleDict({name: nn.Linear(256, 256) for name in ("q_proj", "o_proj")})
    layers = nn.ModuleList([nn.ModuleDict({"attn": attention})])
    return nn.ModuleDict({"layers": layers, "lm_head": nn.Linear(256, 256)})


def only(name: str, module: nn.Module) -> bool:
    return name.startswith("layers")


@pytest.mark.parametrize("call", CALLS)
def test_it_takes_what_the_page_gives_it(call: str) -> None:
    tree = ast.parse(call, mode="eval").body
    assert isinstance(tree, ast.Call)
    called = eval(ast.unparse(tree.func))
    inspect.signature(called).bind(*tree.args, **{str(k.arg): k.value for k in tree.keywords})


@pytest.mark.parametrize("call", RUN)
def test_it_runs(call: str) -> None:
    names = {"stowage": stowage, "torch": torch, "StowageConfig": StowageConfig, "only": only}
    eval(call, names | {"model": make_model(), "tensor": torch.randn(256, 256)})


def test_every_library_has_a_table() -> None:
    tables = re.findall(r"^## (.+)\n\n\| there \| here \| the same \| what differs \|$", PAGE, re.M)
    assert len(tables) == len(re.findall(r"^## ", PAGE, re.M)) == 9
    assert len(CALLS) > 40 and len(RUN) > 15
