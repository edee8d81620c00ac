# SPDX-License-Identifier: Apache-2.0
"""Adapters of PEFT beside resting weights: dtypes, training, files, scales, and no new graphs."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import nn

import stowage
from stowage.tensor import StowedTensor

peft = pytest.importorskip("peft")
from stowage.integrations import peft as stowed_peft  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STORAGES = ["f8_e4m3", "f8_e4m3:row", "int8", "nf4"]
IDS = torch.tensor([[1, 5, 39], [0, 3, 3]])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 64)
        self.q, self.down = nn.Linear(64, 64), nn.Linear(64, 48)
        self.classifier = nn.Linear(48, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        hidden = hidden + torch.relu(self.q(hidden))
        return self.classifier(self.down(hidden))


LINEAR = ["q", "down"]
CONFIGS: dict[str, Any] = {
    "lora": peft.LoraConfig(target_modules=[*LINEAR, "embed"], init_lora_weights=False),
    "rslora": peft.LoraConfig(
        target_modules=LINEAR, use_rslora=True, lora_bias=True, init_lora_weights=False
    ),
    "dora": peft.LoraConfig(target_modules=LINEAR, use_dora=True, init_lora_weights=False),
    "loha": peft.LoHaConfig(target_modules=LINEAR, init_weights=False),
    "lokr": peft.LoKrConfig(target_modules=LINEAR, init_weights=False),
    "ia3": peft.IA3Config(
        target_modules=LINEAR, feedforward_modules=["down"], init_ia3_weights=False
    ),
    "vera": peft.VeraConfig(target_modules=["q"], init_weights=False),
    "oft": peft.OFTConfig(target_modules=LINEAR, oft_block_size=16, init_weights=False),
}


def base(storage: str, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    model = Net()
    stowage.stow(model, storage, compute_dtype=dtype)
    return model


def with_adapter(model: nn.Module, kind: str = "lora", **how: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, copy.deepcopy(CONFIGS[kind]), **how)


def dense(model: nn.Module) -> Any:
    twin = copy.deepcopy(model)
    stowage.unstow(twin)
    return twin


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", CONFIGS)
def test_losses_and_gradients_are_those_of_the_dequantized_base(kind: str, storage: str) -> None:
    model = base(storage)
    twin = dense(model)
    losses: list[list[float]] = []
    for adapted in (with_adapter(model, kind), with_adapter(twin, kind)):
        optimizer = torch.optim.AdamW(trained(adapted).values(), lr=1e-2)
        found = []
        for _ in range(4):
            loss = adapted(IDS).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
        assert not any(isinstance(p, StowedTensor) for p in trained(adapted).values())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("kind", ["lora", "dora", "loha", "ia3"])
def test_row_34_adapters_added_after_stowing_are_in_the_compute_dtype(
    kind: str, storage: str
) -> None:
    """A peer: the adapter is made in float8 and the forward raises."""
    model = with_adapter(base(storage, torch.bfloat16), kind, autocast_adapter_dtype=False)
    assert {p.dtype for p in trained(model).values()} == {torch.bfloat16}
    out = model(IDS)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert {p.grad.dtype for p in trained(model).values()} == {torch.bfloat16}
    # PEFT's own default widens 16-bit adapters, on any base.
    wide = with_adapter(base(storage, torch.bfloat16), kind)
    assert {p.dtype for p in trained(wide).values()} == {torch.float32}
    assert wide(IDS).dtype == torch.bfloat16


@pytest.mark.parametrize("storage", STORAGES)
def test_adapters_added_before_stowing_stay_plain_and_keep_training(storage: str) -> None:
    torch.manual_seed(0)
    model = with_adapter(Net())
    adapters = trained(model)
    report = stowage.stow(model, storage)
    assert trained(model) == adapters  # the very objects: optimizers hold on to them
    assert all("base_layer" in row.name for row in report.stowed) and len(report.stowed) == 3
    assert report["base_model.model.q.lora_A.default.weight"].reason.startswith("an adapter")
    after = with_adapter(base(storage))
    assert torch.equal(model(IDS), after(IDS))


def test_modules_to_save_turns_a_stowed_head_plain_and_trainable(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    stowage.stow(model, rules={"*weight": "int8"})
    twin = copy.deepcopy(model)
    values = model.classifier.weight.dequantize()
    config = peft.LoraConfig(target_modules=["q"], modules_to_save=["classifier"])
    with stowed_peft.adapting():
        adapted = peft.get_peft_model(model, config)
    head = adapted.base_model.model.classifier.modules_to_save["default"]
    assert type(head.weight) is nn.Parameter and head.weight.requires_grad
    assert torch.equal(head.weight, values)
    original = adapted.base_model.model.classifier.original_module
    assert isinstance(original.weight, StowedTensor)
    optimizer = torch.optim.AdamW(trained(adapted).values(), lr=1e-2)
    adapted(IDS).square().mean().backward()
    optimizer.step()
    assert not torch.equal(head.weight, values)
    assert torch.equal(original.weight.dequantize(), values)
    adapted.save_pretrained(tmp_path)
    with stowed_peft.adapting():
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(twin), tmp_path)
    assert torch.equal(loaded(IDS), adapted(IDS))
    with pytest.raises(stowage.Unsupported, match=r"must stay frozen.*peft\.adapting\(\)"):
        peft.get_peft_model(twin, config)  # without the context


def test_a_head_that_no_rule_names_needs_no_context() -> None:
    model = base("int8")
    config = peft.LoraConfig(target_modules=["q"], modules_to_save=["classifier"])
    adapted = peft.get_peft_model(model, config)
    adapted(IDS).sum().backward()
    torch.optim.AdamW(trained(adapted).values()).step()
    assert not any(isinstance(p, StowedTensor) for p in trained(adapted).values())


def test_adapters_are_saved_loaded_and_deleted(tmp_path: Path) -> None:
    model = with_adapter(base("nf4"))
    wanted = model(IDS)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 60_000
    fresh = peft.PeftModel.from_pretrained(base("nf4"), tmp_path)
    assert torch.equal(fresh(IDS), wanted)
    plain = base("nf4")(IDS)
    fresh.load_adapter(tmp_path, "second")
    fresh.set_adapter("second")
    assert torch.equal(fresh(IDS), wanted)
    fresh.delete_adapter("default")
    assert torch.equal(fresh(IDS), wanted) and list(fresh.peft_config) == ["second"]
    with fresh.disable_adapter():
        assert torch.equal(fresh(IDS), plain)
    assert torch.equal(fresh.unload()(IDS), plain)


def test_several_adapters_in_one_batch() -> None:
    model = with_adapter(base("int8")).eval()
    torch.manual_seed(2)
    model.add_adapter("second", copy.deepcopy(CONFIGS["lora"]))
    ids = torch.cat([IDS, IDS[:1]])
    mixed = model(ids, adapter_names=["default", "second", "__base__"])
    for row, name in enumerate(["default", "second"]):
        model.set_adapter(name)
        assert torch.allclose(model(ids)[row], mixed[row], atol=1e-5)
    with model.disable_adapter():
        assert torch.allclose(model(ids)[2], mixed[2], atol=1e-5)


class Counting:
    """A backend that counts graphs and the stowage nodes in them."""

    def __init__(self) -> None:
        self.graphs, self.nodes = 0, 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        self.graphs += 1
        return aot_autograd(fw_compiler=self._count)(graph, inputs)

    def _count(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.nodes += sum("stowage" in str(node.target) for node in graph.graph.nodes)
        return graph.forward


def test_new_values_and_scales_run_in_the_same_graph(tmp_path: Path) -> None:
    torch._dynamo.reset()
    model = with_adapter(base("nf4")).eval()
    model.save_pretrained(tmp_path)
    state = peft.get_peft_model_state_dict(model)
    counting = Counting()
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(IDS), model(IDS), atol=1e-5)
        assert counting.graphs == 1 and counting.nodes == 3
        # Other values in the same adapter: training, another file of the same shape.
        peft.set_peft_model_state_dict(model, {n: t * 2 for n, t in state.items()})
        assert torch.allclose(compiled(IDS), model(IDS), atol=1e-5) and counting.graphs == 1


def test_hotswap_takes_another_adapter_without_a_new_graph(tmp_path: Path) -> None:
    """PEFT's own way to change adapters, ranks and scales under torch.compile."""
    from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap

    torch._dynamo.reset()
    for name, rank, alpha in (("one", 4, 8), ("two", 8, 4), ("three", 2, 32)):
        torch.manual_seed(rank)
        config = peft.LoraConfig(
            target_modules=LINEAR, r=rank, lora_alpha=alpha, init_lora_weights=False
        )
        peft.get_peft_model(base("int8"), config).save_pretrained(tmp_path / name)
    model = peft.PeftModel.from_pretrained(base("int8"), tmp_path / "one").eval()
    prepare_model_for_compiled_hotswap(model, target_rank=8)
    counting = Counting()
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    with torch.no_grad():
        for name in ("one", "two", "three", "one"):
            hotswap_adapter(model, tmp_path / name, adapter_name="default")
            wanted = peft.PeftModel.from_pretrained(base("int8"), tmp_path / name)(IDS)
            assert torch.allclose(compiled(IDS), wanted, atol=1e-5)
    assert counting.graphs == 1 and counting.nodes == 3


def graphs_while_rescaling(model: Any) -> list[int]:
    torch._dynamo.reset()
    counting, found = Counting(), []
    compiled = torch.compile(model.eval(), backend=counting, fullgraph=True)
    layers = [module for module in model.modules() if hasattr(module, "set_scale")]
    with torch.no_grad():
        for scale in (1.0, 0.5, 0.75, 2.0, 3.0):
            for layer in layers:
                layer.set_scale("default", scale)
            assert torch.allclose(compiled(IDS), model(IDS), atol=1e-4)
            found.append(counting.graphs)
        for _ in range(3):
            with model.disable_adapter():
                compiled(IDS)
            compiled(IDS)
            found.append(counting.graphs)
    return found


def test_scales_and_disabling_cost_no_more_graphs_than_on_a_plain_base() -> None:
    model = base("nf4")
    counts = graphs_while_rescaling(with_adapter(dense(model)))
    assert graphs_while_rescaling(with_adapter(model)) == counts
    assert counts[1:5] == [2] * 4 and counts[5:] == [3] * 3


@pytest.mark.parametrize("kind", ["lora", "rslora", "dora", "ia3", "vera", "oft"])
def test_compiled_whole_and_trained(kind: str) -> None:
    """LoHa and LoKr break the graph on any base: PEFT branches on values there."""
    torch._dynamo.reset()
    model = with_adapter(base("nf4"), kind)
    results = []
    for forward in (torch.compile(model, backend="aot_eager", fullgraph=True), model):
        out = forward(IDS)
        out.sum().backward()
        results.append([out, *(p.grad for p in trained(model).values())])
        model.zero_grad()
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))
