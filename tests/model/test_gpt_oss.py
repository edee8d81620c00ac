# SPDX-License-Identifier: Apache-2.0
"""gpt-oss: experts whose parameter is the transpose of what its files hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import stowage
from stowage._ops.library import composite_forced

transformers = pytest.importorskip("transformers")
WAYS = ["eager", "grouped_mm", "batched_mm"]
IDS = torch.arange(12).view(2, 6)


def empty() -> Any:
    config = transformers.GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config).to(torch.bfloat16).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model as its owner publishes it: experts in blocks, all else bf16."""
    torch.manual_seed(0)
    model = empty()
    for name, value in dict(model.named_parameters()).items():
        if value.dim() == 3:
            module, _, last = name.rpartition(".")
            packed = nn.Parameter(stowage.quantize(value.detach(), "mxfp4:transposed"), False)
            setattr(model.get_submodule(module), last, packed)
    stowage.save(model, tmp_path / "model", dialect="mxfp4")
    return tmp_path / "model"


def decoded(folder: Path) -> Any:
    """The dense model, by its owner's decoder."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors = load_file(folder / "model.safetensors")
    state = {name: t for name, t in tensors.items() if not name.endswith(("_blocks", "_scales"))}
    for name in tensors:
        if name.endswith("_blocks"):
            bare = name.removesuffix("_blocks")
            scales = tensors[f"{bare}_scales"]
            state[bare] = convert_moe_packed_tensors(tensors[name], scales, dtype=torch.bfloat16)
    model = empty()
    model.load_state_dict(state)
    return model


def logits(model: Any, way: str) -> torch.Tensor:
    model.set_experts_implementation(way)
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.skipif(composite_forced(), reason="products of bf16 need the kernels to be torch's")
@pytest.mark.parametrize("mmap", [False, True])
def test_logits_are_those_of_its_owners_values(folder: Path, mmap: bool) -> None:
    model, dense = stowage.load(empty, folder, mmap=mmap), decoded(folder)
    resting = {n for n, p in model.named_parameters() if isinstance(p, stowage.StowedTensor)}
    assert resting == {n for n, p in dense.named_parameters() if p.dim() == 3}
    for name in resting:
        assert torch.equal(model.get_parameter(name).dequantize(), dense.get_parameter(name))
    for way in WAYS:
        stowage.fallbacks(clear=True)
        got, want = logits(model, way), logits(dense, way)
        assert float((got - want).norm()) <= 2**-8 * float(want.norm()), way
        assert stowage.fallbacks() == {}


def test_it_is_saved_again_byte_for_byte(folder: Path, tmp_path: Path) -> None:
    model = stowage.load(empty, folder)
    stowage.save(model, tmp_path / "again", dialect="mxfp4")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes()


def test_from_the_disk(folder: Path) -> None:
    wanted = stowage.load(empty, folder)
    model = stowage.load(empty, folder, ram="1MiB")
    for way in WAYS:
        torch.testing.assert_close(logits(model, way), logits(wanted, way))


@pytest.mark.parametrize("way", WAYS)
def test_experts_without_a_token_are_not_read(folder: Path, way: str) -> None:
    """Their scales are made NaN, which any read would show."""
    model = stowage.load(empty, folder)
    for name, module in model.named_modules():
        if name.endswith("router"):  # always the first two
            with torch.no_grad():
                module.weight.zero_()
                module.bias.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0]))
    wanted = logits(model, way)
    resting = [p for p in model.parameters() if isinstance(p, stowage.StowedTensor)]
    assert len(resting) == 4
    for weight in resting:
        weight.parts["scale"][2:] = 255
    assert torch.equal(logits(model, way), wanted) and wanted.isfinite().all()
