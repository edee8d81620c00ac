# SPDX-License-Identifier: Apache-2.0
"""What an engine is told of a pass: its inputs as a number. Budgets, reads and writes are those of
offloaded models: test_offload*.py one folder up."""

from __future__ import annotations

import torch

from stowage._tiers.disk.engine import signature_of


def test_each_kind_of_input_has_a_signature() -> None:
    x, ids = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.int64)
    given = [(), (x,), (x[:1],), (x.half(),), (ids,), (x, ids), (x.reshape(3, 2),)]
    found = [signature_of(args, {}) for args in given]
    with torch.no_grad():
        found.append(signature_of((x,), {}))
    assert len(set(found)) == len(found)
    assert all(0 <= signature < 2**63 for signature in found)
    assert signature_of((x,), {}) == signature_of((), {"x": x + 1}) == signature_of((x, 3), {})
