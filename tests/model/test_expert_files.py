# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with tensors for each expert, as they are published, in models of transformers, which
have the experts of a layer in one parameter."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from dialect_models import factory
from expert_models import IDS, WAYS, build, logits, published
from forking import in_child
from safetensors.torch import load_file, save_file
from sharded import run
from sharded_reads import read_as_whole

import stowage
from stowage._ops.library import composite_forced

transformers = pytest.importorskip("transformers")
SCRIPTS = sysconfig.get_path("scripts")
PROGRAM = shutil.which("stowage", path=SCRIPTS) or Path(stowage.__file__).parent / "bin/stowage"
# What the matrices of files rest as, and their stacks then; of these, the one of gate and up first.
FORMS = {
    "f8_e4m3:block128x128": ("fp8", "f8_e4m3:block128x128", "f8_e4m3:block128x128"),
    "f8_e4m3:block128x128:e8m0": ("fp8", *["f8_e4m3:block128x128:e8m0"] * 2),
    "f8_e4m3:row": ("compressed-tensors", "f8_e4m3:row2", "f8_e4m3:row2"),
    "f8_e4m3:tensor:bf16": ("compressed-tensors", "f8_e4m3:row2:bf16", "f8_e4m3:row:bf16"),
    "f8_e4m3:tensor": ("modelopt", "f8_e4m3:row2", "f8_e4m3:row"),
    "int8:row": ("compressed-tensors", "int8:row2", "int8:row2"),
    "int4:block32:bf16:zero": ("compressed-tensors", *["int4:block32:bf16:zero"] * 2),
    "mxfp4": ("compressed-tensors", "mxfp4", "mxfp4"),
    "int4:block32:f16:zero": ("gptq", *["int4:block32:f16:zero"] * 2),
    "int4:block64:f16:zero": ("awq", *["int4:block64:f16:zero"] * 2),
    "nf4": ("bitsandbytes", "nf4:block64", "nf4:block64"),
    "int8:row:bf16": ("torchao", "int8:row2:bf16", "int8:row2:bf16"),
    "nvfp4": ("modelopt", "nvfp4:row2", "nvfp4:row"),
    "f4_e2m1:block16:e4m3_quotient": (
        "compressed-tensors",
        "f4_e2m1:block16:e4m3_quotient:row2",
        "f4_e2m1:block16:e4m3_quotient:row",
    ),
    "nf4:nested": ("bitsandbytes", "", ""),  # refused
}


def quantized(plain: Path, storage: str, to: Path) -> tuple[Path, Path]:
    """The same with its projections in a dialect, and with the values that they have there."""
    tensors = load_file(plain / "model.safetensors")
    names = [n for n in tensors if "_proj" in n or ".experts." in n]
    assert sum(".experts." in n for n in names) >= 12
    rules = {name: storage for name in names if name.endswith("_proj.weight")}
    rules |= {name: storage for name in names if ".experts." in name}
    model = stowage.load(factory(tensors), plain, rules=rules)
    stowage.save(model, to / "packed", dialect=FORMS[storage][0])
    config = json.loads((plain / "config.json").read_text())
    said = to / "packed" / "config.json"
    said.write_text(json.dumps(config | json.loads(said.read_text()) if said.exists() else config))
    stowage.unstow(model)
    (to / "values").mkdir()
    save_file(model.state_dict(), to / "values/model.safetensors", {"format": "pt"})
    shutil.copy(plain / "config.json", to / "values")
    return to / "packed", to / "values"


CASES = [("Qwen3Moe", storage) for storage, (_, rests, _) in FORMS.items() if rests]
CASES += [("Mixtral", "f8_e4m3:tensor"), ("Mixtral", "int4:block64:f16:zero"), ("Mixtral", "nf4")]
CASES += [("Mixtral", "nvfp4"), ("Mixtral", "f4_e2m1:block16:e4m3_quotient")]
CASES += [("DeepseekV3", "nvfp4"), ("DeepseekV3", "f4_e2m1:block16:e4m3_quotient")]
CASES += [("DeepseekV3", "f8_e4m3:block128x128"), ("DeepseekV3", "f8_e4m3:block128x128:e8m0")]


@pytest.mark.parametrize(("family", "storage"), CASES)
def test_experts_rest_as_their_files_have_them(family: str, storage: str, tmp_path: Path) -> None:
    packed, values = quantized(published(family, tmp_path / "plain"), storage, tmp_path)
    dense = transformers.AutoModelForCausalLM.from_pretrained(values, dtype=torch.bfloat16).eval()
    model = stowage.load(lambda: build(family), packed, exact=True)
    stacks = {n: p for n, p in model.named_parameters() if p.dim() == 3}
    assert len(stacks) == (2 if family == "DeepseekV3" else 4)
    for name, stack in stacks.items():
        assert isinstance(stack, stowage.StowedTensor)
        assert stack.resting == FORMS[storage][1 if "gate_up" in name else 2]
        assert torch.equal(stack.dequantize(), dense.get_parameter(name))
    if not composite_forced():  # torch's grouped products of plain bf16 sum in another order
        assert torch.equal(logits(model, "eager"), logits(dense, "eager"))
    for mmap in (False, True):
        again = stowage.load(lambda: build(family), packed, mmap=mmap)
        stowage.save(again, tmp_path / f"again{mmap}", dialect=FORMS[storage][0])
        files = sorted(path.name for path in packed.iterdir())
        assert files == sorted(path.name for path in (tmp_path / f"again{mmap}").iterdir())
        for file in files:
            same = (tmp_path / f"again{mmap}" / file).read_bytes() == (packed / file).read_bytes()
            assert same, file


SPREAD = [("Qwen3Moe", "f8_e4m3:block128x128"), ("Mixtral", "nf4"), ("Mixtral", "nvfp4")]
SPREAD += [("Qwen3Moe", "int4:block64:f16:zero"), ("DeepseekV3", "f8_e4m3:block128x128:e8m0")]


@pytest.mark.parametrize(("family", "storage"), SPREAD)
def test_each_process_reads_its_experts(family: str, storage: str, tmp_path: Path) -> None:
    packed, _ = quantized(published(family, tmp_path / "plain"), storage, tmp_path)
    run(3, read_as_whole, build, (family,), str(packed), FORMS[storage][0])


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
def test_a_plain_mixture_is_packed_and_then_streamed(tmp_path: Path) -> None:
    """By the program, tensor by tensor, so that it never is in memory; its routers stay plain."""
    plain = published("Qwen3Moe", tmp_path / "plain")
    packed = [PROGRAM, "pack", str(plain), str(tmp_path / "packed"), "--storage", "nf4"]
    subprocess.run(packed, check=True, capture_output=True)
    wanted = stowage.load(lambda: build("Qwen3Moe"), tmp_path / "packed")
    routers = [p for n, p in wanted.named_parameters() if n.endswith(".gate.weight")]
    assert len(routers) == 2 and not any(isinstance(p, stowage.StowedTensor) for p in routers)
    stacks = [p for p in wanted.parameters() if p.dim() == 3]
    assert [p.resting for p in stacks if isinstance(p, stowage.StowedTensor)] == 4 * ["nf4:block64"]
    ram = stowage.nbytes(wanted) // 2
    model = stowage.load(lambda: build("Qwen3Moe"), tmp_path / "packed", ram=ram)
    for way in WAYS:
        assert torch.equal(logits(model, way), logits(wanted, way))
    assert stowage.engine_report(model).peak <= ram


@pytest.mark.parametrize("way", WAYS)
def test_every_way_through_the_experts_keeps_them_resting(way: str, tmp_path: Path) -> None:
    packed, _ = quantized(published("Qwen3Moe", tmp_path / "plain"), "f8_e4m3:row", tmp_path)
    model = stowage.load(lambda: build("Qwen3Moe"), packed, compute_dtype=torch.float32)
    dense = copy.deepcopy(model)
    stowage.unstow(dense)
    stowage.fallbacks(clear=True)
    got, wanted = logits(model, way), logits(dense, way)
    assert stowage.fallbacks() == {}
    assert float((got - wanted).norm()) <= 1e-4 * float(wanted.norm())


def test_an_adapter_trains_beside_them(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    packed, values = quantized(published("Qwen3Moe", tmp_path / "plain"), "f8_e4m3:row", tmp_path)
    dense = transformers.AutoModelForCausalLM.from_pretrained(values, dtype=torch.bfloat16).eval()
    model = stowage.load(lambda: build("Qwen3Moe"), packed, exact=True)
    found = []
    for each in (model, dense):
        each.set_experts_implementation("eager")
        torch.manual_seed(0)
        lora = peft.get_peft_model(each, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4))
        lora(IDS, labels=IDS).loss.backward()
        found.append([p.grad for n, p in lora.named_parameters() if "lora_" in n])
    assert len(found[0]) == 8 and any(bool(grad.any()) for grad in found[0])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=1e-4)


def test_a_changed_expert_changes_its_tensors_alone(tmp_path: Path) -> None:
    packed, _ = quantized(published("Qwen3Moe", tmp_path / "plain"), "f8_e4m3:row", tmp_path)
    model = stowage.load(lambda: build("Qwen3Moe"), packed)
    stack = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    with torch.no_grad():
        stack[2, :128] = 0.25
    stowage.save(model, tmp_path / "again", dialect="compressed-tensors")
    one, two = (load_file(at / "model.safetensors") for at in (packed, tmp_path / "again"))
    changed = {name for name in one if not torch.equal(one[name].float(), two[name].float())}
    gate = "model.layers.1.mlp.experts.2.gate_proj"
    assert changed == {f"{gate}.weight", f"{gate}.weight_scale"}
    again = stowage.load(lambda: build("Qwen3Moe"), tmp_path / "again")
    assert torch.equal(
        again.get_parameter("model.layers.1.mlp.experts.gate_up_proj").dequantize(),
        stack.dequantize(),
    )


def test_rows_of_a_matrix_with_one_scale_keep_it_or_are_not_written(tmp_path: Path) -> None:
    packed, _ = quantized(published("Mixtral", tmp_path / "plain"), "f8_e4m3:tensor", tmp_path)
    model = stowage.load(lambda: build("Mixtral"), packed)
    stack = model.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    with torch.no_grad():
        stack[1, 3] = 9.0
    with pytest.raises(
        stowage.InvalidArgument,
        match=r"experts\.1\.w1\.weight: must have one scale for all rows, as in its file; a write "
        r"to model\.layers\.0\.mlp\.experts\.gate_up_proj has made one for each",
    ):
        stowage.save(model, tmp_path / "again", dialect="modelopt")
    stowage.save(model, tmp_path / "again", dialect="modelopt", requantize=True)
    one, two = (load_file(p / "model.safetensors") for p in (packed, tmp_path / "again"))
    changed = {n for n in one if not torch.equal(one[n].float(), two[n].float())}
    gate = "model.layers.0.block_sparse_moe.experts.1.w1"
    assert changed == {f"{gate}.weight", f"{gate}.weight_scale"}
    wide = stack[1, : one[f"{gate}.weight"].shape[0]].dequantize(torch.float32)
    scale = two[f"{gate}.weight_scale"]
    torch.testing.assert_close(
        two[f"{gate}.weight"].float() * scale, wide, rtol=2**-4, atol=float(scale) * 2**-9
    )
    stowage.save(model, tmp_path / "ours")
    again = stowage.load(lambda: build("Mixtral"), tmp_path / "ours", mmap=True)
    found = again.get_parameter("model.layers.0.mlp.experts.gate_up_proj")
    assert torch.equal(found.dequantize(), stack.dequantize())


def test_plain_experts_are_stacked_and_rest_by_rules(tmp_path: Path) -> None:
    plain = published("Mixtral", tmp_path / "plain")
    dense = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).eval()
    for mmap in (False, True):
        model = stowage.load(lambda: build("Mixtral"), plain, mmap=mmap)
        for name, value in dense.state_dict().items():
            assert torch.equal(model.state_dict()[name], value), name
    for storage in ("int8:row2", "nf4", "f8_e4m3", "nvfp4", "int8:tensor"):
        rules = {"*.experts.*_proj": storage}
        wanted = build("Mixtral")
        wanted.load_state_dict(dense.state_dict())
        told = stowage.stow(wanted, rules=rules)
        model = stowage.load(lambda: build("Mixtral"), plain, rules=rules)
        for row in told.stowed:
            stack, other = model.get_parameter(row.name), wanted.get_parameter(row.name)
            assert stack.resting == other.resting
            for part, theirs in zip(stack.parts.values(), other.parts.values(), strict=True):
                assert torch.equal(part, theirs)
            mine = stowage.report(model)[row.name]
            assert (mine.worst_block, mine.max_error) == (row.worst_block, row.max_error)
            assert mine.relative_error == pytest.approx(row.relative_error)


def broken(tmp_path: Path, change: Any, storage: str = "f8_e4m3:row") -> str:
    """What a load says of a folder whose tensors were changed; the model is as it was."""
    packed, _ = quantized(published("Qwen3Moe", tmp_path / "plain"), storage, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    change(tensors)
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    model = build("Qwen3Moe")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(stowage.StowageError) as caught:
        stowage.load(model, packed)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    return str(caught.value)


_ONE = "model.layers.1.mlp.experts.2.up_proj"


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{_ONE}.weight"], tensors[f"{_ONE}.weight_scale"]

    told = broken(tmp_path, change)
    assert "model.layers.1.mlp.experts.gate_up_proj: must have all of its 4 experts" in told
    assert "has no mlp.experts.2.up_proj.weight" in told


def test_an_expert_of_more_than_the_model_has_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for end in (".weight", ".weight_scale"):
            tensors[_ONE.replace("2", "4") + end] = tensors[_ONE + end].clone()

    told = broken(tmp_path, change)
    assert f"{_ONE.replace('2', '4')}.weight: must be of 4 experts" in told


def test_experts_that_are_there_twice_are_named(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.down_proj"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.zeros(4, 256, 128, dtype=torch.bfloat16)

    assert f"{name}: must be in the file once" in broken(tmp_path, change)


def test_an_expert_that_rests_otherwise_is_named(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{_ONE}.weight_scale"]
        tensors[f"{_ONE}.weight"] = tensors[f"{_ONE}.weight"].to(torch.bfloat16)

    told = broken(tmp_path, change)
    assert f"{_ONE}.weight: must rest as model.layers.1.mlp.experts.0.gate_proj.weight does" in told
    assert "f8_e4m3:row" in told and "is plain bfloat16" in told


def test_what_a_stack_cannot_hold_is_refused_with_the_reason(tmp_path: Path) -> None:
    told = broken(tmp_path, lambda tensors: None, "nf4:nested")
    assert "experts.0.gate_proj.weight: must rest so that it can lie in" in told
    assert "scales of each matrix stand under a number of its own" in told


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
@pytest.mark.parametrize(("family", "storage"), [*CASES, ("Qwen3Moe", None), ("Mixtral", None)])
def test_experts_come_one_by_one_from_the_file_as_it_is(
    family: str, storage: str | None, tmp_path: Path
) -> None:
    packed = published(family, tmp_path / "plain")
    if storage is not None:
        packed, _ = quantized(packed, storage, tmp_path)
    resident = stowage.load(lambda: build(family), packed)
    ram = max(stowage.nbytes(p) for n, p in resident.named_parameters() if p.dim() == 3)
    model = stowage.load(lambda: build(family), packed, ram=ram, reads="direct")
    for name, stack in resident.named_parameters():
        if stack.dim() != 3:
            continue
        found = model.get_parameter(name)
        assert isinstance(found, stowage.StowedTensor)
        if storage is None:
            assert torch.equal(found.dequantize(), stack)
            continue
        assert found.resting == stack.resting
        for part, wanted in zip(found.parts.values(), stack.parts.values(), strict=True):
            assert torch.equal(part.view(torch.uint8), wanted.view(torch.uint8))
    before = stowage.engine_report(model)
    for way in WAYS:
        assert torch.equal(logits(model, way), logits(resident, way))
    report = stowage.engine_report(model).since(before)
    assert report.borrowed == 0 and report.bytes_formed > 0 and report.peak <= ram
    if storage is not None:
        stowage.save(model, tmp_path / "again", dialect=FORMS[storage][0])
        for file in packed.iterdir():
            assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
    stowage.onload(model)
    assert torch.equal(logits(model, "eager"), logits(resident, "eager"))


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
def test_stacks_of_a_file_are_copied_saved_and_written_to(tmp_path: Path) -> None:
    packed = published("Qwen3Moe", tmp_path / "plain")
    resident = stowage.load(lambda: build("Qwen3Moe"), packed)
    model = stowage.load(lambda: build("Qwen3Moe"), packed, ram="1MiB")
    wanted = logits(resident, "eager")
    stowage.save(model, tmp_path / "own")
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    own = stowage.load(lambda: build("Qwen3Moe"), tmp_path / "own")
    for each in (copy.deepcopy(model), again, own):
        assert torch.equal(logits(each, "eager"), wanted)
    name = "model.layers.0.mlp.experts.down_proj"
    for each in (model, resident):
        with torch.no_grad():
            each.get_parameter(name)[1].mul_(2)
    assert not torch.equal(logits(resident, "eager"), wanted)
    assert torch.equal(logits(model, "eager"), logits(resident, "eager"))


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
def test_a_file_that_is_cut_short_under_a_stack_is_named(tmp_path: Path) -> None:
    packed = published("Qwen3Moe", tmp_path / "plain")
    model = stowage.load(lambda: build("Qwen3Moe"), packed, ram="600KiB", reads="buffered")
    path = packed / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(stowage.BadFile, match=r"model\.safetensors"):
        logits(model, "eager")


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
def test_a_child_that_is_forked_finds_stacks_of_the_file(tmp_path: Path) -> None:
    packed = published("Qwen3Moe", tmp_path / "plain")
    model = stowage.load(lambda: build("Qwen3Moe"), packed, ram="1MiB")
    name = "model.layers.0.mlp.experts.down_proj"
    wanted = model.get_parameter(name)[1].sum()
    in_child(lambda: torch.equal(model.get_parameter(name)[1].sum(), wanted))


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
def test_other_problems_are_told_before_stacks_are_gathered(tmp_path: Path) -> None:
    packed = published("Qwen3Moe", tmp_path / "plain")
    tensors = load_file(packed / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(stowage.InvalidArgument, match=r"model\.norm\.weight: must be in"):
        stowage.load(lambda: build("Qwen3Moe"), packed, ram="1MiB")


@pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")
def test_what_a_stack_of_the_file_cannot_be_is_refused(tmp_path: Path) -> None:
    packed = published("Qwen3Moe", tmp_path / "plain")
    with pytest.raises(stowage.InvalidArgument, match="got mapped for codes that"):
        stowage.load(lambda: build("Qwen3Moe"), packed, ram="1MiB", reads="mapped")


def test_what_is_quantized_on_the_way_needs_memory(tmp_path: Path) -> None:
    """No file has it as it rests."""
    packed = published("Qwen3Moe", tmp_path / "plain")
    rules = {"*.experts.*": "int8:row2"}
    with pytest.raises(stowage.InvalidArgument, match="ram"):
        stowage.load(lambda: build("Qwen3Moe"), packed, rules=rules, ram="1MiB")
