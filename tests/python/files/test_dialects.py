# SPDX-License-Identifier: Apache-2.0
"""Files that the owners of dialects have written: opened without being named, with their owners'
values bit for bit, and written again byte for byte. The core's half is
tests/store/dialects_test.cpp."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dialect_models import DIALECTS, copied, expected, opened, plain_of, weights_of
from safetensors.torch import load_file, save_file
from torch import nn

import stowage
from stowage._ops.storage import Storage

FOLDERS = list(DIALECTS)


def file_of(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN is NaN; zeros have signs."""
    assert a.dtype == b.dtype and a.shape == b.shape
    nan = a.isnan() & b.isnan()
    bits = torch.int32 if a.dtype == torch.float32 else torch.int16
    return bool(((a.view(bits) == b.view(bits)) | nan).all())


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("folder", FOLDERS)
def test_opens_with_its_owners_values(folder: str, mmap: bool, tmp_path: Path) -> None:
    dtype = next(iter(weights_of(folder).values())).dtype
    model = opened(folder, copied(folder, tmp_path), compute_dtype=dtype, mmap=mmap)
    for name, value in weights_of(folder).items():
        weight = model.get_parameter(name)
        assert isinstance(weight, stowage.StowedTensor), name  # it rests, and was not widened
        found = weight.dequantize()
        if folder == "modelopt-nvfp4":  # its decoder alone reads code 8 of E2M1 as +0
            found = found + 0
        assert same_bits(found, value), name
    for name, value in plain_of(folder, weights_of(folder)).items():
        assert torch.equal(model.get_parameter(name), value.to(dtype)), name


def test_a_float16_model_has_scales_of_float16(tmp_path: Path) -> None:
    folder, name = "comfy-fp8-scaled", "model.diffusion_model.final_layer.linear.weight"
    model = opened(folder, copied(folder, tmp_path))  # its plain tensors are of float16
    assert same_bits(model.get_parameter(name).dequantize(), expected(folder)[f"{name}::float16"])


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("folder", FOLDERS)
def test_is_written_again_byte_for_byte(folder: str, mmap: bool, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    model = opened(folder, path, mmap=mmap)
    shutil.rmtree(path)  # nothing is read from it any more
    stowage.save(model, tmp_path / "again", dialect=DIALECTS[folder])
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == before


@pytest.mark.parametrize(
    "folder",
    [
        "bnb-nf4-nested",
        "comfy-fp8-scaled",
        "comfy-nvfp4",
        "ct-nvfp4",
        "ct-int8-pack",
        "torchao-float8",
    ],
)
def test_is_written_again_under_modes_of_torch(folder: str, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    for i, mode in enumerate((torch.device("meta"), torch.inference_mode())):
        with mode:  # the plain tensors of f16 are rounded to bf16, and come back
            model = opened(folder, path, compute_dtype=torch.bfloat16)
            stowage.save(model, tmp_path / str(i), dialect=DIALECTS[folder])
        assert {p.name: p.read_bytes() for p in (tmp_path / str(i)).iterdir()} == before
    model = opened(folder, path, compute_dtype=torch.bfloat16, mmap=True)
    stowage.save(model, path, dialect=DIALECTS[folder])  # over the file that it rests in
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    for name, value in weights_of(folder).items():
        assert same_bits(model.get_parameter(name).dequantize(), value), name


def test_a_changed_weight_is_written_in_its_form(tmp_path: Path) -> None:
    folder, name = "fp8-block-f32", "model.layers.0.mlp.gate_proj.weight"
    path = copied(folder, tmp_path)
    model = opened(folder, path)
    with torch.no_grad():
        model.get_parameter(name).mul_(3)
    stowage.save(model, tmp_path / "again", dialect="fp8")
    before, after = (load_file(file_of(p)) for p in (path, tmp_path / "again"))
    changed = {
        n
        for n in before
        if not torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8))
    }
    assert changed == {f"{name}_scale_inv"}  # three times the scales, for the same codes
    again = opened(folder, tmp_path / "again")
    assert torch.equal(
        again.get_parameter(name).dequantize(), model.get_parameter(name).dequantize()
    )


@pytest.mark.parametrize(
    "folder",
    [
        "ct-int4-asym-g32",
        "ct-int4-channel-ragged",
        "ct-int8-pack",
        "ct-mxfp4",
        "mxfp4-gpt-oss",
        "comfy-mxfp8",
        "deepseek-v4",
        "ct-int4-g-idx",
        "gptq-v1",
        "gptq-v1-actorder",
        "awq-gemm",
        "modelopt-nvfp4",
        "ct-nvfp4",
        "comfy-nvfp4",
        "gguf-q8-0",
        "gguf-q4-0",
        "gguf-q4-k",
        "gguf-mxfp4",
    ],
)
def test_changed_weights_open_as_they_were_saved(folder: str, tmp_path: Path) -> None:
    model = opened(folder, copied(folder, tmp_path), compute_dtype=torch.bfloat16)
    before = {name: model.get_parameter(name).dequantize() for name in weights_of(folder)}
    with torch.no_grad():
        for name in before:
            model.get_parameter(name).mul_(-3)
    stowage.save(model, tmp_path / "again", dialect=DIALECTS[folder])
    again = opened(folder, tmp_path / "again", compute_dtype=torch.bfloat16)
    for name, was in before.items():
        value = model.get_parameter(name).dequantize()
        assert not same_bits(value, was)
        assert same_bits(again.get_parameter(name).dequantize(), value), name


def test_scales_of_16_bits_rest_and_are_written_so(tmp_path: Path) -> None:
    folder, name = "ct-fp8-channel", "model.layers.0.self_attn.q_proj.weight"
    path = copied(folder, tmp_path)
    model = opened(folder, path)
    weight = model.get_parameter(name)
    assert isinstance(weight, stowage.StowedTensor) and weight.resting == "f8_e4m3:row:bf16"
    with torch.no_grad():
        weight.mul_(3)  # its scales have eight bits, as the file's
    stowage.save(model, tmp_path / "again", dialect="compressed-tensors")
    again = opened(folder, tmp_path / "again")
    assert torch.equal(again.get_parameter(name).dequantize(), weight.dequantize())
    said = load_file(file_of(tmp_path / "again"))[f"{name}_scale"]
    assert said.dtype == torch.bfloat16 and torch.equal(said, list(weight.parts.values())[1])


def test_refuses_what_is_not_the_files(tmp_path: Path) -> None:
    model = opened("fp8-block-f32", copied("fp8-block-f32", tmp_path))
    with pytest.raises(
        stowage.InvalidArgument,
        match=r"must rest in a storage that modelopt has, got f8_e4m3:block128x128 .*; it is held "
        "by fp8, compressed-tensors",
    ):
        stowage.save(model, tmp_path / "again", dialect="modelopt")
    with pytest.raises(stowage.InvalidArgument, match="must come without dtype"):
        stowage.save(model, tmp_path / "again", dialect="fp8", dtype=torch.bfloat16)
    model.register_parameter("more", nn.Parameter(torch.zeros(2)))
    stowage.unstow(model.get_submodule("model.layers.0.mlp"))
    with pytest.raises(stowage.InvalidArgument) as told:
        stowage.save(model, tmp_path / "again", dialect="fp8")
    assert "more: must be in the files" in str(told.value)
    assert "gate_proj.weight: must be f8_e4m3:block128x128 [64, 192]" in str(told.value)
    with pytest.raises(stowage.InvalidArgument, match="must hold a weight that rests, got none"):
        stowage.save(nn.Linear(2, 2), tmp_path / "again", dialect="fp8")


def test_shards_and_their_index_are_written_again(tmp_path: Path) -> None:
    path = copied("modelopt-fp8", tmp_path)
    tensors = load_file(file_of(path))
    file_of(path).unlink()
    names = sorted(tensors)
    shards = {"a-1.safetensors": names[:4], "a-2.safetensors": names[4:]}
    for shard, held in shards.items():
        save_file({name: tensors[name] for name in held}, path / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    index = json.dumps({"weight_map": weight_map, "metadata": {"of": "others"}}, indent=3)
    (path / "a.safetensors.index.json").write_text(index)
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    stowage.save(opened("modelopt-fp8", path), tmp_path / "again", dialect="modelopt")
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == before


@pytest.mark.parametrize(
    "folder",
    [
        "fp8-block-f32",
        "comfy-mxfp8",
        "torchao-int8",
        "ct-int4-asym-g32",
        "modelopt-nvfp4",
        "ct-nvfp4",
    ],
)
def test_rests_on_the_disk_from_the_untouched_file(folder: str, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    model = opened(folder, path, ram="1MiB", compute_dtype=torch.bfloat16)
    for name, value in weights_of(folder).items():
        x = torch.eye(value.shape[1], dtype=torch.bfloat16)
        y = nn.functional.linear(x, model.get_parameter(name))
        assert torch.allclose(y.T.float(), value.float(), rtol=2**-7, equal_nan=True), name


def test_zero_points_of_gptq_v1_are_undone_by_words(tmp_path: Path) -> None:
    """Not by codes: one from a zero point of 0 borrows from the next."""
    path = copied("gptq-v2", tmp_path)
    tensors = load_file(file_of(path))
    borrows = 0
    for name in [name for name in tensors if name.endswith("qzeros")]:
        words = tensors[name].long() & 0xFFFFFFFF
        words[0, 0] &= 0xFFFFFF0F  # the second row has a zero point of 0
        borrows += int(((words[:, :, None] >> torch.arange(0, 28, 4) & 15) == 0).sum())
        tensors[name] = (words - 0x11111111).to(torch.int32)
    save_file(tensors, file_of(path), {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (path / "config.json").write_text(json.dumps(config))
    model = opened("gptq-v2", path)
    assert borrows >= 2
    for name, value in weights_of("gptq-v2").items():
        module, found = name.removesuffix(".weight"), model.get_parameter(name).dequantize()
        columns = len(tensors[f"{module}.g_idx"]) // len(tensors[f"{module}.qzeros"])
        assert same_bits(found[2:], value[2:]) and same_bits(found[:, columns:], value[:, columns:])
    stowage.save(model, tmp_path / "again", dialect="gptq")
    assert file_of(tmp_path / "again").read_bytes() == file_of(path).read_bytes()


def test_columns_of_gptq_have_the_groups_that_are_named(tmp_path: Path) -> None:
    """Also where some groups have more columns than others."""
    path = copied("gptq-v2", tmp_path)
    plain, tensors = opened("gptq-v2", path), load_file(file_of(path))
    torch.manual_seed(0)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        count = len(tensors[name.replace("g_idx", "scales")])
        tensors[name] = torch.randint(count, tensors[name].shape, dtype=torch.int32)
    save_file(tensors, file_of(path), {"format": "pt"})
    model = opened("gptq-v2", path)
    for name in weights_of("gptq-v2"):
        weight, was = model.get_parameter(name), plain.get_parameter(name)
        assert weight.resting == f"{was.resting}:actorder"
        groups = tensors[f"{name.removesuffix('.weight')}.g_idx"].long()
        codes, scale, zero, named = weight.parts.values()
        assert torch.equal(named, groups.int()) and torch.equal(codes, was.parts["codes"])
        numbers = torch.stack([codes & 15, codes >> 4], -1).flatten(1).float() - 8
        values = (numbers - zero[:, groups]) * scale[:, groups].float()
        assert same_bits(weight.dequantize(), values.to(weight.dtype)), name
    stowage.save(model, tmp_path / "again", dialect="gptq")
    assert file_of(tmp_path / "again").read_bytes() == file_of(path).read_bytes()


@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_a_group_that_is_not_there_is_refused_by_its_byte(wrong: int, tmp_path: Path) -> None:
    path, name = copied("ct-int4-g-idx", tmp_path), "model.layers.0.self_attn.q_proj.weight_g_idx"
    data = bytearray(file_of(path).read_bytes())
    size = int.from_bytes(data[:8], "little")
    begin = 8 + size + json.loads(data[8 : 8 + size])[name]["data_offsets"][0] + 4 * 5
    data[begin : begin + 4] = wrong.to_bytes(4, "little", signed=True)
    file_of(path).write_bytes(data)
    rule = f"{name}.* byte {begin}.*group {wrong} of column 5, of 4 groups"
    with pytest.raises(stowage.BadFile, match=rule):
        opened("ct-int4-g-idx", path)


def test_columns_that_no_tool_has_put_in_order_are_in_order(tmp_path: Path) -> None:
    """compressed-tensors begins with -1 throughout."""
    path = copied("ct-int4-g-idx", tmp_path)
    tensors = load_file(file_of(path))
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name].fill_(-1)
    save_file(tensors, file_of(path), {"format": "pt"})
    model = opened("ct-int4-g-idx", path)
    for name in weights_of("ct-int4-g-idx"):
        assert model.get_parameter(name).resting == "int4:block32:bf16"
    stowage.save(model, tmp_path / "again", dialect="compressed-tensors")
    assert file_of(tmp_path / "again").read_bytes() == file_of(path).read_bytes()


def test_the_older_configuration_of_modelopt_alone_is_enough(tmp_path: Path) -> None:
    folder = "modelopt-nvfp4"
    path = copied(folder, tmp_path)
    (path / "config.json").unlink()
    before = {p.name: p.read_bytes() for p in path.iterdir()}
    assert "hf_quant_config.json" in before
    model = opened(folder, path, compute_dtype=torch.bfloat16)
    for name, value in weights_of(folder).items():
        assert same_bits(model.get_parameter(name).dequantize() + 0, value), name
    stowage.save(model, tmp_path / "again", dialect="modelopt")
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == before


def test_scales_of_nvfp4_are_divided_where_their_owner_divides(tmp_path: Path) -> None:
    """In fp32 the product with a reciprocal has other last bits: the quotient is kept."""
    model = opened("ct-nvfp4", copied("ct-nvfp4", tmp_path))
    tensors = load_file(file_of(tmp_path / "ct-nvfp4"))
    others = 0
    for name in weights_of("ct-nvfp4"):
        codes, scale, outer = (
            tensors[f"{name}_{part}"] for part in ("packed", "scale", "global_scale")
        )
        table = torch.tensor(Storage("nvfp4").values)
        values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()]
        scales = scale.float().repeat_interleave(16, 1)
        found = model.get_parameter(name).dequantize(torch.float32)
        assert torch.equal(found, values * (scales / outer))
        others += int((found != values * (scales * (1 / outer))).sum())
    assert others > 1000


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_program_knows_it(folder: str, tmp_path: Path) -> None:
    path = copied(folder, tmp_path)
    program = str(Path(sys.executable).parent / "stowage")

    def ask(*arguments: str) -> str:
        return subprocess.run(
            [program, *arguments], check=True, capture_output=True, text=True
        ).stdout

    shown = json.loads(ask("inspect", str(path), "--json"))
    assert shown["dialect"] == DIALECTS[folder]
    plain = ("f32", "bf16", "f16")
    resting = {w["name"]: w for w in shown["weights"] if w["storage"] not in plain}
    assert resting.keys() == weights_of(folder).keys()
    assert f"dialect {DIALECTS[folder]}" in ask("verify", str(path))


def test_a_nested_state_has_room_for_every_offset(tmp_path: Path) -> None:
    folder, name = "bnb-nf4-nested", "model.layers.0.mlp.down_proj.weight"
    path = copied(folder, tmp_path)
    model = opened(folder, path)
    weight = model.get_parameter(name)
    assert isinstance(weight, stowage.StowedTensor)
    offset = list(weight.parts.values())[-1]
    for value in (-1.1754943508222875e-38, -0.012345679104328156, 3.4028234663852886e38, 1 / 3):
        offset.fill_(value)
        stowage.save(model, tmp_path / "again", dialect="bitsandbytes")
        again = opened(folder, tmp_path / "again").get_parameter(name)
        assert isinstance(again, stowage.StowedTensor)
        assert torch.equal(list(again.parts.values())[-1], offset)
        assert same_bits(again.dequantize(torch.bfloat16), weight.dequantize(torch.bfloat16))


@pytest.mark.parametrize("other", [1.0, 1.0000001])
def test_what_is_one_in_the_model_has_one_scale_in_the_file(other: float, tmp_path: Path) -> None:
    """To the bit, also where weights that compute in bf16 have it rounded."""
    said = {"layers": {name: {"format": "float8_e4m3fn"} for name in "ab"}}
    codes = torch.randn(16, 16).to(torch.float8_e4m3fn)
    tensors = {f"{name}.weight": codes.clone() for name in "ab"}
    tensors |= {"a.weight_scale": torch.tensor(1.0), "b.weight_scale": torch.tensor(other)}
    save_file(tensors, tmp_path / "m.safetensors", {"_quantization_metadata": json.dumps(said)})
    model = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in "ab"})
    model["b"].weight = model["a"].weight
    if other != 1:
        with pytest.raises(stowage.InvalidArgument, match=r"different values for a\.weight and b"):
            stowage.load(model, tmp_path)
    else:
        stowage.load(model, tmp_path)
        assert torch.equal(model["b"].weight.dequantize(), codes.float())


def test_a_code_of_torchao_that_four_bits_cannot_say_is_refused(tmp_path: Path) -> None:
    path = copied("torchao-intx4", tmp_path)
    file, name = file_of(path), "model.layers.0.self_attn.q_proj._weight_qdata"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    at = 8 + length + json.loads(content[8 : 8 + length])[name]["data_offsets"][0] + 77
    content[at] = 8
    file.write_bytes(content)
    said = f"tensor '{name}': byte {at}: .*, got 8 for a number of 4 bits"
    with pytest.raises(stowage.InvalidArgument, match=said):
        opened("torchao-intx4", path)
