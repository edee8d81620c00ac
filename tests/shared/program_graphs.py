# SPDX-License-Identifier: Apache-2.0
"""Steps of random programs that see the model through other eyes: torch.compile, torch.func."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from hypothesis import strategies as st
from hypothesis.stateful import rule
from program_models import FORWARD, IDS, TRAINED, ModelProgram, Net, dense_twin, near
from programs import MODES
from torch import Tensor
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vjp, vmap
from torch.utils import _pytree as pytree

State = dict[str, Tensor]


def state(model: Net) -> State:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def trained(model: Net) -> State:
    return {k: v.detach() for k, v in state(model).items() if k.startswith(TRAINED)}


def outputs(model: Net) -> Callable[[State], Tensor]:
    """By parameters in place of the model's own."""
    return lambda parameters: functional_call(model, {**state(model), **parameters}, (IDS,))


def loss(model: Net) -> Callable[[State], Tensor]:
    return lambda parameters: outputs(model)(parameters).float().square().mean()


def _directions(parameters: State, seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(p.shape, generator=generator, device="cpu", dtype=torch.float32).to(p)
        for name, p in parameters.items()
    }


def _by_example(model: Net, seed: int) -> object:
    return vmap(lambda ids: functional_call(model, state(model), (ids[None],)))(IDS)


def _ensemble(model: Net, seed: int) -> object:
    parameters, buffers = stack_module_state([model, model])
    return vmap(lambda p, b: functional_call(model, (p, b), (IDS,)))(parameters, buffers)


def _adapters(model: Net, seed: int) -> object:
    """Gradients of several adapters over one base."""
    several = {name: torch.stack([p, p * 2]) for name, p in trained(model).items()}
    return vmap(grad(loss(model)))(several)


def _pulled_back(model: Net, seed: int) -> object:
    result, pull = vjp(outputs(model), trained(model))
    return pull(torch.ones_like(result))


TRANSFORMS: dict[str, Callable[[Net, int], object]] = {
    "functional_call": lambda m, seed: functional_call(m, state(m), (IDS,)),
    "vmap": _by_example,
    "ensemble": _ensemble,
    "adapters": _adapters,
    "grad": lambda m, seed: grad(loss(m))(trained(m)),
    "jacrev": lambda m, seed: jacrev(loss(m))(trained(m)),
    "jvp": lambda m, seed: jvp(outputs(m), (trained(m),), (_directions(trained(m), seed),)),
    "vjp": _pulled_back,
    "grad of jvp": lambda m, seed: grad(
        lambda p: jvp(loss(m), (p,), (_directions(trained(m), seed),))[1]
    )(trained(m)),
}


class Graphs(ModelProgram):
    """Compiled graphs live on while the program changes what they were made of."""

    seen: object = None

    @rule(
        backend=st.sampled_from(["eager", "aot_eager"]),
        mode=FORWARD,
        rarely=st.integers(0, 2),
        backward=st.booleans(),
    )
    def compiled(self, backend: str, mode: str, rarely: int, backward: bool) -> None:
        if rarely:
            return  # each graph takes a good part of a second
        if self.seen is not self.model:
            torch._dynamo.reset()
            self.compiled_model = torch.compile(self.model, backend=backend, dynamic=False)
            self.seen = self.model
        if backward and mode not in ("no_grad", "inference"):
            self.check_gradients(mode, self.compiled_model)
            return
        with MODES[mode]():
            got, wanted = self.compiled_model(IDS), dense_twin(self.model)(IDS)
        near(got, wanted, self.exact, "outputs of a compiled graph")

    def teardown(self) -> None:
        self.__dict__.pop("compiled_model", None)
        self.seen = None
        super().teardown()

    @rule(how=st.sampled_from(sorted(TRANSFORMS)), mode=FORWARD, seed=st.integers(0, 1000))
    def transformed(self, how: str, mode: str, seed: int) -> None:
        """By torch.func, as the dense twin."""
        twin = dense_twin(self.model)
        with MODES[mode]():
            try:
                wanted = TRANSFORMS[how](twin, seed)
            except RuntimeError:
                return  # torch has no such transform under this mode
            got = TRANSFORMS[how](self.model, seed)
        exact = self.exact and how == "functional_call"  # others make products of other shapes
        pairs = zip(pytree.tree_leaves(got), pytree.tree_leaves(wanted), strict=True)

        def true(i: int) -> Tensor:
            return pytree.tree_leaves(TRANSFORMS[how](twin.double(), seed))[i].detach()

        for i, (one, other) in enumerate(pairs):
            near(one.detach(), other.detach(), exact, f"results of {how}", partial(true, i))
