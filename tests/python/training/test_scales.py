# SPDX-License-Identifier: Apache-2.0
"""The two scale rules defined again in plain Python, and torchao's own where it is installed."""

import math
import struct

import pytest
import torch
from torch import Tensor

from stowage.training.recipes import amax_of, amaxes, power_of_two, scale_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
EDGES = (0, 1, 2, 0x3FFFFF, 0x400000, 0x7FFFFE, 0x7FFFFF)
ALL = [e << 23 | m for e in range(256) for m in EDGES]
F32_MAX = struct.unpack("f", struct.pack("I", 0x7F7FFFFF))[0]


def floats(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def bits(x: Tensor) -> list[int]:
    return [b & 0xFFFFFFFF for b in x.view(torch.int32).flatten().tolist()]


def rounded(x: float) -> int:
    """Bits of a double rounded to fp32."""
    if math.isnan(x):
        return 0x7FC00000
    if math.isinf(x) or x >= F32_MAX * (1 + 2**-25):
        return 0x7F800000
    return struct.unpack("I", struct.pack("f", x))[0]


def torchao_rule(amax: float, most: float) -> int:
    return rounded(most / (amax if math.isnan(amax) else max(amax, 1e-12)))


def te_rule(amax: float, most: float) -> int:
    if amax == 0 or not math.isfinite(amax):
        return rounded(1.0)
    found = rounded(most / amax)
    return 0x7F7FFFFF if found == 0x7F800000 else found


@pytest.mark.parametrize("target", [E4M3, E5M2])
@pytest.mark.parametrize(("mode", "rule"), [("torchao", torchao_rule), ("te", te_rule)])
def test_every_exponent_with_every_edge_of_the_mantissa(
    mode: str, rule: object, target: torch.dtype
) -> None:
    amax = floats(ALL)
    found = bits(scale_of(amax, target, mode))
    for given, got in zip(amax.tolist(), found, strict=True):
        wanted = rule(given, LARGEST[target])  # type: ignore[operator]
        if wanted == 0x7FC00000:
            assert got & 0x7FFFFFFF > 0x7F800000, given
        else:
            assert got == wanted, (given, hex(got), hex(wanted))


TABLE = [  # amax, torchao, te (both e4m3)
    ("zero", 0x00000000, 0x57CBBA10, 0x3F800000),
    ("the smallest subnormal", 0x00000001, 0x57CBBA10, 0x7F7FFFFF),
    ("the smallest normal", 0x00800000, 0x57CBBA10, 0x7F7FFFFF),
    ("one", 0x3F800000, 0x43E00000, 0x43E00000),
    ("the largest half", 0x477FE000, 0x3BE01C04, 0x3BE01C04),
    ("the largest float", 0x7F7FFFFF, 0x03E00001, 0x03E00001),
    ("infinity", 0x7F800000, 0x00000000, 0x3F800000),
]


@pytest.mark.parametrize(("name", "amax", "torchao", "te"), TABLE, ids=[row[0] for row in TABLE])
def test_the_table_of_golden_bits(name: str, amax: int, torchao: int, te: int) -> None:
    assert [hex(b) for b in bits(scale_of(floats([amax]), E4M3, "torchao"))] == [hex(torchao)]
    assert [hex(b) for b in bits(scale_of(floats([amax]), E4M3, "te"))] == [hex(te)]


def test_nan_gives_nan_in_one_mode_and_one_in_the_other() -> None:
    assert scale_of(floats([0x7FC00000]), E4M3, "torchao").isnan().all()
    assert scale_of(floats([0x7FC00000]), E4M3, "te").tolist() == [1.0]


def test_te_gives_one_without_an_amax_and_halves_by_the_margin() -> None:
    amax = torch.tensor([0.0, math.inf, math.nan, 2.0])
    assert scale_of(amax, E4M3, "te", margin=3).tolist() == [1.0, 1.0, 1.0, 28.0]


def test_te_caps_an_infinite_scale_at_the_largest_value_of_the_source() -> None:
    tiny = floats([1])
    assert scale_of(tiny, E4M3, "te", source=torch.float16).tolist() == [65504.0]
    assert bits(scale_of(tiny, E4M3, "te")) == [0x7F7FFFFF]


def test_powers_of_two_are_exact_for_every_exponent() -> None:
    x = floats(ALL)
    for given, got in zip(x.tolist(), power_of_two(x).tolist(), strict=True):
        if given == 0 or not math.isfinite(given):
            assert got == given or (math.isnan(given) and math.isnan(got))
        else:
            assert got == 2.0 ** (math.frexp(given)[1] - 1), given
    with pytest.raises(ValueError, match="must be float32"):
        power_of_two(x.double())


def test_amax_of_nothing_is_zero_and_of_rows_keeps_their_dim() -> None:
    assert amax_of(torch.zeros(0, 3)).item() == 0
    assert amax_of(torch.zeros(0, 3), 1).shape == (0, 1)
    assert amax_of(torch.zeros(3, 0), 1).tolist() == [[0], [0], [0]]
    assert amax_of(torch.tensor([[1.0, -3.0], [2.0, 0.0]]), 0).tolist() == [[2, 3]]
    assert amax_of(torch.tensor([1.0, math.nan])).isnan()


@pytest.mark.parametrize("pow2", [False, True])
def test_the_installed_torchao_agrees(pow2: bool) -> None:
    peer = pytest.importorskip("torchao.float8.float8_utils", exc_type=ImportError)
    # Beyond this torchao's own log2 rounds up, the reason for masking bits.
    amax = floats([b for b in ALL if not pow2 or (b & 0x7FFFFF) not in (1, 2)])
    for target in (E4M3, E5M2):
        theirs = peer.amax_to_scale(amax, target, pow2)
        ours = scale_of(amax, target, "torchao", pow2=pow2)
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        assert same.float().mean() > (0.95 if pow2 else 0.9999), amax[~same]


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float32, torch.float16)]
)
def test_amaxes_of_many_are_those_of_each(dtypes: tuple[torch.dtype, ...]) -> None:
    values = [torch.randn(5, 7).to(dtype) for dtype in dtypes for _ in range(3)]
    values += [torch.zeros(0, 7, dtype=dtypes[0]), torch.full((2,), -0.0, dtype=dtypes[0])]
    values += [torch.tensor([1.0, x], dtype=dtypes[0]) for x in (-math.inf, math.nan)]
    found = amaxes(values)
    want = torch.stack([v.float().abs().amax() if v.numel() else torch.zeros(()) for v in values])
    assert torch.equal(found[:-1], want[:-1]) and found[-1].isnan()
    assert not found.signbit().any()
    assert amaxes([torch.zeros(0, 3)] * 2).tolist() == [0, 0]
