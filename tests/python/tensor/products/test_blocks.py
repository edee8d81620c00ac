# SPDX-License-Identifier: Apache-2.0
"""working="block": one widening of each weight per block forward, the bits of exact=True, and
nothing left behind."""

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import stowage
from stowage._ops import library
from stowage._ops.library import composite_forced
from stowage._tensor.products import blocks as _blocks

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (not composite_forced())


class Block(nn.Module):
    """Uses `f` twice, so that without a scope it is widened twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.f = nn.Linear(16, 16, bias=False)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.hook: Callable[[], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(F.relu(self.f(self.a(x))))
        if self.hook is not None:
            self.hook()
        return x + self.conv(y) + y @ self.f.weight


WEIGHTS = ("a", "f", "conv")


def model_of(count: int = 2, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(count)), nn.Linear(16, 4)).to(dtype)
    if options:
        stowage.stow(model, "nf4", **options)
    return model


def block_model(count: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    return model_of(count, dtype, working="block", blocks=Block)


@pytest.fixture(autouse=True)
def nothing_open() -> Iterator[None]:
    yield
    assert _blocks._here.scopes == []


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often the codes at an address were widened by way of a scope."""
    seen: Counter[int] = Counter()
    op = library.dequantize

    def call(codes: Tensor, *args: Any) -> Tensor:
        seen[codes.data_ptr()] += 1
        out: Tensor = op(codes, *args)
        return out

    monkeypatch.setattr(library, "dequantize", call)
    return seen


X = torch.linspace(-2, 2, 2 * 5 * 16).reshape(2, 5, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", ["nf4", "f8_e4m3:row", "nf4:block64:nested", "int8", "bf16"])
def test_every_bit_is_that_of_exact(storage: str, dtype: torch.dtype) -> None:
    exact, block = model_of(dtype=dtype), model_of(dtype=dtype)
    stowage.stow(exact, storage, exact=True)
    stowage.stow(block, storage, working="block", blocks=Block)
    x = X.to(dtype)
    for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with mode():
            assert torch.equal(block(x), exact(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert composite_forced() or torch.equal(block(x), exact(x))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    block(mine).sum().backward()
    exact(other).sum().backward()
    assert torch.equal(mine.grad, other.grad)


def test_a_weight_is_widened_once_for_each_forward_of_its_block(counted: Counter[int]) -> None:
    model = block_model()
    with torch.inference_mode():
        model(X)
        model(X)
    held = {getattr(b, n).weight.parts["codes"].data_ptr() for b in model[:2] for n in WEIGHTS}
    assert counted == dict.fromkeys(held, 2)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_raising_forward_leaves_no_scope(error: type[BaseException]) -> None:
    model, fails = block_model(), [True]
    wanted = model(X)

    def fail() -> None:
        if fails[0]:
            raise error

    model[1].hook = fail
    with pytest.raises(error):
        model(X)
    if error is ValueError:
        assert _blocks._here.scopes == []
    fails[0] = False
    assert torch.equal(model(X), wanted)  # torch calls no hook after KeyboardInterrupt: now it goes
    model[1].hook = None


def test_a_failing_pre_hook_leaves_no_scope() -> None:
    model = block_model()

    def fail(*args: Any) -> None:
        raise ValueError

    for prepend in (False, True):
        handle = model[0].register_forward_pre_hook(fail, prepend=prepend)
        with pytest.raises(ValueError):
            model(X)
        assert _blocks._here.scopes == []
        handle.remove()


def test_nested_and_recursive_blocks(counted: Counter[int]) -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = Block(), nn.Linear(16, 16)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            x = self.own(self.inner(x))
            return x if depth == 0 else self(x, depth - 1) + self.own(x)

    torch.manual_seed(0)
    model = Again()
    stowage.stow(model, "int8", working="block", blocks=["", "inner"])
    assert stowage.report(model)["own.weight"].working == "block"
    with torch.no_grad():
        got = model(X)
    own = model.own.weight.parts["codes"].data_ptr()
    inner = model.inner.f.weight.parts["codes"].data_ptr()
    assert counted[own] == 1 and counted[inner] == 3  # the inner block ends before the next
    stowage.stow(model, "int8", working="layer")
    assert torch.equal(got, model(X))


def test_a_shared_block_and_a_tied_weight() -> None:
    torch.manual_seed(0)
    block = Block()
    block.a.weight = block.f.weight
    model = nn.Sequential(block, block)
    stowage.stow(model, "int8", working="block", blocks="0")
    got = model(X)
    stowage.stow(model, "int8", working="layer")
    assert torch.equal(got, model(X))


def test_a_write_inside_the_block_is_seen() -> None:
    model = block_model(1)
    with torch.no_grad():
        for write in (
            lambda w: w.zero_(),
            lambda w: w.data.mul_(2.0),  # codes may stay as they are
            lambda w: w[0].fill_(0.01),
            lambda w: w.data.copy_(torch.ones(16, 16)),
        ):
            block = copy.deepcopy(model[0])
            # The write follows two uses of `f`, one more comes after it.
            block.hook = partial(write, block.f.weight)
            twin = copy.deepcopy(model[0])
            got = block(X)
            y = twin.f(F.relu(twin.f(twin.a(X))))
            write(twin.f.weight)
            assert torch.equal(got, X + twin.conv(y) + y @ twin.f.weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool, counted: Counter[int]) -> None:
    model, leaf = block_model(), X.clone().requires_grad_()
    model(leaf).sum().backward()
    wanted = leaf.grad.clone()
    counted.clear()
    leaf.grad = None
    x = leaf
    for block in model[:2]:
        x = checkpoint(block, x, use_reentrant=reentrant)
    model[2](x).sum().backward()
    assert torch.equal(leaf.grad, wanted)
    f = model[0].f.weight.parts["codes"].data_ptr()
    assert counted[f] == 2  # in the forward and in its repetition, which both are blocks


def test_two_threads_have_scopes_of_their_own() -> None:
    model = block_model()
    wanted, found, go = model(X), [], threading.Barrier(2)
    model[0].hook = lambda: (go.wait(), found.append(len(_blocks._here.scopes)))

    def run() -> None:
        with torch.no_grad():
            found.append(torch.equal(model(X), wanted))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found.count(1) == 4 and all(found)  # True == 1
    model[0].hook = None


def test_nothing_widened_is_saved_for_backward() -> None:
    model, held = block_model(1), []
    for values in (lambda t: held.append(t) or t,):
        with torch.autograd.graph.saved_tensors_hooks(values, lambda t: t):
            model(X.clone().requires_grad_()).sum()
    shapes = {(16, 16), (5, 5, 3)}
    assert not any(
        type(t) is Tensor and t.dtype == torch.float32 and t.shape in shapes for t in held
    )


@pytest.mark.parametrize("grad", [False, True])
def test_compiled_without_graph_breaks(grad: bool) -> None:
    model, x = block_model(), X.clone().requires_grad_(grad)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x))
    torch._dynamo.reset()
    for block in model[:2]:
        block.compile(backend="aot_eager", fullgraph=True)
    assert torch.equal(model(x), copy_of(model)(x))


def copy_of(model: nn.Module) -> nn.Module:
    twin = model_of(2)
    stowage.stow(twin, "nf4", working="block", blocks=Block)
    stowage.load_state_dict(twin, stowage.state_dict(model))
    return twin


def test_copies_and_pickles_are_blocks(counted: Counter[int]) -> None:
    model = block_model()
    wanted = model(X)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        counted.clear()
        assert torch.equal(twin(X), wanted)
        assert counted[twin[0].f.weight.parts["codes"].data_ptr()] == 1
        # A hook that is added later gets a number of torch's; ours have names.
        twin[0].register_forward_hook(lambda *args: None)
        assert torch.equal(twin(X), wanted) and _blocks.is_block(twin[0])


def test_transforms_and_modes_widen_by_themselves() -> None:
    model = block_model(1)[0]
    got = torch.func.vmap(lambda row: F.linear(row, model.a.weight))(X)
    assert torch.equal(got, F.linear(X, model.a.weight))
    tangent = torch.func.jvp(model, (X,), (torch.ones_like(X),))[1]
    assert tangent.isfinite().all()
    with torch.autograd.profiler.profile():
        assert torch.equal(model(X), model(X))


@pytest.mark.parametrize("working", ["tile", "layer", "block"])
def test_a_result_may_be_written_in_place(working: str) -> None:
    """torch's product of more than two dimensions is a view of a matrix; ours is no view."""
    layer = nn.Linear(16, 16)
    stowage.stow(layer, "int8", working=working, **({"blocks": ""} if working == "block" else {}))
    for x in (X, X[0], X[0, 0]):
        leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        F.relu_(layer(leaf)).sum().backward()
        F.relu(layer(other)).sum().backward()
        assert torch.equal(leaf.grad, other.grad)
        (leaf @ layer.weight).mul_(2.0).sum().backward()
        with torch.autograd.profiler.profile():
            F.relu_(layer(leaf)).sum().backward()
