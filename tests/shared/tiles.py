# SPDX-License-Identifier: Apache-2.0
"""Whether the CPU multiplies tiles (AMX), and oneDNN may use them here."""

import os
from pathlib import Path

HAS_TILES = " amx_bf16" in Path("/proc/cpuinfo").read_text()
_said = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
FORBIDDEN = _said not in ("", "ALL", "DEFAULT") and "AMX" not in _said
