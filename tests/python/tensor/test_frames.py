# SPDX-License-Identifier: Apache-2.0
"""One module looks at the stack, and sees through whatever lies between."""

import ast
from pathlib import Path
from types import FrameType

import stowage
from stowage._tensor.frames import above, module_of, nearest

PACKAGE = Path(stowage.__file__).parent
LOOKS = {"_getframe", "currentframe", "stack", "extract_stack", "walk_stack", "getouterframes"}
ALLOWED = {"_tensor/frames.py"}  # may only become shorter


def _names(path: Path) -> set[str]:
    """Of what could give a frame: sys._getframe, inspect.stack, traceback.walk_stack."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("sys", "inspect", "traceback") and node.attr in LOOKS:
                found.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and node.module in ("sys", "inspect", "traceback"):
            found |= {alias.name for alias in node.names} & LOOKS
    return found


def test_nothing_else_looks_at_the_stack() -> None:
    looking = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if _names(p)}
    assert looking == ALLOWED


def _deep(depth: int) -> FrameType | None:
    return nearest(__name__) if depth == 0 else _deep(depth - 1)


def test_any_number_of_frames_may_lie_between() -> None:
    for depth in (0, 1, 50, 500):
        assert (frame := _deep(depth)) is not None
        assert frame.f_code.co_name == "_deep" and module_of(frame) == __name__
        assert sum(f.f_code.co_name == "_deep" for f in above(frame)) == depth + 1


class _Mode:
    def __torch_function__(self) -> FrameType | None:
        return nearest(__name__)


def test_modes_pass_calls_on_and_are_not_who_calls() -> None:
    frame = _Mode().__torch_function__()
    assert frame is not None
    assert frame.f_code.co_name == "test_modes_pass_calls_on_and_are_not_who_calls"
    assert nearest("no.such.package") is None
