# SPDX-License-Identifier: Apache-2.0
"""C++ examples are found, built and run against the installed wheel, as a user would do it."""

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage

try:
    metadata.distribution("torch-stowage")
except metadata.PackageNotFoundError:
    pytest.skip("needs the installed wheel: make build", allow_module_level=True)
ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(stowage.__file__).parent


def run(*command: str | Path, **environment: str) -> str:
    everything = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, env=everything)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A packed model of one layer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(96, 40)})
    stowage.stow(model, "nf4")
    made = tmp_path_factory.mktemp("packed")
    stowage.save(model, made)
    return made


# site-packages is what scikit-build-core puts on the search path by itself.
@pytest.mark.parametrize("prefix", [PACKAGE, PACKAGE.parent], ids=["package", "site-packages"])
def test_cmake_finds_the_wheel(folder: Path, tmp_path: Path, prefix: Path) -> None:
    source = ROOT / "examples/cpp"
    run("cmake", "-S", source, "-B", tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path, "--target", "multiply")
    check(run(tmp_path / "multiply", folder, "layer.weight"))


def test_pkg_config_finds_the_wheel(folder: Path, tmp_path: Path) -> None:
    where = {"PKG_CONFIG_PATH": str(PACKAGE / "lib/pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", "stowage", **where).split()
    program = tmp_path / "multiply"
    run("g++", "-std=c++20", ROOT / "examples/cpp/multiply.cpp", *flags, "-o", program)
    check(run(program, folder, "layer.weight"))


def check(printed: str) -> None:
    assert "nf4:block64 [40, 96]" in printed
    assert "y[0] = " in printed and "nan" not in printed


def test_example_is_short() -> None:
    assert len((ROOT / "examples/cpp/multiply.cpp").read_text().splitlines()) < 80


def test_sentences_are_sixty_four_different_ones() -> None:
    lines = (ROOT / "examples/sentences.txt").read_text().splitlines()
    assert len(lines) == len(set(lines)) == 64


@pytest.mark.nightly
def test_a_package_of_inductor_runs_without_python(tmp_path: Path) -> None:
    """The listing of docs/serving.md, its lines of the shell, and the values that Python has."""
    page = (ROOT / "docs/serving.md").read_text()
    (listing,) = re.findall(r"^```python\n(.*?)^```", page, re.S | re.M)
    *_, shell = re.findall(r"^```sh\n(.*?)^```", page, re.S | re.M)
    (tmp_path / "inductor.cpp").write_bytes((ROOT / "examples/cpp/inductor.cpp").read_bytes())
    for command in ([sys.executable, "-c", listing], ["bash", "-euc", shell]):
        path = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=path)
        assert done.returncode == 0, done.stdout + done.stderr
    found, want = torch.load(tmp_path / "y.pt"), torch.load(tmp_path / "want.pt")
    assert torch.equal(found, want) and want.abs().max() > 0
    for binary in (tmp_path / "inductor", PACKAGE / "stowage_torch.so"):
        assert "libpython" not in run("ldd", binary)
