# SPDX-License-Identifier: Apache-2.0
"""A place for every weight, said by as few names as do."""

from __future__ import annotations

from collections.abc import Mapping


def collapsed(places: Mapping[str, str]) -> dict[str, str]:
    """Names of weights to places, with a module's name for all below it where they have one place;
    "" for the whole model. No name of the result contains another."""
    below: dict[str, set[str]] = {}
    for name, place in places.items():
        for path in _around(name):
            below.setdefault(path, set()).add(place)
    found: dict[str, str] = {}
    for name, place in places.items():
        widest = next((p for p in _around(name) if len(below[p]) == 1), name)
        found[widest] = place
    return found


def _around(name: str) -> list[str]:
    """The modules that contain a weight, the widest first: "", "a", "a.b" of "a.b.weight"."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))]
