# SPDX-License-Identifier: Apache-2.0
"""Files of Flux as its authors lay them out, in diffusers' model: rows of one tensor are several
parameters there. What they are compared with, diffusers' own reader makes of the same file, and the
decoders of the package gguf."""

from __future__ import annotations

import copy
import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from flux_files import as_gguf
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
from safetensors.torch import load_file, save_file, save_model

import stowage

diffusers = pytest.importorskip("diffusers")
gguf = pytest.importorskip("gguf")

TYPES = {
    "Q8_0": "int8:block32:f16",
    "Q4_0": "int4:block32:f16",
    "Q4_K": "q4_k",
    "Q6_K": "q6_k",
}
single_file = pytest.importorskip("diffusers.loaders.single_file_model")
dequantize_gguf_tensor = pytest.importorskip(
    "diffusers.quantizers.gguf.utils"
).dequantize_gguf_tensor


def plain(path: Path, dtype: torch.dtype, prefix: str = "", **more: Any) -> tuple[Path, Any]:
    """A file, and the model that it was written of."""
    model = built(**more).to(dtype)
    save_file(original(model.state_dict(), prefix), path, {"format": "pt", "of": "a test"})
    return path, model


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_plain_file_opens_and_is_written_again(
    dtype: torch.dtype, mmap: bool, prefix: str, tmp_path: Path
) -> None:
    path, want = plain(tmp_path / "flux.safetensors", dtype, prefix)
    model = stowage.load(built, path, mmap=mmap)
    assert_same(model, want)
    assert torch.equal(answer(model, dtype), answer(want, dtype))
    stowage.save(model, tmp_path / "again", dialect="flux")
    assert (tmp_path / "again/flux.safetensors").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("mmap", [False, True])
def test_parameters_of_one_tensor_have_memory_of_their_own(mmap: bool, tmp_path: Path) -> None:
    """As other writers of models ask for: what they take of each is what it has."""
    path, want = plain(tmp_path / "flux.safetensors", torch.bfloat16)
    model = stowage.load(built, path, mmap=mmap)
    for name in (TO_Q, TO_K):
        parameter = model.get_parameter(name)
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    save_model(model, tmp_path / "theirs.safetensors")
    theirs = load_file(tmp_path / "theirs.safetensors")
    assert all(torch.equal(theirs[name], value) for name, value in want.state_dict().items())
    with torch.no_grad():
        model.get_parameter(TO_Q).zero_()
    assert torch.equal(model.get_parameter(TO_K), want.get_parameter(TO_K))
    assert load_file(path)[QKV][0].any()  # the file is as it was


@pytest.mark.parametrize("guidance", [False, True])
def test_names_are_those_of_diffusers_conversion(guidance: bool, tmp_path: Path) -> None:
    path, want = plain(tmp_path / "flux.safetensors", torch.float32, guidance=guidance)
    state = theirs(256)(load_file(path))
    assert state.keys() == want.state_dict().keys()
    model = stowage.load(lambda: built(guidance=guidance), path)
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_changed_parameter_is_written_to_its_rows_alone(tmp_path: Path) -> None:
    path, _ = plain(tmp_path / "flux.safetensors", torch.bfloat16)
    model = stowage.load(built, path, mmap=True)
    with torch.no_grad():
        model.get_parameter(TO_K)[3] = 0.5
        model.get_parameter("norm_out.linear.weight")[0] = 0.25  # of scale
    stowage.save(model, tmp_path / "again", dialect="flux")
    one, two = load_file(path), load_file(tmp_path / "again/flux.safetensors")
    last = "final_layer.adaLN_modulation.1.weight"
    assert {name for name in one if not torch.equal(one[name], two[name])} == {QKV, last}
    one[QKV][256 + 3], one[last][256] = 0.5, 0.25
    assert torch.equal(one[QKV], two[QKV]) and torch.equal(one[last], two[last])


def test_plain_rows_come_to_rest_by_rules(tmp_path: Path) -> None:
    path, want = plain(tmp_path / "flux.safetensors", torch.bfloat16)
    model = stowage.load(built, path, "int8")
    stowage.stow(want, "int8")
    for (name, one), other in zip(want.named_parameters(), model.parameters(), strict=True):
        assert isinstance(one, stowage.StowedTensor) == isinstance(other, stowage.StowedTensor)
        assert torch.equal(values(other), values(one)), name


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("guidance", [False, True])
def test_a_gguf_file_rests_in_diffusers_model(
    guidance: bool, kind: str, mmap: bool, tmp_path: Path
) -> None:
    path, want = as_gguf(tmp_path / "flux.gguf", kind, guidance=guidance)
    model = stowage.load(
        lambda: built(guidance=guidance), path, mmap=mmap, compute_dtype=torch.float32
    )
    rests = {n: p for n, p in model.named_parameters() if isinstance(p, stowage.StowedTensor)}
    assert {p.resting for p in rests.values()} == {TYPES[kind]}
    assert {TO_Q, TO_K, "norm_out.linear.weight"} <= rests.keys()
    assert "single_transformer_blocks.0.proj_mlp.weight" in rests
    assert "transformer_blocks.0.ff.net.0.proj.weight" not in rests
    for part in (part for p in rests.values() for part in p.parts.values() if not mmap):
        assert part.untyped_storage().resizable()  # torch's, and not the file's
    assert_same(model, want)
    torch.testing.assert_close(answer(model), answer(want), rtol=1e-4, atol=1e-4)
    stowage.save(model, tmp_path / "again", dialect="gguf")
    assert (tmp_path / "again/flux.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_computes_as_diffusers_own_reader_of_the_file(
    kind: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """Which multiplies codes and scales in f16, where gguf's decoder and we do so in f32."""
    path, want = as_gguf(tmp_path / "flux.gguf", kind)
    loadable = single_file.SINGLE_FILE_LOADABLE_CLASSES
    known = loadable["FluxTransformer2DModel"]
    monkeypatch.setitem(known, "checkpoint_mapping_fn", theirs(want.inner_dim))
    want.save_config(tmp_path / "config/transformer")
    peer = diffusers.FluxTransformer2DModel.from_single_file(
        str(path),
        config=str(tmp_path / "config"),
        subfolder="transformer",
        quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
        torch_dtype=torch.float32,
        local_files_only=True,
    ).eval()
    model = stowage.load(built, path, compute_dtype=torch.float32, exact=True)
    got, their = answer(model), answer(peer)
    assert float((got - their).norm()) <= 2**-8 * float(their.norm())
    assert not torch.equal(got, their)  # should they multiply in f32 one day, be strict here
    for name, parameter in peer.named_parameters():
        if quantized := getattr(parameter, "quant_type", None):
            other = dequantize_gguf_tensor(parameter).float()
            ours = values(model.get_parameter(name))
            assert float((ours - other).norm()) <= 2**-10 * float(ours.norm()), (name, quantized)


def test_changed_rows_of_a_gguf_file_open_as_they_were_saved(tmp_path: Path) -> None:
    path, _ = as_gguf(tmp_path / "flux.gguf", "Q4_K")
    model = stowage.load(built, path, compute_dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter(TO_K)[3] *= 2
        model.get_parameter("norm_out.linear.weight")[5] += 0.01
    stowage.save(model, tmp_path / "again", dialect="gguf")
    one, two = (
        {t.name: bytes(t.data) for t in gguf.GGUFReader(at).tensors}
        for at in (path, tmp_path / "again/flux.gguf")
    )
    last = "final_layer.adaLN_modulation.1.weight"
    assert {name for name in one if one[name] != two[name]} == {QKV, last}
    row = 256 // 256 * 144
    assert [one[QKV][i : i + row] == two[QKV][i : i + row] for i in range(0, 768 * row, row)] == [
        i != 256 + 3 for i in range(768)
    ]
    again = stowage.load(built, tmp_path / "again/flux.gguf", compute_dtype=torch.float32)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(values(a), values(b)), name


def test_an_adapter_trains_beside_rows(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    path, want = as_gguf(tmp_path / "flux.gguf", "Q4_0")
    model = stowage.load(built, path, compute_dtype=torch.float32)
    grads = []
    for each in (model, want):
        torch.manual_seed(0)
        config = peft.LoraConfig(target_modules=["to_q"], r=4, init_lora_weights=False)
        lora = peft.get_peft_model(each, config)
        lora(**inputs(each)).sample.square().mean().backward()
        grads.append([p.grad for n, p in lora.named_parameters() if "lora_" in n])
        lora.unload()
    assert len(grads[0]) == 8 and all(bool(grad.any()) for grad in grads[0])
    for got, wanted in zip(*grads, strict=True):
        assert float((got - wanted).norm()) <= 1e-3 * float(wanted.norm())
    stowage.save(model, tmp_path / "again", dialect="gguf")
    assert (tmp_path / "again/flux.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_K", "bf16"])
def test_rests_on_a_disk_from_the_untouched_file(dtype: str, tmp_path: Path) -> None:
    if dtype == "bf16":
        path, want = plain(tmp_path / "flux.safetensors", torch.bfloat16)
        want = want.float()
    else:
        path, want = as_gguf(tmp_path / "flux.gguf", dtype)
    before = path.read_bytes()
    model = stowage.load(built, path, ram="4MiB", compute_dtype=torch.float32)
    for _ in range(2):
        torch.testing.assert_close(answer(model), answer(want), rtol=1e-4, atol=1e-4)
    report = stowage.engine_report(model)
    last = model.get_parameter("norm_out.linear.weight")  # the one whose rows change places
    assert report.bytes_read > 0 and report.borrowed == 0
    parts = last.parts.values() if isinstance(last, stowage.StowedTensor) else [last]
    assert report.written <= sum(part.nbytes for part in parts)
    assert path.read_bytes() == before
    name = "gguf" if dtype != "bf16" else "flux"
    stowage.save(model, tmp_path / "again", dialect=name)
    assert (tmp_path / "again" / path.name).read_bytes() == before


def test_a_plan_says_by_the_files_names_where_weights_rest(tmp_path: Path) -> None:
    path, want = as_gguf(tmp_path / "flux.gguf", "Q8_0")
    plan = stowage.plan(path, ram="6MiB", rows=6)
    model = stowage.load(built, path, plan=plan, compute_dtype=torch.float32)
    torch.testing.assert_close(answer(model), answer(want), rtol=1e-4, atol=1e-4)


def test_what_is_loaded_goes_to_a_folder_and_comes_back(tmp_path: Path) -> None:
    path, want = as_gguf(tmp_path / "flux.gguf", "Q8_0")
    model = stowage.load(built, path, compute_dtype=torch.float32)
    stowage.offload(model, ram="4MiB", folder=tmp_path / "away")
    torch.testing.assert_close(answer(model), answer(want), rtol=1e-4, atol=1e-4)
    stowage.onload(model)
    stowage.save(model, tmp_path / "again", dialect="gguf")
    assert (tmp_path / "again/flux.gguf").read_bytes() == path.read_bytes()


def test_needs_no_package_for_names(tmp_path: Path, monkeypatch: Any) -> None:
    path, want = as_gguf(tmp_path / "flux.gguf", "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    build = functools.partial(diffusers.FluxTransformer2DModel.from_config, want.config)
    assert_same(stowage.load(build, path, compute_dtype=torch.float32), want)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    path, _ = as_gguf(tmp_path / "flux.gguf", "Q8_0", without=QKV)
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.load(built, path)
    v = "transformer_blocks.1.attn.to_v.weight"
    assert f"{QKV}: must be in the file, for {TO_Q} and {TO_K} and {v}, is missing" in str(
        caught.value
    )


def test_a_file_with_guidance_needs_a_model_with_it_and_the_other_way_round(tmp_path: Path) -> None:
    path, _ = plain(tmp_path / "one.safetensors", torch.bfloat16, guidance=True)
    with pytest.raises(stowage.InvalidArgument, match=r"guidance_in.*must be in the model"):
        stowage.load(lambda: built(guidance=False), path)
    path, _ = plain(tmp_path / "other.safetensors", torch.bfloat16, guidance=False)
    with pytest.raises(stowage.InvalidArgument, match=r"guidance_in\.in_layer\.bias: must be in"):
        stowage.load(lambda: built(guidance=True), path)


def test_another_width_is_refused_with_the_shapes(tmp_path: Path) -> None:
    path, _ = plain(tmp_path / "flux.safetensors", torch.bfloat16)
    model = built(head=32)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(stowage.InvalidArgument, match=r"qkv\.weight: shape must be \[384, 128\]"):
        stowage.load(model, path)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    path, _ = as_gguf(tmp_path / "flux.gguf", "Q8_0", architecture="sd3")
    with pytest.raises(stowage.BadFile, match=r"general\.architecture must be 'flux'.*'sd3'"):
        stowage.load(built, path)


def test_the_layout_is_of_models_that_came_from_it(tmp_path: Path) -> None:
    with pytest.raises(stowage.InvalidArgument, match="dialect 'flux' must come with a model that"):
        stowage.save(built(), tmp_path, dialect="flux")


def test_a_checkpoint_with_other_models_is_opened_by_rename(tmp_path: Path) -> None:
    _, want = plain(tmp_path / "flux.safetensors", torch.bfloat16)
    tensors = original(want.state_dict(), "model.diffusion_model.")
    tensors["vae.decoder.conv_in.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "all.safetensors")
    with pytest.raises(stowage.InvalidArgument, match=r"vae\.decoder\.conv_in\.weight: must be in"):
        stowage.load(built, tmp_path / "all.safetensors")
    model = stowage.load(built, tmp_path / "all.safetensors", rename={"vae.*": None})
    assert_same(model, want)
    stowage.save(model, tmp_path / "again", dialect="flux")  # 64 bytes of another model are kept
    same = (tmp_path / "all.safetensors").read_bytes()
    assert (tmp_path / "again/all.safetensors").read_bytes() == same
    with pytest.raises(stowage.InvalidArgument, match=r"'vea\.\*' must match a name of the file"):
        stowage.load(built, tmp_path / "flux.safetensors", rename={"vea.*": None})


def test_every_parameter_of_the_published_sizes_has_its_tensor(tmp_path: Path) -> None:
    """flux1-dev has 780 tensors; a file without any but one lacks 779, by name."""
    with torch.device("meta"):
        model = diffusers.FluxTransformer2DModel(guidance_embeds=True)
    names = original(model.state_dict()).keys()
    assert len(names) == 780 and len(model.state_dict()) == 1160
    one = {"img_in.weight": torch.zeros(3072, 64)}
    save_file(one, tmp_path / "flux.safetensors")
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.load(model, tmp_path / "flux.safetensors")
    told = str(caught.value)
    assert all(f"{name}: must be in the file, for " in told for name in names - one.keys())
