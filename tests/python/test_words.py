# SPDX-License-Identifier: Apache-2.0
"""The words of docs/words.md are those of the tree: none that it forbids, each type's name once."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/words.md").read_text()
FOLDERS = ("src", "include", "python", "docs", "examples", "bench", "tools")
KINDS = {".h", ".cpp", ".py", ".md", ".txt", ""}
# What says why a word went, and what has its peers' names.
OTHERS = ("docs/words.md", "docs/decisions.md", "docs/compat.md", "python/stowage/compat/",
          "src/store/dialects/")  # fmt: skip
# One name in each instruction set: what it does in its own way.
EACH_SET = re.compile(r"src/kernel/cpu/(avx\w+|lanes)-inl\.h")
TYPE = re.compile(
    r"^(?:template *<[^;{]*>\s*)?(?:struct|class|enum class|union)\s+"
    r"(?:alignas\(.*?\)\s*|STOWAGE_API\s+)?(\w+)(?:\s+final)?\s*(?::[^;{]*)?\{",
    re.M,
)


def table(head: str) -> Iterator[list[str]]:
    rows = PAGE[PAGE.index(f"| {head}") :].split("\n\n", 1)[0].splitlines()[2:]
    return ([cell.strip() for cell in row[1:-1].split("|")] for row in rows)


def forbidden() -> list[str]:
    """What the last column has without a bracket that says what else it means."""
    cells = (row[2] for row in table("word | meaning | not"))
    words = [word for cell in cells for word in re.split(r", (?![^(]*\))", cell) if word]
    return [word for word in words if "(" not in word]


def files() -> list[Path]:
    found = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in KINDS]
    found += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return [p for p in found if p.is_file() and not name_of(p).startswith(OTHERS)]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def spelled(text: str) -> str:
    """The words of a text, those in names apart: " reads read ahead " of `ReadAhead reads`."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return f" {' '.join(re.findall('[A-Za-z]+', apart)).lower()} "


def uses(word: str, text: str) -> list[int]:
    """The lines that have it; a phrase may go over the end of one."""
    lines = text.splitlines()
    pairs = (spelled(f"{a} {b}") for a, b in zip(lines, [*lines[1:], ""], strict=True))
    return [at for at, pair in enumerate(pairs, 1) if f" {word} " in pair]


def test_the_page_forbids_words() -> None:
    words = forbidden()
    assert {"prefetch", "dtype (of a plain tensor)"}.isdisjoint(words)
    assert {"upcast", "double quantization", "read ahead"} <= set(words)
    assert len(words) == len(set(words)) > 20


@pytest.mark.parametrize(
    "text",
    ["def _read_ahead():", "struct ReadAhead {", "what is read\n    ahead of use", "Read ahead"],
)
def test_a_forbidden_word_is_seen(text: str) -> None:
    assert uses("read ahead", text)
    assert not uses("ahead read", text)


def test_no_forbidden_word_stands_anywhere() -> None:
    words, found = forbidden(), []
    for path in files():
        text = path.read_text(errors="replace")
        whole = spelled(text)
        for word in (word for word in words if f" {word} " in whole):
            found += [f"{name_of(path)}:{line}: {word}" for line in uses(word, text)]
    assert not found, "\n".join(found)


def cpp_types() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for folder in ("src", "include"):
        for path in (ROOT / folder).rglob("*.h"):
            if not EACH_SET.fullmatch(name_of(path)):
                for name in set(TYPE.findall(path.read_text())):
                    found.setdefault(name, []).append(name_of(path))
    return found


def test_each_type_of_a_header_has_a_name_of_its_own() -> None:
    found = cpp_types()
    assert {"Values", "Session", "Descriptor"} <= found.keys() and len(found) > 150
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}


def test_the_types_of_the_page_are_there() -> None:
    rows = [*table("name | meaning | another idea")]
    names = re.findall(r"`(\w+)`", " ".join(f"{row[0]} {row[2]}" for row in rows))
    texts = [p.read_text() for p in (ROOT / "src").rglob("*") if p.suffix in {".h", ".cpp"}]
    texts += [p.read_text() for p in (ROOT / "include").rglob("*.h")]
    defined = re.compile(r"(?:struct|class|union)\s+(?:STOWAGE_API\s+)?(\w+)[^;()]*\{")
    every = {name for text in texts for name in defined.findall(text)}
    assert names and not set(names) - every - {"pack"}


def test_each_class_of_python_has_a_name_of_its_own() -> None:
    found: dict[str, list[str]] = {}
    for path in (ROOT / "python/stowage").rglob("*.py"):
        for node in ast.parse(path.read_text()).body if "compat" not in path.parts else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name_of(path))
    assert not {name: paths for name, paths in found.items() if len(paths) > 1}
