# SPDX-License-Identifier: Apache-2.0
"""Tests on the pretend device: torch has it for the rest of the process, and other tests must not,
so that these run in a process of their own (tests/python/test_pretend.py starts it)."""

import os

if "STOWAGE_PRETEND" in os.environ:
    import pretend_device

    pretend_device.load()
else:
    collect_ignore_glob = ["test_*.py"]
