# SPDX-License-Identifier: Apache-2.0
"""Nothing looks at the stack: what a tensor is decides what an operator does, never who calls."""

import ast
from pathlib import Path

import stowage

PACKAGE = Path(stowage.__file__).parent
LOOKS = {"_getframe", "currentframe", "stack", "extract_stack", "walk_stack", "getouterframes"}


def _names(path: Path) -> set[str]:
    """Of what could give a frame: sys._getframe, inspect.stack, traceback.walk_stack, f_back."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            looks = node.attr in LOOKS and module in ("sys", "inspect", "traceback")
            if looks or node.attr in ("f_back", "f_locals", "tb_frame", "gi_frame"):
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("sys", "inspect", "traceback"):
            found |= {alias.name for alias in node.names} & LOOKS
    return found


def test_nothing_looks_at_the_stack() -> None:
    looking = {str(p.relative_to(PACKAGE)): n for p in PACKAGE.rglob("*.py") if (n := _names(p))}
    assert looking == {}


def test_looks_are_found(tmp_path: Path) -> None:
    for text in ("import sys\nf = sys._getframe()", "from inspect import stack", "f.f_back"):
        (file := tmp_path / "looks.py").write_text(text)
        assert _names(file), text
