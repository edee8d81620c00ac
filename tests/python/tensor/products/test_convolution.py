# SPDX-License-Identifier: Apache-2.0
"""Convolutions with weights of more than a tile: the values of the dense ones, a tile at a time."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import stowage
from stowage._ops import library
from stowage._ops.storage import Storage
from stowage._tensor.products import convolution, tiles

# Cut by the small tile below: within a group, into whole groups, by rows and by columns.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(24, 80, 3, stride=2), (2, 24, 11)),
    "2d": (lambda: nn.Conv2d(24, 40, 3, padding=1, dilation=2), (2, 24, 7, 9)),
    "2d, same": (
        lambda: nn.Conv2d(24, 40, 3, padding="same", padding_mode="reflect"),
        (2, 24, 7, 9),
    ),
    "2d, no batch": (lambda: nn.Conv2d(24, 40, 3), (24, 7, 9)),
    "2d, channels last": (
        lambda: nn.Conv2d(24, 40, 3).to(memory_format=torch.channels_last),
        (2, 24, 7, 9),
    ),
    "2d, few groups": (lambda: nn.Conv2d(64, 96, 3, groups=2, bias=False), (2, 64, 7, 9)),
    "2d, many groups": (lambda: nn.Conv2d(240, 480, 3, groups=24), (2, 240, 5, 5)),
    "3d": (lambda: nn.Conv3d(24, 40, 2), (1, 24, 3, 4, 5)),
    "1d transposed": (lambda: nn.ConvTranspose1d(24, 80, 3, stride=2), (2, 24, 7)),
    "2d transposed": (
        lambda: nn.ConvTranspose2d(24, 40, 3, stride=3, output_padding=1, bias=False),
        (2, 24, 5, 6),
    ),
    "2d transposed, few groups": (lambda: nn.ConvTranspose2d(64, 96, 3, groups=2), (2, 64, 5, 5)),
    "2d transposed, many groups": (
        lambda: nn.ConvTranspose2d(240, 480, 3, groups=24),
        (2, 240, 5, 5),
    ),
    "3d transposed": (lambda: nn.ConvTranspose3d(24, 40, 2), (1, 24, 3, 4, 5)),
}
NIGHTLY = [pytest.param(s, marks=pytest.mark.nightly) for s in ("f8_e5m2:row", "nf4", "bf16")]
STORAGES = ["f8_e4m3", "int8:block48", "nf4:block64:nested", *NIGHTLY]


@pytest.fixture(autouse=True)
def small_tile(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tile of 16 KiB, so that every weight here has several."""
    for module in (tiles, convolution):
        monkeypatch.setattr(module, "TILE", 16 << 10)
    monkeypatch.setattr(tiles.spans, "__defaults__", (16 << 10,))
    monkeypatch.setattr(convolution, "_LEAST_CHANNELS", 4)
    stowage.fallbacks(clear=True)
    yield
    assert stowage.fallbacks() == {}


def pair(case: str, storage: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Tensor]:
    """The stowed layer, the dense one of the same values, and an input."""
    make, size = LAYERS[case]
    torch.manual_seed(0)
    layer, twin = make().to(dtype), make().to(dtype)
    stowage.stow(layer, storage)
    with torch.no_grad():
        twin.weight.copy_(layer.weight.dequantize())
        if layer.bias is not None:
            twin.bias.copy_(layer.bias)
    x = torch.randn(size, dtype=dtype)
    return layer, twin, x.to(memory_format=torch.channels_last) if "last" in case else x


def near(got: Tensor, wanted: Tensor) -> bool:
    unit = torch.finfo(got.dtype).eps
    scale = wanted.double().abs().amax() + 1
    return bool((got.double() - wanted.double()).abs().amax() <= 8 * unit * scale)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("case", LAYERS)
def test_values_and_gradients_are_those_of_the_dense_layer(case: str, storage: str) -> None:
    layer, twin, x = pair(case, storage)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got, wanted = layer(x), twin(x)
        assert near(got, wanted) and got.stride() == wanted.stride()
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    y, z = layer(mine), twin(other)
    g = torch.randn_like(z)
    y.backward(g)
    z.backward(g)
    assert near(mine.grad, other.grad) and mine.grad.stride() == other.grad.stride()
    if layer.bias is not None:
        assert near(layer.bias.grad, twin.bias.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", ["1d", "2d, few groups", "2d transposed", "3d"])
def test_other_compute_dtypes(case: str, dtype: torch.dtype) -> None:
    layer, twin, x = pair(case, "int8", dtype)
    assert near(layer(x), twin(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert near(layer(x), twin(x))


def widened(monkeypatch: pytest.MonkeyPatch, run: Callable[[], object]) -> list[int]:
    """Elements that each of our ops gave."""
    seen: list[int] = []

    def watch(name: str) -> None:
        op = getattr(library, name)

        def call(*args: Any) -> Tensor:
            out: Tensor = op(*args)
            seen.append(out.numel())
            return out

        patch.setattr(library, name, call)

    with monkeypatch.context() as patch:
        watch("dequantize")
        watch("embedding")
        run()
    return seen


@pytest.mark.parametrize("case", LAYERS)
def test_no_more_than_a_tile_is_widened(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _, x = pair(case, "int8")
    x.requires_grad_()
    pieces = widened(monkeypatch, lambda: layer(x))
    assert len(pieces) > 1 and max(pieces) * 4 <= 16 << 10
    y = layer(x)
    pieces = widened(monkeypatch, lambda: y.sum().backward())
    assert len(pieces) > 1 and max(pieces) * 4 <= 16 << 10


def test_exact_layers_widen_whole_and_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, twin, x = pair("2d", "int8")
    stowage.stow(layer, "int8", exact=True)
    assert torch.equal(layer(x), twin(x))
    assert widened(monkeypatch, lambda: layer(x)) == [layer.weight.numel()]


def test_a_trained_weight_gets_its_gradient() -> None:
    layer, twin, x = pair("2d", "int8")
    layer.weight = nn.Parameter(layer.weight)
    layer(x).square().sum().backward()
    twin(x).square().sum().backward()
    assert near(layer.weight.grad, twin.weight.grad)


def test_double_backward() -> None:
    layer, twin, x = pair("2d", "int8")
    got, wanted = [], []
    for module, into in ((layer, got), (twin, wanted)):
        leaf = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(module(leaf).pow(3).sum(), leaf, create_graph=True)
        into.append(torch.autograd.grad(g.square().sum(), leaf)[0])
    scale = wanted[0].abs().max()
    assert ((got[0] - wanted[0]).abs().max() <= 1e-4 * scale).item()


@pytest.mark.parametrize("case", ["2d", "2d transposed, few groups"])
def test_a_compiled_layer_is_one_op(case: str) -> None:
    layer, _, x = pair(case, "int8")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = compiled(leaf), layer(other)
    assert torch.equal(y, z)
    y.sum().backward()
    z.sum().backward()
    assert torch.equal(leaf.grad, other.grad)
    with torch.inference_mode():
        assert torch.equal(compiled(x), layer(x))


OPCHECKED = {"2d", "3d transposed", "2d, many groups"}  # one for each way through the op


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in OPCHECKED else pytest.mark.nightly) for c in LAYERS],
)
def test_opcheck(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, _, x = pair(case, "int8")
    calls: list[Any] = []
    for name in ("convolution", "grad_input"):
        op = getattr(convolution, name)

        def call(*args: Any, op: Any = op) -> Tensor:
            calls.append((op, args))
            return op(*args)

        monkeypatch.setattr(convolution, name, call)
    layer(x.requires_grad_()).sum().backward()
    assert len(calls) == 2
    for op, args in calls:
        given = [a.detach() if isinstance(a, Tensor) else a for a in args]
        torch.library.opcheck(op, tuple(given))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_what_torch_refuses_is_refused(transposed: bool, groups: int) -> None:
    """Channels are taken in pieces, so that nothing but a check sees too many of them."""
    key, shape = Storage("int8:row").key, [4, 2, 3]
    codes, *scales = library.quantize(torch.randn(shape), key)
    weight = library.dequantize(codes, scales, key, shape, torch.float32)
    options = ([1], [1], [1], transposed, [0], groups)
    taken = 0
    for sizes in ((2, 2, 9), (2, 4, 9), (2, 5, 9), (2, 8, 9), (2, 8, 0), (0, 4, 9), (4, 9)):
        x = torch.randn(sizes)
        for bias in (None, *(torch.randn(s) for s in ([], [1], [2], [3], [4], [8], [4, 1]))):
            try:
                wanted = torch.ops.aten.convolution(x, weight, bias, *options)
            except RuntimeError:
                with pytest.raises(RuntimeError, match=r"^\[invalid_argument\]|[Kk]ernel size"):
                    convolution.convolution(x, codes, scales, key, shape, bias, *options)
                continue
            got = convolution.convolution(x, codes, scales, key, shape, bias, *options)
            assert torch.equal(got, wanted)
            g = torch.randn(wanted.shape)
            weighed = (codes, scales, key, shape)
            assert convolution.grad_input(g, x, *weighed, *options).shape == x.shape
            wider = torch.cat([g, g], 1)
            with pytest.raises(RuntimeError, match="g must be"):
                convolution.grad_input(wider, x, *weighed, *options)
            taken += 1
    assert taken


def test_a_layer_refuses_more_channels_than_it_has() -> None:
    """The defect: the first ones were taken, and a longer bias was cut."""
    layer, _, x = pair("1d transposed", "int8")
    with pytest.raises(RuntimeError, match="must have 24 channels"):
        layer(torch.cat([x, x], 1))


@pytest.mark.parametrize("size", [-1, 2**40, 2**63 - 1])
def test_sizes_that_no_tensor_has(size: int) -> None:
    layer, _, x = pair("1d", "int8")
    layer.padding = (size,)
    with pytest.raises(RuntimeError, match="at least 0 and below"):
        layer(x)
