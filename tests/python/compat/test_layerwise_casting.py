# SPDX-License-Identifier: Apache-2.0
"""diffusers' layerwise casting by our facade, on plain modules: which layers, which dtypes, which
refusals. What diffusers itself does to its models is compared in tests/model/test_casting.py."""

from __future__ import annotations

import fresh
import pytest
import torch
from torch import nn

import stowage
from stowage.compat.diffusers import disable_layerwise_casting, enable_layerwise_casting
from stowage.compat.diffusers.hooks import apply_layerwise_casting, apply_layerwise_casting_hook
from stowage.compat.diffusers.hooks.layerwise_casting import DEFAULT_SKIP_MODULES_PATTERN

E4M3, BF16, F32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_q = nn.Linear(16, 16)  # a name that the default patterns skip
        self.to_q, self.proj_out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj_out(self.to_q(self.norm_q(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Embedding(8, 16)
        self.proj_in, self.proj_out = nn.Linear(16, 16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Attention() for _ in range(2))
        self.table = nn.Parameter(torch.randn(2, 16))
        self.norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.proj_in(x) + self.pos_embed.weight[0].to(x.dtype)
        for block in self.blocks:
            x = block(x) + self.table[0].to(x.dtype)
        return self.proj_out(self.norm(x))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def cast(module: nn.Module) -> set[str]:
    return {row.name.removesuffix(".weight") for row in stowage.report(module).stowed}


BLOCKS = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("to_q", "proj_out")}
EVERY = BLOCKS | {"blocks.0.norm_q", "blocks.1.norm_q", "pos_embed", "proj_in", "proj_out"}


@pytest.mark.parametrize(
    ("pattern", "classes", "wanted"),
    [
        ("auto", None, BLOCKS),  # ^proj_out$ is that of the root alone
        (DEFAULT_SKIP_MODULES_PATTERN, None, BLOCKS),
        ("blocks", None, {"pos_embed", "proj_in", "proj_out"}),
        (["blocks.1"], None, {name for name in EVERY if not name.startswith("blocks.1")}),
        ((r"\.proj", "norm"), None, EVERY - {n for n in EVERY if ".proj" in n or "norm" in n}),
        ([], None, EVERY),
        (None, (nn.Embedding,), EVERY - {"pos_embed"}),
        (None, [Attention], {"pos_embed", "proj_in", "proj_out"}),
        (None, ["attention", nn.Embedding], {"proj_in", "proj_out"}),
        (None, nn.Linear, {"pos_embed"}),
        (None, [], EVERY),
        (None, None, EVERY | {"table"}),  # everything that can rest
        (".*", None, set()),  # the root too
    ],
)
def test_which_layers_rest(pattern: object, classes: object, wanted: set[str]) -> None:
    made = model()
    apply_layerwise_casting(made, E4M3, F32, pattern, classes)  # type: ignore[arg-type]
    assert cast(made) == wanted
    assert torch.isfinite(made(torch.randn(3, 16))).all()


@pytest.mark.parametrize("pattern", ["auto", None])
def test_what_stays_plain_has_a_reason(pattern: str | None) -> None:
    made = model()
    apply_layerwise_casting(made, E4M3, F32, pattern)
    assert all(row.reason for row in stowage.report(made).rows)
    if pattern:
        found = stowage.report(made)
        assert found["blocks.0.norm_q.weight"].reason == "skip pattern 'norm' keeps it plain"
        assert found["table"].reason == "no rule names it"


@pytest.mark.parametrize(
    ("dtype", "storage"),
    [
        (E4M3, "f8_e4m3"),
        (torch.float8_e5m2, "f8_e5m2"),
        (BF16, "bf16"),
        (torch.float16, "f16"),
        (F32, "f32"),
    ],
)
@pytest.mark.parametrize("compute", [F32, BF16, torch.float16])
def test_values_are_those_of_a_cast(dtype: torch.dtype, storage: str, compute: torch.dtype) -> None:
    layer = nn.Linear(64, 48)
    values, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    apply_layerwise_casting(layer, dtype, compute, ())
    assert layer.weight.resting == storage and layer.weight.dtype == compute
    assert torch.equal(layer.weight.dequantize(), values.to(dtype).to(compute))
    assert torch.equal(layer.bias, bias.to(compute))  # not rounded to the storage
    assert layer(torch.randn(2, 64, dtype=compute)).dtype == compute


def test_only_cast_layers_change_dtype() -> None:
    made = model()
    apply_layerwise_casting(made, E4M3, BF16)
    for name, parameter in made.named_parameters():
        inside = name.rsplit(".", 1)[0] in BLOCKS
        assert parameter.dtype == (BF16 if inside else F32), name


def test_whole_module_changes_dtype() -> None:
    made = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4))
    apply_layerwise_casting_hook(made, E4M3, BF16, False)
    floating = [t for t in made.state_dict().values() if t.is_floating_point()]
    assert {t.dtype for t in floating} == {BF16} and cast(made) == {"0"}
    norm = nn.LayerNorm(4)
    apply_layerwise_casting_hook(norm, E4M3, BF16, True)  # nothing in it can rest
    assert norm.weight.dtype == BF16 and type(norm.weight) is nn.Parameter


def test_a_layer_of_its_own() -> None:
    layer = nn.Conv2d(4, 4, 3)
    apply_layerwise_casting(layer, E4M3, F32)
    assert layer.weight.resting == "f8_e4m3"


def test_a_shared_layer_rests_once() -> None:
    made = model()
    made.blocks[1].to_q = made.blocks[0].to_q
    apply_layerwise_casting(made, E4M3, BF16)
    assert made.blocks[1].to_q.weight is made.blocks[0].to_q.weight
    assert made.blocks[0].to_q.weight.dtype == BF16


def test_tied_weights_stay_tied_in_another_dtype() -> None:
    made = model()
    made.blocks[1].to_q.weight = made.blocks[0].to_q.weight
    apply_layerwise_casting(made, E4M3, BF16)
    assert made.blocks[1].to_q.weight is made.blocks[0].to_q.weight


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.float8_e4m3fnuz])
def test_other_storages_are_refused(dtype: torch.dtype) -> None:
    made = model()
    for pattern in ("auto", None):
        with pytest.raises(
            ValueError, match=r"must be one of torch\.float8_e4m3fn, .*float32, got"
        ):
            apply_layerwise_casting(made, dtype, F32, pattern)
    assert not cast(made)


def test_other_bad_input_changes_nothing() -> None:
    made = model()
    with pytest.raises(stowage.InvalidArgument, match=r"regular expressions, got '\('"):
        apply_layerwise_casting(made, E4M3, F32, ["norm", "("])
    with pytest.raises(stowage.InvalidArgument, match="types or class names, got 3"):
        apply_layerwise_casting(made, E4M3, F32, None, [3])  # type: ignore[list-item]
    with torch.no_grad():
        made.blocks[0].to_q.weight[0, 0] = torch.nan
    with pytest.raises(stowage.InvalidArgument, match=r"blocks\.0\.to_q\.weight"):
        apply_layerwise_casting(made, E4M3, F32)
    assert not cast(made)


def test_models_own_lists_are_honoured() -> None:
    made = model()
    made._keep_in_fp32_modules = ["to_q"]
    made._skip_layerwise_casting_patterns = "proj_out"
    enable_layerwise_casting(made, E4M3)
    assert cast(made) == set()
    made._keep_in_fp32_modules = None
    enable_layerwise_casting(made, E4M3, skip_modules_pattern="norm")
    assert cast(made) == EVERY - {n for n in EVERY if "norm" in n or "proj_out" in n}


def test_compute_dtype_is_the_models_own() -> None:
    made = model().bfloat16()
    enable_layerwise_casting(made)
    assert made.blocks[0].to_q.weight.dtype == BF16
    with pytest.raises(stowage.InvalidArgument, match="compute_dtype must be given"):
        enable_layerwise_casting(nn.Sequential())


def test_adapters_rest_only_when_asked() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["to_q"], r=4)
    for enable, wanted in ((enable_layerwise_casting, 0), (apply_layerwise_casting, 4)):
        made = peft.inject_adapter_in_model(config, model())
        enable(made, E4M3, F32)
        names = [name for name in cast(made) if "lora_" in name]
        assert len(names) == wanted and "blocks.0.to_q.base_layer" in cast(made)
        assert torch.isfinite(made(torch.randn(3, 16))).all()


def test_exact_equals_the_cast_model_bit_for_bit() -> None:
    made, dense = model().bfloat16(), model().bfloat16()
    apply_layerwise_casting(made, E4M3, BF16, (), exact=True)
    for module in dense.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.data = module.weight.data.to(E4M3).to(BF16)
    x = torch.randn(5, 16, dtype=BF16)
    with torch.no_grad():
        assert torch.equal(made(x), dense(x))


def test_disabling_gives_plain_weights() -> None:
    made, x = model(), torch.randn(3, 16)
    enable_layerwise_casting(made, E4M3, BF16)
    values = {name: made.get_submodule(name).weight.dequantize() for name in cast(made)}
    disable_layerwise_casting(made)
    assert not cast(made) and len(values) == len(BLOCKS)
    for name, value in values.items():
        assert torch.equal(made.get_submodule(name).weight, value) and value.dtype == BF16
    assert torch.isfinite(made.float()(x)).all()


@pytest.mark.slow
def test_the_facade_needs_no_diffusers() -> None:
    code = (
        "import sys, torch; sys.modules['diffusers'] = None\n"
        "from stowage.compat import diffusers as d\n"
        "layer = torch.nn.Linear(4, 4); d.enable_layerwise_casting(layer)\n"
        "assert layer.weight.resting == 'f8_e4m3'\n"
        "try:\n    d.patched().__enter__()\nexcept ImportError:\n    print('as it should')"
    )
    done = fresh.run(code)
    assert done.stdout == "as it should\n", done.stderr
