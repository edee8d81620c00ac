# SPDX-License-Identifier: Apache-2.0
"""The compiled module: what it links to, and what importing does where it cannot work."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import torch

import stowage

ORIGIN = Path(importlib.util.find_spec("stowage.stowage_torch").origin)
PACKAGE = Path(stowage.__file__).parent


def run(code: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    # The child finds the package where this process found it.
    path = f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r})\n"
    return fresh.run(path + code, *arguments, env={**os.environ, **env})


def undefined_symbols() -> list[str]:
    tool = shutil.which("nm")
    if tool is None:
        pytest.skip("nm is not installed")
    command = [tool, "--dynamic", "--undefined-only", "--demangle", str(ORIGIN)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [line.split(maxsplit=1)[1] for line in text.splitlines()]


def test_only_the_stable_abi_is_used() -> None:
    symbols = undefined_symbols()
    assert [s for s in symbols if re.search(r"\b(at|c10|torch)::", s)] == []
    from_torch = [s for s in symbols if re.match(r"(aoti_torch|torch)_", s)]
    assert len(from_torch) > 10
    assert [s for s in symbols if s.startswith("Py") or "GOMP" in s or "omp_" in s] == []


def test_what_it_links_to() -> None:
    tool = shutil.which("readelf")
    if tool is None:
        pytest.skip("readelf is not installed")
    text = subprocess.run([tool, "-d", str(ORIGIN)], capture_output=True, text=True, check=True)
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", text.stdout))
    system = {"libstdc++.so.6", "libgcc_s.so.1", "libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}
    needed.discard("libstowage.so.0")  # in a wheel, which has no symbolic links, the name is plain
    assert needed - system - {"libstowage.so"} == {"libtorch_cpu.so"}


REFUSALS = """
import importlib.util as u, sys, types
import torch
find = u.find_spec

def refused(name):
    sys.modules.pop("stowage", None)
    try:
        import stowage
    except ImportError as error:
        print(f"{name}: ImportError: {error}".replace(chr(10), " "))

def found(origin):
    return lambda n, *a: origin if n == "stowage.stowage_torch" else find(n, *a)

version, torch.__version__ = torch.__version__, "2.10.1"
refused("old")
torch.__version__ = version
u.find_spec = found(None)
refused("missing")
u.find_spec = found(types.SimpleNamespace(origin=sys.argv[1]))
refused("broken")
u.find_spec = find
import stowage
print("version:", stowage.info()["version"])
for name in [n for n in sys.modules if n == "stowage._ops.library"]:
    del sys.modules[name]
from stowage._ops import library
print("key:", library.torch.ops.stowage.storage_key("nf4"))
"""


@pytest.mark.slow
def test_what_cannot_work_is_said_and_a_second_import_is_fine(tmp_path: Path) -> None:
    """In one process: an old torch, no binary, a broken one; then it is mended, twice."""
    (tmp_path / "stowage_torch.so").write_bytes(b"\x7fELF")
    done = run(REFUSALS, str(tmp_path / "stowage_torch.so"))
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert "torch 2.11 or newer must be installed, got 2.10.1" in said["old"]
    assert "ImportError: stowage: the compiled part" in said["missing"]
    assert "pip install" in said["missing"]
    assert "cannot be loaded" in said["broken"] and "--force-reinstall" in said["broken"]
    assert said["version"] == stowage.info()["version"] and int(said["key"]) >= 0


@pytest.mark.slow
def test_a_second_copy_is_refused(tmp_path: Path) -> None:
    shutil.copy(ORIGIN, tmp_path / "stowage_torch.so")
    code = (
        f"import sys, torch; torch.ops.load_library({str(tmp_path / 'stowage_torch.so')!r})\n"
        f"sys.path.insert(0, {str(PACKAGE.parent)!r}); import stowage"
    )
    finds = {**os.environ, "LD_LIBRARY_PATH": str(PACKAGE / "lib")}  # read when a process starts
    done = subprocess.run([sys.executable, "-c", code], env=finds, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: stowage: the ops of" in done.stderr and "another copy" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "isa",  # test_instruction_sets.py forces scalar in every run
    [pytest.param("scalar", marks=pytest.mark.nightly), "composite"],
)
def test_forced_instruction_sets(isa: str) -> None:
    done = run(
        "import stowage, torch\n"
        "from stowage._ops import library as ops\n"
        "from stowage._ops.storage import Storage\n"
        "k = Storage('nf4').key\n"
        "codes, *scales = ops.quantize(torch.ones(4, 64), k)\n"
        "y = ops.linear(torch.ones(1, 64), codes, scales, k, 4, None)\n"
        "print(stowage.info()['instruction_set'], float(y[0, 0]))",
        STOWAGE_FORCE_ISA=isa,
    )
    assert done.stdout.split() == [isa, "64.0"], done.stderr


@pytest.mark.slow
def test_a_wrong_instruction_set_is_said() -> None:
    done = run(
        "import torch\nfrom stowage._ops import library as ops\n"
        "ops.quantize(torch.ones(4), ops.storage_key('nf4'))",
        STOWAGE_FORCE_ISA="mmx",
    )
    assert done.returncode == 1 and "[invalid_argument]" in done.stderr and "mmx" in done.stderr


def test_info() -> None:
    facts = stowage.info()
    names = ["version", "commit", "instruction_set", "torch", "threads", "missing", "devices"]
    assert list(facts) == names and facts["devices"] == {}
    assert facts["torch"] == torch.__version__ and facts["threads"] == torch.get_num_threads()
    assert re.fullmatch(r"\d+\.\d+\.\d+", facts["version"])


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp", "functionalize", "grad of vmap"])
def test_texts_are_read_under_transforms(transform: str) -> None:
    """A transform wraps what an op returns, and the wrapper has no memory."""
    wanted = stowage._ops.library.text(stowage._ops.library.info())
    x, seen = torch.ones(2, 3), []

    def told(x: torch.Tensor) -> torch.Tensor:
        seen.append(stowage._ops.library.text(stowage._ops.library.info()))
        return x.sum()

    {
        "grad": lambda: torch.func.grad(told)(x),
        "vmap": lambda: torch.func.vmap(told)(x),
        "jvp": lambda: torch.func.jvp(told, (x,), (x,)),
        "functionalize": lambda: torch.func.functionalize(told)(x),
        "grad of vmap": lambda: torch.func.grad(lambda x: torch.func.vmap(told)(x).sum())(x),
    }[transform]()
    assert seen == [wanted]
