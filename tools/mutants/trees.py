# SPDX-License-Identifier: Apache-2.0
"""Copies of the installed package to change, and processes that run tests against one: each is
forked from this one, where torch and pytest are loaded once."""

import compileall
import contextlib
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

MARKS = "not slow and not nightly"


class Tree:
    """A folder with a copy of the package: sources of the checkout, all else linked to `installed`,
    so that a forked process, and those that its tests start, import it before any other."""

    def __init__(self, folder: Path, sources: Path, installed: Path) -> None:
        self.folder, self.package = folder, folder / "stowage"
        shutil.copytree(sources, self.package, ignore=shutil.ignore_patterns("__pycache__"))
        for other in installed.iterdir():
            if other.name != "__pycache__" and not (self.package / other.name).exists():
                (self.package / other.name).symlink_to(other)
        self._originals: dict[str, str] = {}  # of what is changed; the checkout may move meanwhile
        # Compiled once: whoever changes a source removes what was compiled of it.
        mode = compileall.py_compile.PycInvalidationMode.UNCHECKED_HASH
        compileall.compile_dir(self.package, quiet=1, invalidation_mode=mode)

    def change(self, name: str, text: str) -> None:
        self._originals[name] = (self.package / name).read_text()
        self._write(name, text)

    def restore(self) -> None:
        while self._originals:
            self._write(*self._originals.popitem())

    def _write(self, name: str, text: str) -> None:
        path = self.package / name
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


def preload() -> None:
    import hypothesis  # noqa: F401
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import torch.distributed.tensor
    import torch.optim  # noqa: F401


def start(tree: Tree, root: Path, tests: tuple[str, ...], log: Path) -> int:
    """Runs tests of the checkout `root` in a process of its own; returns its id. It ends with 0
    where all have passed."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()
        told = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(told, 1), os.dup2(told, 2)
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(tree.folder)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(tree.folder / "hypothesis")
        sys.path.insert(0, str(tree.folder))
        sys.dont_write_bytecode = True
        status = _run(tree, root, tests)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(status)


def _run(tree: Tree, root: Path, tests: tuple[str, ...]) -> int:
    import pytest

    import stowage

    assert Path(stowage.__file__).is_relative_to(tree.package), stowage.__file__
    options = ["-x", "-q", "--tb=line", "-m", MARKS, "-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*options, "--hypothesis-seed=0", "--rootdir", str(root), *tests]))


def finish(process: int, begun: float, limit: float) -> int | None:
    """The exit status of a process that has ended, or has run for too long; else None."""
    ended, status = os.waitpid(process, os.WNOHANG)
    late = time.monotonic() - begun > limit
    if not ended and not late:
        return None
    with contextlib.suppress(ProcessLookupError):  # what its tests have left, or all of it
        os.killpg(process, signal.SIGKILL)
    if not ended:
        os.waitpid(process, 0)
        return -signal.SIGKILL
    return os.waitstatus_to_exitcode(status)
