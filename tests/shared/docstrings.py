# SPDX-License-Identifier: Apache-2.0
"""What docstrings must say, as the code has it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


def raised(thing: Any) -> set[str]:
    """The exceptions that the body of a function itself raises, by name."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(thing))))
    nodes = list(ast.walk(tree))
    calls = [n.exc for n in nodes if isinstance(n, ast.Raise)]
    names = {c.func.id for c in calls if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
    called = {n.func for n in nodes if isinstance(n, ast.Call)}
    if any(isinstance(f, ast.Name) and f.id == "raise_problems" for f in called):
        names.add("InvalidArgument")
    return names - {"translated", "KeyError", "AttributeError"}
