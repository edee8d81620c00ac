# SPDX-License-Identifier: Apache-2.0
"""What processes do that fork with offloaded models: scenarios for test_forks.py, each run in a
process of its own. `python forking.py <scenario> <folder>`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from offloadable import ONE_WEIGHT, Model, X, made
from torch import nn
from torch.utils.data import DataLoader, Dataset

import stowage


def start(body: Callable[[], bool], exits: bool = False) -> int:
    """Forks; the child's status is 0 where `body` is true there and it ends by itself."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends it
        torch.set_num_threads(1)  # torch's own threads are gone, and it would wait for them
        status = 1
        try:
            status = 0 if body() else 2
        except BaseException:
            traceback.print_exc()
        finally:
            if exits:
                sys.exit(status)  # with all that ends at the end of a process
            os._exit(status)
    return child


def check(child: int) -> None:
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise AssertionError(f"the child hung or was wrong: {os.waitstatus_to_exitcode(status)}")


def in_child(body: Callable[[], bool], exits: bool = False) -> None:
    check(start(body, exits))


def same(model: nn.Module, wanted: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.equal(model(X), wanted)


def offloaded(
    folder: Path, storage: str | None, ram: int, reads: str = "automatic"
) -> tuple[Model, torch.Tensor]:
    torch.set_num_threads(1)  # so that parent and child sum in one order
    model = made(storage).requires_grad_(False)
    wanted = model(X)
    stowage.offload(model, ram=ram, folder=folder, reads=reads)
    return model, wanted


def life(folder: Path, storage: str | None, reads: str) -> None:
    """Before and after the first use, and after rebudget."""
    model, wanted = offloaded(folder, storage, ONE_WEIGHT, reads)
    ours = stowage.engine_report(model).reads

    def child() -> bool:
        report = stowage.engine_report(model)
        good = same(model, wanted) and same(model, wanted)
        good &= report.reads == "mapped" and report.held == report.acquired == 0
        in_child(lambda: same(model, wanted))
        with torch.no_grad():  # what leaves the file makes no engine
            model.blocks[1].weight.copy_(made(storage).blocks[1].weight)
        good &= same(model, wanted) and stowage.engine_report(model).acquired == 0
        stowage.rebudget(model, 1 << 20)  # an engine of its own, as it was asked for
        good &= stowage.engine_report(model).reads == ours
        good &= same(model, wanted) and stowage.engine_report(model).acquired > 0
        stowage.onload(model)
        return good and same(model, wanted)

    for _ in range(2):
        for exits in (False, True):
            in_child(child, exits)
        assert same(model, wanted)
    stowage.rebudget(model, 1 << 20)
    in_child(child)
    assert stowage.engine_report(model).acquired > 0


def lives(folder: Path) -> None:
    for storage, reads in ((None, "automatic"), ("int8", "buffered")):
        life(folder / str(storage), storage, reads)
    stowed = made("int8").requires_grad_(False)  # not offloaded: the core's own threads
    wanted = stowed(X)
    in_child(lambda: same(stowed, wanted), True)


def threads(folder: Path) -> None:
    """While another thread has whatever lock it has."""
    model, wanted = offloaded(folder, "int8", ONE_WEIGHT)
    over = threading.Event()

    def use() -> None:
        while not over.is_set():
            assert same(model, wanted)
            stowage.engine_report(model)
            stowage.rebudget(model, ONE_WEIGHT + (1 << 16))
            stowage.rebudget(model, ONE_WEIGHT)

    user = threading.Thread(target=use)
    user.start()
    try:
        for turn in range(12):
            in_child(lambda: same(model, wanted), exits=turn % 2 == 1)
    finally:
        over.set()
        user.join()
    assert same(model, wanted)


def write(model: nn.Module, storage: str | None, seed: int) -> torch.Tensor:
    """Gives every weight other values, and returns what the model computes then."""
    other = made(storage, seed=seed)
    with torch.no_grad():
        model.load_state_dict(other.state_dict())
        for block in (*model.blocks, *other.blocks):  # type: ignore[misc]
            block.weight.mul_(-2)
        return other(X)


def written(folder: Path, storage: str | None) -> None:
    model, _ = offloaded(folder, storage, ONE_WEIGHT)
    before = write(model, storage, 1)
    assert same(model, before) and stowage.engine_report(model).journal > 0
    there, go = os.pipe()

    def child() -> bool:
        os.read(there, 1)  # the parent has written
        good = same(model, before) and same(model, write(model, storage, 3))
        return good and stowage.engine_report(model).journal > 0

    started = start(child)
    mine = write(model, storage, 2)
    assert same(model, mine)
    os.write(go, b"x")
    check(started)
    assert same(model, mine)


def writes(folder: Path) -> None:
    """What parent and child write after the fork is their own: in memory and in the journal."""
    for storage in (None, "int8"):
        written(folder / str(storage), storage)


def uses(folder: Path) -> None:
    """A child counts for itself, and is told of other runs when it has an engine."""
    model, wanted = offloaded(folder, "int8", ONE_WEIGHT)
    assert same(model, wanted)
    before = stowage.uses(model)
    names = before.weights.keys()
    assert names

    def child() -> bool:
        good = same(model, wanted) and not stowage.uses(model).weights
        try:
            stowage.foresee(model, before)
        except stowage.InvalidArgument as error:
            good &= "got it in a forked one" in str(error)
        else:
            return False
        stowage.rebudget(model, 1 << 20)
        stowage.foresee(model, before)
        return good and same(model, wanted) and stowage.uses(model).weights.keys() == names

    in_child(child)
    assert stowage.uses(model) == before


class Rows(Dataset[torch.Tensor]):
    """Computed by a model in the worker."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            return self.model(X)  # type: ignore[no-any-return]


def answer(model: nn.Module, wanted: torch.Tensor) -> None:
    torch.set_num_threads(1)
    sys.exit(0 if same(model, wanted) else 4)


def process(method: str, model: nn.Module, wanted: torch.Tensor) -> None:
    started = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
        target=answer, args=(model, wanted)
    )
    started.start()
    started.join(200)
    code = started.exitcode
    started.kill()
    assert code == 0, f"{method}: {code}"


def answer_queued(models: Any, wanted: torch.Tensor) -> None:
    answer(models.get(), wanted)


def queue(method: str, model: nn.Module, wanted: torch.Tensor) -> None:
    context = torch.multiprocessing.get_context(method)
    models = context.Queue()
    started = context.Process(target=answer_queued, args=(models, wanted))
    started.start()
    models.put(model)
    started.join(200)
    code = started.exitcode
    started.kill()
    assert code == 0, f"queue, {method}: {code}"


def workers(folder: Path) -> None:
    """DataLoader's workers, and multiprocessing's, that get the model at their start or later."""
    model, wanted = offloaded(folder, "int8", ONE_WEIGHT)
    multiprocessing.set_forkserver_preload(["torch"])  # as slow to import as all else
    for context in ("fork", *sys.argv[3:]):
        assert same(model, wanted)
        loader = DataLoader(
            Rows(model),
            batch_size=None,
            num_workers=2,
            timeout=200,
            multiprocessing_context=context,
        )
        rows = list(loader)
        assert len(rows) == 6 and all(torch.equal(row, wanted) for row in rows)
        process(context, model, wanted)
        queue(context, model, wanted)
        before = stowage.engine_report(model)
        assert same(model, wanted)
        uses = stowage.engine_report(model).since(before).acquired
        assert uses == 4, "its weights rest in the file as before"


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]))
