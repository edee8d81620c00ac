# SPDX-License-Identifier: Apache-2.0
"""Whether the CPU multiplies tiles (AMX), and oneDNN may use them here."""

import os
from pathlib import Path

HAS_TILES = " amx_bf16" in Path("/proc/cpuinfo").read_text()
NAMES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")  # in their order; empty is none
_said = next(filter(None, map(os.environ.get, NAMES)), "").lower()
FORBIDDEN = _said.startswith(("sse", "avx")) and "amx" not in _said
