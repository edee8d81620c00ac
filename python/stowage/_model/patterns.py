# SPDX-License-Identifier: Apache-2.0
"""Patterns that name weights or modules of a model: a glob, a regular expression, a module type or
a predicate. What matches, how a pattern is called in messages, and what it may have meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from torch import nn

from stowage._model.weights import Site
from stowage._ops.errors import InvalidArgument

Predicate = Callable[[str, nn.Module], bool]
Pattern = str | re.Pattern[str] | type[nn.Module] | Predicate
_Value = TypeVar("_Value")
# What is said by patterns, of one kind or of several.
ByPattern = (
    Mapping[str, _Value]
    | Mapping[re.Pattern[str], _Value]
    | Mapping[type[nn.Module], _Value]
    | Mapping[Predicate, _Value]
    | Mapping[Pattern, _Value]
)

KINDS = "a glob, a regular expression (re.compile), a module type or a predicate(name, module)"


def check(pattern: object, where: str, root: bool = False) -> None:
    """Raises InvalidArgument for what is no pattern, naming `where` it stands. With `root`, the
    empty string is one: the path of the model itself."""
    legal = isinstance(pattern, str | re.Pattern) or callable(pattern)
    if isinstance(pattern, nn.Module) or (
        isinstance(pattern, type) and not issubclass(pattern, nn.Module)
    ):
        legal = False
    nameless = pattern == "" and not root
    if not legal or nameless or isinstance(getattr(pattern, "pattern", ""), bytes):
        raise InvalidArgument(f"stowage: {where} must be {KINDS}, got {pattern!r}")


def label(pattern: Pattern) -> str:
    """How messages and the report call a pattern."""
    if isinstance(pattern, str):
        return repr(pattern)
    if isinstance(pattern, re.Pattern):
        return f"regex {pattern.pattern!r}"
    return getattr(pattern, "__name__", None) or repr(pattern)


def matches(pattern: Pattern, site: Site) -> bool:
    """A glob is held against the parameter's name and the path of every module that contains it,
    and a regular expression is searched for in them; case matters. A type is held against the
    module that has the parameter; a predicate gets the parameter's name and that module."""
    return _matches(pattern, site.name, site.module, names_around)


def matches_module(pattern: Pattern, path: str, module: nn.Module) -> bool:
    """The same for a module: a glob and a regular expression are held against its own path alone,
    a predicate gets its path and itself."""
    return _matches(pattern, path, module, lambda own: [own])


def _matches(
    pattern: Pattern, name: str, module: nn.Module, names: Callable[[str], list[str]]
) -> bool:
    if isinstance(pattern, type):
        return isinstance(module, pattern)
    if isinstance(pattern, str):
        return any(fnmatchcase(each, pattern) for each in names(name))
    if isinstance(pattern, re.Pattern):
        return any(pattern.search(each) for each in names(name))
    return bool(pattern(name, module))


def names_around(name: str) -> list[str]:
    """ "a.b.weight" -> itself, "a.b", "a"."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def near_misses(pattern: Pattern, names: Iterable[str]) -> str:
    """What the author of a pattern that matches none of `names` may have meant, as the end of a
    sentence; "" where nothing is near."""
    if not isinstance(pattern, str | re.Pattern):
        return ""
    text = pattern if isinstance(pattern, str) else pattern.pattern
    wanted = re.sub(r"[^\w.]+", "", text).strip(".")
    whole = dict.fromkeys(around for name in names for around in names_around(name))
    parts = dict.fromkeys(part for name in whole for part in name.split("."))
    found = get_close_matches(wanted, list(whole), 3, 0.75) if wanted else []
    for part in wanted.split("."):
        if part and part not in parts:
            found += get_close_matches(part, list(parts), 2, 0.6)
    return f" (near: {', '.join(list(dict.fromkeys(found))[:3])})" if found else ""
