# SPDX-License-Identifier: Apache-2.0
"""Rows taken by integer tensors: only those are dequantized, and the values are the plain ones."""

import pytest
import torch
from torch import Tensor, nn

import stowage

STORAGES = ["f8_e4m3", "int8:row2", "int8:tensor", "int8:block32", "nf4", "nf4:block64:nested"]
IDS = [
    torch.tensor([2, -1, 0, 2]),
    torch.tensor([[1], [3]], dtype=torch.int32),
    torch.tensor([], dtype=torch.int64),
    torch.tensor(1),
]


@pytest.mark.parametrize("storage", STORAGES)
def test_experts_of_a_batch(storage: str) -> None:
    w = stowage.quantize(torch.randn(4, 6, 64), storage, compute_dtype=torch.bfloat16)
    stowage.fallbacks(clear=True)
    for ids in IDS:
        got = w[ids]
        assert torch.equal(got.dequantize() if ids.dim() == 0 else got, w.dequantize()[ids])
    assert torch.equal(w.index_select(0, IDS[0].abs()), w.dequantize()[IDS[0].abs()])
    assert stowage.fallbacks() == {}


def test_nothing_else_is_dequantized() -> None:
    """Peak of a gather of two rows out of 4,096: no row more."""
    w = stowage.quantize(torch.randn(4096, 256), "nf4")
    with torch.profiler.profile(profile_memory=True) as profile:
        w[torch.tensor([7, 4000])]
        w[7].dequantize()
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    assert 0 < taken < 64 * 1024


def test_a_tied_head_gathers_and_multiplies_one_weight() -> None:
    table, head = nn.Embedding(50, 64), nn.Linear(64, 50, bias=False)
    w = stowage.quantize(table.weight.detach(), "nf4")
    table.weight = head.weight = nn.Parameter(w, False)
    ids = torch.tensor([[3, 49, 3]])
    stowage.fallbacks(clear=True)
    got = head(table(ids))
    values = w.dequantize()
    torch.testing.assert_close(got, values[ids] @ values.t())
    assert (
        stowage.fallbacks() == {}
        and stowage.nbytes(nn.ModuleList([table, head])) == w.nbytes_at_rest
    )


def test_errors_are_those_of_torch() -> None:
    w = stowage.quantize(torch.randn(4, 64), "nf4")
    for wrong in (torch.tensor([4]), torch.tensor([-5]), torch.tensor([0.5])):
        with pytest.raises(IndexError) as stock:
            w.dequantize()[wrong]
        with pytest.raises(IndexError) as ours:
            w[wrong]
        assert str(ours.value) == str(stock.value)


def test_gradient_of_a_trained_table() -> None:
    w = nn.Parameter(stowage.quantize(torch.randn(4, 64), "nf4"))
    plain = w.dequantize().detach().requires_grad_()
    for weight in (w, plain):
        weight[torch.tensor([1, 1, 3])].square().sum().backward()
    assert type(w.grad) is Tensor and torch.equal(w.grad, plain.grad)
