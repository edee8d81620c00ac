# SPDX-License-Identifier: Apache-2.0
"""Private names of torch: they stand in one module, and a torch without one is told, never passed.

What a torch lacks is taken from it in a forked process, before stowage is imported there.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import stowage
from stowage._ops import _torch

PACKAGE = Path(stowage.__file__).parent
PEERS = {  # private names of other packages
    *("_fn_refs", "_group_offload_block_modules", "_hf_hook", "_hook_order", "_old_forward"),
    *("_asdict", "_check_merge_allowed", "_fields", "_getframe", "_keys_to_ignore_on_save"),
    *("_no_split_modules", "_replace", "_to_ndarray"),
    *("_activate_lora", "_experts_implementation", "_experts_implementation_internal"),
}


CORE, CORNERS = [*_torch._CORE], [*_torch._CORNERS]
OWN_OF_CLASSES = {"_handle", "_schema", "_version", "_parameters", "_buffers", "_module_info"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def named(node: ast.AST, own: set[str]) -> list[str]:
    """The private names of others that a piece of a module's text names."""
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        if text.startswith("torch.") and not text.startswith("torch.ops."):
            return [text] if any(map(is_private, text.split("."))) else []
        operator = re.match(r"(torch\.ops(\.\w+)?|aten|functional)\._", text)
        mine = node.attr in own or (text == f"self.{node.attr}" and node.attr in OWN_OF_CLASSES)
        return [text] if is_private(node.attr) and not mine and not operator else []
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        return [n for n in names if any(map(is_private, n.split(".")))]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in {"getattr", "hasattr", "setattr"}:
        given = [a.value for a in node.args[1:2] if isinstance(a, ast.Constant)]
        return [n for n in given if is_private(n) and n not in own]
    return []


def test_private_names_of_torch_stand_in_one_module() -> None:
    trees = {p: ast.parse(p.read_text()) for p in PACKAGE.rglob("*.py") if p.name != "_torch.py"}
    ours = {name for tree in trees.values() for name in defined(tree)} | {"_codes"}
    theirs = set(_torch._READERS) | {_torch.IS_PARAMETER}
    own = ours - {n for n in theirs if is_private(n)} | {"_modules"} | PEERS
    found = [
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}: {name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for name in named(node, own)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["torch._C._x", "t._version", "getattr(t, '_local_tensor', t)"])
def test_what_names_one_is_found(text: str) -> None:
    assert [name for node in ast.walk(ast.parse(text)) for name in named(node, set())]


def test_this_torch_has_every_name() -> None:
    for name in _torch._PATHS:
        assert getattr(_torch, name) is not None


@pytest.mark.parametrize("name", [n for n in _torch._READERS if n != "_version"])
def test_an_attribute_that_objects_lack(name: str) -> None:
    (read,) = (
        r
        for r in vars(_torch).values()
        if getattr(r, "__closure__", None) and name in [c.cell_contents for c in r.__closure__]
    )
    what = re.escape(_torch._READERS[name])
    with pytest.raises(stowage.Unsupported, match=rf"has no object\.{name}, by which {what}; take"):
        read(object())


@pytest.fixture(scope="module")
def told() -> dict[str, list[str]]:
    """By each name that was taken away: where a process ended, and what it was told."""
    run = [sys.executable, str(Path(__file__).parents[2] / "shared" / "torch_without.py")]
    names = json.dumps([CORE, CORNERS])
    ended = subprocess.run([*run, names], capture_output=True, text=True, check=True, timeout=300)
    return {each[0]: each[1:] for each in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("path", CORE)
def test_without_a_name_of_the_core_nothing_is_imported(
    told: dict[str, list[str]], path: str
) -> None:
    assert told[path] == ["import", "Unsupported", str(_torch.lacks(path, _torch._NAMES[path]))]


@pytest.mark.slow
@pytest.mark.parametrize("path", CORNERS)
def test_without_a_name_of_a_corner_that_corner_says_so(
    told: dict[str, list[str]], path: str
) -> None:
    assert told[path] == ["corner", "Unsupported", str(_torch.lacks(path, _torch._NAMES[path]))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["forward_ad._current_level", "profiler._is_profiler_enabled"])
def test_without_a_flag_of_the_hot_path_nothing_is_imported(
    told: dict[str, list[str]], name: str
) -> None:
    where, error, text = told[f"torch.autograd.{name}"]
    assert (where, error) == ("import", "Unsupported")
    assert f"has no torch.autograd.{name}, by which" in text
