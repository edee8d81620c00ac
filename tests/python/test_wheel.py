# SPDX-License-Identifier: Apache-2.0
"""What `pip install .` puts on a machine: one wheel for every Python."""

import re
import subprocess
from importlib import metadata
from pathlib import Path

import pytest

try:
    WHEEL = metadata.distribution("torch-stowage")
except metadata.PackageNotFoundError:
    pytest.skip("needs the installed wheel: make build", allow_module_level=True)
FILES = {str(file): file for file in WHEEL.files or []}


def dynamic(name: str) -> str:
    command = ["readelf", "-d", str(FILES[name].locate())]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def needed(name: str) -> set[str]:
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic(name)))


def program() -> str:
    return next(name for name in FILES if name.endswith("bin/stowage"))


def test_tag_serves_every_python() -> None:
    tag = re.search(r"^Tag: (.+)$", WHEEL.read_text("WHEEL") or "", re.M)
    assert tag and tag[1] == "py3-none-linux_x86_64"


@pytest.mark.parametrize(
    "name",
    [
        "stowage/__init__.py",
        "stowage/py.typed",
        "stowage/stowage_torch.so",
        "stowage/lib/libstowage.so",
        "stowage/lib/cmake/stowage/stowageConfig.cmake",
        "stowage/lib/pkgconfig/stowage.pc",
        "stowage/lib/pkgconfig/stowage-c.pc",
        "stowage/include/stowage.h",
        "stowage/include/stowage/storage.h",
    ],
)
def test_contents(name: str) -> None:
    assert name in FILES
    assert Path(FILES[name].locate()).exists()


def test_nothing_else_comes_along() -> None:
    folders = {"/".join(name.split("/")[:2]) for name in FILES if name.startswith("stowage/")}
    folders = {f for f in folders if not f.endswith((".py", "__pycache__"))}
    private = ("_compute", "_files", "_model", "_ops", "_shard", "_tensor", "_tiers")
    packages = (*private, "compat", "integrations", "training")
    names = ("include", "lib", "py.typed", "stowage_torch.so")
    assert folders == {f"stowage/{name}" for name in (*names, *packages)}
    archives = [name for name in FILES if name.endswith((".a", ".o"))]
    assert not archives


def test_libraries_find_each_other_wherever_they_are_installed() -> None:
    assert "libstowage.so" in " ".join(needed("stowage/stowage_torch.so"))
    assert re.search(r"RUNPATH.*\[\$ORIGIN/lib\]", dynamic("stowage/stowage_torch.so"))
    assert "PATH" not in dynamic("stowage/lib/libstowage.so")


def test_core_needs_only_the_system() -> None:
    system = {"libstdc++.so.6", "libc.so.6", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1"}
    system.add("ld-linux-x86-64.so.2")  # thread-local storage
    assert needed("stowage/lib/libstowage.so") <= system


def test_program_runs() -> None:
    done = subprocess.run([FILES[program()].locate(), "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert WHEEL.version in done.stdout


def test_wheel_is_small() -> None:
    total = sum(Path(file.locate()).stat().st_size for file in FILES.values())
    assert total < 16 << 20, f"{total / 2**20:.1f} MiB installed"
