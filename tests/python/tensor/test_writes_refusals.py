# SPDX-License-Identifier: Apache-2.0
"""Writes to stowed weights that cannot be carried out: an error, and nothing changed."""

import mmap
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage

PLAIN = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))


def parameter(storage: str = "nf4", trained: bool = False) -> nn.Parameter:
    return nn.Parameter(stowage.quantize(PLAIN, storage), requires_grad=trained)


REFUSED: dict[str, Callable[[Tensor], object]] = {
    "resize_": lambda w: w.data.resize_(3),
    "resize_as_": lambda w: w.data.resize_as_(torch.zeros(3)),
    "t_": lambda w: w.data.t_(),
    "unsqueeze_": lambda w: w.data.unsqueeze_(0),
    "squeeze_": lambda w: w.data[0:1].squeeze_(0),
    "set_": lambda w: w.data.set_(torch.zeros(3)),
    "out of a wrong shape": lambda w: torch.add(torch.zeros(3), 1, out=w.data),
    "data = of integers": lambda w: setattr(w, "data", torch.zeros(16, 64, dtype=torch.int32)),
    "data of a view =": lambda w: setattr(w.data[0], "data", torch.zeros(64)),
    "data of a slice =": lambda w: setattr(w.data[0:2], "data", torch.zeros(2, 64)),
    "NaN": lambda w: w.data.fill_(float("nan")),
    "one infinity": lambda w: w.data.__setitem__((3, 4), float("inf")),
    "batch_norm": lambda w: F.batch_norm(torch.randn(3, 64), w.data[0], w.data[1], training=True),
    "small add_": lambda w: w.data.add_(1e-6),
    "small sub_": lambda w: w.data.sub_(torch.ones(16, 64), alpha=1e-6),
    "small row add_": lambda w: w.data[3].add_(1e-6),
    "small _foreach_add_": lambda w: torch._foreach_add_([w.data], 1e-6),
    "small add out": lambda w: torch.add(w.data, 1e-6, out=w.data),
    "small index_put_": lambda w: w.data.index_put_(
        (torch.tensor([1, 3]),), 1e-6 * torch.ones(2, 64), accumulate=True
    ),
    "small index_add_": lambda w: w.data.index_add_(
        0, torch.tensor([1, 3]), 1e-6 * torch.ones(2, 64)
    ),
    "small scatter_": lambda w: w.data.scatter_(
        0, torch.tensor([[1, 3]]), 1e-6 * torch.ones(1, 2), reduce="add"
    ),
    "numpy": lambda w: w.data.numpy(),
    "asarray": lambda w: np.asarray(w.data),
    "from_dlpack": lambda w: torch.from_dlpack(w.data),
    "memoryview": lambda w: memoryview(w.data),
    "map_": lambda w: w.data.map_(torch.zeros(16, 64), lambda a, b: b),
    "apply_": lambda w: w.data.apply_(lambda v: 0),
    "storage fill_": lambda w: w.data.untyped_storage().fill_(0),
    "storage copy_": lambda w: w.untyped_storage().copy_(torch.zeros(16, 64).untyped_storage()),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("storage", ["nf4", "int8", "f8_e4m3:tensor", "nf4:block64:nested"])
@pytest.mark.parametrize("form", REFUSED)
def test_refused_with_nothing_changed(form: str, storage: str) -> None:
    w = parameter(storage)
    with pytest.raises((RuntimeError, TypeError)):
        REFUSED[form](w)
    assert torch.equal(w.dequantize(), parameter(storage).dequantize())


TORCHS = ("memoryview", "map_", "apply_", "storage fill_", "storage copy_")


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("form", [form for form in REFUSED if form not in TORCHS])
def test_the_error_is_ours(form: str) -> None:
    w = parameter()
    with pytest.raises(stowage.StowageError):
        REFUSED[form](w)


def small(*shape: int) -> Tensor:
    return torch.full(shape, 1e-6)


# Each changes values of about 1 to 4 by about 1e-6, which no storage of 8 bits can hold.
SWALLOWED: dict[str, Callable[[Tensor], object]] = {
    "add_": lambda w: w.add_(1e-6),
    "sub_": lambda w: w.sub_(1e-6),
    "subtract_": lambda w: w.subtract_(1e-6),
    "mul_": lambda w: w.mul_(1 + 1e-6),
    "multiply_": lambda w: w.multiply_(1 + 1e-6),
    "div_": lambda w: w.div_(1 + 1e-6),
    "divide_": lambda w: w.divide_(1 + 1e-6),
    "true_divide_": lambda w: w.true_divide_(1 + 1e-6),
    "pow_": lambda w: w.pow_(1 + 1e-6),
    "nextafter_": lambda w: w.nextafter_(torch.tensor(9.0)),
    "lerp_": lambda w: w.lerp_(w + 1, 1e-6),
    "addcmul_": lambda w: w.addcmul_(small(4, 4), w.dequantize()),
    "addcdiv_": lambda w: w.addcdiv_(small(4, 4), torch.ones(4, 4)),
    "addmm_": lambda w: w.addmm_(small(4, 4), torch.eye(4)),
    "addmv_": lambda w: w[0].addmv_(small(4, 4), torch.ones(4)),
    "addr_": lambda w: w.addr_(small(4), torch.ones(4)),
    "addbmm_": lambda w: w.addbmm_(small(2, 4, 4), torch.ones(2, 4, 4)),
    "baddbmm_": lambda w: w[None].baddbmm_(small(1, 4, 4), torch.ones(1, 4, 4)),
    "index_add_": lambda w: w.index_add_(0, torch.arange(4), small(4, 4)),
    "index_reduce_": lambda w: w.index_reduce_(0, torch.arange(4), 1 + small(4, 4), "prod"),
    "scatter_add_": lambda w: w.scatter_add_(0, torch.zeros(1, 4).long(), small(1, 4)),
    "scatter_reduce_": lambda w: w.scatter_reduce_(0, torch.zeros(1, 4).long(), small(1, 4), "sum"),
    "put_": lambda w: w.put_(torch.arange(4), small(4), accumulate=True),
    "_foreach_addcmul_": lambda w: torch._foreach_addcmul_([w], [small(4, 4)], [w.dequantize()]),
    "_foreach_lerp_": lambda w: torch._foreach_lerp_([w], [w.dequantize() + 1], 1e-6),
    "_foreach_pow_": lambda w: torch._foreach_pow_([w], 1 + 1e-6),
    "mul out=": lambda w: torch.mul(w, 1 + 1e-6, out=w),
    "pow out=": lambda w: torch.pow(w, 1 + 1e-6, out=w),
}


def coarse() -> Tensor:
    """Casts to f8_e4m3, whose steps are 1/8 of a value."""
    return stowage.quantize(1 + torch.arange(16.0).view(4, 4) / 8, "f8_e4m3")


@pytest.mark.parametrize("form", SWALLOWED)
def test_what_rounding_would_swallow_is_refused(form: str) -> None:
    w = coarse()
    with pytest.raises(stowage.Unsupported, match="rounding step"):
        SWALLOWED[form](w)


def test_a_running_sum_that_rounding_would_swallow_is_refused() -> None:
    w = stowage.quantize(torch.tensor([[1.0, 256.0]]), "f8_e4m3")
    with pytest.raises(stowage.Unsupported, match="rounding step"):
        w.cumsum_(1)  # 257 is 256


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_optimizers_are_refused(kind: type, options: dict[str, bool]) -> None:
    layer = nn.Linear(64, 16)
    layer.weight = parameter("int8", trained=True)
    layer(torch.randn(3, 64)).sum().backward()
    assert type(layer.weight.grad) is Tensor
    with pytest.raises(stowage.Unsupported, match="train a stowed weight in place"):
        kind([layer.weight], lr=1e-2, **options).step()
    assert torch.equal(layer.weight.dequantize(), parameter("int8").dequantize())


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w[0:2], lambda w: w[:, 0]])
@torch.no_grad()
def test_what_is_trained_is_refused_through_any_view(view: Callable[[Tensor], Tensor]) -> None:
    w, frozen = parameter("int8", trained=True), parameter("int8").data
    early = view(frozen)
    frozen.requires_grad_()
    alone = view(parameter("int8").data).requires_grad_()
    for t in (view(w), view(frozen), early, alone):
        with pytest.raises(stowage.Unsupported, match="train a stowed weight in place"):
            t.add_(1)
    for each in (w, frozen):
        assert torch.equal(each.dequantize(), parameter("int8").dequantize())
        view(each).fill_(0.5)  # which loses no step
        assert torch.allclose(view(each).dequantize(), torch.tensor(0.5), atol=0.02)


@pytest.mark.parametrize("storage", ["int8", "nf4"])
def test_data_of_another_shape_is_taken_if_the_storage_holds_it(storage: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn):
        w, values = parameter(storage), torch.randn(24, 64).to(dtype)
        with pytest.raises(stowage.InvalidArgument, match="must be floating"):
            w.data = values.int()
        w.data = values
        wanted = stowage.quantize(values.float(), storage).dequantize()
        assert w.dtype == dtype and torch.equal(w.dequantize(torch.float32), wanted)


def test_data_of_a_shape_that_the_storage_cannot_hold_is_refused() -> None:
    w = nn.Parameter(stowage.quantize(torch.randn(256, 64), "nf4:torchao"), requires_grad=False)
    before = w.dequantize()
    with pytest.raises(stowage.InvalidArgument, match=r"\.data: a weight .*got \[256, 65\]"):
        w.data = torch.randn(256, 65)
    assert torch.equal(w.dequantize(), before)
    w.data = torch.randn(512, 64)
    assert w.shape == (512, 64)


def test_a_result_that_is_near_what_was_there_is_no_step() -> None:
    w = parameter("int8")
    values = w.dequantize() + 1e-6
    torch.add(values, 1e-6, out=w.data)
    assert torch.allclose(w.dequantize(), values, atol=1e-5)
    with pytest.raises(stowage.Unsupported, match="rounding step"):
        torch.add(w.data, 1e-6, out=w.data)


NORMS: dict[str, Callable[[Tensor, Tensor, Tensor], object]] = {
    **{
        name: lambda x, mean, var, name=name: getattr(torch.ops.aten, name)(
            x, None, None, mean, var, True, 0.1, 1e-5
        )
        for name in ("native_batch_norm", "_native_batch_norm_legit")
    },
    **{
        name: lambda x, mean, var, name=name: getattr(torch.ops.aten, name)(
            x, x[0], None, mean, var, True, 0.1, 1e-5
        )
        for name in ("cudnn_batch_norm", "miopen_batch_norm")
    },
    "batch_norm": lambda x, mean, var: F.batch_norm(x, mean, var, training=True),
    "by name": lambda x, mean, var: F.batch_norm(
        x, running_mean=mean, running_var=var, training=True
    ),
    "update_stats": lambda x, mean, var: torch.batch_norm_update_stats(x, mean, var, 0.1),
}


@pytest.mark.parametrize("form", NORMS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_running_statistics_are_never_lost(form: str, mode: Callable[[], object]) -> None:
    """Their schemas do not say that they write; each of the two may rest."""
    w, plain = parameter("int8"), torch.ones(64)
    for given in ((w.data[0], plain), (plain, w.data[0])):
        with pytest.raises(stowage.Unsupported, match="running statistics"), mode():  # type: ignore[attr-defined]
            NORMS[form](torch.randn(3, 64), *given)
    assert torch.equal(plain, torch.ones(64))
    assert torch.equal(w.dequantize(), parameter("int8").dequantize())


def test_a_write_through_an_alias_is_seen_in_both() -> None:
    w, alias = parameter("int8"), parameter("int8")
    alias.data = w
    before = w._version
    alias.fill_(0.5)
    assert w._version > before and torch.allclose(w.dequantize(), torch.tensor(0.5))


def test_a_plain_tensor_may_take_the_shape() -> None:
    w, plain = parameter(), torch.zeros(16 * 64)
    assert plain.resize_as_(w).shape == w.shape


def test_same_values_may_always_be_written() -> None:
    for storage in ("nf4", "int8", "nf4:block64:nested", "f8_e4m3:tensor"):
        w = parameter(storage)
        codes = w.parts["codes"].clone()
        w.data.copy_(w.dequantize())
        w.data[3] = w.data[3].clone()
        w.data.add_(0.0)
        assert torch.equal(w.parts["codes"], codes)


def mapped(path: Path, storage: str) -> tuple[nn.Parameter, Tensor]:
    """A parameter on a file that is mapped read-only, and its values."""
    w = stowage.quantize(PLAIN, storage)
    path.write_bytes(b"".join(p.numpy().tobytes() for p in w.parts.values()))
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    parts, at = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch cannot know that nobody writes to it
        for part in w.parts.values():
            flat = torch.frombuffer(memory, dtype=part.dtype, count=part.numel(), offset=at)
            parts.append(flat.view(part.shape))
            at += part.nbytes
    stowed = stowage.StowedTensor(parts, storage, w.shape, w.dtype)
    return nn.Parameter(stowed, requires_grad=False), w.dequantize()


@pytest.mark.parametrize("storage", ["f8_e4m3", "int8", "nf4", "nf4:block64:nested"])
def test_mapped_weight_is_copied_before_a_write(storage: str, tmp_path: Path) -> None:
    w, values = mapped(tmp_path / "weights", storage)
    before = (tmp_path / "weights").read_bytes()
    alias, rows, column = w.data, w.data[2:5], w.data[:, 7]
    assert torch.equal(w.dequantize(), values)
    w.data[2:5].zero_()
    values[2:5] = 0
    for seen, wanted in ((w, values), (alias, values), (rows, values[2:5]), (column, values[:, 7])):
        assert torch.equal(seen.dequantize(), wanted)
    rows.copy_(0.9 * PLAIN[8:11])
    assert torch.equal(alias.dequantize(), w.dequantize())
    assert (alias.dequantize()[2:5] - 0.9 * PLAIN[8:11]).norm() < 0.2 * PLAIN[8:11].norm()
    assert (tmp_path / "weights").read_bytes() == before


@pytest.mark.parametrize("storage", ["int8", "nf4"])
def test_mapped_weight_takes_a_state_dict(storage: str, tmp_path: Path) -> None:
    layer = nn.Linear(64, 16, bias=False)
    layer.weight, _ = mapped(tmp_path / "weights", storage)
    layer.load_state_dict({"weight": stowage.quantize(-PLAIN, storage)})
    assert torch.equal(layer.weight.dequantize(), stowage.quantize(-PLAIN, storage).dequantize())


def test_slice_of_codes_that_moved_is_stale() -> None:
    w = parameter("int8")
    rows = w.data[2:4]
    codes = w.parts["codes"]
    codes.data = codes.clone()
    with pytest.raises(stowage.Unsupported, match="stale"):
        rows.zero_()
