# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in NVFP4 with tensors for each expert, as ModelOpt and compressed-tensors publish
them, in models that have the experts of a layer in one parameter. Files are made here, of random
codes, scales and numbers over these, and their values by the owners' formulas."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from expert_models import IDS, WAYS, build, logits, published
from safetensors.torch import load_file, save_file

import stowage
from stowage._ops.library import composite_forced

transformers = pytest.importorskip("transformers")

FAMILIES = ("Qwen3Moe", "Mixtral", "DeepseekV3")
GATE = {"Qwen3Moe": "gate_proj", "Mixtral": "w1", "DeepseekV3": "gate_proj"}
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
_WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
_LOCAL = {**_WEIGHTS, "symmetric": True, "strategy": "tensor_group", "dynamic": False}


class Form(NamedTuple):
    dialect: str
    storage: str  # of a matrix
    codes: str  # what tensors are called
    number: str
    sizes: tuple[int, ...]  # of a number
    beside: str
    config: dict[str, Any]


FORMS = {
    "modelopt": Form(
        "modelopt", "nvfp4", "weight", "weight_scale_2", (), "input_scale",
        {
            "config_groups": {"group_0": {"weights": _WEIGHTS, "targets": ["Linear"]}},
            "ignore": ["lm_head"], "quant_algo": "NVFP4", "producer": {"name": "modelopt"},
            "quant_method": "modelopt",
        },
    ),
    "compressed-tensors": Form(
        "compressed-tensors", "f4_e2m1:block16:e4m3_quotient", "weight_packed",
        "weight_global_scale", (1,), "input_global_scale",
        {
            "config_groups": {"group_0": {"weights": _LOCAL, "targets": ["Linear"]}},
            "ignore": ["lm_head"], "format": "nvfp4-pack-quantized",
            "quant_method": "compressed-tensors", "quantization_status": "compressed",
        },
    ),
}  # fmt: skip
CASES = [(family, form) for family in FAMILIES for form in FORMS]


def made(family: str, form: Form, at: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint, and the fp32 values of its matrices."""
    plain = load_file(published(family, at / "plain") / "model.safetensors")
    tensors, values = dict(plain), {}
    random = torch.Generator().manual_seed(1)
    for name in plain:
        module = name.removesuffix(".weight")
        if ".experts." not in name and not module.endswith("_proj"):
            continue
        rows, columns = tensors.pop(name).shape
        codes = torch.randint(256, (rows, columns // 2), generator=random, dtype=torch.uint8)
        scale = torch.rand(rows, columns // 16, generator=random) * 447 + 1
        scale = scale.to(torch.float8_e4m3fn)
        number = 2.0**-14 * (0.5 + torch.rand((), generator=random))  # of its own for each matrix
        if form.dialect == "compressed-tensors":
            number = 1 / number
            read = scale.float() / number
        else:
            read = scale.float() * number
        both = torch.stack([codes & 15, codes >> 4], 2).view(rows, columns).long()
        values[name] = E2M1[both] * read.repeat_interleave(16, 1)
        tensors[f"{module}.{form.codes}"], tensors[f"{module}.weight_scale"] = codes, scale
        tensors[f"{module}.{form.number}"] = number.reshape(form.sizes)
        tensors[f"{module}.{form.beside}"] = torch.rand(form.sizes, generator=random)
    to = at / "packed"
    to.mkdir()
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    config = json.loads((at / "plain/config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "quantization_config": form.config}))
    if form.dialect == "modelopt":
        own = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
        said = {"producer": {"name": "modelopt"}, "quantization": own}
        (to / "hf_quant_config.json").write_text(json.dumps(said))
    return to, values


def dense(at: Path, values: dict[str, torch.Tensor]) -> Any:
    """What transformers makes of the same values, in bf16."""
    (at / "values").mkdir()
    plain = load_file(at / "plain/model.safetensors")
    plain |= {name: value.to(torch.bfloat16) for name, value in values.items()}
    save_file(plain, at / "values/model.safetensors", {"format": "pt"})
    shutil.copy(at / "plain/config.json", at / "values")
    found = transformers.AutoModelForCausalLM.from_pretrained(at / "values", dtype=torch.bfloat16)
    return found.eval()


def stacked(values: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The matrices of the parameter that a model calls so."""
    layer = ".".join(name.split(".")[:3])
    own = {n: v for n, v in values.items() if n.startswith(layer) and ".experts." in n}
    ends = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
    wanted = ends[:2] if name.endswith("gate_up_proj") else ends[2:]
    count = 1 + max(int(n.split(".experts.")[1].split(".")[0]) for n in own)
    return torch.stack([
        torch.cat([
            next(v for n, v in own.items() if f".experts.{i}." in n and n.split(".")[-2] in each)
            for each in wanted
        ])
        for i in range(count)
    ])  # fmt: skip


def same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


@pytest.mark.parametrize(("family", "name"), CASES)
def test_they_have_their_owners_values_and_files(family: str, name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    packed, values = made(family, form, tmp_path)
    wide = stowage.load(lambda: build(family), packed, compute_dtype=torch.float32)
    stacks = {n: p for n, p in wide.named_parameters() if p.dim() == 3}
    assert len(stacks) == (2 if family == "DeepseekV3" else 4)
    for each, stack in stacks.items():
        behind = "row2" if each.endswith("gate_up_proj") else "row"
        assert isinstance(stack, stowage.StowedTensor)
        assert stack.resting == f"{form.storage}:{behind}"
        numbers = stack.parts["global_scale"].view(len(stack), -1)
        assert len(numbers.unique()) == len(stack) * (2 if behind == "row2" else 1)
        wanted = stacked(values, each)
        assert torch.equal(stack.dequantize().view(torch.int32), wanted.view(torch.int32))
        assert torch.equal(stack[2].dequantize().view(torch.int32), wanted[2].view(torch.int32))
    for n, value in values.items():
        if ".experts." not in n:
            assert torch.equal(wide.get_parameter(n).dequantize(), value)
    for mmap in (False, True):
        again = stowage.load(lambda: build(family), packed, mmap=mmap)
        stowage.save(again, tmp_path / f"again{mmap}", dialect=form.dialect)
        same_files(packed, tmp_path / f"again{mmap}")


@pytest.mark.parametrize(("family", "name"), CASES)
def test_they_compute_as_their_dense_twins(family: str, name: str, tmp_path: Path) -> None:
    packed, values = made(family, FORMS[name], tmp_path)
    twin = dense(tmp_path, values)
    exact = stowage.load(lambda: build(family), packed, exact=True)
    if not composite_forced():  # torch's grouped products of plain bf16 sum in another order
        assert torch.equal(logits(exact, "eager"), logits(twin, "eager"))
    wide = stowage.load(lambda: build(family), packed, compute_dtype=torch.float32)
    plain = stowage.load(lambda: build(family), packed, compute_dtype=torch.float32)
    stowage.unstow(plain)
    stowage.fallbacks(clear=True)
    for way in WAYS:
        got, wanted = logits(wide, way), logits(plain, way)
        assert float((got - wanted).norm()) <= 1e-4 * float(wanted.norm())
    assert stowage.fallbacks() == {}


@pytest.mark.skipif(composite_forced(), reason="exact bf16 products need the kernels")
@pytest.mark.parametrize(("family", "name"), CASES)
def test_an_adapter_takes_a_step_beside_them(family: str, name: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    packed, values = made(family, FORMS[name], tmp_path)
    model, twin = stowage.load(lambda: build(family), packed, exact=True), dense(tmp_path, values)
    stacks = [p for p in model.parameters() if p.dim() == 3]
    before = [[part.clone() for part in stack.parts.values()] for stack in stacks]
    found = []
    for each in (model, twin):
        each.set_experts_implementation("eager")
        torch.manual_seed(0)
        lora = peft.get_peft_model(each, peft.LoraConfig(target_modules=["o_proj"], r=4))
        trained = [p for n, p in lora.named_parameters() if "lora_" in n]
        step = torch.optim.SGD(trained, lr=0.5)
        lora(IDS, labels=IDS).loss.backward()
        step.step()
        with torch.no_grad():
            found.append(([p.grad.clone() for p in trained], lora(IDS).logits))
    assert any(bool(grad.any()) for grad in found[0][0])
    for got, wanted in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=1e-4)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=0.05, atol=0.05)
    for stack, parts in zip(stacks, before, strict=True):
        for part, kept in zip(stack.parts.values(), parts, strict=True):
            assert torch.equal(part, kept)


@pytest.mark.parametrize(("family", "name"), CASES)
def test_a_changed_expert_changes_its_tensors_alone(family: str, name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    packed, _ = made(family, form, tmp_path)
    model = stowage.load(lambda: build(family), packed)
    stack = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    torch.manual_seed(2)
    with torch.no_grad():
        stack[2] = torch.randn(stack.shape[1:], dtype=stack.dtype)
        stack[3, 5, :40] = 0.01  # fits what stands over its expert, which stays
    stowage.save(model, tmp_path / "again", dialect=form.dialect)
    one, two = (load_file(at / "model.safetensors") for at in (packed, tmp_path / "again"))
    assert list(one) == list(two)
    changed = {n for n in one if not torch.equal(one[n].float(), two[n].float())}
    ends = {n.split(".experts.")[1].split(".", 2)[2] for n in changed}
    assert {n.split(".experts.")[1][0] for n in changed} == {"2", "3"}
    assert all(".layers.1." in n for n in changed) and form.beside not in ends
    assert len([n for n in changed if n.endswith(form.number)]) == 1
    again = stowage.load(lambda: build(family), tmp_path / "again")
    for n, p in model.named_parameters():
        if isinstance(p, stowage.StowedTensor):
            for part, theirs in zip(
                p.parts.values(), again.get_parameter(n).parts.values(), strict=True
            ):
                assert torch.equal(part, theirs), n


@pytest.mark.parametrize(("family", "name"), CASES)
def test_rows_that_no_longer_have_one_number_are_saved_in_our_form(
    family: str, name: str, tmp_path: Path
) -> None:
    form = FORMS[name]
    packed, _ = made(family, form, tmp_path)
    model = stowage.load(lambda: build(family), packed)
    stack = model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    with torch.no_grad():
        stack[1, 3] = 9.0
    with pytest.raises(
        stowage.InvalidArgument,
        match=rf"experts\.1\.{GATE[family]}\.weight: must have one global_scale for all rows, as "
        r"in its file; a write to model\.layers\.1\.mlp\.experts\.gate_up_proj has made one for ",
    ):
        stowage.save(model, tmp_path / "again", dialect=form.dialect)
    stowage.save(model, tmp_path / "one", dialect=form.dialect, requantize=True)
    one = stowage.load(lambda: build(family), tmp_path / "one")
    rounded = one.get_parameter("model.layers.1.mlp.experts.gate_up_proj").dequantize(torch.float32)
    exact = stack.dequantize(torch.float32)
    rows = exact.shape[1] // 2  # of gate, which was written to
    assert torch.equal(rounded[0], exact[0]) and torch.equal(rounded[1, rows:], exact[1, rows:])
    error = (rounded[1, :rows] - exact[1, :rows]).norm() / exact[1, :rows].norm()
    assert 0 < float(error) < 0.15
    stowage.save(model, tmp_path / "ours")
    with pytest.raises(stowage.StowageError, match="must rest in a storage that"):
        stowage.save(
            stowage.load(lambda: build(family), tmp_path / "ours"),
            tmp_path / "again",
            dialect=form.dialect,
        )
    for options in ({}, {"mmap": True}, {"ram": "1MiB"}):
        again = stowage.load(lambda: build(family), tmp_path / "ours", **options)
        found = again.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
        assert found.resting == f"{form.storage}:row2"
        assert torch.equal(found.dequantize(), stack.dequantize())


@pytest.mark.parametrize("name", FORMS)
def test_an_expert_without_its_number_is_named(name: str, tmp_path: Path) -> None:
    packed, _ = made("Mixtral", FORMS[name], tmp_path)
    tensors = load_file(packed / "model.safetensors")
    one = next(n for n in tensors if ".experts.2." in n and n.endswith(FORMS[name].number))
    del tensors[one]
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(stowage.StowageError, match=one.replace(".", r"\.")):
        stowage.load(lambda: build("Mixtral"), packed)
