# SPDX-License-Identifier: Apache-2.0
"""What a newcomer meets first: system packages, the one message of CMake, presets, help."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = {
    "dpkg-query": "exit 1",  # nothing is installed
    "apt-get": 'echo "$DEBIAN_FRONTEND $*" >> "$LOG"',
    "python3": "exit 0",
    "g++": "exit 0",
}


def run_system_packages(
    folder: Path, user: int, more: Sequence[str] = (), **stubs: str
) -> tuple[int, str, str]:
    """Return exit status, what was printed and what apt-get was asked, on a machine of stubs."""
    (folder / "bin").mkdir()
    for name in ("bash", "env", "grep"):
        (folder / "bin" / name).symlink_to(shutil.which(name))
    for name, text in {**STUBS, "id": f"echo {user}", **stubs}.items():
        (folder / "bin" / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    log = folder / "log"
    log.touch()
    environment = {"PATH": str(folder / "bin"), "LOG": str(log), "CI": "true"}
    done = subprocess.run(
        [ROOT / "tools/system_packages", *more], env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr, log.read_text()


def test_root_installs_what_is_missing(tmp_path: Path) -> None:
    status, printed, asked = run_system_packages(tmp_path, user=0)
    assert status == 0, printed
    update, install = asked.splitlines()
    assert update == "noninteractive update -qq"
    assert install.startswith("noninteractive install -y") and "nlohmann-json3-dev" in install


def test_more_packages_can_be_asked_for(tmp_path: Path) -> None:
    status, printed, asked = run_system_packages(tmp_path, 0, more=["chromium"])
    assert status == 0, printed
    assert asked.splitlines()[1].split()[-1] == "chromium"


def test_sudo_is_used_where_it_asks_nothing(tmp_path: Path) -> None:
    sudo = '[ "$1" = -n ] && shift && exec "$@"'
    stubs = {"sudo": sudo, "true": "exit 0"}
    status, printed, asked = run_system_packages(tmp_path, user=1000, **stubs)
    assert status == 0, printed
    assert "install -y" in asked


@pytest.mark.parametrize("stubs", [{}, {"sudo": "exit 1"}])
def test_others_are_told_what_is_missing(tmp_path: Path, stubs: dict[str, str]) -> None:
    status, printed, asked = run_system_packages(tmp_path, user=1000, **stubs)
    assert status == 1 and not asked
    assert re.search(r"^  apt-get install nlohmann-json3-dev libfmt-dev ", printed, re.M)


def test_nothing_missing_asks_nothing(tmp_path: Path) -> None:
    present = "echo install ok installed"
    status, printed, asked = run_system_packages(tmp_path, 1000, **{"dpkg-query": present})
    assert (status, printed, asked) == (0, "", "")


def test_cmake_lists_every_missing_package_at_once(tmp_path: Path) -> None:
    absent = [
        f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("nlohmann_json", "fmt", "CLI11")
    ]
    done = subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path, *absent], capture_output=True, text=True
    )
    assert done.returncode != 0
    assert done.stderr.count("CMake Error") == 1
    assert "apt-get install nlohmann-json3-dev libfmt-dev libcli11-dev" in done.stderr


def test_presets_are_there() -> None:
    done = subprocess.run(
        ["cmake", "--list-presets"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert set(re.findall(r'"(\w+)"', done.stdout)) >= {"dev", "release", "asan", "tsan"}


def test_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.M)[1].split())
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    done = subprocess.run(
        ["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True, env=environment
    )
    assert set(re.findall(r"^  make ([\w-]+)", done.stdout, re.M)) == targets
