# SPDX-License-Identifier: Apache-2.0
"""StowedTensor as a parameter of stock modules: what it says, copies, files, dtypes, devices."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import stowage

STORAGES = [
    "f32",
    "bf16",
    "f16",
    "f8_e4m3",
    "f8_e5m2:row",
    "f8_e4m3:tensor",
    "int8",
    "int8:block16",
    "nf4",
    "fp4",
]
STORAGES += ["nf4:block32:nested"]


def parameter(storage: str = "nf4", dtype: torch.dtype = torch.float32) -> nn.Parameter:
    torch.manual_seed(0)
    w = stowage.quantize(torch.randn(48, 64), storage, compute_dtype=dtype)
    return nn.Parameter(w, requires_grad=False)


def same(a: Tensor, b: Tensor) -> bool:
    parts = zip(a.parts.items(), b.parts.items(), strict=True)
    return all(m == n and torch.equal(p, q) for (m, p), (n, q) in parts)


def saved(w: Tensor, **options: object) -> Tensor:
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **options)


@pytest.mark.parametrize("storage", STORAGES)
def test_says_what_it_is(storage: str) -> None:
    w = parameter(storage, torch.bfloat16)
    assert type(w) is stowage.StowedTensor and isinstance(w, nn.Parameter)
    assert w.resting == stowage.quantize(torch.randn(2, 64), storage).resting
    assert (w.dtype, w.shape, w.stride(), w.numel()) == (torch.bfloat16, (48, 64), (64, 1), 3072)
    assert next(iter(w.parts)) == "codes"
    assert w.nbytes_at_rest == sum(p.numel() * p.element_size() for p in w.parts.values())
    assert w.data_ptr() == 0 and "bytes at rest" in repr(w) and len(repr(w)) < 200
    assert w.dequantize().dtype == torch.bfloat16
    assert torch.equal(w.dequantize(), w.dequantize(torch.float32).to(torch.bfloat16))
    assert torch.equal(torch.tensor(w.tolist()), w.dequantize().float())


def test_says_so_where_sizes_are_symbols_too() -> None:
    """What torch's logs print of a graph; nothing is asked of the sizes."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    w = mode.from_tensor(stowage.quantize(torch.randn(48, 64), "nf4"))
    with mode:
        view = w.T
    rows, columns = w.shape
    assert f"StowedTensor([{rows}, {columns}], 'nf4:block64'" in repr(w)
    assert "bytes at rest" in repr(w) and "t of StowedTensor" in repr(view)
    assert mode.shape_env is not None and mode.shape_env.guards == []
    prepared = stowage.sharding.prepare(stowage.quantize(torch.randn(48, 64), "nf4"))
    shard = mode.from_tensor(prepared.chunk(2)[1].clone())
    assert repr(shard).startswith(f"StowedRows([{shard.shape[0]}, 64] of [48, 64]")


def test_nbytes_at_rest_of_nf4() -> None:
    assert parameter("nf4").nbytes_at_rest == 48 * 64 // 2 + 48 * 4
    assert parameter("int8").nbytes_at_rest == 48 * 64 + 48 * 4


COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda w: pickle.loads(pickle.dumps(w)),
    "torch.save": saved,
    "accelerate": lambda w: type(w)(w.to("cpu"), requires_grad=w.requires_grad),
}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("copied", COPIES)
def test_copies_are_parameters_with_the_same_bytes(copied: str, storage: str) -> None:
    w = parameter(storage, torch.bfloat16)
    w.note = "kept"  # type: ignore[attr-defined]
    got = COPIES[copied](w)
    assert type(got) is stowage.StowedTensor and isinstance(got, nn.Parameter)
    assert same(got, w) and got.dtype == w.dtype and not got.requires_grad
    if copied != "accelerate":
        assert got.note == "kept"  # type: ignore[attr-defined]
        got.data.zero_()
        assert not torch.equal(w.dequantize(), got.dequantize())


def test_plain_value_for_a_stowed_parameter_stays_a_parameter() -> None:
    value = torch.randn(3, 4)  # what accelerate loads from its offload folder
    got = stowage.StowedTensor(value, requires_grad=False)
    assert type(got) is nn.Parameter and torch.equal(got, value)


def test_deepcopy_and_pickle_keep_ties_and_gradients() -> None:
    a, b = nn.Linear(64, 48, bias=False), nn.Embedding(48, 64)
    a.weight = b.weight = parameter()
    model = nn.ModuleList([a, b])
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to(torch.half)):
        assert copied[0].weight is copied[1].weight
    trained = nn.Parameter(stowage.quantize(torch.randn(4, 8), "int8"))
    trained.grad = torch.ones(4, 8)
    twin = copy.deepcopy(trained)
    assert twin.requires_grad and torch.equal(twin.grad, trained.grad)


def test_saved_whole_module_and_mapped_load(tmp_path: object) -> None:
    layer = nn.Linear(64, 48)
    layer.weight = parameter()
    path = f"{tmp_path}/layer.pt"
    torch.save(layer.state_dict(), path)
    state = torch.load(path, mmap=True, weights_only=True)
    assert same(state["weight"], layer.weight)
    assert torch.load(path, map_location="meta", weights_only=True)["weight"].is_meta
    torch.save(layer, path)
    assert same(torch.load(path, weights_only=False).weight, layer.weight)


@pytest.mark.parametrize("storage", STORAGES)
def test_state_dicts_convert(storage: str) -> None:
    plain, stowed = nn.Linear(64, 48), nn.Linear(64, 48)
    stowed.weight = parameter(storage)
    stowed.load_state_dict(plain.state_dict())  # float -> stowed
    assert same(stowed.weight, stowage.quantize(plain.weight.detach(), storage))
    other = nn.Linear(64, 48)
    other.load_state_dict(stowed.state_dict())  # stowed -> plain
    assert type(other.weight) is nn.Parameter
    assert torch.equal(other.weight, stowed.weight.dequantize())
    twin, codes = copy.deepcopy(stowed), stowed.weight.parts["codes"]
    twin.weight.data.zero_()
    twin.load_state_dict(stowed.state_dict())  # stowed -> stowed
    assert same(twin.weight, stowed.weight)
    assert stowed.weight.parts["codes"] is codes
    twin.load_state_dict(stowed.state_dict(), assign=True)
    assert not twin.weight.requires_grad and same(twin.weight, stowed.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        stowed.load_state_dict(nn.Linear(64, 40).state_dict())


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn]
)
def test_parameter_stays_stowed_and_changes_compute_dtype(dtype: torch.dtype) -> None:
    layer, w = nn.Linear(64, 48), parameter()
    layer.weight = w
    layer.to(dtype)
    assert type(layer.weight) is stowage.StowedTensor and isinstance(layer.weight, nn.Parameter)
    assert layer.weight.dtype == dtype and same(layer.weight, parameter())
    values = parameter().dequantize().to(dtype)
    assert torch.equal(layer.weight.dequantize().view(torch.uint8), values.view(torch.uint8))


def test_tensor_that_is_no_parameter_becomes_plain() -> None:
    w = parameter(dtype=torch.bfloat16).data
    for got in (w.float(), w.to(torch.float32), w.half(), w.double(), w.to(torch.int32)):
        assert type(got) is Tensor
    assert torch.equal(w.float(), w.dequantize(torch.float32))
    assert w.to(torch.bfloat16) is w and type(w.to("meta")) is stowage.StowedTensor
    assert type(w.clone()) is stowage.StowedTensor and same(w.clone(), w)


def test_moves() -> None:
    layer = nn.Linear(64, 48)
    layer.weight = parameter("nf4:block32:nested")
    layer.to("meta")
    assert layer.weight.is_meta and all(p.is_meta for p in layer.weight.parts.values())
    layer.to_empty(device="cpu")
    assert type(layer.weight) is stowage.StowedTensor and layer.weight.device.type == "cpu"
    assert layer.weight.cpu() is layer.weight
    assert not layer.weight.is_pinned()


def test_double_computes_by_dequantizing() -> None:
    layer = nn.Linear(64, 48)
    layer.weight = parameter()
    layer.double()
    x = torch.randn(3, 64, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    values = parameter().dequantize(torch.float64)
    assert torch.equal(y, nn.functional.linear(x, values, layer.bias))
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 48, dtype=torch.float64) @ values)


BAD = {
    "dtype": lambda w: stowage.StowedTensor(w.parts, w.resting, w.shape, torch.int32),
    "count": lambda w: stowage.StowedTensor([w.parts["codes"]], "nf4", w.shape, torch.float32),
    "shape": lambda w: stowage.StowedTensor(w.parts, w.resting, (48, 65), torch.float32),
    "storage": lambda w: stowage.StowedTensor(w.parts, "nf5", w.shape, torch.float32),
    "missing": lambda w: stowage.StowedTensor(w.parts, "nf4"),
    "one tensor": lambda w: stowage.StowedTensor(w.parts["codes"], "nf4"),
}


@pytest.mark.parametrize("case", BAD)
def test_constructor_refuses(case: str) -> None:
    with pytest.raises(stowage.InvalidArgument):
        BAD[case](parameter())


def test_constructor_takes_parts() -> None:
    w = parameter("nf4:block32:nested")
    assert same(stowage.StowedTensor(w.parts, w.resting, w.shape, torch.float32), w)
    assert same(stowage.StowedTensor(list(w.parts.values()), w.resting, w.shape, w.dtype), w)
