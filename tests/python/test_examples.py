# SPDX-License-Identifier: Apache-2.0
"""The C++ example is found, built and run against the installed wheel, as a user would do it."""

import os
import subprocess
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
