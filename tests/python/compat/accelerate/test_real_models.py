# SPDX-License-Identifier: Apache-2.0
"""Models of transformers through the facade and through accelerate itself: the same tokens."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowage
from stowage.compat import accelerate
from stowage.compat.accelerate.hooks import attach_layerwise_casting_hooks
from stowage.compat.accelerate.utils import (
    get_state_dict_offloaded_model,
    has_offloaded_params,
    infer_auto_device_map,
)

transformers = pytest.importorskip("transformers")
IDS = torch.tensor([[3, 17, 42, 5]])


def config(tied: bool = False) -> Any:
    return transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=300, tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip


def made(tied: bool = False) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config(tied)).eval()


def tokens(model: Any) -> list[int]:
    with torch.inference_mode():
        return model.generate(IDS, max_new_tokens=8, do_sample=False)[0].tolist()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shards", ["50GB", "1MB"])
def test_llama_from_shards_onto_the_disk(shards: str, tied: bool, tmp_path: Path) -> None:
    whole = made(tied)
    whole.save_pretrained(tmp_path / "from", max_shard_size=shards)
    with accelerate.init_empty_weights():
        model = transformers.LlamaForCausalLM(config(tied))
    model.tie_weights()
    layer = stowage.nbytes(whole.model.layers[0])
    model = accelerate.load_checkpoint_and_dispatch(
        model.eval(), tmp_path / "from", "auto", {"cpu": stowage.nbytes(whole) - layer},
        ["LlamaDecoderLayer"], offload_folder=tmp_path / "to", strict=not tied,
    )  # fmt: skip
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert has_offloaded_params(model.model.layers[3].mlp.up_proj)
    assert not has_offloaded_params(model.model.layers[0].mlp.up_proj)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert tokens(model) == tokens(whole)
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, whole(IDS).logits)


def test_accelerate_itself_gives_the_same(tmp_path: Path) -> None:
    peer = pytest.importorskip("accelerate")
    whole = made()
    wanted = tokens(whole)
    places = infer_auto_device_map(whole, {"cpu": 3 * 10**6}, ["LlamaDecoderLayer"])
    assert places == peer.infer_auto_device_map(whole, {"cpu": 3 * 10**6}, ["LlamaDecoderLayer"])
    for library, folder in ((peer, tmp_path / "theirs"), (accelerate, tmp_path / "ours")):
        assert tokens(library.dispatch_model(made(), places, offload_dir=str(folder))) == wanted
        assert tokens(library.cpu_offload(made())) == wanted
        assert tokens(library.disk_offload(made(), str(folder / "all"))) == wanted


def test_an_offloaded_model_is_saved_for_transformers(tmp_path: Path) -> None:
    model = accelerate.disk_offload(made(), tmp_path / "rest")
    model.save_pretrained(tmp_path / "resting")
    model.save_pretrained(tmp_path / "plain", state_dict=get_state_dict_offloaded_model(model))
    wanted = made().state_dict()
    for folder in ("resting", "plain"):
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder).eval()
        found = again.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert tokens(again) == tokens(model)


def test_adapters_train_over_a_dispatched_model(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = accelerate.dispatch_model(
        made(), {"model": "disk", "lm_head": "cpu"}, offload_dir=tmp_path
    )
    lora = peft.LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    wrapped = []
    for base in (model, made()):
        torch.manual_seed(1)
        wrapped.append(peft.get_peft_model(base, lora))
    adapted, plain = wrapped
    for one in (adapted, plain):
        one(IDS, labels=IDS).loss.backward()
    grads = [{n: p.grad for n, p in m.named_parameters() if "lora" in n} for m in (adapted, plain)]
    assert all(torch.allclose(grads[0][n], grads[1][n], atol=1e-6) for n in grads[1])
    before = adapted(IDS, labels=IDS).loss.item()
    torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=0.1).step()
    assert adapted(IDS, labels=IDS).loss.item() < before


def test_layerwise_casting_takes_the_layers_that_accelerate_takes() -> None:
    peer = pytest.importorskip("accelerate.big_modeling")
    fp8, f32 = torch.float8_e4m3fn, torch.float32
    for skip in (None, ["lm_head"], ["layers.0", "mlp"]):
        ours, theirs = made(), made()
        attach_layerwise_casting_hooks(ours, fp8, f32, skip)
        peer.attach_layerwise_casting_hooks(theirs, fp8, f32, skip)
        rests = {n for n, p in ours.named_parameters() if isinstance(p, stowage.StowedTensor)}
        assert rests == {n for n, p in theirs.named_parameters() if p.dtype == fp8}
        assert not any("embed" in n or "norm" in n for n in rests)
        assert ours(IDS).logits.isfinite().all()


def test_positional_order_is_that_of_accelerate() -> None:
    import inspect

    peer = pytest.importorskip("accelerate")
    import accelerate.hooks as their_hooks
    import accelerate.utils.modeling as their_modeling
    import accelerate.utils.offload as their_offload

    pairs = [(accelerate, peer), (accelerate.big_modeling, peer.big_modeling),
             (accelerate.hooks, their_hooks),
             (accelerate.utils.modeling, their_modeling),
             (accelerate.utils.offload, their_offload)]  # fmt: skip
    checked = 0
    for ours, theirs in pairs:
        for name in ours.__all__:
            function, other = getattr(ours, name), getattr(theirs, name, None)
            if inspect.isfunction(function) and other and not name.endswith("_on_blocks"):
                wanted = list(inspect.signature(other).parameters)
                assert list(inspect.signature(function).parameters) == wanted, name
                checked += 1
    assert checked > 40


def test_other_names_are_accelerates_own() -> None:
    peer = pytest.importorskip("accelerate")
    assert accelerate.Accelerator is peer.Accelerator
    assert accelerate.utils.send_to_device is peer.utils.send_to_device
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        accelerate.nothing  # noqa: B018
    assert issubclass(nn.Linear, accelerate.utils.constants.SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING)
