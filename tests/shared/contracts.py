# SPDX-License-Identifier: Apache-2.0
"""What a facade owes its peer: the same names with the same arguments. Used by the contract test of
each facade, which gives peer and facade the same calls in one process."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def facade_modules(facade: str) -> Iterator[tuple[str, ModuleType, ModuleType]]:
    """Each module of the facade that the peer has too: its path, ours, the peer's."""
    ours = f"stowage.compat.{facade}"
    root = importlib.import_module(ours)
    for path in (ours, *(i.name for i in pkgutil.walk_packages(root.__path__, ours + "."))):
        dotted = path.removeprefix("stowage.compat.")
        if any(part.startswith("_") and part != "_nf4tensor_api" for part in dotted.split(".")):
            continue
        try:
            peer = importlib.import_module(dotted)
        except ModuleNotFoundError:
            continue
        yield dotted, importlib.import_module(path), peer


def shared_callables(ours: ModuleType, theirs: ModuleType) -> Iterator[tuple[str, Any, Any]]:
    """What our module defines or hands on, and the peer's has under the same name."""
    for name, mine in sorted(vars(ours).items()):
        if name.startswith("__") or isinstance(mine, ModuleType) or not callable(mine):
            continue
        if not getattr(mine, "__module__", "").startswith("stowage"):
            continue
        peer = getattr(theirs, name, None)
        if callable(peer) and peer is not mine:
            yield name, mine, peer


def differences(mine: Any, peer: Any) -> list[str]:
    """Why a call that the peer takes would be refused here, or mean something else."""
    if inspect.isclass(peer):
        found = [f"(): {text}" for text in _of_signatures(_maker(mine), _maker(peer))]
        for name, method in _methods(peer):
            own = inspect.getattr_static(mine, name, None)
            if own is None:
                found.append(f".{name}: is not there")
            elif callable(method) and not isinstance(own, property):
                texts = _of_signatures(getattr(mine, name), method)
                found += [f".{name}: {text}" for text in texts]
        return found
    return _of_signatures(mine, peer)


def _maker(kind: Any) -> Any:
    return kind.__new__ if "__new__" in vars(kind) and kind.__new__ is not object else kind.__init__


def _methods(kind: Any) -> Iterator[tuple[str, Any]]:
    """Public ones that the peer's own classes define, not those of torch or Python."""
    package = kind.__module__.partition(".")[0]
    names = {
        name
        for base in kind.__mro__
        if base.__module__.partition(".")[0] == package
        for name in vars(base)
        if not name.startswith("_")
    }
    for name in sorted(names):
        method = inspect.getattr_static(kind, name)
        if callable(method) or isinstance(method, classmethod | staticmethod | property):
            yield name, getattr(kind, name)


def _of_signatures(mine: Any, peer: Any) -> list[str]:
    try:
        ours, theirs = inspect.signature(mine), inspect.signature(peer)
    except (TypeError, ValueError):
        return []
    own = ours.parameters
    takes_all_names = any(p.kind is p.VAR_KEYWORD for p in own.values())
    takes_all_places = any(p.kind is p.VAR_POSITIONAL for p in own.values())
    places = [p.name for p in own.values() if p.kind in _POSITIONAL]
    found: list[str] = []
    for place, (name, wanted) in enumerate(theirs.parameters.items()):
        if wanted.kind not in (*_NAMED, inspect.Parameter.POSITIONAL_ONLY):
            continue
        got = own.get(name)
        if got is None:
            if not takes_all_names:
                found.append(f"lacks {name!r}")
        elif wanted.kind in _POSITIONAL and not takes_all_places and places[place:][:1] != [name]:
            found.append(f"{name!r} is not argument {place}")
        elif got.default is got.empty and wanted.default is not wanted.empty:
            found.append(f"{name!r} has no default")
        elif wanted.default is not wanted.empty and _told(wanted.default) != _told(got.default):
            found.append(f"{name!r} has another default")
    for name, got in own.items():
        needed = got.kind in _NAMED and got.default is got.empty
        if needed and name not in theirs.parameters:
            found.append(f"asks for {name!r}")
    return found


def all_differences(facade: str) -> tuple[list[str], int]:
    """Of all callables that both have, and how many these are."""
    found: list[str] = []
    compared: set[tuple[int, int]] = set()
    for _, ours, theirs in facade_modules(facade):
        for name, mine, peer in shared_callables(ours, theirs):
            if (id(mine), id(peer)) not in compared:
                compared.add((id(mine), id(peer)))
                found += [name + text for text in differences(mine, peer)]
    return found, len(compared)


def _told(default: Any) -> Any:
    """Defaults compare by value, classes and functions of both sides by name."""
    return getattr(default, "__name__", None) or repr(default)
