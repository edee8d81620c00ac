# SPDX-License-Identifier: Apache-2.0
"""What transformers makes of folders that we wrote: right values, or an error; never codes taken
for values. Without compressed-tensors it must refuse; with it, open what its form can say."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import stowage

READER = importlib.util.find_spec("compressed_tensors") is not None
IDS = torch.tensor([[1, 5, 9]])
SAYABLE = {
    "f8_e4m3:row": ("float-quantized", "channel", None),
    "f8_e4m3:tensor": ("float-quantized", "tensor", None),
    "f8_e4m3:block16": ("float-quantized", "group", 16),
    "int8": ("int-quantized", "channel", None),
    "int8:block16": ("int-quantized", "group", 16),
}
UNSAYABLE = ("f8_e5m2:row", "int8:block20", "nf4", "fp4", "nf4:block64:nested", "int8:row2")


def llama(storage: str | None = None, skip: str | None = "*embed*") -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    if storage is not None:
        stowage.stow(model, storage, skip=skip)
    return model


def said(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config.get("quantization_config", {})


def opens_right(folder: Path, model: Any, dequantize: bool = False) -> bool:
    """Whether transformers opens the folder; fails the test if with other values."""
    how: dict[str, Any] = {}
    if dequantize and READER:
        from transformers import CompressedTensorsConfig

        how["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    try:
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    except (ImportError, ValueError, RuntimeError, AttributeError):
        return False
    assert torch.allclose(found.eval()(IDS).logits, model(IDS).logits, atol=1e-5)
    return True


@pytest.mark.parametrize("storage", SAYABLE)
def test_what_the_form_can_say_is_said(storage: str, tmp_path: Path) -> None:
    model = llama(storage)
    stowage.save(model, tmp_path)
    facts, (form, strategy, group) = said(tmp_path), SAYABLE[storage]
    (scheme,) = facts["config_groups"].values()
    assert facts["quant_method"] == "compressed-tensors" and facts["format"] == form
    assert (scheme["weights"]["strategy"], scheme["weights"]["group_size"]) == (strategy, group)
    rest = {n for n, p in model.named_parameters() if isinstance(p, stowage.StowedTensor)}
    assert {f"{target}.weight" for target in scheme["targets"]} == rest
    if not READER:
        with pytest.raises(ImportError, match="compressed-tensors"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
        return
    opened = opens_right(tmp_path, model)
    assert opened or strategy == "tensor"  # whose scales it wants in the shape [1]
    assert opens_right(tmp_path, model, dequantize=True)


@pytest.mark.parametrize("storage", UNSAYABLE)
def test_what_it_cannot_say_is_refused(storage: str, tmp_path: Path) -> None:
    model = llama(storage)
    stowage.save(model, tmp_path)
    assert said(tmp_path)["format"] == "stowage"
    assert not opens_right(tmp_path, model) and not opens_right(tmp_path, model, dequantize=True)


def test_resting_embeddings_and_two_storages(tmp_path: Path) -> None:
    model = llama()
    stowage.stow(model, rules={"*mlp*": "int8", "*self_attn*": "f8_e4m3:row"})
    stowage.save(model, tmp_path / "two")
    assert said(tmp_path / "two")["format"] == "mixed-precision"
    assert len(said(tmp_path / "two")["config_groups"]) == 2
    assert opens_right(tmp_path / "two", model) == READER
    whole = llama("int8", skip=None)
    stowage.save(whole, tmp_path / "whole")
    opens_right(tmp_path / "whole", whole)  # or an error


def test_our_own_way_back_needs_no_other_library(tmp_path: Path) -> None:
    for storage in ("int8", "nf4"):
        model = llama(storage)
        stowage.save(model, tmp_path)
        config = AutoConfig.from_pretrained(tmp_path)
        loaded = stowage.load(lambda c=config: AutoModelForCausalLM.from_config(c), tmp_path)
        assert torch.equal(loaded.eval()(IDS).logits, model(IDS).logits)


def test_plain_models_and_casts_need_nothing(tmp_path: Path) -> None:
    stowage.save(llama("int8"), tmp_path)
    assert said(tmp_path)
    model = llama()
    stowage.save(model, tmp_path)  # over it
    assert not said(tmp_path) and opens_right(tmp_path, model)
    stowage.save(llama("int8"), tmp_path)
    stowage.save(model, tmp_path, dtype=torch.float32)
    assert not said(tmp_path) and opens_right(tmp_path, model)
    casts = llama("f8_e4m3")
    casts.config.save_pretrained(tmp_path / "casts")
    stowage.save(casts, tmp_path / "casts")
    assert not said(tmp_path / "casts") and opens_right(tmp_path / "casts", casts)
    stowage.save(torch.nn.Linear(3, 3), tmp_path / "bare")
    assert not (tmp_path / "bare/config.json").exists()


def test_a_save_that_fails_keeps_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stowage.save(llama("int8"), tmp_path)
    before = (tmp_path / "config.json").read_text()

    def fails(*args: object, **kwargs: object) -> None:
        assert "interrupted" in (tmp_path / "config.json").read_text()  # readers refuse it
        raise OSError("no space")

    monkeypatch.setattr("stowage._model.files.save.write", fails)
    with pytest.raises(OSError, match="no space"):
        stowage.save(llama("f8_e4m3:row"), tmp_path)
    assert (tmp_path / "config.json").read_text() == before


@pytest.mark.parametrize("storage", ["int8", "f8_e4m3:row", "nf4"])
def test_the_program_says_the_same(storage: str, tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "plain")
    path = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]
    program = shutil.which("stowage", path=path)
    assert program is not None
    rules = ["--rule", "*embed*=plain", "--rule", "*lm_head*=plain"]
    arguments = [str(tmp_path / "plain"), str(tmp_path / "packed"), "--storage", storage, *rules]
    subprocess.run([program, "pack", *arguments], check=True, capture_output=True)
    stowage.save(llama(storage), tmp_path / "saved")
    assert said(tmp_path / "packed") == said(tmp_path / "saved")
    assert opens_right(tmp_path / "packed", llama(storage)) == (READER and storage != "nf4")
