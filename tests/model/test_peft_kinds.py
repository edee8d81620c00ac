# SPDX-License-Identifier: Apache-2.0
"""Every kind of PEFT's adapters beside a base that `from_pretrained` has put to rest: losses and
what is saved are those of a plain base with the same values, bit for bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import accelerated
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from stowage.integrations.transformers import StowageConfig

IDS = torch.arange(24).view(2, 12)
_Q, _QV, _TOKENS = ["q_proj"], ["q_proj", "v_proj"], {"num_virtual_tokens": 4}
KINDS: dict[str, Any] = {
    "AdaLora": {"target_modules": _QV, "total_step": 6, "tinit": 1, "tfinal": 2, "init_r": 4,
                "target_r": 2, "deltaT": 1},
    "FourierFT": {"target_modules": _Q, "n_frequency": 20},
    "HRA": {"target_modules": _Q, "r": 4},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LNTuning": {"target_modules": ["input_layernorm"]},
    "LoHa": {"target_modules": _Q, "r": 4},
    "LoKr": {"target_modules": _Q, "r": 4},
    "Lora": {"target_modules": "all-linear", "r": 4, "use_rslora": True},
    "Lora dora": {"target_modules": _Q, "r": 4, "use_dora": True},
    "Miss": {"target_modules": _Q, "r": 4},
    "PrefixTuning": _TOKENS,
    "PromptEncoder": {**_TOKENS, "encoder_hidden_size": 16},
    "PromptTuning": _TOKENS,
    "RandLora": {"target_modules": _Q, "r": 4},
    "VBLoRA": {"target_modules": _Q, "r": 4, "vector_length": 16, "num_vectors": 16},
    "Vera": {"target_modules": _QV, "r": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return accelerated.written(tmp_path_factory.mktemp("model"))


def base(folder: Path, dense: bool) -> Any:
    config = StowageConfig("nf4", exact=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
    return model.dequantize() if dense else model


def losses(model: Any) -> list[float]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    found = []
    for step in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        if hasattr(model.base_model, "update_and_allocate"):  # of AdaLoRA
            model.base_model.update_and_allocate(step + 1)
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_as_beside_a_plain_base(folder: Path, tmp_path: Path, kind: str) -> None:
    made = getattr(peft, f"{kind.split()[0]}Config")(task_type="CAUSAL_LM", **KINDS[kind])
    found, logits = [], []
    for dense in (False, True):
        torch.manual_seed(1)
        model = peft.get_peft_model(base(folder, dense), copy.deepcopy(made))
        found.append(losses(model))
        model.save_pretrained(tmp_path / str(dense))  # AdaLoRA leaves out the ranks that it masks
        again = peft.PeftModel.from_pretrained(base(folder, dense), tmp_path / str(dense)).eval()
        with torch.no_grad():
            logits.append(again(IDS).logits)
    assert found[0] == found[1] and found[0][-1] < found[0][0]
    assert torch.equal(*logits)


WAYS = ["linear", "svd", "cat", "ties", "ties_svd", "dare_linear", "dare_ties", "magnitude_prune"]


@pytest.mark.parametrize("way", WAYS)
def test_adapters_are_weighed_together(folder: Path, way: str) -> None:
    found = []
    for dense in (False, True):
        torch.manual_seed(1)
        how = {"target_modules": _Q, "task_type": "CAUSAL_LM", "init_lora_weights": False}
        model: Any = peft.get_peft_model(
            base(folder, dense), peft.LoraConfig(r=4, **how), adapter_name="a"
        )
        model.add_adapter("b", peft.LoraConfig(r=4, **how))
        torch.manual_seed(2)
        model.add_weighted_adapter(["a", "b"], [0.7, 0.3], "c", combination_type=way, density=0.5)
        model.set_adapter("c")
        with torch.no_grad():
            found.append(model.eval()(IDS).logits)
    assert torch.equal(*found)
