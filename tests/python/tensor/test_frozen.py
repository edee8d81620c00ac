# SPDX-License-Identifier: Apache-2.0
"""A resting weight is frozen: its parameter refuses to be trained, a parameter that is made to ask
for a gradient gets it, and no optimizer may step."""

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stowage

STORAGES = ["mxfp4", "nf4", "fp4:block128", "nf4:block64:nested"]
Params = Iterable[Tensor]
OPTIMIZERS: dict[str, Callable[[Params], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD, momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.1, foreach=False),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
}


def layer(storage: str, dtype: torch.dtype = torch.float32, exact: bool = False) -> nn.Linear:
    torch.manual_seed(0)
    return stowage.frozen_linear(64, 48, storage, dtype=dtype, exact=exact)


THAW: dict[str, Callable[[nn.Linear], object]] = {
    "requires_grad_": lambda base: base.weight.requires_grad_(),
    "requires_grad_(True)": lambda base: base.weight.requires_grad_(requires_grad=True),
    "attribute": lambda base: setattr(base.weight, "requires_grad", True),
    "module": lambda base: base.requires_grad_(True),
    "model": lambda base: nn.Sequential(base).train().requires_grad_(),
}


@pytest.mark.parametrize("how", THAW)
@pytest.mark.parametrize("made", ["frozen_linear", "stow", "load_state_dict", "deepcopy", "to"])
def test_a_frozen_parameter_says_what_to_do_instead(made: str, how: str) -> None:
    base = layer("nf4")
    if made == "stow":
        stowage.stow(base := nn.Linear(64, 48), "nf4")
    elif made == "load_state_dict":
        state, base = base.state_dict(), stowage.frozen_linear(64, 48, device="meta")
        base.load_state_dict(state, assign=True)
    elif made != "frozen_linear":
        base = copy.deepcopy(base) if made == "deepcopy" else base.to(torch.bfloat16)
    with pytest.raises(stowage.Unsupported, match="must stay frozen") as error:
        THAW[how](base)
    assert all(word in str(error.value) for word in ("adapter", "unstow", "nn.Parameter(weight)"))
    assert not base.weight.requires_grad
    base.requires_grad_(False)
    assert base(torch.randn(3, 64, dtype=base.weight.dtype)).shape == (3, 48)


def test_who_asks_for_the_gradient_of_a_weight_gets_it() -> None:
    base = layer("nf4")
    looked = nn.Parameter(base.weight)
    assert looked.requires_grad and looked.requires_grad_() is looked
    twin = copy.deepcopy(looked)
    assert twin.requires_grad and isinstance(twin, nn.Parameter)
    assert base.weight.detach().requires_grad_().requires_grad
    stowage.unstow(base)
    assert base.requires_grad_().weight.requires_grad


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("storage", ["nf4", "nf4:block64:nested"])
def test_an_optimizer_is_told_what_to_do(storage: str, kind: str) -> None:
    base = layer(storage)
    base.weight = nn.Parameter(base.weight)
    before = [p.clone() for p in base.weight.parts.values()]
    optimizer = OPTIMIZERS[kind]([base.weight])
    base(torch.randn(3, 64)).square().sum().backward()
    assert type(base.weight.grad) is Tensor  # the gradient is there, for those who only look
    with pytest.raises(stowage.Unsupported, match="keep it frozen") as error:
        optimizer.step()
    assert "requires_grad=False" in str(error.value) and "adapter" in str(error.value)
    assert all(torch.equal(p, q) for p, q in zip(before, base.weight.parts.values(), strict=True))


@pytest.mark.parametrize("storage", STORAGES)
def test_row_64_train_eval_train_keeps_gradients(storage: str) -> None:
    base, found = layer(storage), []
    for train in (True, False, True):
        base.train(train)
        x = torch.ones(3, 64, requires_grad=True)
        with contextlib.nullcontext() if train else torch.no_grad():
            y = base(x)
        assert y.requires_grad == train
        if train:
            y.square().sum().backward()
            found.append(x.grad)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("exact", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("storage", STORAGES)
def test_gradcheck_in_double(storage: str, exact: bool) -> None:
    torch.manual_seed(0)
    columns = 16 if storage == "mxfp4" else 15  # whose rows begin on bytes
    w = stowage.frozen_linear(columns, 9, storage, dtype=torch.float64, exact=exact).weight
    x = torch.randn(2, columns, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(9, dtype=torch.float64, requires_grad=True)
    forms: list[Callable[..., Tensor]] = [
        lambda x, b: F.linear(x, w, bias=b),
        lambda x, b: torch.addmm(b, x, w.t()),
        lambda x, b: x @ w.t() + b,
    ]
    for form in forms:
        assert torch.autograd.gradcheck(form, (x, bias), check_batched_grad=True)
        assert torch.autograd.gradgradcheck(form, (x, bias))
    assert torch.autograd.gradcheck(lambda x: F.linear(x, w).tanh(), (x,), check_forward_ad=True)


@pytest.mark.parametrize("storage", STORAGES)
def test_gradients_are_exact_against_dense(storage: str) -> None:
    base = layer(storage, torch.float64)
    plain = base.weight.dequantize()
    results = []
    for w in (base.weight, plain):
        x = torch.linspace(-1, 1, 320, dtype=torch.float64).view(5, 64).requires_grad_()
        y = F.linear(x, w, bias=base.bias)
        (g,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (gg,) = torch.autograd.grad(g.square().sum(), x)
        results.append([y, g, gg])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("storage", STORAGES)
def test_torch_func(storage: str) -> None:
    base = layer(storage)
    values, x = base.weight.dequantize(), torch.randn(5, 64)
    state: dict[str, Any] = {"weight": values, "bias": base.bias}

    def stowed(v: Tensor) -> Tensor:
        return base(v).tanh().sum()

    def plain(v: Tensor) -> Tensor:
        return torch.func.functional_call(base, state, (v,)).tanh().sum()

    for over in (
        lambda f: torch.func.grad(f)(x),
        lambda f: torch.func.vmap(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(f))(x),
        lambda f: torch.func.hessian(f)(x[0]),
        lambda f: torch.func.jvp(f, (x,), (x,))[1],
    ):
        torch.testing.assert_close(over(stowed), over(plain), rtol=1e-4, atol=1e-4)
    swapped = torch.func.functional_call(nn.Linear(64, 48), dict(base.named_parameters()), (x,))
    assert torch.equal(swapped, base(x))


@pytest.mark.parametrize("storage", STORAGES)
def test_a_graph_keeps_codes_only(storage: str) -> None:
    base, saved = layer(storage), []
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        base(x)
    parts = {p.data_ptr() for p in base.weight.parts.values()}
    assert saved and {t.data_ptr() for t in saved} <= parts
