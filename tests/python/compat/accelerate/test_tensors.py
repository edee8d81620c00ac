# SPDX-License-Identifier: Apache-2.0
"""Sizes of values and files, tensors by name, ties."""

from __future__ import annotations

import pytest
import torch
from dispatched import Rooted, Small
from torch import nn

import stowage
from stowage.compat.accelerate.utils import modeling as ours


@pytest.mark.parametrize(
    ("text", "size"),
    [("0MB", 0), ("100MB", 10**8), ("2GB", 2 * 10**9), ("0.1GB", 10**8), ("16MiB", 2**24),
     ("12GIB", 12 * 2**30), ("8Gb", 10**9), ("5kb", 625), (7, 7)],
)  # fmt: skip
def test_file_sizes(text: str | int, size: int) -> None:
    assert ours.convert_file_size_to_int(text) == size
    peer = pytest.importorskip("accelerate.utils.modeling")
    assert peer.convert_file_size_to_int(text) == size


@pytest.mark.parametrize("text", ["5MBB", "5k0MB", "-1GB", -3, "GB", "1e999GB", None])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not in a valid format"):
        ours.convert_file_size_to_int(text)


def test_bytes_of_dtypes_beside_accelerate() -> None:
    peer = pytest.importorskip("accelerate.utils.modeling")
    names = "float64 float32 float16 bfloat16 complex64 int64 int32 int16 uint16 int8 uint8 bool "
    names += "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
    for dtype in (getattr(torch, name) for name in names.split()):
        assert ours.dtype_byte_size(dtype) == peer.dtype_byte_size(dtype), dtype
    assert ours.dtype_byte_size(torch.bool) == 1 / 8
    assert ours.dtype_byte_size(torch.uint4) == 1 / 2  # 0 in accelerate
    from accelerate.utils import CustomDtype

    for kind in CustomDtype:
        assert ours.dtype_byte_size(kind) == peer.dtype_byte_size(kind)
    with pytest.raises(ValueError, match="dtype"):
        ours.dtype_byte_size("float33")


def test_names_of_tensors() -> None:
    model = Rooted(8)
    own = ["scale", "shift", "phase"]
    assert [n for n, _ in ours.named_module_tensors(model)] == own
    assert [n for n, _ in ours.named_module_tensors(model, include_buffers=False)] == ["scale"]
    kept = ours.named_module_tensors(model, recurse=True, remove_non_persistent=True)
    assert {n for n, _ in kept} == set(model.state_dict()) - {"head.weight"}


def test_non_persistent_buffers_below_are_found_and_nothing_changes() -> None:
    model = nn.Sequential(Rooted(8), nn.BatchNorm1d(3))
    model.register_buffer("phase", torch.ones(1))  # persistent, of the same name as one that is not
    before = list(model.state_dict())
    assert ours.get_non_persistent_buffers(model) == set()
    assert ours.get_non_persistent_buffers(model, recurse=True) == {"phase"}
    assert ours.get_non_persistent_buffers(model, recurse=True, fqns=True) == {"0.phase"}
    kept = ours.named_module_tensors(model, recurse=True, remove_non_persistent=True)
    assert "phase" in dict(kept)
    assert list(model.state_dict()) == before
    assert model._non_persistent_buffers_set == set()


def test_tied_names_are_found_and_tied_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert ours.find_tied_parameters(model) == []
    model[2].weight = model[0].weight
    groups = ours.find_tied_parameters(model)
    assert groups == [["0.weight", "2.weight"]]
    model[0].weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    ours.retie_parameters(model, groups)
    assert model[0].weight is model[2].weight
    assert not model[0].weight.is_meta
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    ours.retie_parameters(model, groups)  # accelerate leaves two
    assert model[0].weight is model[2].weight


def test_size_with_ties() -> None:
    model = nn.ModuleList([nn.Linear(10, 10) for _ in range(15)])
    for layer in model:
        layer.weight = model[0].weight
    sizes = ours.compute_module_sizes(model)
    tied = [f"{i}.weight" for i in range(1, 15)]
    units = list(model.named_children())[1:]
    size, names, modules = ours.get_module_size_with_ties(tied, sizes["0"], sizes, units)
    assert size == 400 + 15 * 40
    assert names == [str(i) for i in range(1, 15)]  # "1" is not "10"
    assert modules == list(model)[1:]


@pytest.mark.parametrize("name", ["linear1.weight", "norm.running_mean"])
def test_tensors_are_set_by_name(name: str) -> None:
    model = Small()
    wanted = model.state_dict()[name].clone()
    ours.set_module_tensor_to_device(model, name, "meta")
    assert model.state_dict()[name].is_meta
    with pytest.raises(ValueError, match="we need a `value`"):
        ours.set_module_tensor_to_device(model, name, "cpu")
    ours.set_module_tensor_to_device(model, name, "cpu", value=wanted.double())
    assert torch.equal(model.state_dict()[name], wanted)
    ours.set_module_tensor_to_device(model, name, "cpu", value=wanted, dtype="float16")
    assert model.state_dict()[name].dtype == torch.float16
    ours.set_module_tensor_to_device(model.linear1, "bias", "cpu", value=torch.zeros(4))
    assert model.linear1.bias.requires_grad
    assert not model.linear1.bias.any()


def test_what_cannot_be_set() -> None:
    model = Small()
    with pytest.raises(ValueError, match=r"\[4, 3\], got a tensor of shape \[2, 2\]"):
        ours.set_module_tensor_to_device(model, "linear1.weight", "cpu", value=torch.zeros(2, 2))
    with pytest.raises(ValueError, match="wait"):
        ours.set_module_tensor_to_device(model, "linear1.wait", "cpu", value=torch.zeros(2, 2))


def test_a_resting_weight_stays_at_rest() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    stowage.stow(model, "int8")
    value = torch.randn(64, 64)
    ours.set_module_tensor_to_device(model, "0.weight", "cpu", value=value)
    assert model[0].weight.resting == stowage.quantize(value, "int8").resting
    assert torch.equal(model[0].weight.dequantize(), stowage.quantize(value, "int8").dequantize())
