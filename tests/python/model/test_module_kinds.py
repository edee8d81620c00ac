# SPDX-License-Identifier: Apache-2.0
"""Every kind of module that holds weights: stowed, it equals the one that holds the dequantized
weights, with exact=True bit for bit, in each mode; docs/modules.md is the table of these."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bare_parameters import Containers, Raw, Shared
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pack_padded_sequence

import stowage

EVERY = [
    "f8_e4m3", "f8_e4m3:tensor", "f8_e4m3:row", "f8_e4m3:block16", "f8_e5m2:row", "int8:row",
    "int8:block32", "nf4", "nf4:block32:nested", "fp4", "bf16",
]  # fmt: skip
MODES: dict[str, Callable[[], Any]] = {
    "eager": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


class First(nn.Module):
    """A module that returns several things, reduced to the first."""

    def __init__(self, inner: nn.Module, **named: Any) -> None:
        super().__init__()
        self.inner, self.named = inner, named

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.inner(*inputs, **self.named)[0]


class Packed(nn.Module):
    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
        return self.recurrent(packed)[0].data


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def by_hand() -> nn.Module:
    layer = nn.Linear(16, 16)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def lazy() -> nn.Module:
    layer = nn.LazyLinear(8)
    layer(torch.randn(2, 16))
    return layer


def ids(*shape: int) -> Tensor:
    return torch.randint(12, shape)


def r(*shape: int) -> Tensor:
    return torch.randn(shape)


Kind = tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]


def sequence() -> tuple[Tensor, ...]:
    return (r(2, 5, 16),)


def bag(**named: Any) -> Callable[[], nn.Module]:
    return lambda: nn.EmbeddingBag(12, 16, **named)


def attention(*args: Any, eval: bool = False, **named: Any) -> Callable[[], nn.Module]:
    return lambda: First(nn.MultiheadAttention(16, 2, **named), *args).train(not eval)


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 2).eval()


def conv(rank: int, transposed: bool, **named: Any) -> Kind:
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{rank}d")
    return lambda: kind(4, 8, 3, groups=2, **named), lambda: (r(2, 4, *[7] * rank),)


def same3() -> tuple[Tensor, ...]:
    return (y := r(2, 5, 16), y, y)


KINDS: dict[str, Kind] = {
    "Linear": (lambda: nn.Linear(16, 8), sequence),
    "Bilinear": (lambda: nn.Bilinear(16, 6, 8), lambda: (r(3, 16), r(3, 6))),
    "Embedding": (lambda: nn.Embedding(12, 16, padding_idx=0), lambda: (ids(2, 5),)),
    "Embedding frequency": (
        lambda: nn.Embedding(12, 16, scale_grad_by_freq=True), lambda: (ids(2, 5),)),
    "Embedding sparse": (lambda: nn.Embedding(12, 16, sparse=True), lambda: (ids(2, 5),)),
    **{f"EmbeddingBag {m}": (bag(mode=m, padding_idx=1), lambda: (ids(2, 5),))
       for m in ("sum", "mean", "max")},
    "EmbeddingBag sparse": (bag(mode="sum", sparse=True), lambda: (ids(2, 5),)),
    "EmbeddingBag offsets": (
        bag(include_last_offset=True), lambda: (ids(7), torch.tensor([0, 3, 7]))),
    "EmbeddingBag weights": (bag(mode="sum"), lambda: (ids(7), torch.tensor([0, 3]), r(7))),
    **{f"Conv{n}d": conv(n, False, dilation=2, padding=2) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": conv(n, True, stride=2, output_padding=1) for n in (1, 2, 3)},
    **{f"Conv2d {p}": conv(2, False, padding=1, padding_mode=p)
       for p in ("reflect", "replicate", "circular")},
    "Conv2d same": conv(2, False, padding="same"),
    "LayerNorm": (lambda: nn.LayerNorm(16), sequence),
    "LayerNorm matrix": (lambda: nn.LayerNorm((5, 16)), sequence),
    "RMSNorm": (lambda: nn.RMSNorm(16), sequence),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda: (r(2, 4, 6),)),
    "BatchNorm eval": (lambda: nn.BatchNorm1d(4).eval(), lambda: (r(2, 4, 6),)),
    "BatchNorm train": (lambda: nn.BatchNorm2d(4), lambda: (r(2, 4, 6, 3),)),
    "InstanceNorm": (
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True), lambda: (r(2, 4, 6),)),
    "RNN": (lambda: First(nn.RNN(16, 8)), sequence),
    "GRU": (lambda: First(nn.GRU(16, 8, 2, batch_first=True, bidirectional=True)), sequence),
    "LSTM": (lambda: First(nn.LSTM(16, 8, 2, bidirectional=True)), sequence),
    "LSTM projected": (lambda: First(nn.LSTM(16, 8, proj_size=4)), sequence),
    "LSTM eval": (lambda: First(nn.LSTM(16, 8)).eval(), sequence),
    "LSTM packed": (lambda: Packed(nn.LSTM(16, 8, batch_first=True)), sequence),
    "GRU packed": (lambda: Packed(nn.GRU(16, 8, batch_first=True, bidirectional=True)), sequence),
    "LSTMCell": (lambda: First(nn.LSTMCell(16, 8)), lambda: (r(3, 16),)),
    "GRUCell": (lambda: nn.GRUCell(16, 8), lambda: (r(3, 16),)),
    "RNNCell": (lambda: nn.RNNCell(16, 8), lambda: (r(3, 16),)),
    "MultiheadAttention": (attention(batch_first=True), same3),
    "MultiheadAttention eval": (attention(eval=True, batch_first=True), same3),
    "MultiheadAttention kv": (
        attention(kdim=6, vdim=10, add_bias_kv=True, add_zero_attn=True),
        lambda: (r(5, 2, 16), r(4, 2, 6), r(4, 2, 10))),
    "TransformerEncoder eval": (encoder, sequence),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), sequence),
    "TransformerDecoderLayer": (
        lambda: nn.TransformerDecoderLayer(16, 2, 32, 0.0), lambda: (r(5, 2, 16), r(4, 2, 16))),
    "PReLU": (lambda: nn.PReLU(4), lambda: (r(2, 4, 5),)),
    "raw parameters": (Raw, sequence),
    "ParameterList, ParameterDict": (Containers, sequence),
    "shared": (Shared, sequence),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Conv1d(5, 8, 3)), sequence),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(16, 8)), sequence),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(16, 16)), sequence),
    "orthogonal householder": (
        lambda: parametrizations.orthogonal(nn.Linear(16, 8), orthogonal_map="householder"),
        sequence),
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(16, 8)), sequence),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(16, 8)), sequence),
    "parametrized by hand": (by_hand, sequence),
    "LazyLinear": (lazy, sequence),
}  # fmt: skip

# Modules without modules: every storage is quick.
CHEAP = (
    "Linear", "Bilinear", "Embedding", "EmbeddingBag sum", "EmbeddingBag weights", "Conv1d",
    "ConvTranspose2d", "LayerNorm matrix", "GroupNorm", "GRUCell", "PReLU",
)  # fmt: skip


def narrow_too(model: nn.Module, storage: str) -> dict[Any, str]:
    """Everything rests, biases and norms by rules of their own."""
    fitting = storage.replace(":row", ":tensor").replace(":block16", ":tensor")
    fitting = fitting.replace("int8:block32", "int8:tensor")
    names = {name: parameter.dim() for name, parameter in model.named_parameters()}
    return {n: storage if dims > 1 else fitting for n, dims in names.items()}


def made(kind: str, storage: str, exact: bool) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """A stowed module, and one that holds the dequantized weights."""
    make, inputs = KINDS[kind]
    pair = []
    for _ in range(2):
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the old weight_norm
            module = make()
        report = stowage.stow(module, rules=narrow_too(module, storage), exact=exact)
        assert report.rows and not report.plain
        pair.append(module)
    stowage.unstow(pair[1])
    return pair[0], pair[1], inputs()


def results(module: nn.Module, inputs: tuple[Tensor, ...], mode: str) -> list[Tensor]:
    """The output, and the gradient of every floating input where the mode has gradients."""
    torch.manual_seed(1)
    grad = mode in ("eager", "autocast")
    given = [x.clone().requires_grad_(grad and x.is_floating_point()) for x in inputs]
    with MODES[mode]():
        y = module(*given)
    seen = [y]
    if grad and y.requires_grad:
        y.float().square().sum().backward()
        seen += [x.grad for x in given if x.requires_grad]
    return [t.detach() for t in seen]


def outcome(module: nn.Module, inputs: tuple[Tensor, ...], mode: str) -> list[Tensor] | str:
    """The results, or what torch says that it cannot: oneDNN has no bf16 LSTM on an old CPU."""
    try:
        return results(module, inputs, mode)
    except RuntimeError as error:
        return str(error)


def check(kind: str, storage: str, exact: bool) -> None:
    module, twin, inputs = made(kind, storage, exact)
    for mode in MODES:
        wanted, got = outcome(twin, inputs, mode), outcome(module, inputs, mode)
        if isinstance(wanted, str) or isinstance(got, str):
            assert mode == "autocast" and wanted == got, (storage, exact, mode, wanted, got)
            continue
        assert len(wanted) == len(got)
        error = 3e-2 if mode == "autocast" else 1e-5
        for a, b in zip(wanted, got, strict=True):
            assert a.dtype == b.dtype
            atol = error * max(1.0, a.abs().max().item())
            close = torch.equal(a, b) if exact else torch.allclose(a, b, error, atol)
            assert close, (storage, exact, mode, (a - b).abs().max())


@pytest.fixture(autouse=True)
def without_fast_paths() -> Any:
    """torch takes its fused encoder for plain tensors only; the rest of it is compared."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stowed_module_equals_its_dequantized_twin(kind: str) -> None:
    check(kind, "f8_e4m3:row", True)
    check(kind, "nf4", False)


@pytest.mark.parametrize(
    "kind", [k if k in CHEAP else pytest.param(k, marks=pytest.mark.nightly) for k in KINDS]
)
def test_a_stowed_module_equals_its_twin_in_every_storage(kind: str) -> None:
    for storage in EVERY:
        for exact in (True, False):
            check(kind, storage, exact)


@pytest.mark.parametrize("kind", [k for k in KINDS if k.endswith(" eval")])
def test_fast_paths_of_torch_are_equal_to_rounding(kind: str) -> None:
    module, twin, inputs = made(kind, "f8_e4m3:row", exact=True)
    torch.backends.mha.set_fastpath_enabled(True)
    with torch.inference_mode():
        assert torch.allclose(module(*inputs), twin(*inputs), atol=1e-5)


def test_the_page_names_only_kinds_that_are_tested() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/modules.md").read_text()
    table = page.split("|---|---|---|\n", 1)[1].split("\n\n", 1)[0]
    words = {w for line in table.splitlines() for w in re.findall(r"\w+", line.split("|")[1])}
    named = {w for w in words if isinstance(getattr(nn, w, None), type)} - {"Transformer"}
    tested = {word for kind in KINDS for word in re.findall(r"[A-Za-z]+(?:\dd)?", kind)}
    assert len(named) > 10 and named <= tested | {"BatchNorm", "ParameterList", "ParameterDict"}, (
        named - tested
    )


@pytest.mark.parametrize("kind", ["EmbeddingBag sum", "Bilinear", "Conv2d", "GRUCell", "RNN"])
def test_kinds_that_the_page_says_are_not_widened_whole(kind: str) -> None:
    module, _, inputs = made(kind, "int8:row", exact=False)
    biases = [n for n, p in module.named_parameters() if p.dim() < 2]
    stowage.unstow(module)
    weights: dict[Any, str] = {
        n: "int8:row" for n, _ in module.named_parameters() if n not in biases
    }
    stowage.stow(module, rules=weights)
    stowage.fallbacks(clear=True)
    results(module, inputs, "eager")
    assert not stowage.fallbacks(clear=True)
