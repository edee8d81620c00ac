# SPDX-License-Identifier: Apache-2.0
"""Files that others wrote, read by us, and files of ours, read by others: byte for byte."""

import json
import struct
from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch

from stowage._ops import library
from stowage._ops.storage import Storage

# Every dtype that safetensors 0.8 can save from torch, and how the header spells it.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def some_tensors() -> dict[str, torch.Tensor]:
    made = {
        str(dtype): torch.randint(0, 2, (96,), dtype=torch.uint8).view(dtype)[:12].reshape(3, 4)
        for dtype in DTYPES
        if dtype is not torch.bool
    }
    made["flags"] = torch.tensor([True, False, True])
    made["nibbles"] = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    made |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 7), "schön/名": torch.ones(2)}
    return {name: tensor.clone() for name, tensor in made.items()}


def read_all(path: Path) -> tuple[dict[str, dict[str, object]], dict[str, bytes]]:
    file = library.file_open(str(path))
    facts = {t["name"]: t for t in json.loads(library.text(library.file_describe(file)))["tensors"]}
    content = {name: library.file_read(file, name).numpy().tobytes() for name in facts}
    library.file_close(file)
    return facts, content


def copy(source: Path, target: Path, shard_bytes: int = 0) -> None:
    """Write every tensor of a file again, by its header alone."""
    facts, content = read_all(source)
    declared = {"tensors": list(facts.values()), "shard_bytes": shard_bytes}
    writer = library.writer_open(str(target), json.dumps(declared))
    for name, data in content.items():
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
        library.writer_write(writer, name, tensor)
    library.writer_finish(writer)


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = some_tensors()
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    facts, content = read_all(tmp_path / "m.safetensors")
    assert facts.keys() == tensors.keys()
    for name, tensor in tensors.items():
        if name != "nibbles":  # torch counts pairs of them
            assert facts[name]["shape"] == list(tensor.shape), name
            assert facts[name]["dtype"] == DTYPES[tensor.dtype], name
        assert content[name] == raw(tensor), name
    assert (facts["nibbles"]["dtype"], facts["nibbles"]["shape"]) == ("F4", [12])


@pytest.mark.parametrize("shard_bytes", [0, 200])
def test_safetensors_reads_what_we_wrote(tmp_path: Path, shard_bytes: int) -> None:
    tensors = some_tensors()
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    (tmp_path / "out").mkdir()
    copy(tmp_path / "m.safetensors", tmp_path / "out/m.safetensors", shard_bytes)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == bool(shard_bytes)
    back = {k: v for path in files for k, v in safetensors.torch.load_file(path).items()}
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape, name
        assert raw(back[name]) == raw(tensor), name
    with safetensors.safe_open(files[0], "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    if shard_bytes:
        index = json.loads((tmp_path / "out/m.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == tensors.keys()
        assert index["metadata"]["total_size"] == sum(len(raw(t)) for t in tensors.values())


def test_data_begins_at_a_cache_line(tmp_path: Path) -> None:
    safetensors.torch.save_file(some_tensors(), tmp_path / "m.safetensors")
    copy(tmp_path / "m.safetensors", tmp_path / "out.safetensors")
    (length,) = struct.unpack("<Q", (tmp_path / "out.safetensors").read_bytes()[:8])
    assert (8 + length) % 64 == 0


def test_whole_pages_begin_at_pages(tmp_path: Path) -> None:
    """The order of our writer has no hole, so safetensors reads it; 4 KiB is all that it costs."""
    sizes = {"a": (3,), "b": (64, 1024), "c": (5, 7), "d": (2048,), "e": (4097,), "f": (0, 2)}
    tensors = {name: torch.randn(size).to(torch.bfloat16) for name, size in sizes.items()}
    tensors |= {"g": torch.randn(512), "h": torch.randn(3).double()}
    safetensors.torch.save_file(tensors, tmp_path / "m.safetensors")
    copy(tmp_path / "m.safetensors", tmp_path / "out.safetensors")
    back = safetensors.torch.load_file(tmp_path / "out.safetensors")
    assert {n: (t.dtype, t.shape, raw(t)) for n, t in back.items()} == {
        n: (t.dtype, t.shape, raw(t)) for n, t in tensors.items()
    }
    facts, _ = read_all(tmp_path / "out.safetensors")
    whole = {n: f for n, f in facts.items() if int(str(f["bytes"])) % 4096 == 0}
    assert whole.keys() == {"b", "d", "f"}
    assert all(int(str(f["offset"])) % 4096 == 0 for f in whole.values())
    grown = (tmp_path / "out.safetensors").stat().st_size
    assert grown - (tmp_path / "m.safetensors").stat().st_size <= 4096 + 1024  # and the manifest


def bitsandbytes_weight(
    storage: Storage, quant_storage: torch.dtype, values: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What bitsandbytes saves for one Linear4bit."""
    bnb = pytest.importorskip("bitsandbytes")
    weight = bnb.nn.Params4bit(
        values,
        requires_grad=False,
        blocksize=storage.block,
        compress_statistics=storage.nested,
        quant_type=storage.name[:3],
        quant_storage=quant_storage,
    )
    linear = bnb.nn.Linear4bit(
        *reversed(values.shape), bias=False, compute_dtype=values.dtype, quant_storage=quant_storage
    )
    linear.weight = weight
    return dict(linear.to("cpu").state_dict())


@pytest.mark.parametrize("quant_storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["nf4:block64", "fp4:block128", "nf4:block64:nested"])
def test_reads_what_bitsandbytes_wrote(
    tmp_path: Path, name: str, quant_storage: torch.dtype
) -> None:
    storage = Storage.parse(name)
    values = torch.randn(64, 256, dtype=torch.bfloat16)
    saved = bitsandbytes_weight(storage, quant_storage, values)
    safetensors.torch.save_file(saved, tmp_path / "m.safetensors")
    file = library.file_open(str(tmp_path / "m.safetensors"))
    (weight,) = json.loads(library.text(library.file_describe(file)))["weights"]
    assert (weight["name"], weight["storage"]) == ("weight", name)
    assert (weight["shape"], weight["compute"]) == ([64, 256], "BF16")
    ours = library.quantize(values, storage.key, False)
    for part, mine in zip(weight["parts"], ours, strict=True):
        if "quant_state" not in part and "nested_quant_map" not in part:
            assert library.file_read(file, part).numpy().tobytes() == raw(mine), part
    library.file_close(file)


def test_refuses_what_safetensors_refuses(tmp_path: Path) -> None:
    """A sample; tests/store/ has a row for each of our rules."""
    entry = '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
    for text, data in [
        (entry, b"x"),
        (entry, b"xxx"),
        (entry.replace("[2]", "[3]"), b"xx"),
        (entry.replace("[0,2]", "[2,0]"), b"xx"),
        (entry[:-1], b"xx"),
    ]:
        path = tmp_path / "m.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data)
        with pytest.raises(safetensors.SafetensorError):
            safetensors.torch.load_file(path)
        with pytest.raises(Exception, match=r"m\.safetensors.* must .*\[[a-z_]+\]"):
            library.file_open(str(path))
