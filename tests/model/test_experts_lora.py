# SPDX-License-Identifier: Apache-2.0
"""LoRA beside experts that rest on a disk, on attention and on the experts: gradients and losses
are those of all in memory, with checkpointing too."""

from __future__ import annotations

import copy
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import stowage
from stowage._ops.library import composite_forced
from stowage._tensor import tables

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
stowed_peft = import_module("stowage.integrations.peft")  # after it is known that there is a peft
Delta = import_module("stowage.integrations.peft.deltas").Delta
pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

RAM = 600 << 10  # of 1 MiB
IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(3))
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "attention and experts": {"target_modules": ["q_proj"], "target_parameters": EXPERTS},
}
Trained = tuple[float, dict[str, torch.Tensor]]


def mixture(folder: Path | None, storage: str, way: str = "grouped_mm") -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, moe_intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, num_experts=8,
        num_experts_per_tok=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.set_experts_implementation(way)
    stowage.stow(model, "int8", rules={"*.experts.*_proj": storage}, measure=False)
    if folder is not None:
        stowage.offload(model, ram=RAM, folder=folder, reads="direct")
    return model


def note_routing(experts: torch.nn.Module) -> set[int]:
    """Which are used from now on."""
    found: set[int] = set()

    def note(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        found.update(next(t for t in args if t.dtype == torch.int64).unique().tolist())

    experts.register_forward_pre_hook(note)
    return found


def trained(model: Any, targets: dict[str, Any], checkpoints: bool) -> Trained:
    torch.manual_seed(1)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, init_lora_weights=False, **targets))
    if checkpoints:
        adapted.gradient_checkpointing_enable({"use_reentrant": False})
        adapted.enable_input_require_grads()
    adapted.train()
    loss = adapted(input_ids=IDS, labels=IDS, use_cache=False).loss
    loss.backward()
    grads = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
    return loss.item(), grads


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("storage", ["int8:row2", "nf4"])
@pytest.mark.parametrize("targets", TARGETS)
def test_gradients_are_those_of_weights_in_memory(
    targets: str, storage: str, checkpoints: bool, tmp_path: Path
) -> None:
    want, grads = trained(mixture(None, storage), TARGETS[targets], checkpoints)
    model = mixture(tmp_path / "w", storage)
    routed = [note_routing(layer.mlp.experts) for layer in model.model.layers]
    got, ours = trained(model, TARGETS[targets], checkpoints)
    assert got == want and set(ours) == set(grads)
    assert len(ours) == (8 if targets == "attention" else 12)
    for name, grad in grads.items():
        assert torch.equal(ours[name], grad), name
    report, uses = stowage.engine_report(model), stowage.uses(model)
    assert report.peak <= RAM
    stacks = [u for n, u in uses.weights.items() if n.endswith("experts.gate_up_proj")]
    assert len(stacks) == 2 and all(u.acquired > 0 for u in stacks)
    # A stack of nf4, whose matrices are too small for it here, comes as a whole.
    assert all(bool(u.by_index) == (storage != "nf4") for u in stacks)
    assert all(u.borrowed == 0 for u in stacks)
    if storage != "nf4":
        every = 2 + checkpoints  # forward, again where that was forgotten, backward
        for uses_of, experts in zip(stacks, routed, strict=True):
            assert uses_of.by_index == tuple(every * (e in experts) for e in range(8))


@pytest.mark.parametrize("way", ["eager", "batched_mm"])
def test_other_ways_through_experts_read_those_that_are_used(way: str, tmp_path: Path) -> None:
    targets = TARGETS["attention and experts"]
    want, grads = trained(mixture(None, "int8:row2", way), targets, False)
    model = mixture(tmp_path / "w", "int8:row2", way)
    routed = [note_routing(layer.mlp.experts) for layer in model.model.layers]
    got, ours = trained(model, targets, False)
    assert got == want and set(ours) == set(grads)
    assert all(torch.equal(ours[name], grad) for name, grad in grads.items())
    uses = stowage.uses(model)
    stacks = [u for n, u in uses.weights.items() if n.endswith("experts.gate_up_proj")]
    assert all(u.borrowed == 0 for u in stacks)
    for uses_of, experts in zip(stacks, routed, strict=True):
        assert {e for e, times in enumerate(uses_of.by_index) if times} == experts


def test_losses_are_those_of_the_plain_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = TARGETS["attention and experts"]
    loss, grads = trained(mixture(None, "int8:row2"), targets, False)
    monkeypatch.delitem(tables.FUNCTIONS, torch.baddbmm)
    plain, others = trained(mixture(None, "int8:row2"), targets, False)
    assert loss == pytest.approx(plain, rel=1e-5)
    for name, grad in others.items():
        assert (grads[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-7, name


def several(model: Any, names: tuple[str, ...], keeps_apart: bool) -> Any:
    """Adapters of several ranks and scales, all active."""
    ranks = {"one": (4, 8), "two": (2, 6), "three": (4, 8)}
    torch.manual_seed(1)
    adapted = None
    for name in names:
        r, alpha = ranks[name]
        config = peft.LoraConfig(
            r=r, lora_alpha=alpha, init_lora_weights=False, **TARGETS["attention and experts"]
        )
        if adapted is None:
            adapted = peft.get_peft_model(model, config, adapter_name=name)
        else:
            adapted.add_adapter(name, config)
    assert adapted is not None
    adapted.base_model.set_adapter(list(names))
    if keeps_apart:
        assert len(stowed_peft.apart(adapted)) == 4
    return adapted


@pytest.mark.parametrize("names", [("one", "three"), ("one", "two", "three")])
def test_several_active_adapters_read_those_that_are_used(
    names: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stepped(adapted: Any) -> Trained:
        adapted.train()
        loss = adapted(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        grads = {n: p.grad for n, p in adapted.named_parameters() if p.grad is not None}
        return loss.item(), grads

    formed, whole = stepped(several(mixture(None, "int8:row2"), names, False))
    want, grads = stepped(several(mixture(None, "int8:row2"), names, True))
    assert want == pytest.approx(formed, rel=1e-5) and set(grads) == set(whole)
    assert len(grads) == 12 * len(names)
    for name, grad in whole.items():  # the sums are of other roundings
        assert (grads[name] - grad).abs().max() <= 1e-4 * grad.abs().max() + 1e-7, name
    model = mixture(tmp_path / "w", "int8:row2")
    routed = [note_routing(layer.mlp.experts) for layer in model.model.layers]
    monkeypatch.delattr(Delta, "dequantize")  # nothing forms the sum
    loss, ours = stepped(several(model, names, True))
    assert loss == want and all(torch.equal(ours[n], grad) for n, grad in grads.items())
    uses = stowage.uses(model)
    stacks = [u for n, u in uses.weights.items() if n.endswith("experts.gate_up_proj")]
    for uses_of, experts in zip(stacks, routed, strict=True):
        assert uses_of.borrowed == 0
        assert {e for e, times in enumerate(uses_of.by_index) if times} == experts
    assert stowage.engine_report(model).peak <= RAM


def test_what_keeps_several_apart_changes_nothing_else() -> None:
    """Merging, one adapter, none, copies and pickles."""
    names = ("one", "two")
    plain = several(mixture(None, "int8:row2"), names, False)
    ours = several(mixture(None, "int8:row2"), names, True)
    with torch.no_grad():
        for adapted in (plain, ours):
            adapted.eval()
        given = ours(input_ids=IDS).logits
        assert torch.allclose(given, plain(input_ids=IDS).logits, atol=1e-4)
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert torch.equal(copied(input_ids=IDS).logits, given)
            layers = [m for m in copied.modules() if "get_delta_weight" in m.__dict__]
            assert len(layers) == 4
            assert all(m.__dict__["forward"].__self__._layer is m for m in layers)
        for adapted in (plain, ours):
            adapted.set_adapter("two")
        assert torch.equal(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)
        with ours.disable_adapter(), plain.disable_adapter():
            assert torch.equal(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)
        for adapted in (plain, ours):
            adapted.base_model.set_adapter(list(names))
            stowed_peft.merge(adapted)
        assert torch.equal(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)
        stowed_peft.unmerge(ours)
        assert torch.equal(ours(input_ids=IDS).logits, given)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.allclose(ours(input_ids=IDS).logits.float(), given, atol=0.1)
    delta = Delta([(torch.randn(3, 4, 2), torch.randn(3, 2, 5), 2.0)])
    lhs, rhs, alpha = delta.factors()
    assert torch.allclose(delta * 3, alpha * lhs @ rhs * 3) and delta.shape == (3, 4, 5)
    assert torch.allclose(torch.randn(3, 4, 5).zero_() + delta, alpha * lhs @ rhs)


def test_it_works_in_the_modes_that_one_adapter_does() -> None:
    names = ("one", "two")
    plain = several(mixture(None, "int8:row2"), names, False).eval()
    ours = several(mixture(None, "int8:row2"), names, True).eval()
    with torch.no_grad():
        want = plain(input_ids=IDS).logits
    with torch.inference_mode(), torch.device("meta"):
        assert torch.allclose(ours(input_ids=IDS).logits, want, atol=1e-4)
    layer = next(m for m in ours.modules() if "get_delta_weight" in m.__dict__)
    with pytest.raises(TypeError), torch.no_grad():
        layer()  # a forward that fails
    assert type(layer.get_delta_weight("one")) is not Delta  # outside of a forward
    stack = stowage.quantize(torch.ones(2, 3, 64), "int8:row2")
    delta = Delta([(torch.ones(2, 3, 1), torch.ones(2, 1, 64), 1.0)])
    with pytest.raises(stowage.StowageError, match="below autograd"):
        stack * delta
    assert torch.allclose(delta * 2, torch.full((2, 3, 64), 2.0))


@pytest.mark.parametrize("keeps_apart", [False, True])
def test_what_is_beside_experts_may_be_compiled(keeps_apart: bool) -> None:
    """Of experts that are not kept apart no more: torch's parametrizations swap tensors that graphs
    refer to, and say so."""
    names = ("one", "two") if keeps_apart else ("one",)
    plain, ours = (several(mixture(None, "int8:row2"), names, keeps_apart) for _ in range(2))
    for layer in ours.base_model.model.model.layers:
        layer.self_attn.compile(backend="eager")
    with torch.no_grad():
        assert torch.equal(ours(input_ids=IDS).logits, plain(input_ids=IDS).logits)


@pytest.mark.parametrize("names", [("one",), ("one", "two")])
@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_whole_model_with_adapters_of_experts_may_be_compiled(
    backend: str, on_disk: bool, names: tuple[str, ...], tmp_path: Path
) -> None:
    """Kept apart: else torch's parametrizations swap tensors that graphs refer to."""
    plain = several(mixture(None, "int8:row2"), names, True)
    ours = several(mixture(tmp_path / "w" if on_disk else None, "int8:row2"), names, True)
    compiled = torch.compile(ours, backend=backend)
    losses, grads = [], []
    for adapted, run in ((plain, plain), (ours, compiled)):
        for _ in range(2):  # the second in the graphs of the first
            loss = run(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
        grads.append({n: p.grad for n, p in adapted.named_parameters() if p.grad is not None})
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(grads[0]) == 12 * len(names) and set(grads[0]) == set(grads[1])
    for name, grad in grads[0].items():
        assert torch.allclose(grads[1][name], grad, rtol=1e-4, atol=1e-7), name
