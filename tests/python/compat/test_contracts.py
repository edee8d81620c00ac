# SPDX-License-Identifier: Apache-2.0
"""Every name of a facade beside the peer's: a call that the peer takes is taken here, with the same
defaults. What differs is listed with its reason, and the list must be neither short nor long."""

from __future__ import annotations

import contracts
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


@pytest.mark.slow  # the peers' imports
@pytest.mark.parametrize("facade", KEPT)
def test_every_call_of_the_peer_is_taken(facade: str) -> None:
    pytest.importorskip(facade)
    found: list[str] = []
    compared: set[tuple[int, int]] = set()
    for _, ours, theirs in contracts.facade_modules(facade):
        for name, mine, peer in contracts.shared_callables(ours, theirs):
            if (id(mine), id(peer)) not in compared:
                compared.add((id(mine), id(peer)))
                found += [name + text for text in contracts.differences(mine, peer)]
    kept = KEPT[facade]
    assert [text for text in found if not text.startswith(tuple(kept))] == []
    assert [start for start in kept if not any(text.startswith(start) for text in found)] == []
    assert len(compared) >= SHARED[facade]
