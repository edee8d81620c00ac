# SPDX-License-Identifier: Apache-2.0
"""What cannot rest is said when the model is stowed, not at a later forward; narrow parameters and
buffers rest by rules that mean them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sharding_modes import copied_in_cpp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import parametrizations

import stowage
from stowage.tensor import StowedTensor


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 8), nn.ReLU())


WRITTEN = "a forward in training writes it"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "max_norm": (lambda: nn.Embedding(8, 16, max_norm=1.0), "weight", "each forward writes it"),
    "bag max_norm": (lambda: nn.EmbeddingBag(8, 16, max_norm=1.0), "weight", "(max_norm)"),
    "scripted": (lambda: torch.jit.script(linear()), "0.weight", "a scripted or traced module"),
    "traced": (
        lambda: torch.jit.trace(linear(), torch.ones(2, 16)),
        "0.weight",
        "a scripted or traced module",
    ),
    "statistics": (lambda: nn.BatchNorm2d(4), "running_mean", f"{WRITTEN} (running statistics)"),
    "spectral": (
        lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
        "parametrizations.weight.0._u",
        f"{WRITTEN} (spectral norm)",
    ),
    "old spectral": (
        lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
        "weight_u",
        f"{WRITTEN} (spectral norm)",
    ),
    "integers": (lambda: nn.BatchNorm2d(4), "num_batches_tracked", "int64 values"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_rest_is_told_with_the_reason(case: str) -> None:
    make, name, reason = REFUSED[case]
    model = nn.Sequential(make(), nn.Linear(16, 16))
    with pytest.raises(stowage.InvalidArgument) as caught:
        stowage.stow(model, rules={f"0.{name}": "f8_e4m3"}, buffers=True)
    assert reason in str(caught.value) and "nothing was changed" in str(caught.value)
    report = stowage.stow(model, rules={"*": "f8_e4m3"}, buffers=True)  # others of the rule do rest
    assert reason in report[f"0.{name}"].reason and report[f"0.{name}"].storage is None
    assert report["1.weight"].storage == "f8_e4m3"


def test_the_defaults_pass_over_what_a_forward_writes() -> None:
    model = nn.Sequential(nn.Embedding(8, 16, max_norm=1.0), nn.Linear(16, 16))
    report = stowage.stow(model, "int8")
    assert "max_norm" in report["0.weight"].reason
    for _ in range(41):
        model(torch.arange(8))


def test_quantized_modules_have_nothing_to_stow() -> None:
    layer = torch.ao.nn.quantized.Linear(16, 8)
    assert stowage.stow(layer, "int8").rows == ()
    with pytest.raises(stowage.InvalidArgument, match="must match a parameter of the model"):
        stowage.stow(layer, rules={"*": "int8"})


def test_replicas_are_refused_by_name() -> None:
    model = linear()
    stowage.stow(model, "int8")
    refused = pytest.raises(stowage.Unsupported, match="DataParallel and replicate")
    with refused, copied_in_cpp():
        nn.parallel.replicate(model, [0], detach=True)
    for parallel in (nn.DataParallel(model), nn.DataParallel(model[0])):
        parallel.device_ids = [0]
        parallel.module(torch.ones(1, 16))
        parallel.device_ids = [0, 1]
        with refused:
            parallel(torch.ones(1, 16))
    assert not model[0].weight.is_complex() and not torch.is_complex(model[0].weight)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [False, True])
def test_weights_of_fsdp_are_refused(one_rank: None, original: bool) -> None:
    cpu = torch.device("cpu")
    model = FullyShardedDataParallel(linear(), device_id=cpu, use_orig_params=original)
    with pytest.raises(stowage.InvalidArgument, match="a flat parameter of its own"):
        stowage.stow(model, rules={"*": "f8_e4m3"})
    assert not stowage.stow(model, "f8_e4m3").stowed
    sharded = linear()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(stowage.InvalidArgument, match=r"0\.weight: .*ordinary tensor, got DTensor"):
        stowage.stow(sharded, "f8_e4m3")


# --- narrow parameters ----------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(16), nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm(x)) * self.gain


def test_a_rule_for_wider_weights_leaves_biases_alone() -> None:
    for rule in ("*", "mlp", "mlp.*"):
        report = stowage.stow(Block(), rules={rule: "nf4"})
        assert [row.name for row in report.stowed] == ["mlp.weight"]
        assert report["mlp.bias"].reason.startswith("fewer than two dimensions; a rule that match")


def test_a_rule_for_narrow_weights_lets_them_rest() -> None:
    for rule in ({"*.bias": "nf4"}, {"norm": "f8_e4m3"}, {nn.LayerNorm: "int8:block16"}):
        model = Block()
        report = stowage.stow(model, rules={**rule, "mlp": "int8"}, exact=True)
        assert {"norm.bias", "mlp.weight"} <= {row.name for row in report.stowed}
        twin, x = copy.deepcopy(model), torch.randn(3, 16, requires_grad=True)
        stowage.unstow(twin)
        assert torch.equal(model(x), twin(x))
    assert (
        stowage.stow(Block(), rules={"gain": "f8_e4m3:tensor"})["gain"].storage == "f8_e4m3:tensor"
    )


@pytest.mark.parametrize(("rule", "storage"), [("*.bias", "int8:row"), ("gain", "int8:block16")])
def test_scales_for_each_value_are_refused(rule: str, storage: str) -> None:
    with pytest.raises(stowage.InvalidArgument, match=f"{storage} would have a scale for each"):
        stowage.stow(Block(), rules={rule: storage})


def test_a_trained_bias_that_rests_gets_its_gradient() -> None:
    layer = nn.Linear(16, 8)
    stowage.stow(layer, rules={"bias": "bf16", "weight": "int8"})
    layer.bias = nn.Parameter(layer.bias)
    layer(torch.randn(5, 16)).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((8,), 5.0))


# --- buffers --------------------------------------------------------------------------------------


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(12, 16))
        self.register_buffer("cache", torch.randn(12, 16), persistent=False)
        self.inner = nn.Linear(16, 16)

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.table[ids] + self.cache[ids])


def test_buffers_rest_if_asked(tmp_path: Path) -> None:
    model, ids = Positions(), torch.arange(7)
    with pytest.raises(stowage.InvalidArgument, match="must match a parameter of the model"):
        stowage.stow(model, rules={"table": "f8_e4m3"})
    originals = {name: b.clone() for name, b in model.named_buffers()}
    rules = {"table": "f8_e4m3", "cache": "nf4"}
    report = stowage.stow(model, "int8", rules=rules, buffers=True, keep_master="ram")
    assert [row.name for row in report.stowed] == ["inner.weight", "table", "cache"]
    assert report.buffer_bytes == 0 and report["table"].rest_bytes == 12 * 16
    assert dict(model.named_parameters()).keys() == {"inner.weight", "inner.bias"}
    assert model.state_dict().keys() == {"table", "inner.weight", "inner.bias"}

    wanted, before = model(ids), model.table.dequantize()
    for moved in (model.to(torch.bfloat16), model.to(torch.float32), copy.deepcopy(model)):
        assert isinstance(moved.table, StowedTensor) and isinstance(moved.cache, StowedTensor)
    assert torch.equal(model.table.dequantize(), before)
    stowage.save(model, tmp_path)
    twin = Positions()
    twin.cache.copy_(model.cache)
    stowage.load(twin, tmp_path)
    assert isinstance(twin.table, StowedTensor) and "table" in dict(twin.named_buffers())
    assert torch.allclose(twin(ids), wanted, atol=2e-2)  # the bias went through bf16

    stowage.unstow(model)
    for name, buffer in model.named_buffers():
        assert type(buffer) is Tensor and torch.equal(buffer, originals[name])


def test_buffers_that_no_rule_names_stay_and_change_dtype() -> None:
    model = Positions()
    report = stowage.stow(model, "int8", buffers=True, compute_dtype=torch.bfloat16)
    assert type(model.table) is Tensor and model.table.dtype == torch.bfloat16
    assert "this is a buffer" in report["table"].reason
    stowage.stow(model, rules={"table": "f8_e4m3"}, buffers=True)
    stowage.stow(model, None, compute_dtype=torch.float32)
    assert isinstance(model.table, StowedTensor) and model.table.dtype == torch.float32
