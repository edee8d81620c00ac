# SPDX-License-Identifier: Apache-2.0
"""cat and stack of stowed tensors: joined codes and scales, or dequantized where scales forbid."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage
from stowage import StowedTensor

# Storage of the pieces, of their stack; "" where it is dequantized.
STACKED = {
    "f32": "f32",
    "bf16": "bf16",
    "f8_e4m3": "f8_e4m3",
    "f8_e4m3:tensor": "f8_e4m3:row",
    "int8": "int8:row2",
    "int8:block32": "int8:block32",
    "int8:block48": "",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4:row",
    "nvfp4:row": "nvfp4:row2",
    "int4:row:zero": "int4:row2:zero",
    "nf4": "nf4:block64",
    "fp4:block128": "fp4:block128",
    "nf4:block64:nested": "",
}
CAT = [s for s in STACKED if s not in ("f8_e4m3:tensor", "nvfp4", "nf4:block64:nested")]


def pieces(storage: str, *rows: int) -> list[StowedTensor]:
    torch.manual_seed(0)
    made = [torch.randn(n, 64) * (i + 1) for i, n in enumerate(rows)]
    return [stowage.quantize(p, storage) for p in made]


def values(of: list[StowedTensor]) -> list[Tensor]:
    return [w.dequantize() for w in of]


@pytest.mark.parametrize("storage", CAT)
def test_cat_joins_codes_and_scales(storage: str) -> None:
    w = pieces(storage, 4, 6, 2)
    stowage.fallbacks(clear=True)
    got = torch.cat(w)
    assert type(got) is StowedTensor and got.resting == w[0].resting and got.shape == (12, 64)
    assert stowage.nbytes(got) == sum(map(stowage.nbytes, w))
    assert torch.equal(got.dequantize(), torch.cat(values(w))) and not stowage.fallbacks()
    got.zero_()
    assert all(bool(w.dequantize().abs().sum() > 0) for w in w)  # its own memory


@pytest.mark.parametrize("storage", STACKED)
def test_stack_gives_each_piece_its_scales(storage: str) -> None:
    w = pieces(storage, 4, 4, 4)
    got = torch.stack(w)
    assert torch.equal(got if not STACKED[storage] else got.dequantize(), torch.stack(values(w)))
    if STACKED[storage]:
        assert type(got) is StowedTensor and got.resting == STACKED[storage]
        rebuilt = StowedTensor(got.parts, got.resting, got.shape, got.dtype)  # a legal layout
        for taken, made in zip(rebuilt.unbind(), w, strict=True):
            assert type(taken) is StowedTensor and taken.resting == made.resting
            assert torch.equal(taken.dequantize(), made.dequantize())


@pytest.mark.parametrize("storage", STACKED)
def test_slices_of_one_weight_join_again(storage: str) -> None:
    """They share the scales that pieces of different weights do not."""
    (w,) = pieces(storage, 512)
    got = torch.cat(w.chunk(2))
    assert type(got) is StowedTensor
    assert all(torch.equal(a, b) for a, b in zip(got.parts.values(), w.parts.values(), strict=True))


DIFFERENT: dict[str, Callable[[], list[Tensor]]] = {
    "storage": lambda: [pieces("nf4", 4)[0], pieces("fp4", 4)[0]],
    "block": lambda: [pieces("nf4", 4)[0], pieces("nf4:block128", 4)[0]],
    "exact": lambda: [
        w := pieces("nf4", 4)[0],
        stowage.quantize(w.dequantize(), "nf4", exact=True),
    ],
    "plain": lambda: [pieces("nf4", 4)[0], torch.ones(4, 64)],
    "tensor scale": lambda: pieces("int8:tensor", 4, 4),
    "scale of all": lambda: pieces("nvfp4", 4, 4),
    "nested offset": lambda: pieces("nf4:block64:nested", 256, 256),
    "cut block": lambda: pieces("nf4:block128", 3, 4),
    "view": lambda: [pieces("nf4", 64)[0].t(), pieces("nf4", 64)[0]],
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_what_does_not_fit_is_dequantized_and_counted(case: str) -> None:
    given = DIFFERENT[case]()
    stowage.fallbacks(clear=True)
    plain = [t if type(t) is Tensor else t.dequantize() for t in given]
    got = torch.cat(given)
    assert type(got) is Tensor and torch.equal(got, torch.cat(plain))
    assert stowage.fallbacks(clear=True) == {"aten.cat.default": 1}


def test_other_dtypes_promote_as_plain_ones_do() -> None:
    w = pieces("nf4", 4)[0]
    half = stowage.quantize(w.dequantize(), "nf4", compute_dtype=torch.bfloat16)
    got = torch.cat([half, w])
    assert got.dtype == torch.float32
    assert torch.equal(got, torch.cat([half.dequantize(), w.dequantize()]))


def test_a_fused_projection_multiplies_and_hands_gradients_to_its_pieces() -> None:
    q, k = (nn.Parameter(w) for w in pieces("int8", 4, 6))
    x = torch.randn(3, 64, requires_grad=True)
    fused = torch.cat([q, k])
    assert type(fused) is StowedTensor
    y = F.linear(x, fused)
    torch.testing.assert_close(y, torch.cat([F.linear(x, q), F.linear(x, k)], 1))
    y.square().sum().backward()
    wanted = 2 * y.detach().t() @ x.detach()
    torch.testing.assert_close(torch.cat([q.grad, k.grad]), wanted)


@pytest.mark.parametrize("storage", ["nf4", "int8:tensor"])
def test_in_one_graph(storage: str) -> None:
    """Where nothing can be compared, not even scales."""
    torch._dynamo.reset()
    q, k = (nn.Parameter(w, False) for w in pieces(storage, 4, 6))

    def fused(x: Tensor) -> Tensor:
        return F.linear(x, torch.cat([q, k])) + F.linear(x, torch.stack([q, q])[1]).sum()

    x = torch.randn(3, 64)
    got = torch.compile(fused, backend="aot_eager", fullgraph=True)(x)
    torch.testing.assert_close(got, fused(x))


@pytest.mark.parametrize("storage", ["int8:row", "nf4"])
def test_one_piece_is_joined_and_pieces_of_other_columns_are_not(storage: str) -> None:
    narrow, wide = (stowage.quantize(torch.randn(2, n), storage) for n in (64, 128))
    one, alone = torch.cat([narrow]), torch.stack([narrow])
    assert type(one) is type(alone) is stowage.StowedTensor
    assert one.equal(narrow) and alone.shape == (1, 2, 64) and alone[0].equal(narrow)
    for join in (torch.cat, torch.stack):
        with pytest.raises(RuntimeError, match=r"[Ss]izes|equal size"):
            join([narrow, wide])
