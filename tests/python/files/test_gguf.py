# SPDX-License-Identifier: Apache-2.0
"""GGUF files in transformers' models: names, rows and norms are those of the converter's source,
and come back. What they are compared with, the package gguf makes of the model's own weights."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import run
from sharded_reads import causal, read_as_whole
from torch import nn

import stowage

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
TYPES = {"Q8_0": "int8:block32:f16", "Q4_0": "int4:block32:f16", "Q4_K": "q4_k", "F16": ""}
SUPERBLOCKS = {"hidden_size": 256, "intermediate_size": 512}  # whole ones
T5_SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3}
T5_SIZES |= {"num_heads": 4, "vocab_size": 64}
T5_CLASSES = {"t5": "T5ForConditionalGeneration", "t5encoder": "T5EncoderModel"}


def built(family: str, **more: object) -> Any:
    """Seeded, with norms and biases that are not the ones of a new model."""
    if family in T5_CLASSES:
        return seeded(lambda: getattr(transformers, T5_CLASSES[family])(t5_config()))
    head = {} if family == "llama" or family == "qwen2" else {"head_dim": 16}
    config = transformers.AutoConfig.for_model(
        "gemma3_text" if family == "gemma3" else family, **{**SIZES, **head, **more}
    )
    return seeded(lambda: transformers.AutoModelForCausalLM.from_config(config))


def t5_config() -> Any:
    more = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return transformers.T5Config(**T5_SIZES, **more, decoder_start_token_id=0)


def seeded(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(0.5, 0.3)
    return model


def quantized(values: torch.Tensor, type_: Any) -> Any:
    """Rows of bytes. The package has no Q4_K: codes and records of ours, as ggml's blocks have
    them, 16 bytes of record, then 32 for each 64 codes, the first half in the low halves."""
    if type_.name != "Q4_K":
        return gguf.quants.quantize(values.numpy(), type_)
    parts = stowage.quantize(values, "q4_k").parts
    pairs, records = parts["codes"], parts["scale"]
    codes = torch.stack([pairs & 15, pairs >> 4], -1).view(*records.shape[:2], 4, 2, 32)
    halves = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(2)
    return torch.cat([records, halves], 2).flatten(1).numpy()


def is_plain(values: torch.Tensor) -> bool:
    """Norms, biases, and the table of T5 whose rows have a number for each head."""
    return values.dim() == 1 or values.shape[1] < 32


def converted(family: str, model: nn.Module, path: Path, kind: str) -> Path:
    """What llama.cpp's converter writes of a model, and the model with the values that it wrote."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(SIZES["num_hidden_layers"])
    if family == "t5":
        writer.add_decoder_block_count(T5_SIZES["num_decoder_layers"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, T5_SIZES["num_decoder_layers"])
    for name, parameter in model.named_parameters():
        stem, _, last = name.rpartition(".")
        values = parameter.detach().clone()
        if is_plain(parameter):
            is_norm = family.startswith("gemma") and name.endswith("norm.weight")
            written = (values + 1 if is_norm else values).numpy()
            type_ = gguf.GGMLQuantizationType.F32
            parameter.data = torch.from_numpy(written) - 1 if is_norm else values
        else:
            type_ = gguf.GGMLQuantizationType[kind]
            packed = quantized(values, type_)
            parameter.data = torch.from_numpy(gguf.quants.dequantize(packed, type_).copy())
            written = packed
        if family == "llama" and (found := re.search(r"\.([qk])_proj\.", name)):
            heads = SIZES["num_attention_heads" if found[1] == "q" else "num_key_value_heads"]
            rows = written.reshape(heads, 2, -1, *written.shape[1:])
            written = rows.swapaxes(1, 2).reshape(written.shape)
        writer.add_tensor(f"{names.get_name(stem)}.{last}", written, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def answer(model: Any) -> torch.Tensor:
    ids = torch.arange(12).reshape(2, 6)
    if "decoder_input_ids" in inspect.signature(model.forward).parameters:
        return model(ids, decoder_input_ids=ids.flip(1)).logits
    found = model(ids)
    return found.logits if "logits" in found else found.last_hidden_state


CASES = [("llama", "Q8_0"), ("llama", "Q4_0"), ("llama", "F16"), ("qwen2", "Q4_0")]
CASES += [("llama", "Q4_K"), ("qwen2", "Q4_K")]
CASES += [
    ("t5", "Q8_0"),
    ("t5encoder", "Q4_0"),
    ("qwen3", "Q8_0"),
    ("gemma", "Q8_0"),
    ("gemma2", "Q4_0"),
    ("gemma3", "Q8_0"),
]


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_model_of_transformers_takes_its_values(
    family: str, kind: str, mmap: bool, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"attention_bias": True} if family == "llama" else {}
    more |= SUPERBLOCKS if kind == "Q4_K" else {}
    want, model = built(family, **more), built(family, **more)
    path = converted(family, want, tmp_path / "model.gguf", kind)
    stowage.load(model, path, mmap=mmap, compute_dtype=torch.float32)
    for (name, value), found in zip(want.named_parameters(), model.parameters(), strict=True):
        if kind != "F16" and not is_plain(value):
            assert isinstance(found, stowage.StowedTensor) and found.resting == TYPES[kind], name
        held = found.dequantize() if isinstance(found, stowage.StowedTensor) else found
        assert torch.equal(held, value), name
    with torch.no_grad():
        torch.testing.assert_close(answer(model), answer(want), rtol=1e-4, atol=1e-4)
    stowage.save(model, tmp_path / "again", dialect="gguf")
    assert (tmp_path / "again/model.gguf").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
@pytest.mark.parametrize("world", [2, 3])
def test_each_process_reads_its_rows(kind: str, world: int, tmp_path: Path) -> None:
    more = {"attention_bias": True} | (SUPERBLOCKS if kind == "Q4_K" else {})
    path = converted("llama", built("llama", **more), tmp_path / "model.gguf", kind)
    sizes = ("llama", {**SIZES, **more})
    run(world, read_as_whole, causal, sizes, str(path), "gguf")


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_changed_values_open_as_they_were_saved(family: str, tmp_path: Path) -> None:
    model, again = built(family), built(family)
    path = converted(family, built(family), tmp_path / "model.gguf", "Q4_0")
    stowage.load(model, path, compute_dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    stowage.save(model, tmp_path / "again", dialect="gguf")
    stowage.load(again, tmp_path / "again", compute_dtype=torch.bfloat16)
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        one, other = (x.dequantize() if isinstance(x, stowage.StowedTensor) else x for x in (a, b))
        close = {"rtol": 2**-7, "atol": 2**-7} if "norm" in name else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(one, other, **close)


def test_adapters_train_beside_it_and_it_rests_on_a_disk(tmp_path: Path) -> None:
    path = converted("llama", built("llama"), tmp_path / "model.gguf", "Q8_0")
    model = stowage.load(built("llama"), path, compute_dtype=torch.float32)
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        want = model(ids).logits
    away = stowage.load(built("llama"), path, ram="1MiB", compute_dtype=torch.float32)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(away(ids).logits, want, rtol=1e-4, atol=1e-4)
    report = stowage.engine_report(away)
    assert report.bytes_formed > 0 and report.borrowed == 0
    heads = [
        away.get_parameter(n)
        for n, _ in away.named_parameters()
        if n.endswith(("q_proj.weight", "k_proj.weight"))
    ]
    assert report.written >= sum(p.parts["codes"].nbytes for p in heads) > 0  # of other rows
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    )
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    losses = []
    for _ in range(4):
        loss = adapted(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    base = adapted.unload()  # without its adapters, which left it as it was
    stowage.save(base, tmp_path / "again", dialect="gguf")
    assert (tmp_path / "again/model.gguf").read_bytes() == path.read_bytes()


def test_needs_the_package_for_names_alone(tmp_path: Path, monkeypatch: Any) -> None:
    path = converted("llama", want := built("llama"), tmp_path / "model.gguf", "Q8_0")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    names = {}
    for name, _ in want.named_parameters():
        stem, _, last = name.rpartition(".")
        names[f"{table.get_name(stem)}.{last}"] = name
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(stowage.InvalidArgument, match=r"by the package gguf, .*pip install gguf"):
        stowage.load(built("llama"), path)
    model = stowage.load(built("llama"), path, rename=names.get)
    weight = model.get_parameter("model.layers.1.self_attn.k_proj.weight")
    same = want.get_parameter("model.layers.1.self_attn.k_proj.weight")
    assert torch.equal(weight.dequantize(), same)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"general.architecture": "bert"}, "must be one of llama, .*, got 'bert'"),
        ({"llama.block_count": 10**6}, "block_count must be of blocks in the file, got 1000000"),
        ({"llama.attention.head_count": 3}, "'blk.0.attn_[qk].weight': rows must be pairs of .* 3"),
        ({"llama.attention.head_count_kv": 0}, "'blk.0.attn_k.weight': rows .*_kv heads"),
        (
            {"llama.attention.head_count_kv": 2},
            "head_count_kv must give heads as wide .* for 2, 64",
        ),
        ({"llama.attention.head_count_kv": [2, 2]}, "head_count_kv must .*, got 32 rows for 4, 64"),
        ({"llama.attention.head_count": "four"}, "head_count must be a count, got 'four'"),
    ],
)
def test_refuses_metadata_that_contradict(keys: dict[str, Any], told: str, tmp_path: Path) -> None:
    said = {"llama.block_count": 2, "llama.attention.head_count": 4} | keys
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", said.pop("general.architecture", "llama"))
    add = {str: writer.add_string, int: writer.add_uint32, list: writer.add_array}
    for key, value in said.items():
        add[type(value)](key, value)
    grouped = any(isinstance(value, list) for value in said.values())  # as many for each block
    for part, rows in (("q", 64), ("k", 32 if grouped else 64)):
        writer.add_tensor(f"blk.0.attn_{part}.weight", torch.zeros(rows, 64).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(stowage.StowageError, match=told):
        stowage.load(built("llama"), tmp_path / "m.gguf", strict=False)
