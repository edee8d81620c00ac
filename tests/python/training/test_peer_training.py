# SPDX-License-Identifier: Apache-2.0
"""Defects of casting hooks in other packages that show in training and in parameters of no layer,
as tests of ours; numbered as in test_peer_defects.py."""

import pytest
import torch
from torch import Tensor, nn

import stowage

STORAGES = ["f8_e4m3", "int8", "nf4:block64:nested"]


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d, nn.ConvTranspose2d, nn.Embedding])
def test_row_06_backward_needs_no_autocast(kind: type[nn.Module]) -> None:
    """The graph kept a Parameter whose data was float8 again when backward came."""
    layer = kind(8, 16) if kind in (nn.Linear, nn.Embedding) else kind(8, 16, 3)
    after = nn.Linear(16, 4) if kind in (nn.Linear, nn.Embedding) else nn.Conv2d(16, 4, 1)
    model = nn.Sequential(layer, after)
    stowage.stow(model[0], "f8_e4m3", exact=True)
    x = torch.arange(6) if kind is nn.Embedding else torch.randn(2, 8, 8, 8)
    if x.is_floating_point():
        x.requires_grad_()
    wanted = torch.autograd.grad(model(x).square().sum(), x) if x.requires_grad else ()
    model(x).square().sum().backward()
    stowage.unstow(model)
    dense = torch.autograd.grad(model(x).square().sum(), x) if x.requires_grad else ()
    assert all(map(torch.equal, wanted, dense)) and after.weight.grad is not None


def test_rows_07_08_gradients_and_steps_keep_their_dtype() -> None:
    """.grad was cast to float8 with the weight; an optimizer's step raised or was lost."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8))
    stowage.stow(model, rules={"0.weight": "f8_e4m3"})
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    weight, bias = model[1].weight, model[0].bias
    before = weight.detach().clone()
    for _ in range(2):  # the second forward must not touch the first's gradients
        model(torch.randn(4, 64)).sum().backward()
        assert {p.grad.dtype for p in (weight, bias)} == {torch.float32}
    accumulated = weight.grad.clone()
    assert (accumulated != accumulated.to(torch.float8_e4m3fn).float()).any()
    optimizer.step()
    assert torch.allclose(weight, before - 0.1 * accumulated) and model[0].weight.grad is None


def test_row_09_a_parameter_of_no_layer_is_governed() -> None:
    """A table that a model holds itself stayed wide and met the layers in another dtype."""

    class Modulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.inner = nn.Parameter(torch.randn(2, 64)), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * (1 + self.table[0]) + self.table[1])

    model = Modulated()
    rules = {"table": "f8_e4m3"}
    report = stowage.stow(model, "f8_e4m3", rules=rules, compute_dtype=torch.bfloat16)
    assert report["table"].storage == "f8_e4m3" and model.table.dtype == torch.bfloat16
    assert model(torch.randn(3, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("storage", STORAGES)
def test_row_28_a_graph_keeps_nothing_wide(storage: str) -> None:
    """Autograd kept every widened weight until backward: four times the resting bytes."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    stowage.stow(model, storage)
    own = {t.untyped_storage().data_ptr() for p in model.parameters() for t in of(p)}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        for part in of(t):
            memory = part.untyped_storage()
            if memory.data_ptr() not in own:
                kept[memory.data_ptr()] = memory.nbytes()
        return t

    x = torch.randn(2, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(x).sum().backward()
    assert sum(kept.values()) <= 8 * x.nbytes


def of(t: Tensor) -> list[Tensor]:
    return list(t.parts.values()) if isinstance(t, stowage.StowedTensor) else [t]
