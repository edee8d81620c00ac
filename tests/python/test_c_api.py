# SPDX-License-Identifier: Apache-2.0
"""The C interface of the installed library: the same bytes as from Python, and nothing changed."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator
from ctypes import byref, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

import pytest
import torch
from torch import nn

import stowage

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(stowage.__file__).parent
LIBRARY = PACKAGE / "lib/libstowage.so"
HEADER = ROOT / "include/stowage.h"
DTYPES = {torch.float16: 13, torch.bfloat16: 14, torch.float32: 15}
STORAGES = ["f8_e4m3:row", "int8", "nf4", "nf4:nested", "mxfp4", "int4:block32:bf16:zero", "bf16"]
SHAPE = (48, 64)

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="needs the installed wheel: make build"
)


class WeightInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("storage", c_char_p),
        ("compute", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * 8),
        ("bytes", c_uint64),
    ]


class TensorInfo(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("name", c_char_p),
        ("dtype_name", c_char_p),
        ("dtype", c_int32),
        ("rank", c_int32),
        ("shape", c_int64 * 8),
        ("bytes", c_uint64),
        ("data", c_void_p),
    ]


class Library:
    """`library.quantize(...)` calls stowage_quantize and raises what it says."""

    def __init__(self) -> None:
        self.c = ctypes.CDLL(str(LIBRARY))
        self.c.stowage_last_error.restype = c_char_p
        self.c.stowage_version.restype = c_char_p

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        function = getattr(self.c, f"stowage_{name}")

        def call(*arguments: object) -> None:
            given = [a.encode() if isinstance(a, str) else a for a in arguments]
            if function(*given) != 0:
                raise ValueError(self.c.stowage_last_error().decode())

        return call


@pytest.fixture(scope="module")
def library() -> Library:
    return Library()


@pytest.fixture
def values() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def at(tensor: torch.Tensor) -> c_void_p:
    return c_void_p(tensor.data_ptr())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def parts(library: Library, weight: c_void_p) -> Iterator[tuple[str, bytes]]:
    count = c_int32()
    library.weight_part_count(weight, byref(count))
    for i in range(count.value):
        told = TensorInfo(ctypes.sizeof(TensorInfo))
        library.weight_describe_part(weight, i, byref(told))
        yield told.name.decode(), ctypes.string_at(told.data, told.bytes)


def quantized(library: Library, values: torch.Tensor, storage: str) -> c_void_p:
    weight = c_void_p()
    shape = (c_int64 * values.dim())(*values.shape)
    library.quantize(at(values), DTYPES[values.dtype], shape, values.dim(), storage, byref(weight))
    return weight


@pytest.mark.parametrize("storage", STORAGES)
def test_weights_have_the_bytes_of_python(
    library: Library, values: torch.Tensor, storage: str
) -> None:
    ours = stowage.quantize(values, storage)
    weight = quantized(library, values, storage)
    assert [data for _, data in parts(library, weight)] == [raw(p) for p in ours.parts.values()]
    info = WeightInfo(ctypes.sizeof(WeightInfo))
    library.weight_describe(weight, byref(info))
    assert info.storage.decode() == ours.resting and tuple(info.shape[:2]) == SHAPE
    assert info.bytes == ours.nbytes_at_rest
    for dtype, number in DTYPES.items():
        out = torch.empty(SHAPE, dtype=dtype)
        library.dequantize(weight, c_int64(0), c_int64(SHAPE[0]), at(out), number)
        assert torch.equal(out, ours.dequantize(dtype))
    ids, rows = torch.tensor([7, 0, 47]), torch.empty(3, SHAPE[1])
    library.embedding(weight, at(ids), c_int64(3), at(rows), 15)
    assert torch.equal(rows, nn.functional.embedding(ids, ours))
    x, bias, y = torch.randn(2, SHAPE[1]), torch.randn(SHAPE[0]), torch.empty(2, SHAPE[0])
    library.linear(weight, at(x), c_int64(2), 15, at(bias), at(y))
    assert torch.equal(y, nn.functional.linear(x, ours, bias))
    library.c.stowage_weight_free(weight)


def test_files_go_both_ways(library: Library, values: torch.Tensor, tmp_path: Path) -> None:
    model = nn.ModuleDict({"a": nn.Linear(*reversed(SHAPE)), "b": nn.Linear(8, 8)})
    with torch.no_grad():
        model["a"].weight.copy_(values)
    stowage.stow(model, rules={"a.weight": "nf4"})
    stowage.save(model, tmp_path / "ours")
    file, weight, index = c_void_p(), c_void_p(), c_int64()
    library.file_open(str(tmp_path / "ours"), byref(file))
    library.file_find_weight(file, "a.weight", byref(index))
    library.file_weight(file, index, -1, byref(weight))
    found = [data for _, data in parts(library, weight)]
    assert found == [raw(part) for part in model["a"].weight.parts.values()]
    library.file_find_tensor(file, "b.bias", byref(index))
    told = TensorInfo(ctypes.sizeof(TensorInfo))
    library.file_describe_tensor(file, index, byref(told))
    bias = model["b"].bias.detach()
    assert ctypes.string_at(told.data, told.bytes) == raw(bias)

    writer, shape, path = c_void_p(), (c_int64 * 2)(*SHAPE), str(tmp_path / "c.safetensors")
    library.writer_new(path, None, byref(writer))
    library.writer_declare_weight(writer, "a.weight", "nf4", shape, 2, 15)
    others = {name: t.detach() for name, t in model.state_dict().items() if name != "a.weight"}
    for name, tensor in others.items():
        sizes = (c_int64 * tensor.dim())(*tensor.shape)
        library.writer_declare_tensor(writer, name, 15, sizes, tensor.dim())
    library.writer_write_weight(writer, "a.weight", weight)
    for name, tensor in others.items():
        library.writer_write_tensor(writer, name, at(tensor), c_uint64(tensor.nbytes))
    library.writer_finish(writer)
    for handle, kind in ((writer, "writer"), (weight, "weight"), (file, "file")):
        getattr(library.c, f"stowage_{kind}_free")(handle)
    again = nn.ModuleDict({"a": nn.Linear(*reversed(SHAPE)), "b": nn.Linear(8, 8)})
    stowage.load(again, path, verify=True)
    assert again["a"].weight.resting == "nf4:block64"
    assert torch.equal(again["a"].weight.dequantize(), model["a"].weight.dequantize())
    assert torch.equal(again["b"].bias, bias)


def test_errors_name_what_was_wrong(library: Library, values: torch.Tensor) -> None:
    assert library.c.stowage_version().decode() == stowage.info()["version"]
    with pytest.raises(ValueError, match=r"must be one of .*got 'nf5'"):
        quantized(library, values, "nf5")
    with pytest.raises(ValueError, match="stowage_quantize: values must not be null"):
        library.quantize(None, 15, (c_int64 * 1)(4), 1, "f32", byref(c_void_p()))
    with pytest.raises(ValueError, match=r"none\.safetensors"):
        library.file_open("none.safetensors", byref(c_void_p()))


# ---- what stays ----
def declarations(header: str) -> list[str]:
    """Each declaration on a line, without comments: what programs are compiled against."""
    text = re.sub(r"//[^\n]*|^#[^\n]*|extern \"C\" \{", "", header, flags=re.M)
    made, depth = [""], 0
    for character in " ".join(text.split()):
        depth += {"{": 1, "}": -1}.get(character, 0)
        made[-1] += character
        if character == ";" and depth == 0:
            made[-1] = made[-1].strip()
            made.append("")
    return [line for line in made if ";" in line]


def test_the_header_has_all_of_its_first_version() -> None:
    header = HEADER.read_text()
    assert "#define STOWAGE_ABI_VERSION 1\n" in header
    assert declarations(header) == (ROOT / "tests/c/abi-1.txt").read_text().splitlines()
    assert (PACKAGE / "include/stowage.h").read_text() == header


def test_the_library_shows_each_function() -> None:
    lines = (ROOT / "tests/c/abi-1.txt").read_text()
    declared = set(re.findall(r"^(?!typedef)[^({]*?\b(stowage_\w+)\(", lines, re.M))
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", LIBRARY], check=True, capture_output=True, text=True
    ).stdout
    assert len(declared) > 40 and set(re.findall(r" T (stowage_\w+)$", symbols, re.M)) == declared


def test_each_function_is_called_by_the_program_in_c() -> None:
    lines = (ROOT / "tests/c/abi-1.txt").read_text()
    program = (ROOT / "tests/c/program.c").read_text()
    declared = set(re.findall(r"^(?!typedef)[^({]*?\b(stowage_\w+)\(", lines, re.M))
    assert not {name for name in declared if f"{name}(" not in program}


@pytest.mark.slow
def test_the_listing_runs(values: torch.Tensor, tmp_path: Path) -> None:
    (listing,) = re.findall(r"^```c\n(.*?)^```", (ROOT / "docs/c-api.md").read_text(), re.S | re.M)
    (tmp_path / "listing.c").write_text(listing)
    flags = [f"-I{PACKAGE / 'include'}", f"-L{PACKAGE / 'lib'}", "-lstowage"]
    flags += [f"-Wl,-rpath,{PACKAGE / 'lib'}", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
    command = ["gcc", "-std=c11", tmp_path / "listing.c", *flags, "-o", tmp_path / "listing"]
    subprocess.run(command, check=True)
    model = nn.Sequential(nn.Linear(*reversed(SHAPE)))
    with torch.no_grad():
        model[0].weight.copy_(values)
    stowage.stow(model, "nf4")
    stowage.save(model, tmp_path / "packed")
    command = [tmp_path / "listing", tmp_path / "packed", "0.weight"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    first = model[0].weight.dequantize()[0, 0].item()
    assert done.stdout == f"0.weight rests as nf4:block64, 1728 bytes\ny[0] = {first:g}\n"
    command[2:] = ["1.weight"]
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 1 and failed.stderr.startswith("invalid_argument: ")
