# SPDX-License-Identifier: Apache-2.0
"""Which weights the defaults and the rules choose, and what they say of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage._model.choice.selection import Selection
from stowage._model.weights import Inventory


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.attention = nn.MultiheadAttention(8, 2)


class Model(nn.Module):
    """One of everything that the defaults tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.positions = nn.Parameter(torch.randn(1, 4, 8))
        self.conv = nn.Conv2d(3, 8, 3)
        self.up = nn.ConvTranspose1d(8, 4, 2)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.bag = nn.EmbeddingBag(10, 8)
        self.classifier = nn.Linear(8, 5)
        self.register_parameter("counter", nn.Parameter(torch.zeros(2, 2).int(), False))


def chosen(selection: Selection, model: nn.Module) -> dict[str, str]:
    found = {}
    for choice in selection.choices(Inventory(model)):
        if choice.storage is not None:
            found[choice.held.name] = choice.storage.name
    return found


def reasons(selection: Selection, model: nn.Module) -> dict[str, str]:
    return {c.held.name: c.reason for c in selection.choices(Inventory(model)) if c.storage is None}


def test_defaults_take_linear_embedding_and_conv_weights() -> None:
    selection = Selection.parse("int8")
    assert list(chosen(selection, Model())) == [
        "embed.weight",
        "conv.weight",
        "up.weight",
        "blocks.0.mlp.0.weight",
        "blocks.0.mlp.2.weight",
        "blocks.0.attention.out_proj.weight",
        "blocks.1.mlp.0.weight",
        "blocks.1.mlp.2.weight",
        "blocks.1.attention.out_proj.weight",
    ]


def test_defaults_give_a_reason_for_all_others() -> None:
    why = reasons(Selection.parse("int8"), Model())
    assert "LayerNorm" in why["blocks.0.norm.weight"]
    assert "bias" in why["conv.bias"]
    assert "MultiheadAttention" in why["blocks.0.attention.in_proj_weight"]
    assert "Model" in why["positions"]
    assert "EmbeddingBag" in why["bag.weight"]
    assert "head" in why["classifier.weight"]
    assert all(why.values())


@pytest.mark.parametrize(
    "name", ["classifier", "score", "qa_outputs", "classification_head", "lm_head"]
)
def test_heads_stay_plain_unless_they_are_the_root(name: str) -> None:
    model = nn.Module()
    model.add_module(name, nn.Linear(4, 4))
    model.add_module("body", nn.Linear(4, 4))
    assert list(chosen(Selection.parse("int8"), model)) == ["body.weight"]
    assert list(chosen(Selection.parse("int8"), getattr(model, name))) == ["weight"]


@pytest.mark.parametrize("name", ["gate", "router", "shared_expert_gate"])
def test_routers_stay_plain_unless_a_rule_names_them(name: str) -> None:
    def block(rows: int) -> nn.Module:
        return nn.ModuleDict({"mlp": nn.ModuleDict({name: nn.Linear(64, rows)})})

    weight = f"mlp.{name}.weight"
    assert chosen(Selection.parse("nf4"), block(16)) == {}
    assert chosen(Selection.parse("nf4", {f"*.{name}": "int8:row"}), block(16)) == {
        weight: "int8:row"
    }
    assert chosen(Selection.parse("nf4"), block(17)) == {weight: "nf4:block64"}  # a gated layer
    lazy = nn.ModuleDict({name: nn.LazyLinear(4)})
    with pytest.raises(stowage.InvalidArgument, match=f"{name}.weight: must have a shape"):
        stowage.stow(lazy, "nf4")


def test_a_head_tied_to_an_embedding_follows_it() -> None:
    model = nn.Module()
    model.lm_head = nn.Linear(8, 32, bias=False)  # the head comes first
    model.embed = nn.Embedding(32, 8)
    model.lm_head.weight = model.embed.weight
    assert chosen(Selection.parse("nf4"), model) == {"lm_head.weight": "nf4:block64"}
    rules: Any = {nn.Embedding: "int8"}
    assert chosen(Selection.parse(None, rules), model) == {"lm_head.weight": "int8:row"}


@pytest.mark.parametrize("declared", [["wo"], {"wo"}, "wo", ("wo", "other")])
@pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
def test_modules_kept_in_fp32_stay_plain(declared: Any, attribute: str) -> None:
    """Peer defect 33: a bare string is one name, not its letters."""
    inner = nn.Module()
    inner.wi, inner.wo, inner.wow = (nn.Linear(4, 4) for _ in range(3))
    setattr(inner, attribute, declared)
    model = nn.Module()
    model.wo, model.inner = nn.Linear(4, 4), inner
    assert list(chosen(Selection.parse("int8"), model)) == [
        "wo.weight",  # outside of the module that declares it
        "inner.wi.weight",
        "inner.wow.weight",
    ]


def test_the_first_rule_that_matches_decides() -> None:
    rules: Any = {
        "*norm*": None,
        "blocks.0.*": "nf4",
        "blocks.*.mlp": "int8",  # a module's path
        nn.Conv2d: "f8_e4m3",
        "positions": "bf16",
    }
    assert chosen(Selection.parse(None, rules), Model()) == {
        "positions": "bf16",
        "conv.weight": "f8_e4m3",
        "blocks.0.mlp.0.weight": "nf4:block64",
        "blocks.0.mlp.2.weight": "nf4:block64",
        "blocks.0.attention.in_proj_weight": "nf4:block64",
        "blocks.0.attention.out_proj.weight": "nf4:block64",
        "blocks.1.mlp.0.weight": "int8:row",
        "blocks.1.mlp.2.weight": "int8:row",
    }
    why = reasons(Selection.parse(None, rules), Model())
    assert why["blocks.1.norm.weight"] == "rule '*norm*' keeps it plain"
    assert why["embed.weight"] == "no rule names it"
    assert why["blocks.0.mlp.0.bias"].startswith("fewer than two dimensions; a rule that matches")


def test_rules_go_before_the_defaults() -> None:
    rules: Any = {"classifier": "int8", nn.Embedding: None}
    found = chosen(Selection.parse("nf4", rules), Model())
    assert found["classifier.weight"] == "int8:row"  # a rule may name a head
    assert "embed.weight" not in found
    assert found["conv.weight"] == "nf4:block64"


def test_rules_match_with_case() -> None:
    model = nn.Module()
    model.Body = nn.Linear(4, 4)
    selection = Selection.parse(None, {"body*": "int8"})
    assert selection.idle_rules(selection.choices(Inventory(model)))
    assert list(chosen(Selection.parse(None, {"Body": "int8"}), model)) == ["Body.weight"]


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"*.mpl.*": "nf4"}, "matches none"),
        ({"*.mpl.*": None}, "matches none"),
        ({nn.GRU: "nf4"}, "rule GRU: must match a parameter of the model"),
        (
            {"*bias": "int8"},
            "fewer than two dimensions: int8:row would have a scale for each value",
        ),
        ({"counter": "nf4"}, "int32 values"),
    ],
)
def test_a_rule_that_lets_nothing_rest_is_a_problem(rules: Any, text: str) -> None:
    selection, model = Selection.parse(None, {"conv": "int8", **rules}), Model()
    (problem,) = selection.idle_rules(selection.choices(Inventory(model)))
    assert text in problem
    with pytest.raises(stowage.InvalidArgument, match="nothing was changed"):
        stowage.stow(model, rules={"conv": "int8", **rules})
    assert isinstance(model.conv.weight, nn.Parameter)
    assert not stowage.report(model).stowed


def test_a_rule_may_keep_plain_what_is_plain() -> None:
    selection = Selection.parse(None, {"*norm*": None, "*bias": None, "*": "int8"})
    assert selection.idle_rules(selection.choices(Inventory(Model()))) == []


@pytest.mark.parametrize("said", [("f8_e4m4",), (None, {"*": "f8_e4m4"})])
def test_a_typo_lists_the_legal_storages(said: Any) -> None:
    with pytest.raises(ValueError, match=r"nf4\[:block<N>\].*f8_e4m4"):
        Selection.parse(*said)


def test_rules_have_one_door() -> None:
    rules: Any = {"*": "int8"}
    with pytest.raises(stowage.InvalidArgument, match="rules must come as rules="):
        stowage.stow(Model(), rules)


def test_every_typo_is_told_at_once() -> None:
    with pytest.raises(stowage.InvalidArgument, match=r"(?s)'nf5'.*'int9'.*'f8'"):
        Selection.parse("f8", {"a": "nf5", "b": "int9"})
    dtype: Any = torch.float8_e4m3fn
    with pytest.raises(stowage.InvalidArgument, match=r"such as 'f8_e4m3'.*got torch"):
        Selection.parse(dtype)


def test_a_rule_is_a_pattern() -> None:
    rules: Any = {3: "nf4"}
    with pytest.raises(stowage.InvalidArgument, match=r"a rule must be a glob, .*got 3"):
        Selection.parse(None, rules)
    given = {"*norm*": None, "*": "int8"}
    Selection.parse("nf4", given)
    assert given == {"*norm*": None, "*": "int8"}  # peer defect 13


def test_adapters_and_trained_copies_stay_plain() -> None:
    peft = pytest.importorskip("peft")
    model = nn.Sequential()
    model.add_module("body", nn.Linear(8, 8))
    model.add_module("score", nn.Linear(8, 2))
    config = peft.LoraConfig(target_modules=["body"], modules_to_save=["score"], r=2)
    adapted = peft.get_peft_model(model, config)
    assert list(chosen(Selection.parse("nf4"), adapted)) == [
        "base_model.model.body.base_layer.weight"
    ]
    why = reasons(Selection.parse("nf4"), adapted)
    assert "adapter" in why["base_model.model.body.lora_A.default.weight"]
    assert "head" in why["base_model.model.score.original_module.weight"]


def test_parametrized_and_weight_normed_weights_are_reported() -> None:
    """Peer defect 12: the defaults pass over a weight that is computed, and say so."""
    old = torch.nn.utils.weight_norm(nn.Linear(4, 4))
    new = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(old, new, nn.Linear(4, 4))
    x = torch.randn(2, 4)
    expected = model[:2](x)
    report = stowage.stow(model, "int8")
    assert [row.name for row in report.stowed] == ["2.weight"]
    assert report["0.weight_g"].reason and report["1.parametrizations.weight.original1"].reason
    assert torch.equal(model[:2](x), expected)
