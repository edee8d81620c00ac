# SPDX-License-Identifier: Apache-2.0
"""Defects of offloading in other packages, as tests of ours: rows 20 to 32 of the list, numbered as
in test_peer_defects.py, with those of rows 40 to 57 that are about the same.

Not here: row 29 and the second half of row 25, which are about copies to an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fresh
import pytest
import torch
from offloadable import KINDS, ONE_WEIGHT, RAM, Model, X, made, offloaded
from torch import nn

import stowage


@KINDS
def test_rows_20_40_a_folder_of_another_model(storage: str | None, tmp_path: Path) -> None:
    """Was taken for the model's own: it computed with the other's weights."""
    offloaded(tmp_path, storage)
    other = made(storage, seed=1)
    wanted = other(X)
    with pytest.raises(stowage.InvalidArgument, match=r"0\.weight: must have the model's values"):
        stowage.offload(other, ram=RAM, folder=tmp_path)
    assert torch.equal(other(X), wanted)


def test_row_21_a_folder_of_another_dtype(tmp_path: Path) -> None:
    """Weights came back in the dtype that the folder was written in."""
    offloaded(tmp_path)
    with pytest.raises(stowage.InvalidArgument, match=r"must be \[160, 160\] torch.bfloat16"):
        stowage.offload(made(dtype=torch.bfloat16), ram=RAM, folder=tmp_path)


@KINDS
def test_rows_22_41_44_states_have_all_values(storage: str | None, tmp_path: Path) -> None:
    """Were uninitialised memory, or tensors of no device, without the root's own parameters."""
    model, whole = offloaded(tmp_path / "w", storage), made(storage)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    again = torch.load(tmp_path / "state.pt", weights_only=True)
    for state in (model.state_dict(), again, stowage.state_dict(model)):
        assert {tensor.device.type for tensor in state.values()} == {"cpu"} and "scale" in state
        fresh = made(storage, seed=2)
        stowage.load_state_dict(fresh, state)
        assert torch.equal(fresh(X), whole(X))


@KINDS
def test_row_23_what_is_saved_can_be_loaded(storage: str | None, tmp_path: Path) -> None:
    """A checkpoint of garbage was written without a word."""
    model, whole = offloaded(tmp_path / "w", storage), made(storage)
    stowage.save(model, tmp_path / "saved")
    assert torch.equal(stowage.load(Model, tmp_path / "saved")(X), whole(X))
    stowage.save(model, tmp_path / "values", dtype=torch.float32)
    values = stowage.load(Model, tmp_path / "values").state_dict()
    assert all(torch.equal(values[n], p.detach() + 0) for n, p in whole.named_parameters())


@KINDS
def test_rows_24_47_54_writes_are_not_lost(storage: str | None, tmp_path: Path) -> None:
    """Files were written once, and updates, load_state_dict and assignments were forgotten."""
    weight = torch.linspace(-1, 1, 160 * 160).reshape(160, 160)

    def rebind(model: Model) -> None:
        model.blocks[1].weight = nn.Parameter(weight.clone())

    def assign(model: Model) -> None:
        model.blocks[1].weight.data = weight.clone()

    def copy_in(model: Model) -> None:
        model.blocks[1].weight.copy_(weight)

    def load_state(model: Model) -> None:
        model.load_state_dict(made(storage, seed=3).state_dict())

    writes: list[Callable[[Model], None]] = [rebind, assign, copy_in, load_state]
    for number, write in enumerate(writes):
        model, whole = offloaded(tmp_path / f"{number}", storage), made(storage)
        with torch.no_grad():
            before = model(X)
            write(model), write(whole)
            wanted = whole(X)
            assert not torch.equal(wanted, before)
            for _ in range(3):
                assert torch.allclose(model(X), wanted, rtol=1e-5, atol=1e-5), write


@KINDS
def test_rows_25_46_backward_has_the_weights(storage: str | None, tmp_path: Path) -> None:
    """Backward ran on emptied weights, or gave no gradient to anybody, without an error."""
    grads = []
    for model in (made(storage), offloaded(tmp_path, storage)):
        x = X.clone().requires_grad_()
        model(x).square().sum().backward()
        grads.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(grads[0]) == len(grads[1]) > 4
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@KINDS
def test_rows_26_45_an_exception_leaves_nothing_in_use(storage: str | None, tmp_path: Path) -> None:
    """Weights that were fetched for a forward that raised stayed."""
    model = made(storage)
    stowage.offload(model, ram=ONE_WEIGHT, folder=tmp_path, workers=0)
    places = [p.data_ptr() if storage is None else id(p) for p in model.parameters()]
    wanted = model(X)
    for bad in (X[:, :7], X * torch.nan):
        for _ in range(3):
            with pytest.raises((RuntimeError, ValueError)):
                model(bad)
    assert torch.equal(model(X), wanted)  # one weight has room: none of the others may be in use
    assert stowage.engine_report(model).borrowed == 0
    assert places == [p.data_ptr() if storage is None else id(p) for p in model.parameters()]


def test_row_30_two_components_in_one_folder(tmp_path: Path) -> None:
    """The second one's equal names were taken for the first one's."""
    components = nn.ModuleDict({"text": made(seed=4), "image": made(seed=5)})
    stowage.offload(components["text"], ram=RAM, folder=tmp_path)
    with pytest.raises(stowage.InvalidArgument, match="must have the model's values"):
        stowage.offload(components["image"], ram=RAM, folder=tmp_path)
    wanted = components["image"](X)
    stowage.offload(components["image"], ram=RAM, folder=tmp_path / "image")
    assert torch.equal(components["image"](X), wanted)


@KINDS
def test_rows_31_57_weights_can_be_read_outside_of_forward(
    storage: str | None, tmp_path: Path
) -> None:
    """Norms, ties and averages saw uninitialised memory or no values at all."""
    model, whole = offloaded(tmp_path, storage), made(storage)
    for mine, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert mine.device.type == "cpu" and not mine.is_meta
        assert mine.norm().item() == theirs.norm().item()
        assert torch.equal(torch.lerp(mine.detach() + 0, theirs.detach() + 0, 0.5), theirs + 0)
    assert model.tied.weight is model.blocks[0].weight


CHILD = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("accelerate", "diffusers", "transformers", "peft"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import torch, stowage
model = torch.nn.Linear(160, 160)
wanted = model(torch.ones(160))
stowage.offload(model, ram="1MiB", folder=sys.argv[1])
assert torch.equal(model(torch.ones(160)), wanted)
"""


def test_row_32_nothing_of_others_is_needed(tmp_path: Path) -> None:
    """A missing package was found by the first forward."""
    fresh.run(CHILD, tmp_path).check_returncode()
