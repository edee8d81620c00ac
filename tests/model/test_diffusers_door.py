# SPDX-License-Identifier: Apache-2.0
"""`from_pretrained` and `save_pretrained` of diffusers' models and pipelines with StowageConfig."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import diffused
import flux_models
import peft
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    PipelineQuantizationConfig,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from same_weights import parts, same
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import stowage
from stowage.integrations import peft as stowed_peft
from stowage.integrations.diffusers import StowageConfig

MODELS = {"unet": diffused.unet, "transformer": diffused.transformer}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shards", ["10GB", "100KB"])
def test_a_model_rests_from_its_file_on(tmp_path: Path, kind: str, shards: str) -> None:
    plain = MODELS[kind]()
    plain.save_pretrained(tmp_path / "plain", max_shard_size=shards)
    rules = {"*to_q": "int8:row"}
    config = StowageConfig("f8_e4m3:row", rules=rules)
    model = type(plain).from_pretrained(tmp_path / "plain", quantization_config=config)
    expected = type(plain).from_pretrained(tmp_path / "plain")
    report = stowage.stow(expected, "f8_e4m3:row", rules=rules)
    assert same(model, expected) and len(report.stowed) > 30
    assert [r.reason for r in stowage.report(model).rows] == [r.reason for r in report.rows]
    assert torch.allclose(diffused.run(model), diffused.run(expected), atol=1e-5)
    model.save_pretrained(tmp_path / "rests", max_shard_size=shards)
    said = json.loads((tmp_path / "rests/config.json").read_text())["quantization_config"]
    assert said == {"quant_method": "stowage", "storage": "f8_e4m3:row", "rules": rules}
    again = type(plain).from_pretrained(tmp_path / "rests")
    assert same(again, model)
    assert same(stowage.load(MODELS[kind], tmp_path / "rests"), model)
    again.save_pretrained(tmp_path / "again", max_shard_size=shards)
    for path in (tmp_path / "rests").glob("*.safetensors"):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()
    dense = again.dequantize()
    stowage.unstow(expected)
    assert same(dense, expected)
    dense.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())
    assert same(type(plain).from_pretrained(tmp_path / "dense"), dense)


def test_a_dtype_is_what_it_works_in(tmp_path: Path) -> None:
    plain = diffused.transformer()
    plain.save_pretrained(tmp_path / "plain")
    config = StowageConfig("nf4")
    kind, how = type(plain), {"torch_dtype": torch.bfloat16}
    model = kind.from_pretrained(tmp_path / "plain", quantization_config=config, **how)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.save_pretrained(tmp_path / "rests")
    assert same(kind.from_pretrained(tmp_path / "rests", **how), model)
    wide = kind.from_pretrained(tmp_path / "rests", torch_dtype=torch.float32)
    assert {p.dtype for p in wide.parameters()} == {torch.float32}
    with pytest.raises(stowage.InvalidArgument, match="torch_dtype must be one to work in"):
        kind.from_pretrained(tmp_path / "rests", torch_dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("rests", [False, True])
def test_a_budget_is_kept(tmp_path: Path, rests: bool) -> None:
    plain = diffused.transformer()
    plain.save_pretrained(tmp_path / "plain")
    kind, given = type(plain), StowageConfig("int8:row")
    expected = kind.from_pretrained(tmp_path / "plain", quantization_config=given)
    if rests:
        expected.save_pretrained(tmp_path / "rests")
        how = {"device_map": "auto", "max_memory": {"cpu": "500KiB"}}
        model = kind.from_pretrained(tmp_path / "rests", **how)
    else:
        given = StowageConfig("int8:row", ram="500KiB", folder=tmp_path / "weights")
        model = kind.from_pretrained(tmp_path / "plain", quantization_config=given)
    tiers = {row.tier for row in stowage.report(model).rows if row.storage}
    assert tiers == {"disk"}
    assert torch.allclose(diffused.run(model), diffused.run(expected), atol=1e-5)
    assert 0 < stowage.engine_report(model).peak <= 500 << 10


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole pipeline, of the smallest parts that it has."""
    folder = tmp_path_factory.mktemp("pipeline")
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{one}</w>" for one in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = [str(folder / name) for name in ("vocab.json", "merges.txt")]
    torch.manual_seed(0)
    StableDiffusionPipeline(
        tokenizer=CLIPTokenizer(*files, model_max_length=8),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(words), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                num_attention_heads=4, max_position_embeddings=8, bos_token_id=0, eos_token_id=1,
                pad_token_id=1,
            )
        ),
        unet=UNet2DConditionModel(
            sample_size=8, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=64,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8,
        ),
        vae=AutoencoderKL(block_out_channels=(32,), latent_channels=4, norm_num_groups=8),
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder / "plain")  # fmt: skip
    return folder / "plain"


def image(pipe: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    how = {"num_inference_steps": 2, "output_type": "pt"}
    made: torch.Tensor = pipe("a b", generator=torch.Generator().manual_seed(0), **how).images
    return made


def opened(folder: Path, config: Any = None) -> Any:
    how = {} if config is None else {"quantization_config": config}
    return StableDiffusionPipeline.from_pretrained(folder, safety_checker=None, **how)


RESTS = {"unet": 83, "text_encoder": 14, "vae": 0}


def resting(pipe: Any) -> dict[str, int]:
    return {name: len(stowage.report(getattr(pipe, name)).stowed) for name in RESTS}


@pytest.mark.parametrize("each", [False, True])
def test_pipelines_rest_in_parts(pipeline: Path, tmp_path: Path, each: bool) -> None:
    if each:
        parts = {"unet": StowageConfig("nf4"), "text_encoder": StowageConfig("int8:row")}
        config = PipelineQuantizationConfig(quant_mapping=parts)
    else:
        config = PipelineQuantizationConfig(
            quant_backend="stowage",
            quant_kwargs={"storage": "f8_e4m3:row"},
            components_to_quantize=["unet", "text_encoder"],
        )
    pipe = opened(pipeline, config)
    assert resting(pipe) == RESTS
    expected = opened(pipeline)
    stowage.stow(expected.unet, "nf4" if each else "f8_e4m3:row")
    stowage.stow(expected.text_encoder, "int8:row" if each else "f8_e4m3:row")
    assert torch.allclose(image(pipe), image(expected), atol=1e-4)
    made = image(pipe)
    pipe.vae.enable_tiling()
    assert torch.allclose(image(pipe), made, atol=1e-4)
    pipe.save_pretrained(tmp_path)
    again = opened(tmp_path)
    assert resting(again) == RESTS and same(again.unet, pipe.unet)
    assert torch.allclose(image(again), made, atol=1e-4)


def test_adapters_fuse_and_come_out(pipeline: Path) -> None:
    def made() -> Any:
        config = PipelineQuantizationConfig(quant_mapping={"unet": StowageConfig("int8:row")})
        unet = opened(pipeline, config).unet
        torch.manual_seed(0)
        lora = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
        unet.add_adapter(lora, adapter_name="one")
        return unet

    torch.manual_seed(1)
    sample, text = torch.randn(1, 4, 8, 8), torch.randn(1, 5, 64)

    def run(unet: Any) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = unet(sample, 3, text).sample
        return found

    unet, other = made(), made()
    other.disable_adapters()
    beside, without = run(unet), run(other)
    assert not torch.allclose(beside, without, atol=1e-3)
    before = {name: [p.clone() for p in each] for name, each in parts(unet).items()}
    with stowed_peft.merging(unet):
        unet.fuse_lora(adapter_names=["one"])
    assert torch.allclose(run(unet), beside, atol=0.02)
    unet.unfuse_lora()
    after = parts(unet)
    assert all(all(map(torch.equal, before[name], after[name])) for name in before)
    assert torch.equal(run(unet), beside)
    unet.delete_adapters("one")
    assert torch.equal(run(unet), without)


def test_pipelines_load_adapters(pipeline: Path, tmp_path: Path) -> None:
    config = PipelineQuantizationConfig(quant_mapping={"unet": StowageConfig("nf4")})
    pipe = opened(pipeline, config)
    without = image(pipe)
    torch.manual_seed(0)
    how = {"target_modules": ["to_q", "to_v"], "init_lora_weights": False}
    lora = peft.LoraConfig(r=4, lora_alpha=4, **how)
    pipe.unet.add_adapter(lora, adapter_name="one")
    layers = peft.get_peft_model_state_dict(pipe.unet, adapter_name="one")
    StableDiffusionPipeline.save_lora_weights(tmp_path, unet_lora_layers=layers)
    other = opened(pipeline, config)
    other.load_lora_weights(tmp_path)
    assert torch.allclose(image(other), image(pipe), atol=1e-4)
    assert not torch.allclose(image(other), without, atol=1e-3)
    other.unload_lora_weights()
    other.enable_attention_slicing()
    assert torch.allclose(image(other), without, atol=1e-4)


def test_a_quantized_file_in_pickles_is_refused(tmp_path: Path) -> None:
    plain = diffused.unet()
    plain.save_pretrained(tmp_path / "plain")
    given = StowageConfig("int8:row")
    model = type(plain).from_pretrained(tmp_path / "plain", quantization_config=given)
    with pytest.raises(stowage.InvalidArgument, match="must write safetensors files"):
        model.save_pretrained(tmp_path / "rests", safe_serialization=False)


def test_a_single_file_is_quantized_while_it_is_read(tmp_path: Path) -> None:
    plain = diffused.transformer()
    plain.save_pretrained(tmp_path / "plain")
    file, kind = tmp_path / "plain/diffusion_pytorch_model.safetensors", type(plain)
    how = {"config": str(tmp_path / "plain"), "quantization_config": StowageConfig("int8:row")}
    model = kind.from_single_file(str(file), **how)
    expected = kind.from_pretrained(tmp_path / "plain")
    stowage.stow(expected, "int8:row")
    assert same(model, expected)
    model.save_pretrained(tmp_path / "rests")
    with pytest.raises(stowage.InvalidArgument, match=r"weight.*must be values, got"):
        kind.from_single_file(str(tmp_path / "rests" / file.name), **how)


def test_blocks_compile_once(tmp_path: Path) -> None:
    plain = flux_models.built()
    plain.save_pretrained(tmp_path)
    given = StowageConfig("f8_e4m3:row")
    model = type(plain).from_pretrained(tmp_path, quantization_config=given)

    def run() -> torch.Tensor:
        ones = torch.full((1, 16, 32), 0.1), torch.full((1, 4, 256), 0.1), torch.ones(1, 256)
        places = {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(4, 3)}
        when = {"timestep": torch.tensor([0.5]), "guidance": torch.tensor([3.5])}
        with torch.no_grad():
            made: torch.Tensor = model(*ones, **places, **when).sample
        return made

    eager = run()
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert torch.allclose(run(), eager, atol=1e-5)
    assert counters["stats"]["unique_graphs"] <= 3  # of four blocks of two kinds
    torch._dynamo.reset()
