# SPDX-License-Identifier: Apache-2.0
"""Scripts in processes of their own that need not import torch: they are forked from one that has
imported torch and nothing else, which takes longer than most scripts do.

For scripts that ask what the package does in a fresh process. What torch reads from the environment
when it loads (OMP_NUM_THREADS, LD_PRELOAD), and peaks of memory, ask for `sys.executable`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import subprocess
import sys
import tempfile
import types
from functools import cache
from pathlib import Path
from typing import Any


def run(
    text: str,
    *arguments: object,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    stderr: str = "",
) -> subprocess.CompletedProcess[str]:
    """As `python -c text arguments`, with what it printed; `stderr`: the path of a terminal."""
    server, answers = _server()
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder, "out"), Path(folder, "errors")
        out.touch()
        errors.touch()
        asked = {
            "text": text,
            "arguments": [str(argument) for argument in arguments],
            "environment": dict(os.environ if env is None else env),
            "folder": str(cwd or Path.cwd()),
            "out": str(out),
            "errors": stderr or str(errors),
        }
        assert server.stdin is not None
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        ended = answers.readline()
        assert ended, "the process that forks has ended"
        return subprocess.CompletedProcess(
            ["python", "-c", text, *asked["arguments"]],
            int(ended),
            out.read_text(),
            errors.read_text(),
        )


def script(path: Path, *arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    """As `python path arguments`."""
    text = (
        "import runpy, sys\nsys.argv[:2] = sys.argv[1:2]\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    return run(text, path, *arguments, **how)


@cache
def _server() -> tuple[subprocess.Popen[str], Any]:
    mine, theirs = os.pipe()
    started = subprocess.Popen(
        [sys.executable, __file__, str(theirs)], stdin=subprocess.PIPE, pass_fds=[theirs], text=True
    )
    os.close(theirs)
    assert started.stdin is not None
    atexit.register(started.wait)
    atexit.register(started.stdin.close)  # what ends it; the last that is registered comes first
    return started, os.fdopen(mine)


def _serve(answers: int) -> dict[str, Any] | None:
    """In a child: what it is asked to do. In the server: None, when all has been asked."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.close(answers)
            return json.loads(line)  # type: ignore[no-any-return]
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())
    return None


def _begin(asked: dict[str, Any]) -> None:
    """Makes the process look like one that was started with the script."""
    for number, path in enumerate([os.devnull, asked["out"], asked["errors"]]):
        opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_NOCTTY)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["folder"])
    sys.argv = ["-c", *asked["arguments"]]
    sys.path[0] = ""
    sys.modules["__main__"] = types.ModuleType("__main__")


if __name__ == "__main__":
    import torch  # noqa: F401

    gc.freeze()
    if (_asked := _serve(int(sys.argv[1]))) is not None:
        _begin(_asked)
        exec(compile(_asked["text"], "<string>", "exec"), vars(sys.modules["__main__"]))
