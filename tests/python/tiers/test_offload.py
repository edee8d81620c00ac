# SPDX-License-Identifier: Apache-2.0
"""Offloaded models compute what resident ones do, and can be read, written, saved and copied."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.utils.checkpoint import checkpoint

import stowage
from stowage import StowedTensor

STORAGES = ["f8_e4m3:row", "nf4:block64:nested", "int8:block32", "f8_e5m2", None]
READS = ["mapped", "buffered", "direct"]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Blocks, a tied head, a raw parameter of the root, buffers, and names that are hard."""

    def __init__(self, blocks: int = 4, width: int = 192) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 300, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((), 1.25))
        self.mixing = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.named = nn.ParameterDict({"a/b c": torch.randn(200, width), "none": torch.empty(0, 4)})
        self.register_buffer("shift", torch.linspace(0, 1, width))
        self.register_buffer("lost", torch.ones(3), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) @ self.mixing * self.scale + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.named["a/b c"].mean(0) * self.lost.sum())


def made(storage: str | None, dtype: torch.dtype = torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model().to(dtype).eval()
    if storage is not None:
        stowage.stow(model, storage)
    return model


IDS = torch.arange(24).reshape(2, 12) * 7 % 300


def budget(model: nn.Module) -> int:
    """Room for two of the largest weights, with the pages at their edges."""
    largest = max(stowage.nbytes(p) for p in model.parameters())
    return 2 * (largest + (1 << 14))


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("storage", STORAGES)
def test_every_bit_is_that_of_the_resident_model(
    storage: str | None, reads: str, tmp_path: Path
) -> None:
    model = made(storage)
    with torch.inference_mode():
        wanted = model(IDS)
        objects = {n: p for n, p in model.named_parameters() if isinstance(p, StowedTensor)}
        stowage.offload(model, ram=budget(model), folder=tmp_path / "w", reads=reads)
        for _ in range(4):
            assert torch.equal(model(IDS), wanted)
        report = stowage.engine_report(model)
        assert report.reads == reads
        assert report.peak <= budget(model)
        assert report.acquired == report.hits + report.misses + report.late + report.borrowed > 0
        now = dict(model.named_parameters())
        assert all(now[name] is p for name, p in objects.items())
        assert model.head.weight is model.embed.weight
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        stowage.onload(model)
        assert torch.equal(model(IDS), wanted)
    assert all(row.tier == "ram" for row in stowage.report(model).rows)
    if storage is None:
        assert not any(isinstance(p, StowedTensor) for p in model.parameters())


@pytest.mark.parametrize("storage", ["nf4", None])
def test_load_within_a_budget(storage: str | None, tmp_path: Path) -> None:
    model = made(storage, torch.bfloat16)
    with torch.inference_mode():
        wanted = model(IDS)
        stowage.save(model, tmp_path)
        loaded = stowage.load(Model, tmp_path, ram=budget(model)).eval()
        for _ in range(2):
            assert torch.equal(loaded(IDS), wanted)
    assert stowage.engine_report(loaded).acquired > 0
    tiers = {row.name: row.tier for row in stowage.report(loaded).rows}
    assert tiers["blocks.0.up.weight"] == "disk"
    assert tiers["blocks.0.up.bias"] == "ram"


def test_it_can_be_read_anywhere(tmp_path: Path) -> None:
    model, whole = made("int8"), made("int8")
    stowage.offload(model, ram=budget(model), folder=tmp_path)
    for (name, mine), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine.sum(), theirs.sum()), name
        assert torch.equal(mine.to(torch.float64), theirs.to(torch.float64)), name
    flat, expected = stowage.state_dict(model), stowage.state_dict(whole)
    assert flat.keys() == expected.keys()
    assert all(torch.equal(flat[k].view(-1), expected[k].view(-1)) for k in flat)
    stowage.save(model, tmp_path / "again")
    one, other = tmp_path / "model.safetensors", tmp_path / "again" / "model.safetensors"
    assert one.read_bytes() == other.read_bytes()


def test_writes_take_effect_and_the_file_stays(tmp_path: Path) -> None:
    model, whole = (made("f8_e4m3:row").requires_grad_(False) for _ in range(2))
    stowage.offload(model, ram=budget(model), folder=tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    with torch.no_grad():
        for each in (model, whole):
            each.blocks[1].up.weight.mul_(2)
            each.mixing.add_(1)
        for _ in range(3):
            assert torch.equal(model(IDS), whole(IDS))
        state = made("f8_e4m3:row").state_dict()
        model.load_state_dict(state)
        whole.load_state_dict(state)
        for _ in range(3):
            assert torch.equal(model(IDS), whole(IDS))
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_copies_share_the_file_until_they_are_written(tmp_path: Path) -> None:
    model = made("int8")
    stowage.offload(model, ram=budget(model), folder=tmp_path)
    with torch.no_grad():
        wanted = model(IDS)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(IDS), wanted)
        mine, theirs = model.blocks[0].up.weight, twin.blocks[0].up.weight
        assert mine.parts["codes"].data_ptr() == theirs.parts["codes"].data_ptr()
        theirs.mul_(3)
        assert not torch.equal(twin(IDS), wanted)
        assert torch.equal(model(IDS), wanted)
        del model
        twin.load_state_dict(made("int8").state_dict())
        assert torch.equal(twin(IDS), wanted)


def test_a_copy_keeps_the_engine_when_the_original_is_onloaded(tmp_path: Path) -> None:
    model = made("int8")
    with torch.inference_mode():
        wanted = model(IDS)
        stowage.offload(model, ram=budget(model), folder=tmp_path)
        twin = copy.deepcopy(model)
        stowage.onload(model)
        before = stowage.engine_report(twin).acquired
        assert torch.equal(twin(IDS), wanted)
        assert stowage.engine_report(twin).acquired > before
        stowage.onload(twin)
        assert torch.equal(twin(IDS), wanted)
        assert torch.equal(model(IDS), wanted)


def test_a_pickled_model_has_its_bytes_with_it(tmp_path: Path) -> None:
    model = made("nf4")
    stowage.offload(model, ram=budget(model), folder=tmp_path)
    with torch.no_grad():
        wanted = model(IDS)
        text = pickle.dumps(model)
        os.remove(tmp_path / "model.safetensors")
        assert torch.equal(pickle.loads(text)(IDS), wanted)
        assert torch.equal(model(IDS), wanted)  # the open file is still there


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_gradients_are_those_of_the_resident_model(reentrant: bool | None, tmp_path: Path) -> None:
    grads = []
    for offloaded in (False, True):
        model = made("nf4").train()
        if offloaded:
            stowage.offload(model, ram=budget(model), folder=tmp_path)
        x = torch.randn(3, 192, generator=torch.Generator().manual_seed(1), requires_grad=True)
        y = x
        for block in model.blocks:
            y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
        y.square().sum().backward()
        grads.append([x.grad, *(b.norm.weight.grad for b in model.blocks)])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    model = made("int8")
    with torch.no_grad():
        wanted = model(IDS)
        stowage.offload(model, ram=budget(model), folder=tmp_path)
        for _ in range(5):
            with pytest.raises((IndexError, RuntimeError)):
                model(IDS + 10_000)
            assert torch.equal(model(IDS), wanted)


def test_two_threads_in_one_model(tmp_path: Path) -> None:
    model = made("f8_e4m3:row")
    with torch.inference_mode():
        wanted = model(IDS)
    stowage.offload(model, ram=budget(model), folder=tmp_path, reads="buffered")
    wrong: list[int] = []

    def run() -> None:
        with torch.inference_mode():
            wrong.extend(not torch.equal(model(IDS), wanted) for _ in range(10))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 20 and not any(wrong)


def test_one_graph_for_equal_blocks(tmp_path: Path) -> None:
    model = made("int8")
    with torch.inference_mode():
        wanted = model(IDS)
    stowage.offload(model, ram=budget(model), folder=tmp_path)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.allclose(model(IDS), wanted, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.allclose(whole(IDS), wanted, rtol=1e-4, atol=1e-4)


def test_cycles_leave_no_descriptor_and_no_mapping(tmp_path: Path) -> None:
    model = made("int8")

    def counted() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text().count("model.safetensors")
        return len(os.listdir("/proc/self/fd")), maps

    before = None
    for _ in range(20):
        stowage.offload(model, ram=budget(model), folder=tmp_path)
        with pytest.raises(stowage.InvalidArgument):
            stowage.offload(model, ram=1, folder=tmp_path)
        with torch.inference_mode():
            model(IDS)
        stowage.onload(model)
        if before is None:
            gc.collect()  # closes files of other tests, which would else be closed meanwhile
            before = counted()
        assert counted() == before


def test_the_listing_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "offload.md"
    text = page.read_text().split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(text, str(page), "exec"), {})
