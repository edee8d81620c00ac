# SPDX-License-Identifier: Apache-2.0
"""Make the golden files of a release: python tests/golden/make.py FOLDER [PROGRAM].

Packs one small weight in every storage with the `stowage` program, and keeps the values that it
unpacks to. Run once for each version that writes files differently, and never again: see README.md.
"""

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SHAPES = {"weight": [2, 3, 96], "special.weight": [2, 5], "matrix.weight": [6, 96]}
STORAGES = [
    "f32",
    "bf16",
    "f16",
    "f8_e4m3",
    "f8_e4m3:tensor",
    "f8_e4m3:row",
    "f8_e4m3:row2",
    "f8_e4m3:block40",
    "f8_e5m2",
    "f8_e5m2:tensor",
    "f8_e5m2:row",
    "f8_e5m2:row2",
    "f8_e5m2:block40",
    "int8:tensor",
    "int8:row",
    "int8:row2",
    "int8:block40",
    "nf4:block64",
    "nf4:block128",
    "nf4:block64:nested",
    "fp4:block64",
    "fp4:block32",
    "fp4:block64:nested",
]
# Of two dimensions and whole scaler blocks: a folder of their own.
TORCHAO = [f"nf4:torchao:block32:scaler2:{dtype}" for dtype in ("f32", "bf16", "f16", "f64")]
# Rows of whole bytes of two codes: likewise.
SUPERBLOCKS = ["q4_k"]
# Rows of whole eights of codes.
DENSE = ["int2:block32", "int3:row:f16", "int5:block40:bf16:zero", "int6:tensor:zero", "int7:row"]
DENSE += ["q6_k"]
INT4 = ["int4:block32", "int4:row:f16", "int4:block40:bf16:zero", "int4:tensor:zero"]
PACKED = ["f4_e2m1:row", "mxfp4", "nvfp4"]
# Zeros that are numbers, in both arithmetics.
ZEROS = ["int4:block32:bf16:zero_sum", "int4:row:f16:zero_sum", "int4:tensor:zero_sum"]
ZEROS += ["uint4:block32:f16:zero_rounded", "uint4:row:bf16:zero_rounded"]
ZEROS += ["uint4:block4x32:zero_rounded"]
# Groups of one column, of a matrix whose rows they fill.
COLUMNS = ["uint4:column2:f16:zero_rounded", "uint4:column6:bf16:zero_rounded"]
COLUMNS += ["uint4:column2:zero_rounded"]
# The other arithmetics of scales under one number.
NVFP4 = ["f4_e2m1:block16:e4m3_bf16", "f4_e2m1:block16:e4m3_quotient"]
# Blocks of rows of each matrix of a stack, whose last ones are short.
STACKS = ["f8_e4m3:block2x40", "int8:block2x40:bf16:zero", "f4_e2m1:block2x32"]
# Scales of rows, and of pairs of indices, under numbers of their own: of a stack too.
UNDER_ROWS = ["nvfp4:row", "nvfp4:row2", "f4_e2m1:block16:e4m3_bf16:row"]
UNDER_ROWS += ["f4_e2m1:block16:e4m3_quotient:row2"]
# int8 of bitsandbytes: likewise.
ABSMAX = ["int8:row:absmax"]
# A signed zero, subnormals, ties, and what the narrow casts saturate.
SPECIAL = [-0.0, 1e-40, -1e-45, 0.1, 1.0625, 449.0, -600.0, 60000.0, -65520.0, 1e30]


def values() -> list[float]:
    """Fixed pseudo-random numbers of three magnitudes, with one block of zeros."""
    state, out = 12345, []
    for i in range(576):
        state = (1664525 * state + 1013904223) % 2**32
        out.append(((state >> 16 & 0x1FFF) - 4096) / 4096 * 2.0 ** -(i // 64 % 3))
    out[64:128] = [0.0] * 64
    return out


def write(path: Path, tensors: dict[str, bytes]) -> None:
    """Write F32 tensors as safetensors, by nobody's library; a name's last word tells the shape."""
    header: dict[str, object] = {}
    end = 0
    for name, data in tensors.items():
        shape = SHAPES[name.split()[-1]]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def read(path: Path, name: str) -> bytes:
    """Return the bytes of one tensor."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    begin, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    return content[8 + length + begin : 8 + length + end]


def make(folder: Path, program: str, storages: list[str], tensors: dict[str, bytes]) -> None:
    """Write input, packed and expected files of these storages."""
    folder.mkdir(parents=True)
    source = folder / "input.safetensors"
    write(source, tensors)
    expected = {}
    for storage in storages:
        packed = folder / f"{storage.replace(':', '-')}.safetensors"
        subprocess.run([program, "pack", source, packed, "--storage", storage], check=True)
        with tempfile.TemporaryDirectory() as scratch:
            plain = Path(scratch) / "plain.safetensors"
            subprocess.run([program, "unpack", packed, plain, "--compute", "f32"], check=True)
            expected |= {f"{storage} {name}": read(plain, name) for name in tensors}
    write(folder / "expected.safetensors", expected)


def main(folder: Path, program: str) -> None:
    weight, special = struct.pack("<576f", *values()), struct.pack("<10f", *SPECIAL)
    make(folder, program, STORAGES, {"weight": weight, "special.weight": special})
    others = {
        "torchao": TORCHAO,
        "int4": INT4,
        "packed": PACKED,
        "nvfp4": NVFP4,
        "superblocks": SUPERBLOCKS,
        "zeros": ZEROS,
        "columns": COLUMNS,
        "dense": DENSE,
        "absmax": ABSMAX,
    }
    for name, storages in others.items():
        beside = folder.with_name(f"{folder.name}-{name}")
        make(beside, program, storages, {"matrix.weight": weight})
    for name, storages in {"stacks": STACKS, "under-rows": UNDER_ROWS}.items():
        make(folder.with_name(f"{folder.name}-{name}"), program, storages, {"weight": weight})


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "stowage")
