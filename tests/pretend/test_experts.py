# SPDX-License-Identifier: Apache-2.0
"""Mixtures that compute on a device while their experts rest elsewhere: each comes by itself."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_models import IDS, build
from pretend_device import counted, speeds, times
from torch import nn
from torch.nn import functional as F

import stowage
from stowage._tiers.device.ring import DeviceTier, unit_bytes

DEVICE = torch.device("pretend:0")
EXPERTS, WIDTH, HIDDEN = 12, 96, 64
STORAGES = [None, "int8:row2", "f8_e4m3:block32", "nf4"]


class Mixture(nn.Module):
    """Two stacks, one after the other, and a weight that all tokens use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 8, requires_grad=False)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 8, requires_grad=False)
        self.way = "grouped"

    def forward(self, x: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        x = self.dense(x)
        if self.way == "rows":
            return torch.bmm(self.down[picked], torch.bmm(self.up[picked], x[:, :, None]))[..., 0]
        ends = torch.bincount(picked, minlength=EXPERTS).cumsum(0).to(torch.int32)
        if self.way == "grouped":
            return stowage.grouped_linear(stowage.grouped_linear(x, self.up, ends), self.down, ends)
        begin, found = 0, []
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                found.append(F.linear(F.linear(x[begin:end], self.up[expert]), self.down[expert]))
            begin = end
        return torch.cat(found)


def made(storage: str | None) -> Mixture:
    model = Mixture().eval()
    if storage:
        stowage.stow(model, rules={"up": storage, "down": storage, "dense": "int8"})
    return model


def asked(picked: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(len(picked), WIDTH).to(DEVICE), torch.tensor(sorted(picked)).to(DEVICE)


def there(model: Mixture, picked: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = copy.deepcopy(model).to(DEVICE)(*asked(picked)).cpu()
        return found


def room_of_one(stack: Any) -> int:
    """Bytes of a matrix in the ring."""
    parts = list(stack.parts.values()) if isinstance(stack, stowage.StowedTensor) else [stack]
    each = [torch.empty(part.nbytes // EXPERTS, dtype=torch.uint8) for part in parts]
    return unit_bytes(each)


def told(model: nn.Module) -> stowage.DeviceReport:
    found = stowage.engine_report(model).device
    assert found is not None
    return found


@pytest.mark.parametrize("way", ["grouped", "loop", "rows"])
@pytest.mark.parametrize("storage", STORAGES)
def test_only_routed_experts_come_and_they_stay(storage: str | None, way: str) -> None:
    model = made(storage)
    model.way = way
    wanted = there(model, [1, 5, 5, 9])
    each = room_of_one(model.up) + room_of_one(model.down)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator="8MiB")
        assert torch.equal(model(*asked([1, 5, 5, 9])).cpu(), wanted)
        dense = unit_bytes([model.dense.weight] if storage is None else _parts(model.dense.weight))
        first = told(model)
        assert first.bytes_copied <= dense + 3 * each
        assert torch.equal(model(*asked([1, 5, 5, 9])).cpu(), wanted)
        assert told(model).bytes_copied == first.bytes_copied
        model(*asked([1, 2]))
        assert told(model).bytes_copied - first.bytes_copied <= each
        assert told(model).evicted == 0


def _parts(weight: Any) -> list[torch.Tensor]:
    return list(weight.parts.values())


@pytest.mark.parametrize("storage", STORAGES)
def test_in_a_ring_of_less_than_a_stack(storage: str | None) -> None:
    """Also of more experts than have room."""
    model = made(storage)
    one = max(room_of_one(model.up), room_of_one(model.down))
    dense = stowage.nbytes(model.dense.weight) + 512
    every = [[3, 7], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [7], [3, 7, 11]]
    wanted = [there(model, picked) for picked in every]
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=dense + 5 * one)
        assert told(model).ring < stowage.nbytes(model.up)
        for _ in range(2):
            for picked, found in zip(every, wanted, strict=True):
                assert torch.equal(model(*asked(picked)).cpu(), found)
        assert told(model).peak <= told(model).ring
        assert told(model).evicted > 0


def test_a_ring_must_hold_a_matrix() -> None:
    class Large(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, 256, WIDTH), requires_grad=False)

    model = Large().eval()
    stowage.stow(model, rules={"up": "int8:row2", "down": "int8:row2", "dense": "int8"})
    one = room_of_one(model.up)
    with counted():
        with pytest.raises(stowage.InvalidArgument, match=f"the largest weight, up of {one}, got"):
            stowage.offload(model, device=DEVICE, accelerator=one - 1)
        stowage.offload(model, device=DEVICE, accelerator=one)


def copies_of_matrices(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of those that begin from now on."""
    found, copy_it = [], DeviceTier._copy

    def noted(tier: DeviceTier, unit: Any, *rest: Any) -> None:
        if unit.is_matrix:
            found.append(unit.size)
        copy_it(tier, unit, *rest)

    monkeypatch.setattr(DeviceTier, "_copy", noted)
    return found


def test_dense_weights_beyond_the_ring_leave_room_for_experts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A quarter of the ring, which they stream through otherwise."""

    class Deep(Mixture):
        def __init__(self) -> None:
            super().__init__()
            every = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(24)]
            self.before = nn.Sequential(*every)

        def forward(self, x: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
            return super().forward(self.before(x), picked)

    model = Deep().eval()
    rules = {"up": "int8:row2", "down": "int8:row2", "dense": "int8", "before.*": "int8"}
    stowage.stow(model, rules=rules)
    wanted = there(model, [1, 2, 3])
    size = room_of_one(model.up) + room_of_one(model.down)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=16 * size)
        for _ in range(3):
            model(*asked([1, 2, 3]))
        dense = sum(unit_bytes(_parts(layer.weight)) for layer in model.before) + _dense(model)
        assert told(model).ring == 16 * size < dense
        copied = copies_of_matrices(monkeypatch)
        for _ in range(4):
            assert torch.equal(model(*asked([1, 2, 3])).cpu(), wanted)
        assert not copied


def test_a_stack_that_is_used_whole_says_what_it_needs() -> None:
    model = made("int8:row2")
    one = room_of_one(model.up)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=16384 + 2 * one)
        with pytest.raises(stowage.OutOfMemory, match="must hold a weight of"):
            torch.bmm(torch.ones(EXPERTS, 1, WIDTH, device=DEVICE), model.up.mT)
        model(*asked([1]))


def test_what_comes_is_not_in_the_way_of_itself() -> None:
    """A ring of six: of three experts that come, those that are here stay, others leave."""
    model = made("int8:row2")
    one = max(room_of_one(model.up), room_of_one(model.down))
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=_dense(model) + 6 * one)
        model(*asked([9, 10, 11]))
        before = told(model)
        model(*asked([1, 10, 11]))
        assert told(model).evicted - before.evicted == 2
        assert told(model).bytes_copied - before.bytes_copied <= 2 * one
        assert told(model).misses == before.misses  # copies had begun


def _dense(model: Mixture) -> int:
    return unit_bytes(_parts(model.dense.weight))


def test_a_prompt_leaves_room_for_each_stack() -> None:
    """All of the first stack would fill the ring."""
    model = made("int8:row2")
    size = room_of_one(model.up) + room_of_one(model.down)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=_dense(model) + 5 * size)
        model(*asked(range(EXPERTS)))
        model(*asked([1, 2, 3]))
        before = told(model)
        for _ in range(3):
            model(*asked([1, 2, 3]))
        assert told(model).bytes_copied == before.bytes_copied


def test_where_all_are_used_a_part_stays() -> None:
    """What was used longest ago is what comes next, then."""
    model = made("int8:row2")
    size = room_of_one(model.up) + room_of_one(model.down)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=_dense(model) + EXPERTS // 2 * size)
        for _ in range(3):
            model(*asked(range(EXPERTS)))
        before = told(model)
        for _ in range(4):
            model(*asked(range(EXPERTS)))
        copied = told(model).bytes_copied - before.bytes_copied
        assert 0 < copied / 4 <= 0.6 * EXPERTS * size


def test_a_prompt_leaves_what_is_used_most() -> None:
    model = made("int8:row2")
    size = room_of_one(model.up) + room_of_one(model.down)
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator=_dense(model) + EXPERTS // 2 * size)
        for _ in range(8):
            model(*asked([2, 7]))
        model(*asked(range(EXPERTS)))
        before = told(model)
        model(*asked([2, 7]))
        assert told(model).bytes_copied == before.bytes_copied


def test_the_second_stack_comes_with_the_first() -> None:
    model = made("int8:row2")
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator="8MiB")
        model(*asked([1, 2]))
        before = told(model)
        model(*asked([3, 4]))
        assert told(model).ahead - before.ahead == 4
        assert told(model).misses == before.misses


def test_nothing_is_in_the_way_of_who_swaps_weights() -> None:
    model = made("int8:row2")
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator="8MiB")
        for picked in ([1, 2], [2, 3]):
            model(*asked(picked))
        other = made("int8:row2")
        torch.utils.swap_tensors(model.up, other.up)
        assert torch.equal(model(*asked([1, 2])).cpu(), there(made("int8:row2"), [1, 2]))


@pytest.mark.parametrize("way", ["grouped", "rows"])
def test_a_write_is_seen(way: str) -> None:
    model = made("int8:row2")
    model.way = way
    with counted(), torch.no_grad():
        stowage.offload(model, device=DEVICE, accelerator="8MiB")
        model(*asked([1, 5]))
        model.up.copy_(torch.randn(EXPERTS, HIDDEN, WIDTH))
        plain = made("int8:row2")
        plain.way = way
        plain.up.copy_(model.up.dequantize())  # type: ignore[operator]
        assert torch.equal(model(*asked([1, 5])).cpu(), there(plain, [1, 5]))


def test_a_write_to_a_weight_that_is_no_stack_is_seen() -> None:
    """Rows of three dimensions, by their numbers, of a module of torch's own."""
    layer = nn.Conv1d(32, 64, 3, bias=False).requires_grad_(False)
    stowage.stow(layer, "int8")
    ids = torch.tensor([3, 5]).to(DEVICE)
    with counted(), torch.no_grad():
        stowage.offload(layer, device=DEVICE, accelerator="1MiB")
        before = layer.weight[ids].cpu()
        layer.weight.mul_(2)
        assert torch.equal(layer.weight[ids].cpu(), layer.weight.dequantize()[[3, 5]])
        assert not torch.equal(layer.weight[ids].cpu(), before)
        first = layer.weight[4].sum()
        assert first == layer.weight.dequantize()[4].sum()


def test_where_all_stays_a_kernel_has_the_stack_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which waits for no end of a group, and may be in a graph; else matrices come."""
    from stowage._tensor.products import grouped

    given = []

    class Kernels:
        def grouped_linear(self, x: Any, parts: Any, kind: Any, shape: Any, ends: Any) -> Any:
            given.append([(part.device, tuple(part.shape)) for part in parts])
            return x.new_zeros(len(x), shape[1])

    monkeypatch.setattr(grouped, "grouped_kernels", lambda *_: Kernels())
    x = torch.ones(2, WIDTH, device=DEVICE)
    ends = torch.tensor([0, 2, *[2] * 10], dtype=torch.int32, device=DEVICE)
    for room in (1 << 20, 40960):
        model = made("int8:row2")
        with counted(), torch.no_grad():
            stowage.offload(model, device=DEVICE, accelerator=room)
            codes, *scales = _parts(model.up)
            storage = model.up._storage.key  # type: ignore[attr-defined]
            found = grouped.grouped(x, codes, scales, storage, model.up.shape, ends, True, False)
            assert found.count_nonzero() == (0 if room == 1 << 20 else found.numel())
    assert given == [[(DEVICE, (EXPERTS, HIDDEN, WIDTH)), (DEVICE, (EXPERTS, HIDDEN, 1))]]


def test_compiled() -> None:
    class Grouped(Mixture):
        def forward(self, x: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
            return F.grouped_mm(x, self.up.mT, offs=picked)

    model = Grouped().eval().to(torch.bfloat16)
    stowage.stow(model, rules={"up": "int8:row2"})
    x = torch.randn(4, WIDTH, dtype=torch.bfloat16).to(DEVICE)
    ends = torch.tensor([0, 2, 2, 4, *[4] * 8], dtype=torch.int32).to(DEVICE)
    with torch.no_grad():
        wanted = copy.deepcopy(model).to(DEVICE)(x, ends).cpu()
        with counted():
            stowage.offload(model, device=DEVICE, accelerator="8MiB")
            compiled = torch.compile(model, backend="aot_eager")
            assert torch.equal(compiled(x, ends).cpu(), wanted)
            assert told(model).bytes_copied <= 2 * room_of_one(model.up)
            model.up.mul_(2)
            assert torch.equal(compiled(x, ends).cpu(), model(x, ends).cpu())
            assert not torch.equal(compiled(x, ends).cpu(), wanted)


@pytest.mark.parametrize("reads", ["mapped", "buffered"])
@pytest.mark.parametrize("storage", ["int8:row2", "nf4"])
def test_from_a_disk_through_memory(storage: str, reads: str, tmp_path: Path) -> None:
    """With less memory than a stack takes, and a ring of less than that."""

    class Wide(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(EXPERTS, 512, WIDTH) / 8, requires_grad=False)
            self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 512) / 8, requires_grad=False)

    model = Wide().eval()
    stowage.stow(model, rules={"up": storage, "down": storage, "dense": "int8"})
    every = [[1, 5], [2, 5], [0, 7, 11]]
    wanted = [there(model, picked) for picked in every]
    one = max(room_of_one(model.up), room_of_one(model.down))
    with counted(), torch.no_grad():
        stowage.offload(
            model, ram=7 * (one + (2 << 14)), folder=tmp_path, device=DEVICE, reads=reads,
            accelerator=_dense(model) + 4 * one,
        )  # fmt: skip
        for _ in range(2):
            for picked, found in zip(every, wanted, strict=True):
                assert torch.equal(model(*asked(picked)).cpu(), found)
        report = stowage.engine_report(model)
        assert report.device is not None and report.device.peak <= report.device.ring
        assert report.peak <= 7 * (one + (2 << 14))
        if reads != "mapped":
            assert report.borrowed == 0


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
@pytest.mark.parametrize("way", ["eager", "batched_mm"])  # the device counts no integers
def test_of_transformers(family: str, way: str) -> None:
    torch.manual_seed(0)
    model = build(family).to(torch.float32)
    stowage.stow(model, "int8:row2")
    model.set_experts_implementation(way)
    with torch.no_grad():
        wanted = copy.deepcopy(model).to(DEVICE)(IDS.to(DEVICE)).logits.cpu()
        with counted():
            stowage.offload(model, device=DEVICE, accelerator="400KiB")
            for _ in range(2):
                assert torch.allclose(model(IDS).logits.cpu(), wanted, atol=1e-5)
            assert told(model).peak <= told(model).ring < stowage.nbytes(model)


class Layers(nn.Module):
    """Ten of forty experts in each of three layers, wide ones, as the caller picks them."""

    COUNT, USED = 40, 10

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(self.COUNT, 64, 256), (self.COUNT, 256, 64)] * 3
        every = [nn.Parameter(torch.randn(size), requires_grad=False) for size in sizes]
        self.stacks = nn.ParameterList(every)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        for stack in self.stacks:
            x = stowage.grouped_linear(x, stack, ends)
        return x


@pytest.mark.parametrize("ratio", [1, 4])
def test_where_most_are_there_a_token_takes_what_it_takes_with_all(ratio: float) -> None:
    """One of ten experts is new for each token. `ratio`: of the time that the link takes for all
    that a token uses to that of the work; codes rest in pinned memory."""

    def a_token(number: int) -> list[int]:
        return sorted((number + i) % Layers.COUNT for i in range(Layers.USED))

    def took(model: nn.Module) -> float:
        """Of eight tokens, when the first have come."""
        begin = 0.0
        for number in range(24):
            if number == 16:
                begin = times().host
            ends = torch.zeros(Layers.COUNT, dtype=torch.int64)
            ends[a_token(number)] = 1
            model(torch.ones(Layers.USED, 256, device=DEVICE), ends.cumsum(0).to(DEVICE)).cpu()
        return times().host - begin

    def made() -> Layers:
        model = Layers().eval()
        stowage.stow(model, rules={"stacks": "int8:row2"})
        return model

    work = {"work": 1000.0, "byte_of_work": 0.01}
    with counted(lazy=False), torch.no_grad():
        model = made()
        size = stowage.nbytes(model)
        stowage.offload(model, device=DEVICE, accelerator=2 * size, pin=2 * size)
        for number in range(0, Layers.COUNT, Layers.USED):  # all come
            ends = torch.zeros(Layers.COUNT, dtype=torch.int64)
            ends[a_token(number)] = 1
            model(torch.ones(Layers.USED, 256, device=DEVICE), ends.cumsum(0).to(DEVICE)).cpu()
        with speeds(**work):
            resident = took(model)
    with counted(lazy=False), torch.no_grad():
        model = made()
        stowage.offload(model, device=DEVICE, accelerator=size // 3, pin=2 * size)
        of_token = size * Layers.USED / Layers.COUNT
        with speeds(**work, copy=100, byte_copied=ratio * resident / 8 / of_token):
            before = told(model)
            found = took(model)
        report = told(model)
    assert report.bytes_copied - before.bytes_copied <= 1.02 * of_token * (1 + 23 / Layers.USED)
    assert found <= resident / 0.9
