# SPDX-License-Identifier: Apache-2.0
"""Facades say what their names do and what is otherwise than in the peer, whose documentation holds
for the rest: arguments that the peer lacks, and what is raised here."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import pytest
from contracts import facade_modules, shared_callables
from docstrings import raised

import stowage

FACADES = ("accelerate", "bitsandbytes", "diffusers", "torchao", "transformer_engine")


def defined(module: ModuleType) -> list[str]:
    own = vars(module).items()
    return [n for n, t in own if getattr(t, "__module__", "") == module.__name__ and n[0] != "_"]


def public(facade: str) -> dict[str, Any]:
    """What the modules of a facade list, without those that begin with an underscore."""
    root = importlib.import_module(f"stowage.compat.{facade}")
    found = {}
    for path in (
        root.__name__,
        *(i.name for i in pkgutil.walk_packages(root.__path__, root.__name__ + ".")),
    ):
        if not any(part.startswith("_") for part in path.split(".")):
            module = importlib.import_module(path)
            for name in getattr(module, "__all__", None) or defined(module):
                thing = getattr(module, name)
                plain = inspect.isfunction(thing) or inspect.isclass(thing)
                if plain and thing.__module__.startswith("stowage.compat"):
                    found[f"{path}.{name}"] = thing
    return found


@pytest.mark.parametrize("facade", FACADES)
def test_every_name_of_a_facade_is_explained(facade: str) -> None:
    names = public(facade)
    assert len(names) > 3
    assert not [n for n, t in names.items() if not (t.__doc__ or "").strip().endswith((".", ")"))]


def named(kind: str, text: str) -> bool:
    """Whether a text names an exception, or what its peer raises there: a base of it."""
    bases = getattr(stowage, kind).__mro__ if hasattr(stowage, kind) else ()
    return kind in text or any(base.__name__ in text for base in bases[:-3])


@pytest.mark.parametrize("facade", FACADES)
def test_what_a_facade_raises_is_said(facade: str) -> None:
    wrong = []
    for name, thing in public(facade).items():
        if inspect.isfunction(thing):
            said = thing.__doc__ or ""
            wrong += [f"{name}: {kind}" for kind in raised(thing) if not named(kind, said)]
    assert not wrong


@pytest.mark.parametrize("facade", FACADES)
def test_arguments_that_a_peer_lacks_are_explained(facade: str) -> None:
    pytest.importorskip(facade)
    wrong = []
    for path, ours, theirs in facade_modules(facade):
        for name, mine, peer in shared_callables(ours, theirs):
            public = inspect.isfunction(mine) and not name.startswith("_")
            if public and inspect.isfunction(peer):
                own = inspect.signature(mine).parameters.keys()
                added = own - inspect.signature(peer).parameters.keys() - {"args", "kwargs"}
                wrong += [
                    f"{path}.{name}: {a}" for a in added if f"`{a}`" not in (mine.__doc__ or "")
                ]
    assert not wrong
