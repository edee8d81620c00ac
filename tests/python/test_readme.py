# SPDX-License-Identifier: Apache-2.0
"""The README's listings run, in their order, and the links of all pages lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import stowage

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(stowage.__file__).parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]


def listing(language: str) -> str:
    blocks = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M
    )
    assert len(blocks) == 1, f"README.md should have one {language} listing, has {len(blocks)}"
    return blocks[0]


def run(*command: str | Path, folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_listings_run(tmp_path: Path) -> None:
    (tmp_path / "listing.py").write_text(listing("python"))
    printed = run(sys.executable, "listing.py", folder=tmp_path)
    assert "f8_e4m3:row" in printed and "nf4" in printed

    (tmp_path / "listing.cpp").write_text(listing("cpp"))
    libraries = PACKAGE / "lib"
    if not (libraries / "libstowage.so").exists():
        pytest.skip("needs the installed wheel, which carries the headers: make build")
    flags = [f"-I{PACKAGE / 'include'}", f"-L{libraries}", "-lstowage", f"-Wl,-rpath,{libraries}"]
    compiler = ("g++", "-std=c++20", "-Wall", "-Werror")
    run(*compiler, "listing.cpp", *flags, "-o", "listing", folder=tmp_path)
    printed = run(tmp_path / "listing", folder=tmp_path)
    assert "2.weight [512, 2048] rests as nf4:block64" in printed
    assert re.search(r"y\[0\] = -?\d", printed)


def test_listings_are_short() -> None:
    for language in ("python", "cpp"):
        lines = [line for line in listing(language).splitlines() if line.strip()]
        assert len(lines) <= 24, f"{language}: {len(lines)} lines"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page}: {missing}"


def test_every_page_is_listed() -> None:
    listed = set(re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert listed == {page.name for page in ROOT.glob("docs/*.md")} - {"README.md"}
