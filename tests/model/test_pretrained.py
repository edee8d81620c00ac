# SPDX-License-Identifier: Apache-2.0
"""`from_pretrained` and `save_pretrained` of transformers with StowageConfig: what rests, where,
and that it is what `stowage.stow` and `stowage.load` make."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import expert_models as mixtures
import pytest
import torch
import torch.distributed as dist
from same_weights import same
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
)

import stowage
from stowage.integrations.transformers import StowageConfig, StowageQuantizer
from stowage.integrations.transformers.destinations import Destinations

SCRIPTS = sysconfig.get_path("scripts")
PROGRAM = shutil.which("stowage", path=SCRIPTS) or Path(stowage.__file__).parent / "bin/stowage"
IDS = torch.tensor([[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]])
SIZES = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


def built(tied: bool = False, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def opened(folder: Path, *arguments: Any, kind: Any = AutoModelForCausalLM, **more: Any) -> Any:
    config = StowageConfig(*arguments)
    return kind.from_pretrained(folder, quantization_config=config, **more)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    built().save_pretrained(folder)
    return folder


# ---- quantized while it is read ----
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", ["50GB", "200KB"])
def test_it_is_what_stow_makes_of_a_plain_model(tmp_path: Path, tied: bool, shards: str) -> None:
    built(tied).save_pretrained(tmp_path, max_shard_size=shards)
    rules = {"*.down_proj": "int8:row", "*.1.*": None}
    model = opened(tmp_path, "nf4", rules)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    report = stowage.stow(expected, "nf4", rules=rules)
    assert same(model, expected) and torch.equal(logits(model), logits(expected))
    found = stowage.report(model)
    assert [(r.name, r.storage, r.reason, r.relative_error) for r in found.rows] == [
        (r.name, r.storage, r.reason, r.relative_error) for r in report.rows
    ]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_what_transformers_says_of_it_is_right(plain: Path) -> None:
    model, dense = opened(plain, "int8:row"), AutoModelForCausalLM.from_pretrained(plain)
    assert model.get_memory_footprint() == stowage.nbytes(model) < dense.get_memory_footprint()
    buffers = sum(map(stowage.nbytes, model.buffers()))
    assert model.get_memory_footprint(return_buffers=False) == stowage.nbytes(model) - buffers
    assert model.num_parameters() == dense.num_parameters()
    assert model.is_quantized and model.quantization_method == "stowage"
    assert model.dtype == torch.bfloat16 and not model.training
    quantizer = model.hf_quantizer
    assert quantizer.is_serializable() and quantizer.is_trainable and quantizer.is_compileable
    assert not quantizer.is_qat_trainable


def test_a_dtype_is_what_it_works_in(plain: Path, tmp_path: Path) -> None:
    for dtype in (torch.float32, torch.float16):
        model = opened(plain, "nf4", dtype=dtype)
        expected = AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
        stowage.stow(expected, "nf4")
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert torch.equal(logits(model), logits(expected))
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert {p.dtype for p in again.parameters()} == {dtype}
        assert torch.isfinite(logits(again)).all()


def test_modules_to_not_convert_stay_plain(plain: Path) -> None:
    config = StowageConfig("nf4", modules_to_not_convert=["o_proj", "model.layers.0"])
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    left = {r.name for r in stowage.report(model).rows if not r.storage and "proj" in r.name}
    every = {name for name, _ in model.named_parameters() if "proj" in name}
    assert left == {name for name in every if ".layers.0." in name or "o_proj" in name}


def test_a_new_head_is_drawn_and_the_rest_rests(plain: Path) -> None:
    model = opened(plain, "nf4", kind=AutoModelForSequenceClassification, num_labels=3)
    body = opened(plain, "nf4", kind=AutoModel)
    assert same(model.model, body)
    assert type(model.score.weight.data) is torch.Tensor and model.score.weight.std() > 0


@pytest.mark.parametrize("shards", ["50GB", "200KB"])
def test_variants_beside_other_files_open(tmp_path: Path, shards: str) -> None:
    built().save_pretrained(tmp_path, variant="fp16", max_shard_size=shards)
    (tmp_path / "other").mkdir()
    built().save_pretrained(tmp_path / "other")
    shutil.copy(tmp_path / "other/model.safetensors", tmp_path / "consolidated.safetensors")
    model = opened(tmp_path, "int8:row", variant="fp16")
    expected = built()
    stowage.stow(expected, "int8:row")
    assert same(model, expected)
    resting = tmp_path / "resting"
    model.save_pretrained(resting, variant="fp16", max_shard_size=shards)
    shutil.copy(tmp_path / "consolidated.safetensors", resting)
    if shards == "50GB":
        assert same(AutoModelForCausalLM.from_pretrained(resting, variant="fp16"), model)
    else:
        with pytest.raises(stowage.StowageError):
            AutoModelForCausalLM.from_pretrained(resting, variant="fp16")


def test_old_files_of_pickles_open(tmp_path: Path) -> None:
    model = built()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert stowage.stow(model, "int8:row").stowed
    assert same(opened(tmp_path, "int8:row"), model)


def test_errors_and_bytes_decide_as_in_stow(plain: Path) -> None:
    for given in ({"max_error": 0.02}, {"budget": "256KiB"}):
        config = StowageConfig(["nf4", "int8:row", "bf16"], **given)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
        expected = AutoModelForCausalLM.from_pretrained(plain)
        stowage.stow(expected, ["nf4", "int8:row", "bf16"], **given)
        assert same(model, expected)


@pytest.mark.parametrize("family", mixtures.FAMILIES)
@pytest.mark.parametrize("storage", ["nf4", "int8"])
def test_stacks_of_experts_rest_without_a_rule(tmp_path: Path, family: str, storage: str) -> None:
    model = opened(mixtures.published(family, tmp_path), storage)
    stacks = {n: p for n, p in model.named_parameters() if p.dim() == 3}
    assert stacks
    for weight in stacks.values():
        assert weight.resting == {"nf4": "nf4:block64", "int8": "int8:row2"}[storage]
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)
    stowage.stow(expected, storage, rules={n: w.resting for n, w in stacks.items()})
    assert same(model, expected)
    model.save_pretrained(tmp_path / "rests", max_shard_size="100KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "rests")
    for way in mixtures.WAYS:
        assert torch.equal(mixtures.logits(again, way), mixtures.logits(expected, way))


# ---- written and read again ----
@pytest.mark.parametrize("shards", ["50GB", "60KB"])
def test_what_is_saved_opens_as_it_was(plain: Path, tmp_path: Path, shards: str) -> None:
    model = opened(plain, "nf4", {"*.down_proj": "int8:row", "*.0.*up_proj": "mxfp4"})
    model.save_pretrained(tmp_path / "one", max_shard_size=shards)
    said = json.loads((tmp_path / "one/config.json").read_text())["quantization_config"]
    rules = {"*.down_proj": "int8:row", "*.0.*up_proj": "mxfp4"}
    assert said == {"quant_method": "stowage", "storage": "nf4", "rules": rules}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    assert same(again, model) and torch.equal(logits(again), logits(model))
    again.save_pretrained(tmp_path / "two", max_shard_size=shards)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    for command in (
        "inspect",
        "verify",
    ):  # which a method of its own in config.json does not mislead
        subprocess.run([PROGRAM, command, tmp_path / "one"], check=True, capture_output=True)
    loaded = stowage.load(built, tmp_path / "one")  # the same files, through our own door
    assert same(loaded, model)
    inner = AutoModel.from_pretrained(tmp_path / "one")
    assert same(inner, model.model)


def test_what_is_plain_in_such_a_file_stays_plain(plain: Path, tmp_path: Path) -> None:
    """Whatever its rules would mean for the names that another class has."""
    config = StowageConfig("nf4", {"model.layers.0.*": None}, modules_to_not_convert=["lm_head"])
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    model.save_pretrained(tmp_path)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)
    assert same(AutoModel.from_pretrained(tmp_path), model.model)
    other = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert same(other.model, model.model)


def test_a_load_in_inference_mode_makes_ordinary_weights(plain: Path) -> None:
    with torch.inference_mode():
        model = opened(plain, "int8:row")
    expected = opened(plain, "int8:row")
    for name, weight in model.named_parameters():
        if isinstance(weight, stowage.StowedTensor):
            assert not any(part.is_inference() for part in weight.parts.values()), name
    assert same(model, expected) and torch.equal(logits(model), logits(expected))


def test_our_own_files_open_too(plain: Path, tmp_path: Path) -> None:
    model = opened(plain, "f8_e4m3:row")
    stowage.save(model, tmp_path)
    config = StowageConfig.from_checkpoint(tmp_path)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path, config=config), model)


def test_dequantized_it_is_plain_again(plain: Path, tmp_path: Path) -> None:
    model = opened(plain, "int8:row")
    values = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    model.save_pretrained(tmp_path / "rests")
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path / "rests")):
        dense = one.dequantize()
        assert not dense.is_quantized and not hasattr(dense.config, "quantization_config")
        assert all(type(p.data) is torch.Tensor for p in dense.parameters())
        assert all(torch.equal(p, values[name]) for name, p in dense.named_parameters())
        assert dense.get_memory_footprint() > 2 * dense.num_parameters() - 1
        dense.save_pretrained(tmp_path / "dense")
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
        assert torch.equal(logits(theirs), logits(dense))


def test_experts_dequantized_have_their_owners_names_again(tmp_path: Path) -> None:
    model = opened(mixtures.published("Qwen3Moe", tmp_path), "nf4")
    dense = model.dequantize()
    dense.save_pretrained(tmp_path / "dense")
    names = json.loads(
        (tmp_path / "dense/model.safetensors").read_bytes()[8:].split(b"}}", 1)[0] + b"}}"
    )
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in names
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert torch.equal(mixtures.logits(again, "eager"), mixtures.logits(dense, "eager"))


def test_copies_and_pickles_are_models_of_their_own(plain: Path) -> None:
    model = opened(plain, "nf4")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(other, model)
        stowage.unstow(model)
        assert other.get_memory_footprint() == stowage.nbytes(other) < stowage.nbytes(model)
        model = opened(plain, "nf4")


# ---- published forms ----
PUBLISHED = {
    "fp8": "f8_e4m3:block128x128", "gptq": "int4:block128:f16:zero", "modelopt": "nvfp4",
    "awq": "int4:block128:f16:zero", "compressed-tensors": "int4:block128:bf16",
    "bitsandbytes": "nf4", "hqq": "uint4:block64:bf16:zero_rounded", "torchao": "int8:row",
}  # fmt: skip


@pytest.mark.parametrize("dialect", PUBLISHED)
def test_published_forms_rest_as_they_came(tmp_path: Path, dialect: str) -> None:
    model = built()
    stowage.stow(model, rules={"model.layers.*": PUBLISHED[dialect]})
    stowage.save(model, tmp_path / "one", dialect=dialect)
    config = StowageConfig.from_checkpoint(tmp_path / "one")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "one", config=config)
    loaded = stowage.load(built, tmp_path / "one")
    assert len(stowage.report(again).stowed) == 14
    assert same(again, loaded) and torch.equal(logits(again), logits(loaded))
    stowage.save(again, tmp_path / "two", dialect=dialect)
    for path in (tmp_path / "one").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
    inner = AutoModel.from_pretrained(tmp_path / "one", config=config)
    assert same(inner, loaded.model)


@pytest.mark.parametrize("family", ["Qwen3Moe", "DeepseekV3"])
def test_experts_in_their_owners_form_rest_in_stacks(tmp_path: Path, family: str) -> None:
    """Files with a tensor for each expert, quantized by their owner's rule."""
    mixtures.published(family, tmp_path / "plain")
    command = [PROGRAM, "convert", tmp_path / "plain", tmp_path / "fp8", "--to", "fp8"]
    more = ["--storage", "f8_e4m3:block128x128"]
    subprocess.run([*command, *more], check=True, capture_output=True)
    config = StowageConfig.from_checkpoint(tmp_path / "fp8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", config=config)
    loaded = stowage.load(lambda: mixtures.build(family), tmp_path / "fp8")
    assert same(model, loaded)
    assert all(isinstance(p, stowage.StowedTensor) for p in model.parameters() if p.dim() == 3)
    assert torch.equal(mixtures.logits(model, "eager"), mixtures.logits(loaded, "eager"))


# ---- places ----
LAYERS = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
    "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu",
}  # fmt: skip


def tiers(model: Any) -> dict[str, str]:
    return {row.name: row.tier for row in stowage.report(model).rows if row.storage}


@pytest.mark.parametrize("rests", [False, True])
def test_places_are_kept(plain: Path, tmp_path: Path, rests: bool) -> None:
    expected = opened(plain, "int8:row")
    if rests:
        expected.save_pretrained(tmp_path / "rests")

    def made(ram: str | None = None, **more: Any) -> Any:
        if rests and ram is not None:
            config = StowageConfig.from_checkpoint(tmp_path / "rests", ram=ram)
            return AutoModelForCausalLM.from_pretrained(tmp_path / "rests", config=config, **more)
        if rests:
            return AutoModelForCausalLM.from_pretrained(tmp_path / "rests", **more)
        config = StowageConfig("int8:row", ram=ram)
        return AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, **more)

    for more in ({}, {"device_map": "cpu"}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}):
        model = made(**more)
        assert set(tiers(model).values()) == {"ram"} and same(model, expected)
    for more in ({"ram": "160KiB"}, {"device_map": "auto", "max_memory": {"cpu": "160KiB"}}):
        model = made(**more)
        assert set(tiers(model).values()) == {"disk"}
        assert torch.equal(logits(model), logits(expected))
        assert 0 < stowage.engine_report(model).peak <= 160 << 10
    model = made(device_map=dict(LAYERS))
    found = tiers(model)
    assert {place for name, place in found.items() if ".layers.1." in name} == {"disk"}
    assert {place for name, place in found.items() if ".layers.0." in name} == {"ram"}
    assert torch.equal(logits(model), logits(expected))
    model.save_pretrained(tmp_path / "again")
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), expected)
    stowage.unstow(expected)
    for name, values in model.dequantize().named_parameters():
        assert torch.equal(values, expected.get_parameter(name))


def test_a_plan_is_carried_out(plain: Path, tmp_path: Path) -> None:
    expected = opened(plain, "int8:row")
    expected.save_pretrained(tmp_path)
    plan = stowage.plan(tmp_path, ram="700KiB")
    plan.save(tmp_path / "plan.json")
    for given in (plan, tmp_path / "plan.json"):
        config = StowageConfig.from_checkpoint(tmp_path, plan=given)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config)
        assert "disk" in tiers(model).values()
        assert torch.equal(logits(model), logits(expected))


def test_a_place_that_nobody_chose_is_said_and_goes_with_the_model(plain: Path) -> None:
    with pytest.warns(UserWarning, match="MiB of weights go to") as said:
        model = opened(plain, "int8:row", device_map="auto", max_memory={"cpu": "160KiB"})
    folder = Path(str(said[0].message).partition(" go to ")[2].split()[0])
    assert (folder / "model.safetensors").exists()
    del model
    gc.collect()
    assert not folder.exists()


def test_rules_alone_leave_the_rest_plain(plain: Path, tmp_path: Path) -> None:
    given = {"quant_method": "stowage", "rules": {"*.down_proj": "nf4"}}  # as config.json has it
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=given)
    resting = {row.name for row in stowage.report(model).stowed}
    assert resting == {f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)}
    model.save_pretrained(tmp_path)
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_the_folder_of_the_disk_is_the_one_that_is_given(plain: Path, tmp_path: Path) -> None:
    config = StowageConfig("int8:row", ram="160KiB", folder=tmp_path / "weights")
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)
    assert (tmp_path / "weights/model.safetensors").exists()
    assert "folder" not in model.config.quantization_config.to_dict()


# ---- what is refused ----
def test_limits_beside_accelerators_are_refused(plain: Path) -> None:
    says = r"on the CPU alone, device_map has (0|cuda:1)"
    for given, places in (
        ({"ram": "1MiB"}, {"a": 0, "b": "cpu"}),
        ({"plan": "plan.json"}, {"": "cuda:1"}),
    ):
        found = Destinations(StowageConfig(**given))
        found.note(places)
        with pytest.raises(stowage.Unsupported, match=says):
            found.of_file(1 << 30)
    found = Destinations(StowageConfig())
    found.limited({0: 1 << 30, "cpu": 1 << 10})
    found.note({"model": 0, "lm_head": "cpu"})
    assert found.of_file(1 << 30) == {}  # it may all be on the accelerator
    with pytest.raises(stowage.Unsupported, match="a limit for the memory of the CPU"):
        found.keep(opened(plain, "int8:row"))
    try:  # not the CPU, although 0 is false
        assert found.device_of("model.layers.0").type != "cpu"
    except RuntimeError as error:  # of torch, where there is no accelerator
        assert "accelerator" in str(error)


def test_weights_that_are_spread_are_refused(plain: Path, tmp_path: Path) -> None:
    where = f"file://{tmp_path}/store"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        model, name = built(), "model.layers.0.mlp.up_proj.weight"
        quantizer = StowageQuantizer(StowageConfig("nf4"), pre_quantized=False)
        quantizer.preprocess_model(model)
        assert quantizer.param_needs_quantization(model, name)
        module = model.get_submodule(name.removesuffix(".weight"))
        spread = distribute_tensor(module.weight.detach(), mesh, [Shard(0)])
        module.weight = torch.nn.Parameter(spread)
        with pytest.raises(stowage.Unsupported, match=f"{name} must be whole to rest"):
            quantizer.param_needs_quantization(model, name)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"storage": "nf5"}, "got 'nf5'"),
        ({"budget": 3}, "budget must come with storage or rules"),
        ({"skip": ["x"]}, "skip must come with storage or rules"),
        ({"plan": "x", "ram": 3}, "plan must come without storage, rules and ram"),
        ({"storage": "nf4", "plan": "x"}, "plan must come without storage, rules and ram"),
        ({"quant_method": "gptq"}, "quant_method must be 'stowage', got 'gptq'"),
        ({"folder": "x"}, "folder must come with ram"),
        ({"rules": {torch.nn.Linear: "nf4"}}, "rules must be globs, which JSON can hold"),
    ],
)
def test_what_contradicts_itself_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(stowage.InvalidArgument, match=says):
        StowageConfig(**arguments)


def test_what_the_model_does_not_have_is_refused(plain: Path) -> None:
    for config, says in (
        (StowageConfig("nf4", {"nothing.*": "int8"}), "rule 'nothing.*'"),
        (StowageConfig("nf4", modules_to_not_convert=["foo"]), "got 'foo'"),
    ):
        with pytest.raises(stowage.InvalidArgument, match=says):
            AutoModelForCausalLM.from_pretrained(plain, quantization_config=config)


def test_values_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    model = built()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="issues during automatic conversion"):
        opened(tmp_path, "int8:row")
    config = StowageConfig("nf4", keep_nonfinite=True)
    kept = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    assert kept.model.layers[1].mlp.up_proj.weight.isnan().any()


def test_files_that_are_not_those_of_the_index_are_refused(plain: Path, tmp_path: Path) -> None:
    opened(plain, "nf4").save_pretrained(tmp_path, max_shard_size="60KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    with open(files[1], "r+b") as file:
        file.truncate(files[1].stat().st_size - 1)
    with pytest.raises(stowage.BadFile, match=files[1].name):
        AutoModelForCausalLM.from_pretrained(tmp_path)
