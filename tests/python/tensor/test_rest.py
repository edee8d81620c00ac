# SPDX-License-Identifier: Apache-2.0
"""Rest is never rewritten: the bytes and the addresses of resting weights are the same after any
number of forwards, after one that raised, and with several threads in one model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage
from stowage.tensor import StowedTensor

STORAGES = ["f8_e4m3:row", "int8:block32", "nf4:block64:nested", "fp4", "bf16"]


class Everything(nn.Module):
    """A weight of each way of use: by an op of ours, dequantized for the call, read in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.conv = nn.Conv1d(64, 64, 3, padding=1, groups=4)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.norm = nn.LayerNorm(64)
        self.table = nn.Parameter(torch.randn(2, 64))
        self.mlp = nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 32, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor, fail: bool = False) -> Tensor:
        x = self.conv(self.embed(ids).mT).mT
        x = self.lstm(x)[0] + self.attention(x, x, x)[0]
        x = self.norm(x) * (1 + self.table[0]) + self.table[1]
        x = self.mlp(F.gelu(x))
        if fail:
            raise KeyError("in the middle")
        return self.lm_head(x)


IDS = torch.arange(12).view(2, 6)


def resting(storage: str) -> Everything:
    torch.manual_seed(0)
    model = Everything().eval()
    stowage.stow(model, rules={"*": storage})
    return model


def bytes_at_rest(model: nn.Module) -> dict[str, tuple[int, bytes]]:
    """Address and content of each part of each weight."""
    return {
        f"{name}.{part}": (
            t.data_ptr(),
            t.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
        )
        for name, weight in model.named_parameters()
        if isinstance(weight, StowedTensor)
        for part, t in weight.parts.items()
    }


def many_forwards(model: Everything, count: int) -> None:
    modes = (torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16))
    for i in range(count):
        if i % 8 == 0:
            with pytest.raises(KeyError):
                model(IDS, fail=True)
            model(IDS).sum().backward()
            model.zero_grad()
        with modes[i % 3]():
            model(IDS)


@pytest.mark.parametrize("storage", STORAGES)
def test_forwards_and_failures_change_no_byte(storage: str) -> None:
    model = resting(storage)
    before = bytes_at_rest(model)
    assert len(before) >= 8
    many_forwards(model, 9)
    assert bytes_at_rest(model) == before


@pytest.mark.nightly
@pytest.mark.parametrize("storage", STORAGES)
def test_a_thousand_forwards_change_no_byte(storage: str) -> None:
    model = resting(storage)
    before = bytes_at_rest(model)
    many_forwards(model, 1000)
    assert bytes_at_rest(model) == before


@pytest.mark.parametrize("storage", ["f8_e4m3:row", "nf4"])
def test_threads_in_one_model_get_its_results(storage: str) -> None:
    model = resting(storage)
    before = bytes_at_rest(model)
    inputs = [torch.randint(32, (2, 6)) for _ in range(4)]
    modes = (torch.inference_mode, torch.no_grad)
    wanted = []
    for mode in modes:
        with mode():
            wanted.append([model(ids) for ids in inputs])

    def run(i: int) -> bool:
        if i % 5 == 0:
            with pytest.raises(KeyError):
                model(inputs[0], fail=True)
        with modes[i // 4 % 2]():
            return torch.equal(model(inputs[i % 4]), wanted[i // 4 % 2][i % 4])

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(run, range(48)))
    assert bytes_at_rest(model) == before


def test_a_failing_forward_leaves_nothing_wide() -> None:
    model = resting("int8:row")

    def wide() -> set[str]:
        return {n for n, p in model.named_parameters() if type(p) is not StowedTensor}

    plain = wide()
    for module in model.modules():
        if module not in (model, model.attention.out_proj):  # whose forward torch never calls
            handle = module.register_forward_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(IDS)
            handle.remove()
            assert wide() == plain
    assert all(not isinstance(v, Tensor) for m in model.modules() for v in vars(m).values())
