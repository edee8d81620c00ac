# SPDX-License-Identifier: Apache-2.0
"""Weights that other tools wrote mean what their owners' decoders say, by kernels and composite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from stowage._ops import composite, library
from stowage._ops.storage import Storage

FILES = sorted((Path(__file__).parent / "owners").glob("*.safetensors"))


def owned(path: Path) -> tuple[Storage, Tensor, list[Tensor], Tensor]:
    with safe_open(path, "pt") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        storage = Storage(file.metadata()["storage"])
    scales = [parts[name] for name in storage.part_names[1:]]
    return storage, parts["codes"], scales, parts["expected"]


def test_the_rule_of_modelopt_gives_its_bytes() -> None:
    path = Path(__file__).parent / "owners" / "nvfp4.safetensors"
    storage, codes, scales, _ = owned(path)
    with safe_open(path, "pt") as file:
        given = file.get_tensor("values")
    for ops in (library, composite):
        for values in (given, given.float()):
            assert all(map(torch.equal, ops.quantize(values, storage.key), [codes, *scales]))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def owner(request: pytest.FixtureRequest) -> Iterator[tuple[Storage, Tensor, list[Tensor], Tensor]]:
    yield owned(request.param)


def test_there_is_a_file_for_each_kind_of_scale() -> None:
    kinds = {(s.kind, s.scale_type) for s, *_ in map(owned, FILES)}
    assert kinds >= {("block", "e8m0"), ("block2", "f32"), ("block2", "e8m0")}
    assert kinds >= {(kind, "bf16") for kind in ("tensor", "row", "block2")}


@pytest.mark.parametrize("ops", [library, composite], ids=["kernels", "composite"])
def test_values_are_the_owners(owner, ops) -> None:
    storage, codes, scales, expected = owner
    shape = list(expected.shape)
    got = ops.dequantize(codes, scales, storage.key, shape, expected.dtype)
    assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
    ids = torch.tensor([shape[0] - 1, 0, 5])
    rows = ops.embedding(ids, codes, scales, storage.key, shape, expected.dtype)
    assert torch.equal(rows, expected[ids])


def by_powers(storage: Storage) -> bool:
    """Whether quantizing its values gives them back: other rules divide, and round the quotient."""
    return storage.powers == "floor" and storage.scale_type == "e8m0"


@pytest.mark.parametrize("path", [p for p in FILES if by_powers(owned(p)[0])], ids=lambda p: p.stem)
@pytest.mark.parametrize("ops", [library, composite], ids=["kernels", "composite"])
def test_the_rule_of_microscaling_gives_their_values_back(path, ops) -> None:
    storage, _, _, expected = owned(path)
    parts = ops.quantize(expected, storage.key)
    args = (storage.key, list(expected.shape), expected.dtype)
    assert torch.equal(ops.dequantize(parts[0], parts[1:], *args), expected)


def test_products_in_both_directions(owner) -> None:
    storage, codes, scales, expected = owner
    rows, columns = expected.shape
    weight = expected.double()
    for m in (1, 3, 40):
        x, g = torch.randn(m, columns), torch.randn(m, rows)
        y = library.linear(x, codes, scales, storage.key, rows, None)
        gx = library.linear_grad_input(g, codes, scales, storage.key, columns)
        for got, a, w in ((y, x, weight.t()), (gx, g, weight)):
            # bf16 values of the f32 product: the owner rounds once more than an fp32 product does.
            bound = (2**-8 + 2**-20) * (a.double().abs() @ w.abs())
            assert ((got.double() - a.double() @ w).abs() <= bound).all()


def test_quantizing_the_values_again_gives_them_back(owner) -> None:
    storage, *_, expected = owner
    if storage.scale_type != "e8m0":
        return  # other scales are those of rounded values
    codes, *scales = library.quantize(expected, storage.key)
    again = library.dequantize(codes, scales, storage.key, expected.shape, expected.dtype)
    assert torch.equal(again, expected)
