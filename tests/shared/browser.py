# SPDX-License-Identifier: Apache-2.0
"""Pages as a browser shows them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

# Added to a copy of the page: say by the console what was not loaded, and where parts are drawn.
LISTENING = """<!doctype html><script>
addEventListener("error", e => console.error("error of " + (e.target.src || e.message)), true);
</script>"""
ASKING = """<script>
const parts = [...document.querySelectorAll("h1,h2,h3,svg,table")].map(part => {
  const box = part.getBoundingClientRect();
  return {kind: part.localName, text: part.localName[0] == "h" ? part.innerText : "",
          width: box.width, height: box.height, right: box.right};
});
console.log("parts " + JSON.stringify({parts, width: document.documentElement.clientWidth,
                                       needed: document.documentElement.scrollWidth}));
</script>"""


@dataclass(frozen=True)
class Shown:
    picture: Path
    parts: list[dict[str, object]]  # headings, pictures and tables: kind, text and pixels
    fits: bool  # nothing is wider than the window
    complaints: list[str]  # what the console has: errors, and what was not found

    def headings(self) -> list[object]:
        return [part["text"] for part in self.parts if str(part["kind"]).startswith("h")]

    def is_drawn(self) -> bool:
        """Each part has a size, and the picture has more than a few colours."""
        colours = Image.open(self.picture).convert("RGB").getcolors(1 << 24) or []
        return all(part["width"] and part["height"] for part in self.parts) and len(colours) > 50


def shown(page: Path, height: int = 1400) -> Shown:
    """A page in a window of 1100 pixels. Skips the test where no chromium is installed."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium is installed to render the page with")
    asking = page.with_suffix(".asking.html")
    asking.write_text(page.read_text().replace("<!doctype html>", LISTENING, 1) + ASKING)
    picture = page.with_suffix(".png")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--enable-logging=stderr", f"--user-data-dir={page.parent / 'profile'}"]
    command += [f"--window-size=1100,{height}", f"--screenshot={picture}", asking.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    said = re.findall(r':CONSOLE[^\]]*\] "(.*)", source: ', done.stderr)
    answer = [line.removeprefix("parts ") for line in said if line.startswith("parts ")]
    assert len(answer) == 1, done.stderr
    seen = json.loads(answer[0])
    complaints = [line for line in said if not line.startswith("parts ")]
    return Shown(picture, seen["parts"], seen["needed"] <= seen["width"], complaints)
