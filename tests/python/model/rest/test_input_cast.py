# SPDX-License-Identifier: Apache-2.0
"""Readers see the compute dtype, and inputs are cast where that is asked."""

import copy
import pickle
import re
import threading
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import stowage
from stowage._model.rest import granularity as _granularity
from stowage._ops.library import composite_forced

pytestmark = pytest.mark.skipif(composite_forced(), reason="models of bf16 need the kernels")
BF16, F32 = torch.bfloat16, torch.float32


def linear(how: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    stowage.stow(model, "f8_e4m3", compute_dtype=BF16, input_cast=how)
    return model


X = torch.linspace(-1, 1, 24).reshape(3, 8)


def test_never_leaves_the_error_of_torch() -> None:
    model = linear(None)
    with pytest.raises(RuntimeError, match="dtype"):
        model(X)
    stowage.stow(model, "f8_e4m3", input_cast="compute")
    assert model(X).dtype == BF16
    stowage.stow(model, "f8_e4m3")  # says nothing of casts
    assert model(X).dtype == BF16
    stowage.stow(model, "f8_e4m3", input_cast="never")
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("grad", [False, True])
def test_compute_and_restore(grad: bool) -> None:
    x = X.clone().requires_grad_(grad)
    compute, restore = linear("compute"), linear("restore")
    assert compute(x).dtype == BF16 and torch.equal(compute(x), compute(X.bfloat16()))
    y = restore(x)
    assert y.dtype == F32
    # Between the layers too, where the plain model would have fp32.
    assert torch.equal(y, restore[1](restore[0](X.bfloat16()).float()))
    assert restore(X.half()).dtype == torch.float16
    if grad:
        y.sum().backward()
        assert x.grad is not None and x.grad.dtype == F32


class Pair(NamedTuple):
    left: Tensor
    right: Any


class Nested(nn.Module):
    """Takes and gives trees of tensors, and calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.seen: list[torch.dtype] = []

    def forward(self, first: Any, *more: Any, depth: int = 0, **named: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((first, more, named))
        self.seen = [t.dtype for t in leaves if isinstance(t, Tensor)]
        if depth:
            self(torch.ones(8, dtype=torch.float64), depth=depth - 1)
        y = torch.ones(8, dtype=BF16) @ self.weight
        return {"out": [y, Pair(y, (y, 3, "text"))], "ids": torch.arange(2)}


def test_nested_inputs_and_outputs() -> None:
    module = Nested()
    rules: Any = {"weight": "int8"}
    stowage.stow(module, rules=rules, compute_dtype=BF16, input_cast="restore")
    half = torch.ones(2, dtype=torch.float16)
    ids = torch.arange(3)
    out = module([ids, X], Pair(half, None), name={"deep": (X, [half])}, flag=True, depth=2)
    assert module.seen == [BF16]  # of the innermost call
    assert out["out"][0].dtype == out["out"][1].left.dtype == out["out"][1].right[0].dtype == F32
    assert isinstance(out["out"][1], Pair) and out["out"][1].right[1:] == (3, "text")
    assert out["ids"].dtype == torch.int64
    module([ids, X], Pair(half, None), name={"deep": (X, [half])})
    assert module.seen == [torch.int64, BF16, BF16, BF16, BF16]
    module(ids)
    assert module(first=half)["out"][0].dtype == torch.float16


def test_a_raising_forward_leaves_nothing() -> None:
    model = linear("restore")
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 7))
    assert _granularity._here.running == []
    assert model(X).dtype == F32


def test_two_threads() -> None:
    model, found = linear("restore"), []

    def run(dtype: torch.dtype) -> None:
        for _ in range(50):
            found.append(model(X.to(dtype)).dtype is dtype)

    threads = [threading.Thread(target=run, args=(d,)) for d in (F32, torch.float64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 100 and all(found)


@pytest.mark.parametrize("how", ["compute", "restore"])
@pytest.mark.parametrize("grad", [False, True])
def test_compiled_without_graph_breaks(how: str, grad: bool) -> None:
    model, x = linear(how), X.clone().requires_grad_(grad)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(x), model(x)) and compiled(x).dtype == model(x).dtype
    assert counter.frame_count == 1 and _granularity._traced == []


def test_rules() -> None:
    model = linear({"1": "restore", nn.Linear: "compute"})
    assert model[0](X).dtype == BF16 and model[1](X).dtype == F32
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert twin[0](X).dtype == BF16 and twin[1](X).dtype == F32
    stowage.unstow(twin)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in twin.modules())
    assert not any(m._forward_pre_hooks_with_kwargs for m in twin.modules())
    linear({"0": "never", "*": "compute"})[1](X)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("always", "input_cast must be never, compute, restore"),
        ({"0": "cast"}, "got '0': 'cast'"),
        ({"2": "compute"}, "input_cast '2': must match a module that holds a resting weight"),
        ({"": "compute"}, "input_cast '': must match a module that holds a resting"),
        ({nn.GRU: "compute"}, "input_cast GRU: must match"),
        ({re.compile("^x"): "compute"}, "input_cast regex '^x': must match"),
        ({3: "compute"}, "a key of input_cast must be a glob, a regular expression"),
    ],
)
def test_refusals(how: Any, text: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    with pytest.raises(stowage.InvalidArgument) as error:
        stowage.stow(model, "int8", input_cast=how)
    assert text in str(error.value)
    assert type(model[0].weight) is nn.Parameter


# --- code that reads dtypes -----------------------------------------------------------------------


class FeedForward(nn.Module):
    """As T5's: the parent casts to what the child's weight says (peer defect 14)."""

    def __init__(self) -> None:
        super().__init__()
        self.wi, self.wo = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.wi(x))
        if hidden.dtype != self.wo.weight.dtype and self.wo.weight.dtype != torch.int8:
            hidden = hidden.to(self.wo.weight.dtype)
        return self.wo(hidden)


class TimestepEmbedder(nn.Module):
    """As Z-Image's: it casts its input to the dtype of its first layer (peer defect 11)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8))

    def forward(self, t: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(4, dtype=F32))
        turns = t[:, None].float() * frequencies
        waves = torch.cat([turns.cos(), turns.sin()], -1)
        if self.mlp[0].weight.dtype.is_floating_point:
            waves = waves.to(self.mlp[0].weight.dtype)
        return self.mlp(waves)


@pytest.mark.parametrize("working", ["tile", "layer"])
@pytest.mark.parametrize("storage", ["f8_e4m3", "f8_e5m2", "int8", "nf4", "f16"])
def test_readers_see_the_compute_dtype(storage: str, working: str) -> None:
    for make, x in ((FeedForward, X.bfloat16()), (TimestepEmbedder, torch.tensor([3.0, 500.0]))):
        model = make()
        stowage.stow(model, storage, compute_dtype=BF16, working=working)
        assert next(model.parameters()).dtype == BF16
        assert {p.dtype for p in model.parameters()} == {BF16}
        y = model(x)
        assert y.dtype == BF16 and y.isfinite().all()


def test_an_fp32_place_between_bf16_ones() -> None:
    """T5 keeps `wo` in fp32; its parent's cast follows it."""
    model = FeedForward()
    model._keep_in_fp32_modules = ["wo"]
    stowage.stow(model, rules={"wi": "int8", "wo": "f16"}, compute_dtype=BF16)
    assert model.wo.weight.dtype == F32 and model(X.bfloat16()).dtype == F32


def test_the_dtype_of_library_models() -> None:
    transformers = pytest.importorskip("transformers")
    diffusers = pytest.importorskip("diffusers")
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=32
    )
    t5 = transformers.T5EncoderModel(config).eval()
    stowage.stow(t5, "f8_e4m3", compute_dtype=BF16)
    assert t5.dtype == BF16
    assert t5(torch.arange(4)[None]).last_hidden_state.isfinite().all()
    unet = diffusers.UNet2DModel(
        sample_size=8, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    stowage.stow(unet, "f8_e4m3", compute_dtype=BF16)
    assert unet.dtype == BF16
    sample = unet(torch.randn(1, 3, 8, 8, dtype=BF16), 3).sample
    assert sample.dtype == BF16 and sample.isfinite().all()
