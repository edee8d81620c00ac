# SPDX-License-Identifier: Apache-2.0
"""A budget that yields to others' need of memory, and what is available to a container."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage
from stowage._tiers.maps.budgets import available_ram

MIB = 1 << 20
X = torch.linspace(-1, 1, 2 * 512).reshape(2, 512)
NEVER = 3600.0  # seconds: the test looks itself


def made(layers: int = 8) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers))).eval()
    stowage.stow(model, "int8")
    return model.requires_grad_(False)


@pytest.fixture
def model(tmp_path: Path) -> Iterator[nn.Module]:
    made_one = made()
    stowage.offload(made_one, ram="2MiB", folder=tmp_path / "w", reads="buffered")
    yield made_one


def test_it_shrinks_grows_and_changes_no_result(model: nn.Module) -> None:
    wanted, there = made()(X), [5 * MIB]
    with stowage.keep_free(model, "4MiB", every=NEVER, available=lambda: there[0]) as keeper:
        for available, budget in ((5, 2), (3, 1), (3.5, 0.5), (4, 0.5), (4.03, 0.5), (9, 2)):
            there[0] = int(available * MIB)
            keeper.look()
            assert keeper.ram == int(budget * MIB), available
            assert torch.equal(model(X), wanted)
            assert stowage.engine_report(model).held <= keeper.ram
        assert keeper.changes == 3
        there[0] = 0
        keeper.look()
        assert keeper.ram < MIB, "as far down as the model can"
    assert torch.equal(model(X), wanted)


def test_it_ends_where_the_model_needs_all(
    model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    one = stowage.nbytes(model[0].weight)  # type: ignore[index]
    with (
        caplog.at_level(logging.INFO, "stowage"),
        stowage.keep_free(model, MIB, least=1, every=NEVER, available=lambda: -9 * MIB) as keeper,
    ):
        keeper.look()
        lowest = keeper.ram
        keeper.look()
    assert one <= lowest == keeper.ram < one + 2 * MIB // 8
    assert "must hold the largest weight" in caplog.text
    assert torch.equal(model(X), made()(X))


def test_a_plan_is_made_anew(tmp_path: Path) -> None:
    model = made()
    plan = stowage.plan(model, ram="4MiB", links=_links())
    stowage.offload(model, plan=plan, folder=tmp_path / "w", reads="buffered")
    there = [0]
    with stowage.keep_free(model, MIB, every=NEVER, available=lambda: there[0]) as keeper:
        there[0] = -MIB  # 2 MiB are missing
        keeper.look()
        assert keeper.ram == 2 * MIB and torch.equal(model(X), made()(X))
        assert stowage.engine_report(model).peak <= 2 * MIB


def _links() -> dict[str, object]:
    linear = {name: {"read": 8e9, "multiply": 2e11} for name in ("f32", "int8")}
    rates = {"disk": 2e9, "cached": 6e9, "memcpy": 1e10, "linear": linear, "accelerators": {}}
    return {"key": stowage.planning.machine_key(), **rates}


def test_it_looks_from_a_thread_while_the_model_works(model: nn.Module) -> None:
    wanted, asked = made()(X), []

    def available() -> int:
        asked.append(1)
        return 5 * MIB if len(asked) % 2 else 3 * MIB

    with stowage.keep_free(model, 4 * MIB, every=0.001, available=available) as keeper:
        while keeper.changes < 60:
            assert torch.equal(model(X), wanted)


def test_it_does_not_hold_the_model(tmp_path: Path) -> None:
    model = made()
    stowage.offload(model, ram="2MiB", folder=tmp_path / "w")
    keeper, gone = stowage.keep_free(model, MIB, every=NEVER), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    keeper.look()
    keeper.stop()


@pytest.mark.parametrize(
    ("given", "told"),
    [({"every": 0}, "every must be"), ({"free": "much"}, "free must"), ({"least": "x"}, "least")],
)
def test_refused(model: nn.Module, given: dict[str, object], told: str) -> None:
    with pytest.raises(stowage.InvalidArgument, match=told):
        stowage.keep_free(model, **({"free": 1} | given))  # type: ignore[arg-type]
    with pytest.raises(stowage.InvalidArgument, match="must rest on a disk"):
        stowage.keep_free(made(), 1)


GROUP = "sys/fs/cgroup/pods/one"


def root_of(tmp_path: Path, groups: dict[str, tuple[str, int]]) -> Path:
    files = {"proc/meminfo": "MemTotal: 999999 kB\nMemAvailable:   8192 kB\n"}
    files["proc/self/cgroup"] = "0::/pods/one\n"
    for group, (most, used) in groups.items():
        files[f"{group}/memory.max"] = f"{most}\n"
        files[f"{group}/memory.current"] = f"{used}\n"
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_what_the_machine_has(tmp_path: Path) -> None:
    assert available_ram(root_of(tmp_path, {})) == 8 * MIB
    assert available_ram() > 0
    with pytest.raises(stowage.InvalidArgument, match="does not tell"):
        available_ram(tmp_path / "nothing")


def test_what_a_container_leaves(tmp_path: Path) -> None:
    root = root_of(tmp_path, {GROUP: ("max", 5), "sys/fs/cgroup/pods": (str(4 * MIB), 3 * MIB)})
    assert available_ram(root) == MIB
    (root / GROUP / "memory.max").write_text(str(2 * MIB))
    (root / GROUP / "memory.current").write_text(str(2 * MIB))
    assert available_ram(root) == 0
    (root / GROUP / "memory.stat").write_text(f"anon 12\ninactive_file {MIB // 2}\n")
    assert available_ram(root) == MIB // 2
