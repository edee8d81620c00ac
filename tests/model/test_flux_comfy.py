# SPDX-License-Identifier: Apache-2.0
"""Flux in ComfyUI's files: one scale of a tensor serves each parameter that has rows of it, scales
in tiles are put in order and then cut. What they are compared with is decoded here, slowly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flux_files import COMFYUI, PREFIX, converted, scaled
from flux_models import (
    QKV,
    TO_K,
    TO_Q,
    answer,
    assert_same,
    built,
    inputs,
    original,
    theirs,
    values,
)
from flux_ranks import spread
from safetensors.torch import load_file, save_file
from sharded import run
from sharded_reads import read_as_whole

import stowage
from stowage._ops.memory import octets

pytest.importorskip("diffusers")

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decoded(path: Path) -> Any:
    """A bf16 model with the values of a file, by ComfyUI's arithmetic."""
    tensors = load_file(path)
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        scale = tensors.get(f"{module}.weight_scale", tensors.get(f"{module}.scale_weight"))
        if name.endswith((".weight", ".bias", "_norm.scale")):
            own = value if scale is None or module == name else _matrix(tensors, module, scale)
            found[name.removeprefix(PREFIX)] = own.bfloat16()
    model = built().bfloat16()
    model.load_state_dict(theirs(256)(found))
    return model


def _matrix(tensors: dict[str, torch.Tensor], module: str, scale: torch.Tensor) -> torch.Tensor:
    codes, over = tensors[f"{module}.weight"], tensors.get(f"{module}.weight_scale_2")
    if scale.dim() == 0:
        return codes.bfloat16() * scale.bfloat16()
    columns = scale.shape[1]
    r = torch.arange(codes.shape[0])[:, None]
    block = 32 if over is None else 16
    c = torch.arange((codes.shape[1] * (1 if over is None else 2)) // block)[None]
    place = (r // 128 * (columns // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    scales = scale.view(torch.uint8).flatten()[place]
    if over is None:
        return codes.float() * torch.exp2(scales.float() - 127).repeat_interleave(32, 1)
    each = over.bfloat16() * scales.view(torch.float8_e4m3fn).bfloat16()
    pairs = torch.stack([codes >> 4, codes & 15], -1).flatten(1).long()
    magnitudes = torch.where(pairs >= 8, -1.0, 1.0) * E2M1[pairs % 8]
    return magnitudes.bfloat16() * each.repeat_interleave(16, 1)


def assert_opens(path: Path, storage: str, dialect: str, mmap: bool, to: Path) -> Any:
    want = decoded(path)
    model = stowage.load(built, path, mmap=mmap, exact=True)
    for name in (TO_Q, TO_K, "single_transformer_blocks.1.proj_mlp.weight"):
        found = model.get_parameter(name)
        assert isinstance(found, stowage.StowedTensor) and found.resting == storage
    assert_same(model, want)
    assert torch.equal(answer(model, torch.bfloat16), answer(want, torch.bfloat16))
    stowage.save(model, to / "again", dialect=dialect)
    assert (to / "again" / path.name).read_bytes() == path.read_bytes()
    return model


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("storage", COMFYUI)
def test_comfyui_opens_and_is_written_again(storage: str, mmap: bool, tmp_path: Path) -> None:
    path = converted(tmp_path, COMFYUI[storage], PREFIX if mmap else "")
    quants = [json.loads(bytes(t)) for n, t in load_file(path).items() if "comfy_quant" in n]
    assert len(quants) >= 28
    assert_opens(path, COMFYUI[storage], "comfyui", mmap, tmp_path)


@pytest.mark.parametrize("mmap", [False, True])
def test_scaled_fp8_opens_and_is_written_again(mmap: bool, tmp_path: Path) -> None:
    path = scaled(tmp_path)
    model = assert_opens(path, "f8_e4m3:tensor", "comfyui-scaled", mmap, tmp_path)
    scales = {float(model.get_parameter(name).parts["scale"]) for name in (TO_Q, TO_K)}
    assert len(scales) == 1  # the tensor has one, and each of them that


def test_adapters_train_beside_rows_with_a_scale_in_common(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path = scaled(tmp_path)
    model, want = stowage.load(built, path, exact=True), decoded(path)
    grads = []
    for each in (model, want):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["to_k"], r=4, init_lora_weights=False)
        lora = peft.get_peft_model(each, config)
        lora(**inputs(each, torch.bfloat16)).sample.float().square().mean().backward()
        grads.append([p.grad for n, p in lora.named_parameters() if "lora_" in n])
        lora.unload()
    for got, wanted in zip(*grads, strict=True):
        assert float((got - wanted).norm()) <= 0.03 * float(wanted.norm())
    stowage.save(model, tmp_path / "again", dialect="comfyui-scaled")
    assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("storage", COMFYUI)
def test_rests_on_a_disk_from_the_untouched_file(storage: str, tmp_path: Path) -> None:
    path = converted(tmp_path, COMFYUI[storage])
    want = stowage.load(built, path, compute_dtype=torch.float32)
    model = stowage.load(built, path, ram="4MiB", compute_dtype=torch.float32)
    for _ in range(2):
        torch.testing.assert_close(answer(model), answer(want), rtol=1e-4, atol=1e-4)
    report = stowage.engine_report(model)
    last = model.get_parameter("norm_out.linear.weight")
    assert report.bytes_read > 0 and report.borrowed == 0
    assert report.written <= sum(part.nbytes for part in last.parts.values())


def test_rows_within_the_scale_in_common_are_written_to_their_rows_alone(tmp_path: Path) -> None:
    path = scaled(tmp_path)
    model = stowage.load(built, path)
    with torch.no_grad():
        model.get_parameter(TO_K)[3] = 0.01
    stowage.save(model, tmp_path / "again", dialect="comfyui-scaled")
    one, two = load_file(path), load_file(tmp_path / "again" / path.name)
    changed = {n for n in one if one[n].float().ne(two[n].float()).any()}
    assert changed == {PREFIX + QKV}
    rows = one[PREFIX + QKV].float().ne(two[PREFIX + QKV].float()).any(1).nonzero().flatten()
    assert rows.tolist() == [256 + 3]


@pytest.mark.parametrize("storage", ["f8_e4m3:tensor", "nvfp4"])
def test_rows_with_another_scale_are_not_written(storage: str, tmp_path: Path) -> None:
    path = scaled(tmp_path) if storage != "nvfp4" else converted(tmp_path, COMFYUI["nvfp4"])
    dialect, what = (
        ("comfyui", "global_scale") if storage == "nvfp4" else ("comfyui-scaled", "scale")
    )
    model = stowage.load(built, path)
    with torch.no_grad():
        model.get_parameter(TO_K).copy_(model.get_parameter(TO_K).dequantize() * 9)
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.save(model, tmp_path / "again", dialect=dialect)
    assert (
        f"{PREFIX}{QKV}: must have one {what} for all rows, as in its file; a write to {TO_Q} or "
        f"{TO_K} or {TO_K.replace('_k', '_v')} has made another; save with requantize=True"
        in str(caught.value)
    )
    assert not (tmp_path / "again" / path.name).exists()
    stowage.save(model, tmp_path / "again", dialect=dialect, requantize=True)
    one, two = load_file(path), load_file(tmp_path / "again" / path.name)
    changed = {n for n in one if not torch.equal(octets(one[n]), octets(two[n]))}
    assert len(changed) > 1 or storage != "nvfp4"  # the number of all, and the scales of blocks
    assert PREFIX + QKV in changed or storage == "nvfp4"
    assert {n.rpartition(".")[0] for n in changed} == {(PREFIX + QKV).rpartition(".")[0]}
    found = stowage.load(built, tmp_path / "again" / path.name)
    for name in (TO_Q, TO_K, TO_K.replace("_k", "_v")):
        want, has = values(model.get_parameter(name)), values(found.get_parameter(name))
        most = 2**-7 if name == TO_K else 0.15  # what the largest is of stays, but for bf16
        assert (want - has).norm() <= most * want.norm(), name
    stowage.save(model, tmp_path / "ours")
    again = stowage.load(built, tmp_path / "ours")
    assert torch.equal(values(again.get_parameter(TO_K)), values(model.get_parameter(TO_K)))


def test_a_changed_parameter_of_blocks_is_written_to_its_rows_alone(tmp_path: Path) -> None:
    path = converted(tmp_path, COMFYUI["mxfp8"])
    model = stowage.load(built, path)
    with torch.no_grad():
        model.get_parameter(TO_K)[3] = 0.5
    stowage.save(model, tmp_path / "again", dialect="comfyui")
    one, two = load_file(path), load_file(tmp_path / "again" / path.name)
    module = (PREFIX + QKV).removesuffix(".weight")
    changed = {n for n in one if one[n].view(torch.uint8).ne(two[n].view(torch.uint8)).any()}
    assert changed == {f"{module}.weight", f"{module}.weight_scale"}
    rows = one[f"{module}.weight"].float().ne(two[f"{module}.weight"].float()).any(1)
    assert rows.nonzero().flatten().tolist() == [256 + 3]
    again = stowage.load(built, tmp_path / "again" / path.name)
    assert_same(again, _dequantized(model))


def _dequantized(model: Any) -> Any:
    stowage.unstow(model)
    return model


WIDTHS = [("f8_e4m3:block128x128", 64, "blocks of 128 rows run on across rows 0 to 192")]
WIDTHS += [("nf4", 24, "blocks of 64 run on across the ends of rows 0 to 72")]


@pytest.mark.parametrize(("storage", "head", "told"), WIDTHS)
def test_rows_that_are_no_blocks_are_refused(
    storage: str, head: int, told: str, tmp_path: Path
) -> None:
    path = packed(tmp_path, storage, head, 3)
    model = built(head=head, heads=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.load(model, path)
    assert f"must have rows that can be {TO_Q}, {told}; `stowage convert`" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("storage", ["f8_e4m3:block128x128", "nf4", "f8_e4m3", "int8"])
def test_what_stowage_has_packed_opens_too(storage: str, tmp_path: Path) -> None:
    path = packed(tmp_path, storage, 64, 4)
    model = stowage.load(built, path)
    state = load_file(tmp_path / "plain.safetensors")
    whole = stowage.quantize(state[QKV], storage).dequantize()
    assert model.get_parameter(TO_K).resting.startswith(storage)
    assert torch.equal(values(model.get_parameter(TO_K)), whole[256:512])
    last = stowage.quantize(state["final_layer.adaLN_modulation.1.weight"], storage).dequantize()
    found = values(model.get_parameter("norm_out.linear.weight"))
    assert torch.equal(found, torch.cat([last[256:], last[:256]]))
    stowage.save(model, tmp_path / "ours")
    again = stowage.load(built, tmp_path / "ours")
    assert torch.equal(values(again.get_parameter(TO_K)), whole[256:512])


@pytest.mark.parametrize("mmap", [False, True])
def test_nf4_of_bitsandbytes_opens_and_is_written_again(mmap: bool, tmp_path: Path) -> None:
    path = converted(tmp_path, "nf4", "", "bitsandbytes")
    model = stowage.load(built, path.parent, mmap=mmap)
    state = load_file(tmp_path / "plain.safetensors")
    whole = stowage.quantize(state[QKV], "nf4").dequantize()
    found = model.get_parameter(TO_K)
    assert isinstance(found, stowage.StowedTensor) and found.resting == "nf4:block64"
    assert torch.equal(values(found), whole[256:512])
    stowage.save(model, tmp_path / "again", dialect="bitsandbytes")
    assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()


def test_it_is_spread_over_processes(tmp_path: Path) -> None:
    for path, dialect in ((scaled(tmp_path), "comfyui-scaled"), (nvfp4(tmp_path), "comfyui")):
        assert run(2, spread, str(path), dialect) == path.name


def test_each_process_reads_its_rows(tmp_path: Path) -> None:
    for path, dialect in ((scaled(tmp_path), "comfyui-scaled"), (nvfp4(tmp_path), "comfyui")):
        run(3, read_as_whole, built, (), str(path), dialect)


def nvfp4(to: Path) -> Path:
    return converted(to, COMFYUI["nvfp4"])


def packed(to: Path, storage: str, head: int, heads: int) -> Path:
    plain = to / "plain.safetensors"
    model = built(head=head, heads=heads, axes_dims_rope=(head // 3, head // 3, head // 3))
    save_file(original(model.bfloat16().state_dict()), plain)
    program = str(Path(sys.executable).parent / "stowage")
    command = [program, "pack", str(plain), str(to / "packed"), "--storage", storage]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return to / "packed"
