# SPDX-License-Identifier: Apache-2.0
"""What loading takes: of each kind of dialect the peak of a process that loads a large file, and
what each of two processes that share a model holds of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sharded import run
from torch import nn
from torch.distributed.fsdp import fully_shard

import stowage

MIB = 1 << 20
LAYERS, ROWS, COLUMNS = 24, 2048, 4096  # 2e8 weights: int8 in 200 MB

# A dialect, a storage that it has, and whether its codes lie in the file as they rest.
KINDS = {
    "fp8": ("f8_e4m3:block128x128", True),
    "compressed-tensors": ("int8:row:bf16", True),
    "compressed-tensors:pack-quantized": ("int8:row:bf16", False),
    "modelopt": ("nvfp4", True),
    "comfyui": ("f4_e2m1:block16:e4m3_bf16", False),
    "torchao": ("int4:block32:bf16:zero", False),
    "bitsandbytes": ("int8:row:absmax", True),
    "gptq": ("int4:block128:f16:zero", False),
    "awq": ("int4:block128:f16:zero", False),
}

_LOAD = """
import json, sys
from pathlib import Path
import torch
from torch import nn
import stowage

layers, rows, columns = 24, 2048, 4096
small = nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16()
stowage.stow(small, "int8")
stowage.save(small, Path(sys.argv[2]) / "small")
stowage.load(lambda: nn.Sequential(nn.Linear(256, 256, bias=False)).bfloat16(),
             Path(sys.argv[2]) / "small", progress=False)  # what a first load imports and allocates

def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024

def make():
    layers_ = [nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
    return nn.Sequential(*layers_)

Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = stowage.load(make, sys.argv[1], mmap=sys.argv[3] == "mapped", progress=False)
peak = status("VmHWM") - before
report = stowage.report(model)
print(json.dumps({"peak": peak, "formed": report.formed_bytes, "forming": report.forming}))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, in several files."""
    folder = tmp_path_factory.mktemp("source")
    torch.manual_seed(0)
    names = [f"{i}.weight" for i in range(LAYERS)]
    where = {}
    for first in range(0, LAYERS, 8):
        file = f"model-{first // 8 + 1:05d}-of-00003.safetensors"
        some = {n: torch.randn(ROWS, COLUMNS).bfloat16() for n in names[first : first + 8]}
        save_file(some, folder / file)
        where |= dict.fromkeys(some, file)
    index = {"metadata": {"total_size": 2 * LAYERS * ROWS * COLUMNS}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    return folder


def converted(source: Path, to: Path, dialect: str, storage: str) -> Path:
    program = str(Path(sys.executable).parent / "stowage")
    how = ["--to", dialect, "--storage", storage, "--shard-size", "64MB"]
    done = subprocess.run(
        [program, "convert", str(source), str(to), *how], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return to


# In every run one that lies as kernels take it, one that is put in order, and one in tiles.
QUICK = ("fp8", "gptq", "comfyui")
NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in KINDS if name not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [*QUICK, *NIGHTLY])
def test_the_peak_of_a_load(dialect: str, source: Path, tmp_path: Path) -> None:
    """No more than 1.05 of the file, and its largest tensor; mapped, what is put in order alone."""
    storage, in_place = KINDS[dialect]
    path = converted(source, tmp_path / "model", dialect, storage)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    largest = ROWS * COLUMNS
    for how in ("read", "mapped"):
        command = [sys.executable, "-c", _LOAD, str(path), str(tmp_path), how]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        took: dict[str, Any] = json.loads(done.stdout)
        assert took["peak"] <= 1.05 * size + largest, (how, took, size)
        assert (took["formed"] > 0) >= (not in_place)
        if how == "mapped" and in_place:
            assert took["peak"] <= 0.1 * size + largest, (took, size)
    shutil.rmtree(path)


def _shard(mesh: Any, path: str) -> int:
    """The bytes that this rank holds of the model."""

    def make() -> nn.Module:
        layers = [nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)]
        return nn.Sequential(*layers)

    model = stowage.load(make, path, mmap=True, progress=False).requires_grad_(False)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stowage.report(model).rest_bytes


@pytest.mark.slow
@pytest.mark.parametrize("dialect", [name for name, (_, whole) in KINDS.items() if whole])
def test_a_rank_holds_its_rows_alone(dialect: str, source: Path, tmp_path: Path) -> None:
    storage, _ = KINDS[dialect]
    path = converted(source, tmp_path / "model", dialect, storage)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert run(2, _shard, str(path)) <= 0.55 * size
