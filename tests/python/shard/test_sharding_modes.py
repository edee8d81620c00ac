# SPDX-License-Identifier: Apache-2.0
"""Sharding does not depend on what stands between torch and its operators: default devices, modes,
profilers, autocast. Bytes, records, places and results are those without."""

from typing import Any

import pytest
import sharding_modes
from ranks import on_ranks
from sharding_modes import MODES, STORAGES

RECIPES = ("tensorwise", "rowwise")


def check(cases: list[Any], world: int = 2) -> None:
    shape = (1, world)
    for wrong in on_ranks(world, sharding_modes.differences, cases, shape, seconds=200):
        assert wrong == []


def test_every_mode() -> None:
    cases: list[Any] = [("fsdp", "nf4", mode) for mode in (*MODES, "inference_mode")]
    cases += [("parallelized", "int8", mode) for mode in MODES]
    cases += [("distributed", "nf4:nested", mode) for mode in MODES]
    cases += [("float8", "tensorwise", mode) for mode in MODES]
    check(cases)


def test_every_storage() -> None:
    check(
        [(way, s, "set_default_device meta") for way in ("fsdp", "parallelized") for s in STORAGES]
    )


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3])
def test_every_mode_with_every_storage(world: int) -> None:
    ways = ("fsdp", "distributed") if world == 3 else ("fsdp", "parallelized", "distributed")
    for way in ways:
        check([(way, s, mode) for s in STORAGES for mode in MODES], world)
    check([("float8", recipe, mode) for recipe in RECIPES for mode in MODES], 2)


def test_init_values_go_along_under_modes() -> None:
    on_ranks(2, sharding_modes.kept_values, ["with torch.device", "function mode", "dispatch mode"])


@pytest.mark.parametrize("mode", ["set_default_device", "bare function mode"])
def test_columns_are_refused_under_modes(mode: str) -> None:
    for text in on_ranks(2, sharding_modes.along_columns, mode):
        assert "must be sharded along dim 0" in text and "build the model again" in text


@pytest.mark.parametrize("mode", [mode for mode in MODES if "bare" not in mode])
def test_replicas_are_refused_under_every_mode(mode: str) -> None:
    assert "DataParallel and replicate() copy plain parameters" in sharding_modes.replicas(mode)
