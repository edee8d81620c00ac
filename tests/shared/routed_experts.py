# SPDX-License-Identifier: Apache-2.0
"""Experts of which two have tokens, while the memory of all others cannot be read: who touches it
ends by a signal. A script: FOLDER, which gets a file for each storage.

It prints a line for each way before it is gone, and figures at the end of each.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stowage

EXPERTS, HIDDEN, INNER, TOKENS = 16, 512, 512, 6
ROUTED = (3, 11)
WAYS = ("eager", "grouped_mm", "batched_mm")
STORAGES = ("f8_e4m3:block128x128", "f8_e4m3:row2", "mxfp4", "nvfp4:row2", "nf4")
STORAGES += ("int4:block32:bf16:zero",)
_PAGE = 4096
_NONE, _READ_AND_WRITE, _READ = 0, 3, 1


def build() -> Any:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=EXPERTS,
        num_experts_per_tok=2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def experts_of(model: Any) -> nn.Module:
    found: nn.Module = model.model.layers[0].mlp.experts
    return found


def routed(experts: Any, way: str, x: torch.Tensor) -> torch.Tensor:
    """The experts' own forward, with all tokens sent to ROUTED."""
    experts.config._experts_implementation = way
    y: torch.Tensor = experts(x, torch.tensor([ROUTED] * len(x)), torch.full((len(x), 2), 0.5))
    return y


def gaps(part: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Addresses of the whole pages of a part [EXPERTS, ...] that are of no expert in ROUTED."""
    each, start = part.nbytes // EXPERTS, part.data_ptr()
    edges = [-1, *ROUTED, EXPERTS]
    for before, after in pairwise(edges):
        first = -(-(start + (before + 1) * each) // _PAGE) * _PAGE
        last = (start + after * each) // _PAGE * _PAGE
        if first < last:
            yield first, last


@contextmanager
def unreadable(experts: nn.Module, mapped: bool) -> Iterator[int]:
    """Gives how many bytes are."""
    every: Sequence[Any] = list(experts.parameters())
    ranges = [gap for w in every for part in w.parts.values() for gap in gaps(part)]
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    try:
        for first, last in ranges:
            assert protect(first, last - first, _NONE) == 0, ctypes.get_errno()
        yield sum(last - first for first, last in ranges)
    finally:
        for first, last in ranges:
            protect(first, last - first, _READ if mapped else _READ_AND_WRITE)


def try_all(folder: Path) -> None:
    model = build()
    torch.manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN)
    for storage in STORAGES:
        at = folder / storage.replace(":", "-")
        packed = build()
        packed.load_state_dict(model.state_dict())
        stowage.stow(packed, rules={"*.experts.*_proj": storage})
        stowage.save(packed, at)
        for mapped in (False, True):
            experts = experts_of(stowage.load(build, at, mmap=mapped))
            every = sum(p.nbytes for w in experts.parameters() for p in w.parts.values())
            for way in WAYS:
                print(f"{storage} mapped={mapped} {way}", flush=True)
                _try_one(experts, way, x, mapped, every)


def _try_one(experts: nn.Module, way: str, x: torch.Tensor, mapped: bool, every: int) -> None:
    with torch.no_grad():
        wanted = routed(experts, way, x)
    tracked = x.clone().requires_grad_()
    stowage.fallbacks(clear=True)
    with unreadable(experts, mapped) as hidden:
        with torch.no_grad():
            got = routed(experts, way, x)
        y = routed(experts, way, tracked)
        (gradient,) = torch.autograd.grad(y.square().sum(), tracked)
    assert torch.equal(got, wanted) and gradient.isfinite().all() and gradient.any()
    assert stowage.fallbacks() == {}, stowage.fallbacks()
    share = every * len(ROUTED) // EXPERTS
    print(f"  {every - hidden} of {every} bytes could be read, {share} are routed to", flush=True)
    assert share <= every - hidden <= share + 64 * _PAGE


if __name__ == "__main__":
    try_all(Path(sys.argv[1]))
