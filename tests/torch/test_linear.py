# SPDX-License-Identifier: Apache-2.0
"""The products: their error bound, exact mode, threads."""

import os
import subprocess
import sys

import pytest
import tiles
import torch
from torch import Tensor
from torch.nn import functional as F

import stowage
from stowage._ops import library
from stowage._ops.storage import Storage

SAMPLED = ("bf16", "f8_e4m3", "f8_e5m2:row", "int8:block32", "nf4", "nf4:block64:nested")
COMPUTE = (torch.float32, torch.bfloat16, torch.float16)
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
BATCHES = (1, 3, 16, 17, 65)  # our kernels, then tiles


@pytest.fixture(params=SAMPLED)
def kind(request: pytest.FixtureRequest) -> Storage:
    return Storage(request.param)


@pytest.fixture(params=COMPUTE, ids=["f32", "bf16", "f16"])
def compute(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def weight(kind: Storage, rows: int, columns: int, device: str) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(7)
    values = torch.randn(rows, columns, generator=generator) * columns**-0.5
    codes, *scales = library.quantize(values.to(device), kind.key)
    return codes, scales


def bounded(ours: Tensor, dense: Tensor, a: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """`a` times `w`, both in the compute dtype, against fp64 and against the dense product."""
    wide = a.double(), w.double()
    exact, size = wide[0] @ wide[1], wide[0].abs() @ wide[1].abs()
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    slack = 0.0 if a.dtype == torch.float32 else 2.0**-8
    limit = UNIT[a.dtype] * exact.abs() + ((a.shape[1] + 8) * 2.0**-24 + slack) * size + 1e-30
    error = (ours.double() - exact).abs()
    assert bool((error <= limit).all())
    # In the mean: kernels that skip the rounding of w err elsewhere than the dense product.
    theirs = (dense.double() - exact).square().mean().sqrt()
    assert float(error.square().mean().sqrt()) <= 2 * float(theirs) + 1e-7


@pytest.mark.parametrize("isa", ["", "AVX512_CORE_BF16", "avx512_core_bf16"])
@pytest.mark.skipif(not tiles.HAS_TILES, reason="needs a CPU with tiles of bf16 (AMX)")
def test_more_rows_are_torchs_where_it_alone_multiplies_tiles(isa: str) -> None:
    """On vectors our own kernels are as fast up to 128 rows, and on tiles they are not."""
    script = """if True:
        import torch
        from stowage._ops import library
        from stowage._ops.storage import Storage
        key = Storage("nf4").key
        torch.manual_seed(0)
        codes, *scales = library.quantize(torch.randn(512, 4096), key)
        w = library.dequantize(codes, scales, key, (512, 4096), torch.bfloat16)
        x = torch.randn(128, 4096).bfloat16()
        alike = [torch.equal(library.linear(x[:m], codes, scales, key, 512, None),
                             torch.nn.functional.linear(x[:m], w)) for m in (64, 128)]
        print(alike)
    """
    told = (*tiles.NAMES, "STOWAGE_FORCE_ISA", "ATEN_CPU_CAPABILITY")
    environment = {k: v for k, v in os.environ.items() if k not in told}
    environment |= {"ONEDNN_MAX_CPU_ISA": isa} if isa else {}
    environment["STOWAGE_FORCE_ISA"] = "avx512bf16"
    done = subprocess.check_output([sys.executable, "-c", script], text=True, env=environment)
    assert done.split() == (["[False,", "False]"] if isa else ["[True,", "True]"])


@pytest.mark.skipif(stowage.info()["instruction_set"] != "amx", reason="no tiles are in use")
@pytest.mark.parametrize("name", ["nf4", "f8_e4m3:row"])
def test_by_tiles_a_row_is_the_same_among_any_others(name: str) -> None:
    torch.manual_seed(0)
    key = Storage(name).key
    codes, *scales = library.quantize(torch.randn(96, 2048), key)
    x = torch.randn(700, 2048).bfloat16()
    y = library.linear(x, codes, scales, key, 96, None)
    for m in (5, 16, 300):
        assert torch.equal(library.linear(x[:m], codes, scales, key, 96, None), y[:m])


@pytest.mark.parametrize("shape", [(96, 64), (50, 130)], ids=["96x64", "50x130"])
def test_error_bound(kind, compute, shape, device) -> None:
    rows, columns = shape
    codes, scales = weight(kind, rows, columns, device)
    w = library.dequantize(codes, scales, kind.key, shape, compute)
    bias = torch.randn(rows, device=device).to(compute)
    for m in BATCHES:
        x = torch.randn(m, columns, device=device).to(compute)
        y = library.linear(x, codes, scales, kind.key, rows, bias)
        bounded(y, F.linear(x, w, bias), x, w.t(), bias)
        g = torch.randn(m, rows, device=device).to(compute)
        gx = library.linear_grad_input(g, codes, scales, kind.key, columns)
        bounded(gx, g @ w, g, w, None)


@pytest.mark.parametrize("compute", COMPUTE[:2], ids=["f32", "bf16"])
def test_weights_of_several_tiles(compute, device) -> None:
    kind, rows, columns = Storage("f8_e4m3:row"), 1500, 2080
    codes, scales = weight(kind, rows, columns, device)
    assert rows * columns * 2 > 4 << 20
    w = library.dequantize(codes, scales, kind.key, (rows, columns), compute)
    x = torch.randn(40, columns, device=device).to(compute)
    bias = torch.randn(rows, device=device).to(compute)
    y = library.linear(x, codes, scales, kind.key, rows, bias)
    bounded(y, F.linear(x, w, bias), x, w.t(), bias)
    g = torch.randn(40, rows, device=device).to(compute)
    # The tiles cut these sums and each part is rounded to bf16: 1.5 times the dense error.
    bounded(library.linear_grad_input(g, codes, scales, kind.key, columns), g @ w, g, w, None)


@pytest.mark.parametrize("lead", [(), (3,), (2, 5), (40,)])
def test_exact_is_the_dense_product(kind, compute, lead, device, request) -> None:
    if compute == torch.bfloat16:
        request.getfixturevalue("kernels")
    codes, scales = weight(kind, 48, 64, device)
    w = library.dequantize(codes, scales, kind.key, (48, 64), compute)
    x = torch.randn(*lead, 64, device=device).to(compute)
    for bias in (None, torch.randn(48, device=device).to(compute)):
        y = library.linear(x, codes, scales, kind.key, 48, bias, True)
        assert torch.equal(y, F.linear(x, w, bias))
    g = torch.randn(*lead, 48, device=device).to(compute)
    wanted = torch.autograd.grad(F.linear(x.requires_grad_(), w), x, g)[0]
    assert torch.equal(library.linear_grad_input(g, codes, scales, kind.key, 64, True), wanted)


def test_more_than_two_leading_dimensions(device) -> None:
    kind = Storage("int8")
    codes, scales = weight(kind, 8, 16, device)
    x = torch.randn(2, 1, 3, 2, 16, device=device)
    y = library.linear(x, codes, scales, kind.key, 8, None)
    flat = library.linear(x.view(-1, 16), codes, scales, kind.key, 8, None)
    assert torch.equal(y.view(-1, 8), flat)


# --- threads -------------------------------------------------------------------------------------


@pytest.fixture
def on_threads():
    before = torch.get_num_threads()

    def run(count: int, call):
        torch.set_num_threads(count)
        return call()

    yield run
    torch.set_num_threads(before)


def test_casts_give_the_same_bytes_on_any_thread_count(storage, on_threads, values) -> None:
    kind = Storage(storage)
    x = values((515, 384), torch.bfloat16)
    ids = torch.arange(515).flip(0)

    def all_ops() -> list[Tensor]:
        codes, *scales = parts = library.quantize(x, kind.key)
        args = (codes, scales, kind.key, (515, 384), torch.bfloat16)
        return [*parts, library.dequantize(*args), library.embedding(ids, *args)]

    one, two, three = (on_threads(count, all_ops) for count in (1, 2, 3))
    for a, b, c in zip(one, two, three, strict=True):
        raw = [t.reshape(-1).view(torch.uint8) for t in (a, b, c)]
        assert torch.equal(raw[0], raw[1]) and torch.equal(raw[0], raw[2])


def test_own_kernels_give_the_same_bytes_on_any_thread_count(
    kind, compute, on_threads, kernels
) -> None:
    codes, scales = weight(kind, 512, 640, "cpu")
    for m in (1, 4, 16):
        x, g = torch.randn(m, 640).to(compute), torch.randn(m, 512).to(compute)

        def both(x=x, g=g) -> list[Tensor]:
            return [
                library.linear(x, codes, scales, kind.key, 512, None),
                library.linear_grad_input(g, codes, scales, kind.key, 640),
            ]

        for a, b in zip(on_threads(1, both), on_threads(2, both), strict=True):
            assert torch.equal(a, b)
