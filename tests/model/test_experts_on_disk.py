# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts whose weights rest on a disk: each expert comes by itself, when it is used,
and nothing else of its stack does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage._ops.library import composite_forced

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

WAYS = ["eager", "grouped_mm", "batched_mm"]
STORAGES = [
    None,
    "int8:row2",
    "nf4",
    "f8_e4m3:block128x128",
    "mxfp4",
    "nvfp4:row2",
    "int4:block64:f16:zero",
]
LAYERS, EXPERTS, PICKED, WIDTH, INNER = 3, 16, 2, 256, 128
PAGES = 2 * 4096  # at both ends of a part
IDS = torch.tensor([[3, 1, 4, 1, 5]])


def build(family: str = "Qwen3Moe") -> Any:
    sizes: dict[str, Any] = {
        "vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "num_experts_per_tok": PICKED, "max_position_embeddings": 64,
        "pad_token_id": 0, "num_local_experts": EXPERTS,
    }  # fmt: skip
    if family == "Qwen3Moe":
        sizes |= {"num_experts": EXPERTS, "moe_intermediate_size": INNER}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def rested(storage: str | None, family: str = "Qwen3Moe") -> Any:
    model = build(family)
    stowage.stow(model, "int8", rules={} if storage is None else {"*.experts.*_proj": storage})
    return model


def stacks(model: nn.Module) -> list[torch.Tensor]:
    return [p for name, p in model.named_parameters() if "experts" in name and p.dim() == 3]


class Routed:
    """Counts, in hooks, which experts each module had tokens for."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        for name, module in model.named_modules():
            if name.endswith("experts"):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        numbers = next(t for t in given if isinstance(t, torch.Tensor) and t.dtype == torch.int64)
        self.count += len(numbers.unique())


@pytest.mark.parametrize("reads", ["mapped", "direct", "buffered"])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("way", WAYS)
def test_only_what_is_routed_comes(
    way: str, storage: str | None, reads: str, tmp_path: Path
) -> None:
    model = rested(storage)
    model.set_experts_implementation(way)
    of_experts = [stowage.nbytes(stack) // EXPERTS for stack in stacks(model)]
    others = stowage.nbytes(model) - sum(of_experts) * EXPERTS
    routed = Routed(model)
    with torch.inference_mode():
        wanted = model(IDS).logits
        most = PICKED * IDS.numel() + 1  # experts of a layer, whatever is routed where
        ram = others + (sum(of_experts) + 18 * PAGES) * most
        stowage.offload(model, ram=ram, folder=tmp_path / "w", reads=reads)
        routed.count = 0
        assert torch.equal(model(IDS).logits, wanted)
        first = stowage.engine_report(model)
        per_expert = sum(of_experts) // LAYERS + 2 * 3 * PAGES
        assert first.bytes_read <= others + 20 * PAGES + routed.count * per_expert
        assert first.borrowed == 0 and first.misses <= 2 and first.peak <= ram
        for _ in range(3):
            assert torch.equal(model(IDS).logits, wanted)
    again = stowage.engine_report(model).since(first)
    assert again.misses == 0 and again.borrowed == 0
    assert again.bytes_read == 0  # what is routed stays where it fits


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "GptOss"])
@pytest.mark.parametrize("way", WAYS)
def test_a_budget_below_a_layers_experts_streams_them(
    way: str, family: str, tmp_path: Path
) -> None:
    model = rested("mxfp4:transposed" if family == "GptOss" else "int8:row2", family)
    model.set_experts_implementation(way)
    largest = max(stowage.nbytes(stack) for stack in stacks(model))
    ids = torch.arange(48).view(4, 12)  # nearly all experts of each layer
    with torch.inference_mode():
        wanted = model(ids).logits
        ram = largest // 2
        stowage.offload(model, ram=ram, folder=tmp_path / "w", reads="direct")
        for _ in range(4):
            assert torch.equal(model(ids).logits, wanted)
    report = stowage.engine_report(model)
    assert report.peak <= ram
    # Not one wait for a read of its own in twenty uses: what comes next is read meanwhile.
    assert report.misses <= report.acquired / 20 and report.borrowed == 0
    assert report.bytes_read <= 4.4 * (stowage.nbytes(model) + 2 * PAGES * report.acquired / 4)


def test_a_loaded_model_has_them_by_themselves_too(tmp_path: Path) -> None:
    model = rested("nf4")
    with torch.inference_mode():
        wanted = model(IDS).logits
        stowage.save(model, tmp_path / "packed")
        largest = max(stowage.nbytes(stack) for stack in stacks(model))
        loaded = stowage.load(build, tmp_path / "packed", ram=largest)
        assert torch.equal(loaded(IDS).logits, wanted)
        assert stowage.engine_report(loaded).peak <= largest
        stowage.rebudget(loaded, 2 * largest)
        assert torch.equal(loaded(IDS).logits, wanted)
        stowage.onload(loaded)
        assert torch.equal(loaded(IDS).logits, wanted)
    assert not any(
        "Routing" in type(hook).__name__
        for module in loaded.modules()
        for hook in module._forward_pre_hooks.values()
    )


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_weights_in_memory(way: str, tmp_path: Path) -> None:
    """With checkpointing, which computes again with the same experts."""
    model = rested("int8:row2").train()
    model.set_experts_implementation(way)
    model.requires_grad_(False)
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def gradient() -> torch.Tensor:
        x = torch.randn(1, 6, WIDTH, generator=torch.Generator().manual_seed(1))
        x = x.bfloat16().requires_grad_()
        model(inputs_embeds=x).logits.float().square().sum().backward()
        assert x.grad is not None
        return x.grad

    wanted = gradient()
    largest = max(stowage.nbytes(stack) for stack in stacks(model))
    stowage.offload(model, ram=largest, folder=tmp_path / "w")
    for _ in range(2):
        assert torch.equal(gradient(), wanted)
    assert stowage.engine_report(model).borrowed == 0


@pytest.mark.slow
@pytest.mark.parametrize("way", ["grouped_mm", "batched_mm"])
def test_compiled_graphs_have_them_by_themselves(way: str, tmp_path: Path) -> None:
    model = rested("int8:row2")
    model.set_experts_implementation(way)
    with torch.inference_mode():
        wanted = torch.compile(model)(IDS).logits
        ram = max(stowage.nbytes(stack) for stack in stacks(model))
        stowage.offload(model, ram=ram, folder=tmp_path / "w")
        compiled = torch.compile(model)
        for _ in range(2):
            assert torch.equal(compiled(IDS).logits, wanted)
    report = stowage.engine_report(model)
    assert report.borrowed == 0 and report.peak <= ram
