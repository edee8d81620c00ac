# SPDX-License-Identifier: Apache-2.0
"""Loading a model of each dialect as it rests, beside pread + memcpy of the bytes of its files.

The model has matrices of 4096 and 14336 and lies in the page cache. What is compared, and how
memory is warmed before, is in load.py. Parts that the file has in another order are put in order
meanwhile, which the limit has not. Run:
python bench/python/load_dialects.py [--json] [--gigabytes 0.5] [--threads 2] [--rounds 5]
    [--only gptq] [--processor-time]
"""

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path

import load
import torch
from load import Row, limit, model, seconds, touch
from torch import nn

import stowage

LIMIT = 1.5
load.HIDDEN, load.WIDE = 4096, 14336  # of a model of eight billion
# What is loaded: the dialect, maybe with its form, and what the weights rest as.
CASES = (
    ("fp8", "f8_e4m3:block128x128"),
    ("compressed-tensors", "f8_e4m3:row:bf16"),
    ("compressed-tensors", "int8:row:bf16"),
    ("compressed-tensors:pack-quantized", "int8:row:bf16"),
    ("compressed-tensors", "int4:block128:bf16"),
    ("compressed-tensors", "mxfp4"),
    ("compressed-tensors", "f4_e2m1:block16:e4m3_quotient"),
    ("modelopt", "f8_e4m3:tensor"),
    ("modelopt", "nvfp4"),
    ("comfyui", "f8_e4m3:block32:e8m0"),
    ("comfyui", "f4_e2m1:block16:e4m3_bf16"),
    ("torchao", "int8:row"),
    ("torchao", "int4:block32:bf16:zero"),
    ("bitsandbytes", "nf4"),
    ("bitsandbytes", "nf4:block64:nested"),
    ("gptq", "int4:block128:f16:zero"),
    ("awq", "int4:block128:f16:zero"),
    ("gguf", "Q8_0"),
    ("gguf", "Q4_0"),
)


def dense(layers: int) -> nn.Module:
    with torch.device("meta"):
        made = model(layers).bfloat16()
    made.to_empty(device="cpu")
    for parameter in made.parameters():
        parameter.data.normal_(std=0.02)
    return made


def write_gguf(folder: Path, made: nn.Module, kind: str) -> None:
    """One layer is quantized, by the package of the format's owners; all have its bytes."""
    package = import_module("gguf")
    writer = package.GGUFWriter(folder / "model.gguf", "llama")
    type_ = package.GGMLQuantizationType[kind]
    packed = {
        name: package.quants.quantize(p.detach().float().numpy(), type_)
        for name, p in made[0].named_parameters()  # type: ignore[index]
        if p.dim() == 2
    }
    for name, parameter in made.named_parameters():
        of_layer = packed.get(name.partition(".")[2])
        if of_layer is None:
            writer.add_tensor(name, parameter.detach().float().numpy())
        else:
            writer.add_tensor(name, of_layer, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(folder: Path, layers: int, dialect: str, storage: str) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    made = dense(layers)
    if dialect == "gguf":
        write_gguf(folder, made, storage)
        return
    stowage.stow(made, storage, measure=False)
    stowage.save(made, folder, dialect=dialect)


def layers_of(gigabytes: float, dialect: str, storage: str, root: Path) -> int:
    """So many that the files have about these bytes: one layer tells."""
    write(root / "one", 1, dialect, storage)
    size = sum(file.stat().st_size for file in files_of(root / "one"))
    shutil.rmtree(root / "one")
    return max(1, round(gigabytes * 1e9 / size))


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.suffix in (".safetensors", ".gguf"))


def measure(case: tuple[str, str], args: argparse.Namespace, root: Path) -> Row:
    dialect, storage = case
    layers = layers_of(args.gigabytes, dialect, storage, root)
    folder = root / "model"
    write(folder, layers, dialect, storage)
    files = files_of(folder)
    limit(files, args.threads)  # into the page cache
    run: Callable[[], object] = partial(_load, layers, folder)
    ratios, times = [], []
    for turn in range(args.rounds + 1):
        probe = limit(files, args.threads)
        touch(2 * sum(file.stat().st_size for file in files), most=2 * probe)
        taken = seconds(run)
        if turn:  # after the first the heap has the size of these results
            ratios.append(taken / probe)
            times.append(taken)
    shutil.rmtree(folder)
    name = f"{dialect} {storage}"
    return Row(name, statistics.median(times), statistics.median(ratios), LIMIT)


def _load(layers: int, folder: Path) -> None:
    stowage.load(lambda: model(layers), folder, measure=False, compute_dtype=torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="a part of the name, as it is printed")
    parser.add_argument("--folder", help="where the models are written; a disk, not a tmpfs")
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    if args.processor_time:
        load.clock = load.time.process_time
    torch.set_num_threads(args.threads)
    chosen = [case for case in CASES if args.only is None or args.only in " ".join(case)]
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        rows = [measure(case, args, Path(made)) for case in chosen]
    if args.json:
        print(json.dumps([{**asdict(row), "met": row.met} for row in rows], indent=2))
        return
    for row in rows:
        verdict = "met" if row.met else "NOT MET"
        print(f"{row.name:48} {row.seconds:7.3f} s  {row.ratio:6.2f}x  limit {LIMIT:g}  {verdict}")


if __name__ == "__main__":
    main()
