# SPDX-License-Identifier: Apache-2.0
"""The model of random programs: what rests in it, the dense twin that it is compared with, and what
every machine over it has."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine
from programs import EXACT_MODES, MODES, bytes_of
from torch import Tensor, nn

import stowage
from stowage import StowedTensor

IDS = torch.tensor([[1, 5, 0, 7], [2, 2, 3, 23]])
WIDTH, WORDS = 64, 32
EXACT = st.sampled_from(EXACT_MODES)
FORWARD = st.sampled_from(sorted({*EXACT_MODES} - {"device meta"}))


class Net(nn.Module):
    """One of each: a table tied to a head, a matrix, a convolution, a bare matrix, a trained norm,
    an adapter, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.bare = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.norm(self.first(self.embed(ids)) + self.shift)
        h = h + self.up(self.down(h))
        h = self.conv(h.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(h @ self.bare))


TRAINED = ("norm", "down", "up")


def put_to_rest(model: nn.Module, storage: str, exact: bool, buffers: bool) -> None:
    rules: dict[str, str | None] = {f"{name}*": None for name in TRAINED}
    rules |= {"bare": storage}
    if re.search(r"torchao|:block\d+x", storage):
        rules |= {"conv*": None}  # it holds no more than two dimensions
    if buffers:
        rules |= {"shift": "bf16"}
    stowage.stow(model, storage, rules=rules, exact=exact, buffers=buffers)


def built(seed: int, dtype: torch.dtype, storage: str, exact: bool, buffers: bool) -> Net:
    torch.manual_seed(seed)
    model = Net().to(dtype)
    put_to_rest(model, storage, exact, buffers)
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, StowedTensor):
            parameter.requires_grad_(name.startswith(TRAINED))
    return model


def dense_twin(model: Net) -> Net:
    """A plain model of the values that `model` has now."""
    twin = Net().to(model.norm.weight.dtype)
    with torch.no_grad():
        pairs = [*model.named_parameters(), *model.named_buffers()]
        into = dict([*twin.named_parameters(), *twin.named_buffers()])
        for name, value in pairs:
            plain = value.dequantize() if isinstance(value, StowedTensor) else value
            into[name].copy_(plain)
            into[name].requires_grad_(value.requires_grad)
    return twin


def near(
    got: Tensor,
    wanted: Tensor,
    exact: bool,
    what: str,
    true: Callable[[], Tensor] | None = None,
) -> None:
    """`true`: in fp64, for results whose error in bf16 may be of their own size: then as near to
    it as those of the dense twin."""
    if exact:
        assert torch.equal(got, wanted), f"{what} must be those of the dense twin, bit for bit"
        return
    bound = {torch.float32: 1e-4, torch.bfloat16: 0.25}[got.dtype]  # of other values: 1.4
    off = float((got.float() - wanted.float()).norm())
    allowed = bound * float(wanted.float().norm()) + 1e-5
    if off > allowed and true is not None:
        truth = true()
        off, allowed = float((got - truth).norm()), 2 * float((wanted - truth).norm())
    assert off <= allowed, f"{what} are off by {off}"


def resting(model: nn.Module) -> dict[str, StowedTensor]:
    every = [*model.named_parameters(), *model.named_buffers()]
    return {name: t for name, t in every if isinstance(t, StowedTensor)}


def look(module: nn.Module, inputs: object, output: Tensor) -> None:
    """A hook that only looks."""


def copied(model: Net, how: str, where: Path, other: Net) -> Net:
    """The same model in other memory; `other` is one of the same form, for files."""
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    stowage.save(model, where)
    return stowage.load(other.to(model.norm.weight.dtype), where)


def forked(model: Net, wanted: Tensor) -> int:
    """A child that ends with 0 where the model computes the same there."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with torch.inference_mode():
            torch.set_num_threads(1)
            near(model(IDS), wanted, False, "outputs in a child")
        status = 0
    finally:
        os._exit(status)


def write_under_graphs(model: Net) -> None:
    """Writes weights between a forward and its backward, which must raise then."""
    x = torch.randn(2, WIDTH, 5, dtype=model.norm.weight.dtype, requires_grad=True)
    for module, given in ((model.first, x.transpose(1, 2)), (model.conv, x)):
        out = module(given)
        with torch.no_grad():
            try:
                module.weight.copy_(module.weight.dequantize() * 0.5)
            except stowage.StowageError:
                continue
        try:
            out.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), error
        else:
            raise AssertionError("a backward used a weight that was written since its forward")


class ModelProgram(RuleBasedStateMachine):
    """A stowed model; its twin is made from it again whenever something is compared."""

    model: Net
    exact: bool
    offloaded: bool
    optimizer: torch.optim.Optimizer

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="programs-"))
        self.folders = 0

    def teardown(self) -> None:
        self.__dict__.pop("model", None)
        gc.collect()
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_folder(self) -> Path:
        self.folders += 1
        return self.folder / str(self.folders)

    def take(self, model: Net) -> None:
        """Goes on with this model; the bytes that it has now are those that it must have."""
        self.model = model
        self.held = {name: bytes_of(weight) for name, weight in resting(model).items()}

    def make_optimizer(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=1e-3)

    def check_gradients(self, mode: str, call: Callable[[Tensor], Tensor]) -> None:
        """Those of `call`, which is the model in some form, are the twin's."""
        twin = dense_twin(self.model)
        self.model.zero_grad()
        with MODES[mode]():
            call(IDS).float().square().mean().backward()
            twin(IDS).float().square().mean().backward()
        wanted = dict(twin.named_parameters())
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                near(parameter.grad, wanted[name].grad, False, f"gradients of {name}")
            else:
                assert parameter.grad is None
