# SPDX-License-Identifier: Apache-2.0
"""What this installation is and what it runs on."""

import importlib.util
import json
from typing import Any

import torch

from stowage._ops import device_kernels, library
from stowage._ops.library import composite_forced

# What each optional library adds. Its absence is no error; a call that needs it names it.
_OPTIONAL = {
    "accelerate": "device maps of transformers and diffusers",
    "bitsandbytes": "opening files packed for it",
    "diffusers": "image and video models",
    "peft": "adapters on stowed weights",
    "safetensors": "checkpoints of other packages",
    "sentence_transformers": "sentence embedding models",
    "transformers": "language models",
}


def info() -> dict[str, Any]:
    """What this installation is and what it runs on.

    Returns:
        "version", "commit", "instruction_set" (`composite` where STOWAGE_FORCE_ISA asks for stock
        torch ops), "torch", "threads", in "missing" the optional libraries that are not there, and
        in "devices" what is known of each CUDA device whose tensors were met: "architecture" and
        "compiler" of its kernels, or why stock torch ops do the work there.

    Example:
        >>> sorted(stowage.info())
        ['commit', 'devices', 'instruction_set', 'missing', 'threads', 'torch', 'version']
    """
    facts: dict[str, Any] = json.loads(library.text(library.info()))
    if composite_forced():
        facts["instruction_set"] = "composite"
    missing = sorted(name for name in _OPTIONAL if importlib.util.find_spec(name) is None)
    return {
        "version": facts["version"],
        "commit": facts["commit"],
        "instruction_set": facts["instruction_set"],
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "missing": missing,
        "devices": device_kernels.known(),
    }
