# SPDX-License-Identifier: Apache-2.0
"""4-bit files between Stowage and bitsandbytes, through `stowage.load` and `save`. The files
themselves are in test_store_interop.py, folders of transformers in test_cli.py."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import stowage
import stowage.compat.bitsandbytes as facade

theirs = pytest.importorskip("bitsandbytes")
KINDS = [("nf4", False), ("nf4", True), ("fp4", False), ("fp4", True)]
SIZES = (256, 128, 64)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(k, n) for k, n in pairwise(SIZES)))


def peers(kind: str, nested: bool, **arguments: Any) -> nn.Sequential:
    facts = {"quant_type": kind, "compress_statistics": nested, **arguments}
    made = nn.Sequential(*(theirs.nn.Linear4bit(k, n, **facts) for k, n in pairwise(SIZES)))
    made.load_state_dict(plain().state_dict())
    return made.to("cpu")


def values(layer: Any) -> torch.Tensor:
    return theirs.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def is_mapped(part: torch.Tensor, path: Path) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= part.data_ptr() < int(last, 16):
            return str(path) in line
    return False


@pytest.mark.parametrize("quant_storage", [torch.uint8, torch.bfloat16])
@pytest.mark.parametrize(("kind", "nested"), KINDS)
def test_loads_what_they_wrote_without_them(
    kind: str,
    nested: bool,
    quant_storage: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, path = peers(kind, nested, quant_storage=quant_storage), tmp_path / "m.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # an import of it raises
    loaded = plain()
    stowage.load(loaded, path, mmap=True)
    storage = f"{kind}:block64{':nested' if nested else ''}"
    for ours, peer in zip(loaded, model, strict=True):
        assert ours.weight.resting == storage and ours.weight.dtype is torch.float32
        assert torch.equal(ours.weight.dequantize(), values(peer))
        assert torch.equal(ours.bias, peer.bias)
        assert is_mapped(ours.weight.parts["codes"], path)  # no copy was made


def test_map_and_offset_of_the_file_are_used(tmp_path: Path) -> None:
    """The map of bitsandbytes depends on the build of torch that wrote the file."""
    model = peers("nf4", True)
    for layer in model:
        state = layer.weight.quant_state
        state.state2.code = state.state2.code * 1.25
        state.offset = state.offset * 0.75
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    loaded = plain()
    stowage.load(loaded, tmp_path / "m.safetensors")
    stowage.save(loaded, tmp_path / "again")
    again = plain()
    stowage.load(again, tmp_path / "again")
    for ours, other, peer in zip(loaded, again, model, strict=True):
        assert torch.equal(ours.weight.dequantize(), values(peer))
        assert torch.equal(other.weight.dequantize(), values(peer))


@pytest.mark.parametrize(("kind", "nested"), KINDS)
def test_they_load_what_we_wrote(kind: str, nested: bool, tmp_path: Path) -> None:
    model = plain()
    stowage.stow(model, f"{kind}{':block64:nested' if nested else ''}")
    stowage.save(model, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    saved = safetensors.torch.load_file(path)
    for i, ours in enumerate(model):
        name = f"{i}.weight"
        stats = {k: v for k, v in saved.items() if k.startswith(f"{name}.")}
        weight = theirs.nn.Params4bit.from_prequantized(saved[name], stats, device="cpu")
        found = theirs.functional.dequantize_4bit(weight.data, weight.quant_state)
        assert torch.equal(found, ours.weight.dequantize())
    mirror = nn.Sequential(*(facade.nn.Linear4bit(k, n) for k, n in pairwise(SIZES)))
    mirror.load_state_dict(saved)
    for layer, ours in zip(mirror, model, strict=True):
        assert torch.equal(layer.weight.dequantize(), ours.weight.dequantize())
    x = torch.randn(3, SIZES[0])
    torch.testing.assert_close(mirror(x), model(x), rtol=1e-5, atol=1e-5)
