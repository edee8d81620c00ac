# SPDX-License-Identifier: Apache-2.0
"""Changes to the C++ sources: each is made in a copy of them, rebuilt, and given to a test."""

import os
import shutil
import subprocess
import time
from pathlib import Path

_SOURCES = ("CMakeLists.txt", "cmake", "include", "src", "tests", "version.txt", "fuzz", "python")
# Not joined: a change compiles its own file again, and not those of the whole layer.
_OPTIONS = (
    "-GNinja", "-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG=-O1", "-DSTOWAGE_JOIN=OFF",
    "-DSTOWAGE_BUILD_TESTS=ON", "-DSTOWAGE_BUILD_TORCH=OFF",
)  # fmt: skip


class Core:
    """`folder` is kept from run to run, so that only what has changed since is built."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.sources, self.build = folder / "sources", folder / "build"
        self.limits: dict[str, float] = {}  # seconds, by target: what waits for ever has failed
        wanted = set()
        for name in _SOURCES:
            for path in [root / name, *(root / name).rglob("*")]:
                if path.is_file() and path.suffix != ".pyc":
                    wanted.add(path.relative_to(root))
        for name in wanted:
            self._put(self.sources / name, (root / name).read_bytes())
        for path in [p for p in self.sources.rglob("*") if p.is_file()]:
            if path.relative_to(self.sources) not in wanted:
                path.unlink()
        for name in wanted:
            shutil.copymode(root / name, self.sources / name)
        command = ["cmake", "-S", self.sources, "-B", self.build, *_OPTIONS]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def _put(self, path: Path, content: bytes) -> None:
        """Leaves the time of a file that is the same."""
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def passes(self, target: str, log: Path) -> bool:
        """Whether the sources as they are build, and the test program passes. A program's tests may
        be picked: "engine_tests:Plan.*"."""
        program, _, some = target.partition(":")
        with log.open("w") as told:
            both = {"stdout": told, "stderr": subprocess.STDOUT}
            build = ["cmake", "--build", self.build, "--target", program]
            if subprocess.run(build, **both).returncode:
                raise SystemExit(f"mutate: {program} does not build, see {log}")
            found = next(p for p in self.build.rglob(program) if os.access(p, os.X_OK))
            run = [found, "--gtest_brief=1", "--gtest_fail_fast"]
            run += [f"--gtest_filter={some}"] if some else []
            began = time.monotonic()
            try:
                done = subprocess.run(run, **both, timeout=self.limits.get(target, 600))
            except subprocess.TimeoutExpired:
                return False
            if " 0 tests " in log.read_text(errors="replace"):
                raise SystemExit(f"mutate: {program} has no tests {some!r}")
            # The first run, of sources as they are, says how long the others may take.
            self.limits.setdefault(target, 60 + 10 * (time.monotonic() - began))
            return done.returncode == 0

    def write(self, name: str, text: str) -> None:
        self._put(self.sources / name, text.encode())
