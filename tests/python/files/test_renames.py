# SPDX-License-Identifier: Apache-2.0
"""Files whose names are not the model's: maps of patterns, functions, and what they may not do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowage


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"h": nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))})


class Old(nn.Module):
    """The same under other names, with a tensor that nobody wants."""

    def __init__(self) -> None:
        super().__init__()
        made = build()["h"]
        self.model = nn.ModuleDict({"layer0": made[0]})
        self.norm, self.aux = made[1], nn.Linear(3, 3)


RULES: list[Any] = [
    {"model.layer*.*": "h.*.*", "norm.*": "h.1.*", "aux.*": None},
    {re.compile(r"^model\.layer"): "h.", re.compile("^norm"): "h.1", re.compile("aux"): None},
    lambda name: (
        None if "aux" in name else name.replace("model.layer", "h.").replace("norm", "h.1")
    ),
]


@pytest.mark.parametrize("rename", RULES, ids=["globs", "regex", "function"])
@pytest.mark.parametrize("storage", [None, "int8"])
def test_names_are_mapped(rename: Any, storage: str | None, tmp_path: Path) -> None:
    old = Old()
    if storage:
        stowage.stow(old, storage)
    stowage.save(old, tmp_path)
    x = torch.randn(2, 64)
    wanted = old.norm(old.model["layer0"](x))
    for given in ({}, {"ram": "1MiB"}):
        loaded = stowage.load(build, tmp_path, rename=rename, **given)
        assert torch.equal(loaded["h"](x), wanted)


def test_the_first_rule_decides(tmp_path: Path) -> None:
    stowage.save(Old(), tmp_path)
    model = build()
    bias = model["h"][0].bias.detach().clone()
    rename = {
        "model.layer*.weight": "h.*.weight",
        "model.*": None,
        "norm.*": "h.1.*",
        "aux.*": None,
    }
    stowage.load(model, tmp_path, rename=rename, strict=False)
    assert torch.equal(model["h"][0].weight, Old().model["layer0"].weight)
    assert torch.equal(model["h"][0].bias, bias)


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"*": "one"}, "as many \\* in the new name"),
        ({"*": "a.*.*"}, "as many \\*"),
        ({3: "x"}, "must map globs or regular expressions"),
        ({"a": 3}, "must map globs or regular expressions"),
        (7, "must be a function or a mapping, got int"),
        ({"model.*.weight": "h.0.bias", "*": "*"}, "as many"),
        ({"nothing.*": None, "model.layer*.*": "h.*.*"}, "rename: 'nothing.*' must match a name"),
        ({re.compile("weight|bias"): "both"}, "name of its own, got model.layer0.both, which"),
    ],
)
def test_refusals(rename: Any, words: str, tmp_path: Path) -> None:
    stowage.save(Old(), tmp_path)
    model = build()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(stowage.InvalidArgument, match=words):
        stowage.load(model, tmp_path, rename=rename)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_all_problems_at_once(tmp_path: Path) -> None:
    stowage.save(Old(), tmp_path)
    rename = {"norm.*": "aux.*", "model.*": "other.*", "none": None}
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.load(build, tmp_path, rename=rename)
    for words in (
        "norm.weight: rename must give each a name of its own, got aux.weight",
        "rename: 'none' must match",
        "h.0.weight: must be in",
        "other.layer0.weight: must be in the model",
    ):
        assert words in str(caught.value), words


def test_a_tie_to_what_the_model_has_not_is_none(tmp_path: Path) -> None:
    pair = nn.ModuleDict({"table": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    pair["head"].weight = pair["table"].weight
    stowage.save(pair, tmp_path)
    head = nn.ModuleDict({"head": nn.Linear(4, 8, bias=False)})
    with pytest.raises(stowage.InvalidArgument, match=r"head\.weight: must be in .*, is missing"):
        stowage.load(head, tmp_path, rename={"table.*": None})
    before = head["head"].weight.detach().clone()
    stowage.load(head, tmp_path, rename={"table.*": None}, strict=False)
    assert torch.equal(head["head"].weight, before)
