# SPDX-License-Identifier: Apache-2.0
"""Reference pages of the site: public names of Python, each on one page, and the headers."""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "python/stowage"
MODULES = (  # a name is explained on the first page that has it
    "stowage",
    "stowage.tensor",
    "stowage.views",
    "stowage.policy",
    "stowage.skips",
    "stowage.loading",
    "stowage.checkpoint",
    "stowage.planning",
    "stowage.sharding",
    "stowage.training",
    "stowage.training.scaling",
    "stowage.integrations.transformers",
    "stowage.integrations.diffusers",
    "stowage.integrations.peft",
    "stowage.integrations.fabric",
)


@cache
def source(module: str) -> Path:
    """The file of a module."""
    path = PACKAGE.parent / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def imported(module: str) -> dict[str, tuple[str, str]]:
    """The names that a module takes from ours, and where it takes each from."""
    nodes = ast.walk(ast.parse(source(module).read_text()))
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "stowage"
        for alias in node.names
    }  # type: ignore[misc]


def home(module: str, name: str) -> tuple[str, str]:
    """The module that defines what another one has under a name, and its name there."""
    there = imported(module).get(name)
    return home(*there) if there else (module, name)


def public(module: str) -> list[str]:
    """The names that a module gives."""
    for node in ast.parse(source(module).read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{module}: must have __all__")


def is_hidden(module: str, name: str) -> bool:
    """Whether a module of the same name stands before it, for who reads without running."""
    return source(f"{module}.{name}").exists() and source(module).name == "__init__.py"


def headers() -> str:
    """The page of the public headers, whose comments explain them."""
    text = [
        "# Headers",
        "`stowage.h` is [for C](../c-api.md), the others are for C++, in which the README has "
        "[a program](../index.md#twenty-lines-of-c).",
    ]
    for path in sorted(PACKAGE.parent.parent.glob("include/**/*.h")):
        lines = path.read_text().splitlines()[1:]  # behind the licence
        told = list(takewhile(lambda line: line.startswith("//"), lines))
        text += [f"## {path.name}", " ".join(line[3:] for line in told)]
        text += ["~~~~ cpp\n" + "\n".join(lines[len(told) :]) + "\n~~~~"]
    return "\n\n".join(text)


@cache
def explained() -> dict[str, tuple[str, str]]:
    """The names of all pages, by module, with the module that defines each and its name there."""
    found: dict[str, tuple[str, str]] = {}
    for module in MODULES:
        for name in public(module):
            if home(module, name) not in found.values() and not is_hidden(module, name):
                found[f"{module}.{name}"] = home(module, name)
    return found


def pages() -> Iterator[tuple[str, str]]:
    """The name and the text of each page."""
    where = {defined: name for name, defined in explained().items()}
    for module in MODULES:
        shown = [name for name in public(module) if f"{module}.{name}" in explained()]
        text = [f"# {module}", f"::: {module}\n    options: {{members: {shown}}}"]
        others = []
        for name in (name for name in public(module) if name not in shown):
            defined = home(module, name)
            if defined in where:
                others.append(f"[`{name}`][{where[defined]}]")
            else:
                options = "{show_root_heading: true, show_root_full_path: false}"
                text.append(f"::: {'.'.join(defined)}\n    options: {options}")
        text += [f"Explained elsewhere: {', '.join(others)}."] if others else []
        yield f"reference/{module}.md", "\n\n".join(text)
    yield "reference/headers.md", headers()
