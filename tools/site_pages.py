# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: pages of the site that stand elsewhere in the tree, and links that lead there.

README.md is the first page, docs/README.md the list of all; what pages link to outside of docs/
(examples, the licence) becomes a page with its text. Reference pages are made from docstrings.
"""

import os
import re
from pathlib import Path

import site_reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PLACES = {ROOT / "README.md": "index.md", DOCS / "README.md": "contents.md"}
TOP = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
LANGUAGES = {".py": "python", ".cpp": "cpp", ".h": "cpp", ".sh": "bash"}


def place(path: Path) -> str:
    """The page of the site that shows a file or folder of the tree."""
    if path in PLACES:
        return PLACES[path]
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return name if path.suffix == ".md" else f"{name}.md"


def linked(page: Path) -> set[Path]:
    """The files and folders that a page links to."""
    found = (page.parent / target for target, _ in LINK.findall(page.read_text()))
    return {path.resolve() for path in found if path.exists()}


def outside() -> set[Path]:
    """What becomes a page without standing in docs/."""
    found = {ROOT / "README.md", DOCS / "README.md", *TOP}
    for start in [*found, *DOCS.glob("*.md")]:
        found |= {path for path in linked(start) if not path.is_relative_to(DOCS)}
    return found


def listing(path: Path) -> str:
    """The text of a page that shows a file, or the files of a folder."""
    if path.suffix == ".md":
        return path.read_text()
    parts = [f"# {path.relative_to(ROOT)}"]
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        parts += [f"## {file.name}"] if path.is_dir() else []
        parts.append(f"~~~~ {LANGUAGES.get(file.suffix, 'text')}\n{file.read_text()}\n~~~~")
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    shown = InclusionLevel.NOT_IN_NAV  # need not be there
    for path in sorted(outside()):
        files.append(File.generated(config, place(path), content=listing(path), inclusion=shown))
    for name, text in site_reference.pages():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links lead to pages of the site."""
    here = page.file.src_uri
    source = next((path for path in outside() if place(path) == here), DOCS / here)

    def moved(match: re.Match[str]) -> str:
        path = (source.parent / match[1]).resolve()
        if not path.exists():
            return match[0]
        return os.path.relpath(place(path), os.path.dirname(here)) + match[2]

    return LINK.sub(moved, markdown)
