# SPDX-License-Identifier: Apache-2.0
"""Where the program is: beside this interpreter, or in the package."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import stowage

_FOUND = shutil.which("stowage", path=sysconfig.get_path("scripts"))
PROGRAM = _FOUND or Path(stowage.__file__).parent / "bin/stowage"
