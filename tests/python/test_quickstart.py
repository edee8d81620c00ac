# SPDX-License-Identifier: Apache-2.0
"""The quickstart runs and leaves nothing behind."""

from pathlib import Path

import fresh
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
def test_quickstart(tmp_path: Path) -> None:
    done = fresh.script(EXAMPLES / "quickstart.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for expected in ("int8:row", "nf4:block64", "rule '3' keeps it plain", "f8_e4m3:row"):
        assert expected in done.stdout
    assert not list(tmp_path.iterdir())
