# SPDX-License-Identifier: Apache-2.0
"""Layerwise casting of diffusers' own models, by diffusers and by our facade: the same layers, the
same numbers, less memory. Covers what the peer's tester mixins assert for every model."""

from __future__ import annotations

import copy

import pytest
import torch
from families import DIFFUSION, answer, relative
from torch import nn

import stowage
from stowage.compat.diffusers import enable_layerwise_casting, patched

pytest.importorskip("diffusers")
pytestmark = pytest.mark.slow  # importing diffusers is
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HALF_UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3, BF16: 2.0**-9, F16: 2.0**-11}  # of rounding to storage


def cast_by_peer(model: nn.Module, storage: torch.dtype, compute: torch.dtype) -> nn.Module:
    made = copy.deepcopy(model)
    made.enable_layerwise_casting(storage, compute)
    return made


def with_biases_of(peer: nn.Module, model: nn.Module, compute: torch.dtype) -> nn.Module:
    """A copy of `model` whose biases are rounded as the peer rounds them."""
    made = copy.deepcopy(model)
    for theirs, ours in zip(peer.parameters(), made.parameters(), strict=True):
        if theirs.dtype != ours.dtype and ours.dim() < 2:
            ours.data = theirs.detach().to(compute)
    return made


@pytest.mark.parametrize("family", DIFFUSION)
@pytest.mark.parametrize(
    ("storage", "compute"),
    [
        (E4M3, F32),
        (E4M3, BF16),
        pytest.param(E5M2, F32, marks=pytest.mark.nightly),
        pytest.param(F16, F32, marks=pytest.mark.nightly),
        pytest.param(BF16, F32, marks=pytest.mark.nightly),
        pytest.param(E5M2, BF16, marks=pytest.mark.nightly),
    ],
)
@torch.no_grad()
def test_equals_the_peer(family: str, storage: torch.dtype, compute: torch.dtype) -> None:
    model, batch = DIFFUSION[family].build().to(compute), DIFFUSION[family].batch(compute)
    peer, ours = cast_by_peer(model, storage, compute), copy.deepcopy(model)
    enable_layerwise_casting(ours, storage, compute)
    twin = with_biases_of(peer, model, compute)
    enable_layerwise_casting(twin, storage, compute, exact=True)
    cast = {name for name, p in peer.named_parameters() if p.dtype == storage and p.dim() > 1}
    assert {row.name for row in stowage.report(ours).stowed} == cast and len(cast) > 10
    for name, weight in ours.named_parameters():  # the values of the weights are the same
        if name in cast:
            wanted = peer.get_parameter(name).to(compute)
            assert torch.equal(weight.dequantize(), wanted), name
    theirs, dense = answer(peer, batch), answer(model, batch)
    assert torch.equal(answer(twin, batch), theirs)  # exact, biases rounded likewise: bit for bit
    # Biases that keep their values change less than rounding the weights did.
    assert relative(answer(ours, batch), theirs) < max(relative(theirs, dense), HALF_UNIT[storage])


@pytest.mark.parametrize("family", DIFFUSION)
@torch.no_grad()
def test_memory_as_the_peers_tester_asks(family: str) -> None:
    """fp8 computing in bf16 is smaller than in fp32, which is smaller than nothing cast; and never
    larger than what the peer leaves at rest, but for the biases."""
    sizes, theirs = {}, {}
    for storage, compute in ((F32, F32), (E4M3, F32), (E4M3, BF16)):
        model = DIFFUSION[family].build().to(compute)
        theirs[storage, compute] = cast_by_peer(model, storage, compute).get_memory_footprint()
        with patched():
            model.enable_layerwise_casting(storage, compute)
            answer(model, DIFFUSION[family].batch(compute))
            sizes[storage, compute] = model.get_memory_footprint()
    assert sizes[E4M3, BF16] < sizes[E4M3, F32] < sizes[F32, F32]
    biases = sum(p.nbytes for p in model.parameters() if p.dim() < 2)
    for key, size in sizes.items():
        assert size <= theirs[key] + 2 * biases


@pytest.mark.parametrize("family", DIFFUSION)
@pytest.mark.parametrize(
    ("storage", "compute"),
    [
        (E4M3, BF16),
        pytest.param(F16, F32, marks=pytest.mark.nightly),
        pytest.param(E4M3, F32, marks=pytest.mark.nightly),
        pytest.param(E5M2, F32, marks=pytest.mark.nightly),
    ],
)
def test_training_as_the_peers_tester_asks(
    family: str, storage: torch.dtype, compute: torch.dtype
) -> None:
    """Backward runs under autocast; here the gradients of what still trains are finite too."""
    model = DIFFUSION[family].build().to(compute).train()
    enable_layerwise_casting(model, storage, compute)
    with torch.autocast("cpu", compute if compute != F32 else BF16):
        out = answer(model, DIFFUSION[family].batch(compute))
        loss = torch.nn.functional.mse_loss(out, torch.ones_like(out))
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.grad is None or torch.isfinite(p.grad).all() for p in trained)
    assert sum(p.grad is not None for p in trained) > len(trained) // 2


@torch.no_grad()
def test_pinned_modules_stay_fp32() -> None:
    """As the peer's tester does it: some module is pinned, the others become fp16."""
    model = DIFFUSION["dit"].build()
    model._keep_in_fp32_modules = ["proj_out_1"]
    enable_layerwise_casting(model, F16, F16)
    stowed = {row.name for row in stowage.report(model).stowed}
    assert stowed and not any("proj_out_1" in name for name in stowed)
    assert model.proj_out_1.weight.dtype == F32
    assert {model.get_parameter(name).dtype for name in stowed} == {F16}


@torch.no_grad()
def test_row_12_a_weight_normed_autoencoder() -> None:
    """The peer cannot cast it: the kernel of weight_norm knows no float8."""
    import diffusers

    torch.manual_seed(0)
    model = diffusers.AutoencoderOobleck(
        encoder_hidden_size=12,
        decoder_channels=12,
        decoder_input_channels=6,
        downsampling_ratios=[2, 4],
        channel_multiples=[1, 2],
    ).eval()
    batch = {"sample": torch.randn(1, 2, 24)}
    dense = answer(model, batch)
    with pytest.raises(NotImplementedError, match="weight_norm"):
        answer(cast_by_peer(model, E4M3, F32), batch)
    enable_layerwise_casting(model, E4M3, F32)
    assert len(stowage.report(model).stowed) > 50
    assert relative(answer(model, batch), dense) < 0.2
