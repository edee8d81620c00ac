# SPDX-License-Identifier: Apache-2.0
"""Pages as a browser shows them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest


def screenshot(page: Path) -> Path:
    """A picture of a page, beside it. Skips the test where no chromium is installed."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium is installed to render the page with")
    shot = page.with_suffix(".png")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1100,1400"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    run = [*command, profile, f"--screenshot={shot}", page.as_uri()]
    subprocess.run(run, check=True, capture_output=True, timeout=120)
    return shot
