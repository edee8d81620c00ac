# SPDX-License-Identifier: Apache-2.0
"""Stacks of matrices that rest on a disk: each matrix comes by itself, whoever uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage
from stowage._ops.library import composite_forced

pytestmark = pytest.mark.skipif(composite_forced(), reason="engines belong to the kernels")

EXPERTS, OUT, IN = 12, 128, 192
ONE = OUT * IN  # bytes of codes
PAGES = 4 * 4096


class Bank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, OUT, IN), requires_grad=False)

    def forward(self, use: Callable[[Tensor], Tensor]) -> Tensor:
        return use(self.w)


def bank(folder: Path, ram: int, storage: str = "int8:row2", reads: str = "direct") -> Bank:
    torch.manual_seed(0)
    made = Bank()
    stowage.stow(made, rules={"w": storage})
    stowage.offload(made, ram=ram, folder=folder, reads=reads)
    return made


X = torch.randn(5, IN, generator=torch.Generator().manual_seed(2))
USES: dict[str, tuple[Callable[[Tensor], Tensor], set[int]]] = {
    "one": (lambda w: F.linear(X, w[7]), {7}),
    "one from behind": (lambda w: F.linear(X, w[-2]), {10}),
    "by a number of a tensor": (lambda w: F.linear(X, w[torch.tensor(3)]), {3}),
    "a loop": (lambda w: torch.stack([X @ w[e].T for e in (2, 9, 4)]), {2, 9, 4}),
    "grouped_linear": (lambda w: stowage.grouped_linear(X, w, [0, 2, 2, 5, *[5] * 8]), {1, 3}),
    "gathered": (lambda w: w[torch.tensor([5, 0, 5])], {5, 0}),
    "index_select": (lambda w: w.index_select(0, torch.tensor([6, 1])), {6, 1}),
}


@pytest.mark.parametrize("reads", ["mapped", "direct"])
@pytest.mark.parametrize("name", USES)
def test_a_use_reads_those_that_it_names(name: str, reads: str, tmp_path: Path) -> None:
    use, named = USES[name]
    model = bank(tmp_path / "w", 4 * (ONE + PAGES), reads=reads)
    got = model(use)
    report = stowage.engine_report(model)
    assert report.borrowed == 0 and report.acquired == len(named)
    assert report.bytes_read <= len(named) * (ONE + PAGES)
    stowage.onload(model)
    assert torch.equal(got, model(use))


def test_all_of_it_is_read_where_it_is_mapped(tmp_path: Path) -> None:
    model = bank(tmp_path / "w", ONE + PAGES)
    got = model(lambda w: torch.einsum("si,eoi->eso", X, w.dequantize()))
    report = stowage.engine_report(model)
    assert report.borrowed > 0 and report.held == 0
    stowage.onload(model)
    assert torch.equal(got, model(lambda w: torch.einsum("si,eoi->eso", X, w.dequantize())))


def test_ids_that_are_no_matrix_are_refused(tmp_path: Path) -> None:
    model = bank(tmp_path / "w", ONE + PAGES)
    for ids in ([0, EXPERTS], [-EXPERTS - 1]):
        with pytest.raises(IndexError):
            model(lambda w, ids=ids: w[torch.tensor(ids)])
    assert model(lambda w: w[torch.zeros(0, dtype=torch.int64)]).shape == (0, OUT, IN)


def test_compiled_products_say_nothing_ahead_while_they_are_traced(tmp_path: Path) -> None:
    model = bank(tmp_path / "w", 4 * (ONE + PAGES))
    use = USES["grouped_linear"][0]
    wanted = model(use)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(use)(model.w), wanted)
    gather = torch.compile(USES["gathered"][0])
    assert torch.equal(gather(model.w), model(USES["gathered"][0]))
    assert stowage.engine_report(model).borrowed == 0


def test_modes_change_nothing(tmp_path: Path) -> None:
    model = bank(tmp_path / "w", 4 * (ONE + PAGES))
    for name, (use, _) in USES.items():
        wanted = model(use)
        with torch.inference_mode():
            assert torch.equal(model(use), wanted), name
        if "gathered" in name or "index" in name or "number" in name:
            continue  # their ids would be made on the default device
        torch.set_default_device("meta")
        try:
            found = model(use)
        finally:
            torch.set_default_device(None)
        assert torch.equal(found, wanted), name


def test_matrices_that_are_small_come_as_a_whole(tmp_path: Path) -> None:
    model = Bank()
    model.w = nn.Parameter(torch.randn(64, 16, 64), requires_grad=False)
    stowage.stow(model, rules={"w": "int8:row2"})
    size = stowage.nbytes(model)
    with pytest.raises(stowage.InvalidArgument, match="must hold the largest weight, w of"):
        stowage.offload(model, ram=size // 4, folder=tmp_path / "w", reads="direct")
    assert not (tmp_path / "w").exists()
    stowage.offload(model, ram=size + PAGES, folder=tmp_path / "w", reads="direct")
    model(lambda w: F.linear(torch.ones(1, 64), w[5]))
    assert stowage.engine_report(model).misses == stowage.engine_report(model).acquired == 1


def test_stacks_in_a_list_come_by_themselves_too(tmp_path: Path) -> None:
    model = nn.ParameterList([torch.randn(EXPERTS, OUT, IN)])
    stowage.stow(model, rules={"0": "int8:row2"})
    stowage.offload(model, ram=2 * (ONE + PAGES), folder=tmp_path / "w", reads="direct")
    F.linear(X, model[0][3])
    report = stowage.engine_report(model)
    assert report.acquired == report.misses == 1 and report.bytes_read <= ONE + PAGES


def test_the_budget_must_hold_one(tmp_path: Path) -> None:
    with pytest.raises(stowage.InvalidArgument, match=r"ram must hold the largest weight"):
        bank(tmp_path / "w", ONE // 2)
    assert not (tmp_path / "w").exists()
    model = bank(tmp_path / "w", ONE + PAGES)
    with pytest.raises(stowage.InvalidArgument, match=r"ram must hold the largest weight"):
        stowage.rebudget(model, ONE // 2)
    model(lambda w: F.linear(X, w[1]))


@pytest.mark.parametrize("storage", ["int8:row2", "nf4", "nf4:nested", "f8_e4m3:block128x128"])
def test_a_write_to_one_leaves_the_others(storage: str, tmp_path: Path) -> None:
    model = bank(tmp_path / "w", EXPERTS * (ONE + PAGES), storage)
    before = model.w.dequantize().clone()
    with torch.no_grad():
        model.w[3].copy_(torch.ones(OUT, IN))
    after = model.w.dequantize()
    others = [e for e in range(EXPERTS) if e != 3]
    assert torch.equal(after[others], before[others])
    assert torch.allclose(after[3], torch.ones(()), atol=0.1)
    for e in (0, 3, 11):
        found = model(lambda w, e=e: F.linear(X, w[e]))
        assert torch.allclose(found, F.linear(X, after[e]), atol=1e-4)


def test_threads_share_them(tmp_path: Path) -> None:
    model = bank(tmp_path / "w", 3 * (ONE + PAGES))
    wanted = [F.linear(X, model.w[e]) for e in range(EXPERTS)]
    wrong: list[int] = []

    def use(seed: int) -> None:
        order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(seed)).tolist()
        for e in order * 5:
            if not torch.equal(F.linear(X, model.w[e]), wanted[e]):
                wrong.append(e)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert stowage.engine_report(model).peak <= 3 * (ONE + PAGES)


class OwnConv(nn.Conv1d):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Conv1d(64, 128, 3),
        lambda: OwnConv(1800, 8, 3),
        lambda: nn.Conv1d(640, 640, 5),  # in tiles, as the next one
        lambda: nn.Bilinear(48, 400, 96),
    ],
)
def test_weights_of_torchs_modules_come_as_a_whole(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = nn.Sequential(make())
    stowage.stow(model, rules={"0.weight": "int8"})
    stowage.offload(model, ram="4MiB", folder=tmp_path / "w", reads="direct")
    module = model[0]
    if isinstance(module, nn.Conv1d):
        module(torch.randn(1, module.in_channels, 9))
    else:
        module(torch.randn(2, 48), torch.randn(2, 400))
    report = stowage.engine_report(model)
    assert report.borrowed == 0 and report.misses == 1 and 1 <= report.acquired <= 4
    assert report.bytes_read >= module.weight.numel()
