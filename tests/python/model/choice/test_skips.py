# SPDX-License-Identifier: Apache-2.0
"""What `skip` and patterns match, the named lists, what models declare, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage._model.choice import skips
from stowage._model.patterns import near_misses
from stowage._model.weights import Inventory


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_proj = nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Embedding(4, 8)
        self.proj_in = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[0].proj_in = nn.Linear(8, 8)


EVERY = {
    "pos_embed",
    "proj_in",
    *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm_proj", "mlp.0", "mlp.2")),
    "blocks.0.proj_in",
}
MLP = {"blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1.mlp.0", "blocks.1.mlp.2"}


def stowed(model: nn.Module, storage: Any = "int8", **options: Any) -> set[str]:
    report = stowage.stow(model, storage, **options)
    return {row.name.removesuffix(".weight") for row in report.stowed}


@pytest.mark.parametrize(
    ("skip", "skipped"),
    [
        (None, set()),
        ((), set()),
        ("proj_in", {"proj_in"}),
        ("*proj_in", {"proj_in", "blocks.0.proj_in"}),
        (re.compile("^proj_in$"), {"proj_in"}),
        (re.compile(r"mlp\.\d+\.weight"), MLP),
        (nn.Embedding, {"pos_embed"}),
        (nn.Sequential, MLP),  # a type takes what is inside
        (Block, EVERY - {"pos_embed", "proj_in"}),
        (
            lambda name, module: getattr(module, "out_features", 0) == 16,
            {"blocks.0.mlp.0", "blocks.1.mlp.0"},
        ),
        (["*norm*", nn.Embedding], {"pos_embed", "blocks.0.norm_proj", "blocks.1.norm_proj"}),
        ((pattern for pattern in ("*norm*",)), {"blocks.0.norm_proj", "blocks.1.norm_proj"}),
        ("diffusion", {"pos_embed", "proj_in", "blocks.0.norm_proj", "blocks.1.norm_proj"}),
        (["language", "*mlp*"], MLP | {"pos_embed", "blocks.0.norm_proj", "blocks.1.norm_proj"}),
    ],
)
def test_what_is_skipped_stays_plain(skip: Any, skipped: set[str]) -> None:
    model = Model()
    assert EVERY - stowed(model, skip=skip) == skipped
    for name in skipped:
        reason = stowage.report(model)[f"{name}.weight"].reason
        assert reason.startswith("skip ") and "keeps it plain" in reason


def test_skip_goes_before_rules_and_rules_before_what_a_model_declares() -> None:
    assert stowed(Model(), None, rules={"*mlp*": "int8"}, skip="blocks.0") == {
        "blocks.1.mlp.0",
        "blocks.1.mlp.2",
    }
    model: Any = Model()
    model._skip_layerwise_casting_patterns = ["norm"]
    assert EVERY - stowed(model) == {"blocks.0.norm_proj", "blocks.1.norm_proj"}
    model: Any = Model()
    model._skip_layerwise_casting_patterns = ["norm"]
    model._keep_in_fp32_modules = ["mlp"]
    assert "blocks.0.norm_proj" in stowed(model, rules={"blocks.0.*": "int8"})
    assert stowage.report(model)["blocks.1.mlp.0.weight"].reason.endswith("_keep_in_fp32_modules")


@pytest.mark.parametrize(
    "declared", [["norm", "^proj_in$"], ("norm", "^proj_in$"), "norm|^proj_in$"]
)
def test_declared_patterns_are_relative_to_what_declares_them(declared: Any) -> None:
    inner: Any = Model()
    inner._skip_layerwise_casting_patterns = declared
    outer = nn.ModuleDict({"proj_in": nn.Linear(4, 4), "norm": nn.Linear(4, 4), "inner": inner})
    report = stowage.stow(outer, "f8_e4m3")
    plain = {
        row.name.removesuffix(".weight") for row in report.plain if row.name.endswith("weight")
    }
    assert plain == {"inner.proj_in", "inner.blocks.0.norm_proj", "inner.blocks.1.norm_proj"}
    assert "lists it in _skip_layerwise_casting_patterns" in report["inner.proj_in.weight"].reason


def test_a_match_takes_the_whole_subtree() -> None:
    model: Any = Model()
    model._skip_layerwise_casting_patterns = [r"blocks\.1$"]
    assert stowed(model) == {name for name in EVERY if not name.startswith("blocks.1")}


def test_declared_patterns_that_are_none_are_refused() -> None:
    model: Any = Model()
    model._skip_layerwise_casting_patterns = ["("]
    with pytest.raises(stowage.InvalidArgument, match="Model must be regular expressions"):
        stowage.stow(model, "int8")
    model._skip_layerwise_casting_patterns = None  # as diffusers has it where there are none
    assert stowed(model) == EVERY


def test_a_tied_weight_is_skipped_by_any_of_its_names() -> None:
    def tied() -> nn.Module:
        model = nn.ModuleDict({"embed": nn.Embedding(32, 8), "lm_head": nn.Linear(8, 32, False)})
        model["lm_head"].weight = model["embed"].weight
        return model

    assert stowed(tied(), skip="lm_head") == set()
    assert stowed(tied(), skip="language") == {"embed"}  # judged as the defaults do


@pytest.mark.parametrize(
    "skip",
    [3, [3], nn.Linear(2, 2), str, ["*", int], "", [""], b"norm", re.compile(b"norm"), [None]],
)
def test_what_is_no_pattern_is_refused(skip: Any) -> None:
    model = Model()
    with pytest.raises(stowage.InvalidArgument, match="skip must be a glob, a regular expression"):
        stowage.stow(model, "int8", skip=skip)
    assert not stowage.report(model).stowed


@pytest.mark.parametrize(
    ("skip", "text"),
    [
        ("blocks.2", r"skip 'blocks.2': must match .* \(near: blocks\.\d, blocks\.\d"),
        ("*.mpl.*", r"skip '\*.mpl.\*': .*none \(near: mlp\)"),
        (re.compile("^norm_proj$"), r"skip regex '\^norm_proj\$': must match a parameter"),
        (nn.GRU, "skip GRU: must match"),
        (lambda name, module: False, "skip <lambda>: must match"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(skip: Any, text: str) -> None:
    model = Model()
    with pytest.raises(stowage.InvalidArgument, match=f"{text}(?s:.*)nothing was changed"):
        stowage.stow(model, "int8", skip=[skip, "*norm*"])
    assert not stowage.report(model).stowed
    assert len(stowed(model, skip=[skip, "*norm*"], allow_unmatched=True)) == len(EVERY) - 2


def test_rules_that_match_nothing_can_be_permitted() -> None:
    rules: Any = {"*.mpl.*": "nf4", nn.GRU: None, "*mlp*": "int8"}
    with pytest.raises(stowage.InvalidArgument, match=r"2 problems(?s:.*)near: mlp(?s:.*)rule GRU"):
        stowage.stow(Model(), rules=rules)
    assert stowed(Model(), None, rules=rules, allow_unmatched=True) == MLP


def test_rules_take_regular_expressions_and_predicates() -> None:
    rules: Any = {
        re.compile(r"^blocks\.1"): None,
        (lambda name, module: isinstance(module, nn.Linear) and "mlp" in name): "int8",
    }
    model = Model()
    assert stowed(model, None, rules=rules) == {"blocks.0.mlp.0", "blocks.0.mlp.2"}
    reasons = {row.name: row.reason for row in stowage.report(model).rows}
    assert reasons["blocks.1.mlp.0.weight"] == r"rule regex '^blocks\\.1' keeps it plain"
    assert reasons["blocks.0.mlp.0.weight"] == "rule <lambda>"


def test_a_predicate_that_raises_changes_nothing() -> None:
    def angry(name: str, module: nn.Module) -> bool:
        raise KeyError(name)

    model = Model()
    with pytest.raises(KeyError):
        stowage.stow(model, "int8", skip=angry)
    assert not stowage.report(model).stowed


def test_integers_are_left_alone_and_reported() -> None:
    model = Model()
    model.register_parameter("table", nn.Parameter(torch.zeros(4, 4).int(), False))
    kind = nn.Linear(4, 4)
    kind.weight = nn.Parameter(torch.zeros(4, 4).long(), False)
    model.lookup = kind
    report = stowage.stow(
        model, "int8", rules={"blocks.0|*": "int8", "*": "int8"}, allow_unmatched=True
    )
    assert report["table"].storage is None and report["table"].reason == "int32 values"
    assert report["lookup.weight"].reason == "int64 values"
    assert torch.equal(model.table, torch.zeros(4, 4).int())


@pytest.mark.parametrize("name", sorted(skips.NAMED))
def test_named_lists_are_globs_that_the_page_shows(name: str) -> None:
    page = (Path(__file__).parents[4] / "docs" / "choosing.md").read_text()
    assert f'skip="{name}"' in page
    for glob in skips.NAMED[name]:
        assert isinstance(glob, str) and glob
    assert len(set(skips.NAMED[name])) == len(skips.NAMED[name])


@pytest.mark.parametrize(
    ("path", "diffusion", "language"),
    [
        ("transformer_blocks.0.norm1.linear", True, True),
        ("time_text_embed.timestep_embedder.linear_1", True, False),
        ("context_embedder", True, False),
        ("proj_out", True, False),
        ("down_blocks.0.attentions.0.proj_out", False, False),
        ("conv_in", True, False),
        ("mid_block.resnets.0.conv1", False, False),
        ("model.layers.0.mlp.gate", False, True),
        ("model.layers.0.mlp.gate_proj", False, False),
        ("model.layers.0.mlp.experts.0.w1", False, False),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", False, True),
        ("embeddings.position_embeddings", False, True),
        ("transformer.wpe", False, True),
        ("lm_head", False, True),
    ],
)
def test_named_lists_know_the_places(path: str, diffusion: bool, language: bool) -> None:
    model = nest(path)
    for name, expected in (("diffusion", diffusion), ("language", language)):
        skip = skips.Skips.parse(name)
        (held, *_) = Inventory(model).parameters
        assert bool(skip.reason(held, held.sites[0])) == expected, name


def nest(path: str) -> nn.Module:
    """A model with one Linear at `path`."""
    root = nn.Module()
    *parents, last = path.split(".")
    module = root
    for name in parents:
        module.add_module(name, nn.Module())
        module = module.get_submodule(name)
    module.add_module(last, nn.Linear(2, 2))
    return root


def test_auto_is_what_fits() -> None:
    assert skips.fitting(Model()) == ("diffusion", "language")
    for library, name in (("diffusers", "diffusion"), ("transformers", "language")):
        kind = type("Made", (nn.Module,), {"__module__": f"{library}.models.made"})
        assert skips.fitting(nn.Sequential(kind(), nn.Linear(2, 2))) == (name,)
    plain = EVERY - stowed(Model(), skip="auto")
    assert plain == {"pos_embed", "proj_in", "blocks.0.norm_proj", "blocks.1.norm_proj"}


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("encoder.layr.0", " (near: encoder.layer.0, encoder.layer, layer)"),
        ("*.atention.*", " (near: attention)"),
        ("zzz", ""),
        (nn.Linear, ""),
    ],
)
def test_near_misses_name_what_was_meant(pattern: Any, near: str) -> None:
    assert near_misses(pattern, ["encoder.layer.0.attention.weight"]) == near


def test_load_skips_too(tmp_path: Path) -> None:
    build: Callable[[], nn.Module] = Model
    stowage.save(build(), tmp_path)
    model = stowage.load(build, tmp_path, "int8", skip=["*norm*", nn.Embedding])
    names = {row.name.removesuffix(".weight") for row in stowage.report(model).stowed}
    assert EVERY - names == {"pos_embed", "blocks.0.norm_proj", "blocks.1.norm_proj"}
    with pytest.raises(stowage.InvalidArgument, match=r"skip '\*nrm\*': must match"):
        stowage.load(build, tmp_path, "int8", skip="*nrm*")
    stowage.load(build, tmp_path, "int8", skip="*nrm*", allow_unmatched=True)
    with pytest.raises(stowage.InvalidArgument, match="skip must come with storage"):
        stowage.load(build, tmp_path, skip="*norm*")
    with pytest.raises(stowage.InvalidArgument, match="storage must be one"):
        stowage.load(build, tmp_path, ["nf4", "int8"])
