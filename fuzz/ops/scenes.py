# SPDX-License-Identifier: Apache-2.0
"""What a call of an op needs beside its own arguments: files, engines, plans, random weights."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from torch import Tensor

import stowage.training  # has ops of its own
from stowage._ops import library
from stowage._ops.storage import Storage

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests/shared"))
from storages import codec, covering, flat_shapes

STORAGES = (
    *covering(codec, flat_shapes), "nf4:block128:nested", "nf4:torchao:block32:scaler1:f32",
    "nf4:torchao:block32:scaler1:bf16", "nf4:torchao:block32:scaler2:f16",
    "nf4:torchao:block32:scaler2:f64", "f8_e4m3:block32:bf16", "int8:row:f16:zero",
)  # fmt: skip
COMPUTE = (torch.float32, torch.bfloat16, torch.float16)
VALUES = (*COMPUTE, torch.float64)
_GIB = 1 << 30
PEER_FILE = Path(__file__).resolve().parents[2] / "tests/golden/dialects/gptq-v2"
LINKS = {
    "key": "here", "disk": 1e9, "cached": 2e9, "memcpy": 1e10,
    "linear": {c: {"read": 1e9, "multiply": 1e10}
               for c in ("f32", "bf16", "f16", "f8_e4m3", "f8_e5m2", "int8", "nf4", "fp4")},
    "accelerators": {"cuda:0": {"copy": 1e9, "read": 1e10, "multiply": 1e11, "assumed": True}},
}  # fmt: skip


class Scene:
    """What one call needs, made from its own random numbers; `close` takes back what it opened."""

    folder = Path(tempfile.mkdtemp(prefix="stowage-fuzz-"))
    written: str = ""  # a file of weights
    plan: str = ""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.closers: list[Callable[[], object]] = []

    def close(self) -> None:
        for closer in reversed(self.closers):
            with contextlib.suppress(RuntimeError):  # the call closed it
                closer()

    def storage(self) -> Storage:
        return Storage(self.random.choice(STORAGES))

    def matrix(self) -> tuple[Storage, int, int]:
        """A storage and sizes of a matrix that it holds."""
        kind, wide = self.storage(), self.random.random() < 0.01
        rows, columns = self.random.randint(1, 40), self.random.randint(1, 140)
        if wide:  # more than a tile
            rows, columns = self.random.choice(((1100, 1000), (2000, 1088), (3, 4500)))
        if kind.dialect == "torchao" or self.random.random() < 0.3:
            columns += -columns % 64
        if kind.packing == "low_first":
            columns += columns % 2
        return kind, rows, columns

    def weight(self, kind: Storage, *shape: int) -> tuple[Tensor, list[Tensor]]:
        codes, *scales = library.quantize(torch.randn(shape), kind.key)
        return codes, scales

    def batch(self) -> tuple[int, ...]:
        """Leading sizes of x: every regime of rows."""
        few = (1, 2, 3, 4, 5, 16, 17, 64, 65, 129, 300)
        sizes = [self.random.choice(few if self.random.random() < 0.3 else few[:6])]
        sizes += [1] * self.random.choice((0, 0, 1, 1, 2, 7, 12))
        return tuple(self.random.sample(sizes, len(sizes)))

    def file(self) -> int:
        handle: int = library.file_open(self.written)
        self.closers.append(lambda: library.file_close(handle))
        return handle

    def peer_file(self) -> int:
        """One whose tensors are no parts as they lie there."""
        handle: int = library.file_open(str(PEER_FILE))
        self.closers.append(lambda: library.file_close(handle))
        return handle

    def stacks(self) -> str:
        """A stack of one matrix of that file."""
        described = json.loads(library.text(library.file_describe(self.peer_file())))
        one = next(w for w in described["weights"] if w["name"].endswith("q_proj.weight"))
        shape, key = [1, *one["shape"]], Storage(one["storage"]).key
        stack = {"name": "stack", "storage": key, "shape": shape, "matrices": [[one["name"]]]}
        return json.dumps([stack])

    def stacked_file(self) -> int:
        handle: int = library.file_stacks(self.peer_file(), self.stacks())
        self.closers.append(lambda: library.file_close(handle))
        return handle

    def engine(self) -> int:
        file, mode = self.file(), self.random.choice(("automatic", "mapped", "buffered", "direct"))
        handle: int = library.engine_open(file, 1 << 20, mode, self.random.choice((0, 0, 0, 2)))
        self.closers.append(lambda: library.engine_close(handle))
        return handle

    def declaration(self) -> str:
        tensors = [{"name": "a", "dtype": "U8", "shape": [3, 4]}]
        tensors.append({"name": "b", "dtype": "NEW", "shape": [2], "bytes": 5})
        return json.dumps({"tensors": tensors, "metadata": {"k": "v"}, "shard_bytes": 0})

    def path(self) -> str:
        path = self.folder / f"{os.getpid()}.safetensors"
        self.closers.append(lambda: path.unlink(missing_ok=True))
        return str(path)

    def writer(self) -> int:
        handle: int = library.writer_open(self.path(), self.declaration())
        self.closers.append(lambda: library.writer_discard(handle))
        return handle

    def finished(self) -> int:
        handle = self.writer()
        library.writer_write(handle, "a", torch.zeros(12, dtype=torch.uint8))
        library.writer_write(handle, "b", torch.zeros(5, dtype=torch.uint8))
        return handle


def prepare() -> None:
    """The files and documents that calls share. Set STOWAGE_LINKS first: nothing is measured."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({f"m{i}": torch.nn.Linear(64, 40) for i in range(3)})
    stowage.stow(model, rules={"m0.*": "f8_e4m3:row", "m1.*": "nf4:block64:nested"})
    path = Scene.folder / "model.safetensors"
    stowage.save(model, path)
    Scene.written = str(path)
    where = os.stat(Scene.folder).st_dev
    disk = f"{os.major(where)}:{os.minor(where)}"
    rates = {"disk": 1e9, "cached": 2e9}
    machine = {"links": {k: v for k, v in LINKS.items() if k != "key"}, "disks": {disk: rates}}
    kept = {"stowage_links": 1, "machines": {library.text(library.machine_key()): machine}}
    Path(os.environ["STOWAGE_LINKS"]).write_text(json.dumps(kept))
    Scene.plan = library.text(library.plan_make(request(None), json.dumps(LINKS)))


def request(path: str | None) -> str:
    units = [
        {"name": f"m{i}", "storage": s, "shape": [4096, 1024], "rest": 4 << 20, "rows": False}
        for i, s in enumerate(("int8:row", "f8_e4m3:row", "nf4:block64"))
    ]
    return json.dumps({
        "path": path, "name": "model", "units": units, "ram": _GIB, "accelerators": [],
        "uses": [["m0", 0.5]], "storage": None, "rows": 4, "activations": 1 << 20,
        "works_on_cpu": True, "order": [] if path else ["m2", "m0", "m1"],
    })  # fmt: skip


MEASURED = json.dumps({"seconds": 0.5, "peak": {"ram": 100}, "bytes": {"ram": 10}, "stall": 0.1})
_WEIGHT = {
    "name": "w", "storage": "int8:row", "compute": "bf16", "shape": [2, 4], "bytes": 16,
    "reason": "", "tier": "", "kind": "Linear", "error": 0.1, "also": [],
}  # fmt: skip
REPORT = json.dumps({"stowage_report": 1, "model": "m", "weights": [_WEIGHT], "notes": ["n"]})
NAMES = json.dumps(["m0.weight", "m1.weight", "no such"])
