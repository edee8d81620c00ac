# SPDX-License-Identifier: Apache-2.0
"""The model's names for what a file has: a function, or patterns and what to put in their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from stowage._files.names import Entry
from stowage._ops.errors import InvalidArgument

Rename = (
    Callable[[str], str | None]
    | Mapping[str, str]
    | Mapping[str, str | None]
    | Mapping[str | re.Pattern[str], str | None]
)


class Renaming:
    """Names of a file as names of a model. The first pattern that matches decides; a glob is held
    against the whole name and gives its `*` to those of the new one, a regular expression replaces
    what it finds. `then`: what some of the new names become. `problems`: patterns that match
    nothing, and names that would meet.

    Raises InvalidArgument for what is no pattern, and a new name that has not as many `*`.
    """

    def __init__(self, given: Rename | None, then: Mapping[str, str] | None = None) -> None:
        self.problems: list[str] = []
        self._then = then or {}
        self._used: set[str] = set()
        self._rules: list[tuple[str, re.Pattern[str], str | None]] = []
        self._function = given if callable(given) else None
        if isinstance(given, Mapping):
            self._rules = [_rule(pattern, new) for pattern, new in given.items()]
        elif given is not None and self._function is None:
            raise InvalidArgument(
                f"stowage: rename must be a function or a mapping, got {type(given).__name__}"
            )

    def __call__(self, name: str) -> str | None:
        new = self._renamed(name)
        return None if new is None else self._then.get(new, new)

    def _renamed(self, name: str) -> str | None:
        if self._function is not None:
            return self._function(name)
        for label, pattern, new in self._rules:
            if pattern.search(name):
                self._used.add(label)
                return None if new is None else pattern.sub(new, name)
        return name

    def entries(self, given: Mapping[str, Entry]) -> dict[str, Entry]:
        """By their new names, without those that have none."""
        found: dict[str, Entry] = {}
        for name, entry in given.items():
            new = self(name)
            if new in found:
                self.problems.append(
                    f"{name}: rename must give each a name of its own, got {new}, which "
                    f"{found[new].name} has"
                )
            elif new is not None:
                found[new] = entry
        self.problems += [
            f"rename: {label} must match a name of the file"
            for label, _, _ in self._rules
            if label not in self._used
        ]
        return found

    def ties(self, given: Mapping[str, str], every: Iterable[str]) -> dict[str, str]:
        """Ties of the file between names that the model has, `every`."""
        known = set(every)
        found = ((self(name), self(kept)) for name, kept in given.items())
        return {a: b for a, b in found if a is not None and b in known}


def _rule(pattern: object, new: object) -> tuple[str, re.Pattern[str], str | None]:
    if not isinstance(pattern, str | re.Pattern) or not isinstance(new, str | None):
        raise InvalidArgument(
            f"stowage: rename must map globs or regular expressions to names or None, got "
            f"{pattern!r}: {new!r}"
        )
    if isinstance(pattern, re.Pattern):
        return f"regex {pattern.pattern!r}", pattern, new
    pieces = pattern.split("*")
    whole = re.compile("^" + "(.*)".join(map(re.escape, pieces)) + "$", re.S)
    if new is None:
        return repr(pattern), whole, None
    parts = new.split("*")
    if len(parts) != len(pieces):
        raise InvalidArgument(
            f"stowage: rename must have as many * in the new name as in the old, got "
            f"{pattern!r}: {new!r}"
        )
    literal = [part.replace("\\", r"\\") for part in parts]
    template = literal[0] + "".join(rf"\g<{i}>{t}" for i, t in enumerate(literal[1:], 1))
    return repr(pattern), whole, template
