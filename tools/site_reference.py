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
    "stowage.integrations.torchtitan",
)
FACADES = {  # and what of each is shown with it, in this order
    "stowage.compat.bitsandbytes": ("functional", "nn", "nn.parametrize"),
    "stowage.compat.torchao": ("quantization", "float8"),
    "stowage.compat.diffusers": ("hooks",),
    "stowage.compat.accelerate": ("big_modeling", "hooks", "utils.modeling", "utils.offload"),
    "stowage.compat.transformer_engine": ("pytorch", "common.recipe"),
}


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
    here = module, name
    there = imported(module).get(name, here)
    return here if there == here else home(*there)  # a package names its own modules so


def public(module: str) -> list[str]:
    """The names that a module gives: its `__all__`, or what it defines."""
    body = ast.parse(source(module).read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    defined = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in defined if not name.startswith("_")]


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


def facade(module: str, parts: tuple[str, ...]) -> str:
    """The page of a facade, where each name stands once."""
    text, seen = [f"# {module}", "What differs: [compat.md](../compat.md)."], set()
    for part in ("", *parts):
        where = f"{module}.{part}" if part else module
        homes = {name: home(where, name) for name in public(where)}
        shown = [n for n in homes if not (homes[n] in seen or is_hidden(where, n) or n[0] == "_")]
        seen |= set(homes.values())
        text += [f"## {part}"] if part else []
        text.append(f"::: {where}\n    options: {{heading_level: 3, members: {shown}}}")
    return "\n\n".join(text)


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
                shows = "show_root_heading: true, show_root_toc_entry: true"
                options = f"{{{shows}, show_root_full_path: false}}"
                text.append(f"::: {'.'.join(defined)}\n    options: {options}")
        text += [f"Explained elsewhere: {', '.join(others)}."] if others else []
        yield f"reference/{module}.md", "\n\n".join(text)
    for module, parts in FACADES.items():
        yield f"reference/{module}.md", facade(module, parts)
    yield "reference/headers.md", headers()
