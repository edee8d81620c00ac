# SPDX-License-Identifier: Apache-2.0
"""Every name of a facade beside the peer's: a call that the peer takes is taken here, with the same
defaults. What differs is listed with its reason, and the list must be neither short nor long."""

from __future__ import annotations

import json
import sys

import fresh
import pytest

_STEP = "a step of the peer's own arithmetic"
_GATHER = "rows that rest are gathered by operators, whatever their class"
_MARK = "a mark for those who ask whether a module is offloaded; nothing hooks a forward"
KEPT = {  # how a difference begins, and why it stays
    "bitsandbytes": {
        "Params4bit.from_prequantized: 'device'": "not every machine has CUDA",
    },
    "torchao": {
        "Float8Linear()": "for isinstance; from_float converts",
        "WeightWithDynamicFloat8CastTensor": "for isinstance; convert_float8",
        "NF4Tensor.convert_to_norm_float_weight": _STEP,
        "NF4Tensor.dequantize_scalers": _STEP,
        "NF4Tensor.double_quantize_scalers": _STEP,
        "NF4Tensor.quantize_tensor_nearest": _STEP,
        "NF4Tensor.dequantize": _STEP,
        "NF4Tensor.fsdp": _GATHER,
    },
    "accelerate": {},
    "diffusers": {"GroupOffloadingHook": _MARK},
}
SHARED = {"bitsandbytes": 25, "torchao": 16, "accelerate": 50, "diffusers": 8}  # at least
_SCRIPT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
import contracts
print(json.dumps(contracts.all_differences(sys.argv[2])))
"""


@pytest.mark.slow  # the peers' imports
@pytest.mark.parametrize("facade", KEPT)
def test_every_call_of_the_peer_is_taken(facade: str) -> None:
    pytest.importorskip(facade)
    # In a process of its own: torchao writes to its defaults where they are used.
    asked = fresh.run(_SCRIPT, json.dumps(sys.path), facade)
    assert asked.returncode == 0, asked.stderr
    found, compared = json.loads(asked.stdout.splitlines()[-1])
    kept = KEPT[facade]
    assert [text for text in found if not text.startswith(tuple(kept))] == []
    assert [start for start in kept if not any(text.startswith(start) for text in found)] == []
    assert compared >= SHARED[facade]
