# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with every option of FSDP2, copied, compiled, and with copies of shards."""

import parallel_options
import pytest
from ranks import on_ranks


@pytest.mark.nightly
def test_options_of_fsdp_on_pieces() -> None:
    for found in on_ranks(4, parallel_options.everything, seconds=200):
        assert found.pop("by hand") <= 1e-6
        for kind, ways in found.items():
            for way, apart in ways.items():
                assert apart <= (0.05 if way == "bf16" else 1e-5), (kind, way, apart)


@pytest.mark.nightly
def test_copies_of_shards_of_pieces() -> None:
    """2x2x2: scales go over the ranks that a weight is spread over, not over its copies."""
    for found in on_ranks(8, parallel_options.every_copy, seconds=200):
        assert all(apart <= 1e-5 for apart in found.values()), found
