# SPDX-License-Identifier: Apache-2.0
"""Old machines get the same bytes: the package under each instruction set that this CPU runs, in
processes of their own, through modules. Products keep their bound; all else is equal."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import fresh
import pytest
import tiles
import torch

from stowage._ops.library import composite_forced

pytestmark = pytest.mark.skipif(composite_forced(), reason="no instruction set to choose")

SCRIPT = """
import sys, torch, stowage
from torch import nn

torch.set_num_threads(1)
isa, out = sys.argv[1:]
try:
    stowage.quantize(torch.ones(2, 2), "int8")
except NotImplementedError:
    sys.exit(7)  # the CPU lacks it
assert stowage.info()["instruction_set"].startswith(isa)
found = {}
storages = "f8_e4m3 f8_e5m2:row int8 int8:block48 nf4 nf4:block64:nested fp4"
for storage in f"{storages} nf4:torchao:block16:scaler1 nf4:torchao:block32:scaler2:bf16".split():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        torch.manual_seed(0)
        embed, layer = nn.Embedding(48, 72), nn.Linear(72, 40)
        x = torch.randn(20, 72).to(dtype)
        model = nn.ModuleList([embed, layer])
        stowage.stow(model, storage, compute_dtype=dtype)
        key = f"{storage} {dtype}"
        found[key + " rows"] = embed(torch.arange(0, 48, 3))
        found[key + " weight"] = layer.weight.dequantize()
        found[key + " parts"] = torch.cat([
            p.contiguous().view(-1).view(torch.uint8) for p in layer.weight.parts.values()])
        with torch.no_grad():
            found[key + " y"] = torch.cat([layer(x[:n]) for n in (1, 3, 16)])
            found[key + " exact"] = torch.cat([x[:n] for n in (1, 3, 16)]).double() @ (
                layer.weight.dequantize().double().t()) + layer.bias.double()
torch.save(found, out)
"""


def run(isa: str, folder: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "STOWAGE_FORCE_ISA": isa}
    return fresh.run(SCRIPT, isa, folder / isa, env=env)


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bytes(tmp_path: Path) -> None:
    names = ("scalar", "avx2", "avx512", "avx512bf16", "amx")
    if platform.machine() in ("aarch64", "arm64"):
        names = ("scalar", "neon")
    runs = {name: run(name, tmp_path) for name in names}
    scalar = torch.load(tmp_path / "scalar")
    lacking = [name for name in names if runs[name].returncode == 7]
    for name in names[1:]:
        if name in lacking:
            continue
        assert runs[name].returncode == 0, runs[name].stderr[-2000:]
        found = torch.load(tmp_path / name)
        assert found.keys() == scalar.keys()
        for key, wanted in scalar.items():
            got = found[key]
            if not key.endswith(" y"):
                assert torch.equal(got, wanted), (name, key)
                continue
            exact = scalar[key.replace(" y", " exact")]
            unit = torch.finfo(got.dtype).eps
            error, scale = (got.double() - exact).abs().max(), exact.abs().max()
            # docs/numbers.md allows (72 + 8) / 2 units of sum |x w|, in whatever order it is added.
            assert error <= scale * (4 * unit + (0 if "float32" in key else 2.0**-8)), (name, key)
    if lacking:
        pytest.skip(f"equal where this CPU runs them; it lacks {', '.join(lacking)}")


WITHOUT_TILES = """
import ctypes, struct

# prctl(2), seccomp(2): arch_prctl(ARCH_REQ_XCOMP_PERM) fails, as where a system lends no tiles.
LOAD, SKIP_UNLESS, RETURN, REFUSE, ALLOW = 0x20, 0x15, 0x06, 0x00050001, 0x7FFF0000
filter = b"".join(struct.pack("=HBBI", *op) for op in (
    (LOAD, 0, 0, 0), (SKIP_UNLESS, 0, 3, 158), (LOAD, 0, 0, 16), (SKIP_UNLESS, 0, 1, 0x1023),
    (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)))
kept = ctypes.create_string_buffer(filter)
program = struct.pack("@HP", len(filter) // 8, ctypes.addressof(kept))
prctl = ctypes.CDLL(None, use_errno=True).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, program, 0, 0) == 0

import os, torch, stowage
if os.environ.get("STOWAGE_FORCE_ISA") == "amx":
    try:
        stowage.quantize(torch.ones(2, 2), "int8")
    except NotImplementedError as error:
        print(error)
else:
    w = stowage.quantize(torch.randn(64, 256).bfloat16(), "f8_e4m3:row")
    y = torch.randn(32, 256).bfloat16() @ w.t()
    print(stowage.info()["instruction_set"], y.isfinite().all().item())
"""


@pytest.mark.skipif(not tiles.HAS_TILES, reason="needs a CPU with tiles of bf16 (AMX)")
def test_a_process_that_gets_no_tiles_multiplies_vectors() -> None:
    def says(isa: str) -> str:
        environment = {**os.environ, "STOWAGE_FORCE_ISA": isa}
        command = [sys.executable, "-c", WITHOUT_TILES]
        return subprocess.check_output(command, text=True, env=environment)

    assert says("").split() == ["avx512bf16", "True"]
    assert "STOWAGE_FORCE_ISA=amx: must be a set that this CPU runs" in says("amx")
