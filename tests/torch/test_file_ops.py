# SPDX-License-Identifier: Apache-2.0
"""Files through the ops: what is written comes back in place, and every handle ends."""

import gc
import json
from pathlib import Path

import pytest
import torch

from stowage._ops import library
from stowage._ops.storage import Storage


def write(path: Path, tensors: dict[str, torch.Tensor], **more: object) -> None:
    names = {torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16"}
    declared = [
        {"name": n, "dtype": names[t.dtype], "shape": list(t.shape)} for n, t in tensors.items()
    ]
    writer = library.writer_open(str(path), json.dumps({"tensors": declared, **more}))
    for name, tensor in tensors.items():
        library.writer_write(writer, name, tensor)
    library.writer_finish(writer)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    tensors = {"a": torch.randn(3, 5), "empty": torch.empty(0, 4), "b": torch.randn(7).bfloat16()}
    write(path, tensors, metadata={"who": "me"})
    file = library.file_open(str(path))
    facts = json.loads(library.text(library.file_describe(file)))
    assert facts["paths"] == [str(path)] and facts["metadata"]["who"] == "me"
    found = {t["name"]: t for t in facts["tensors"]}
    for name, tensor in tensors.items():
        raw = library.file_read(file, name)
        assert raw.dtype == torch.uint8 and raw.numel() == found[name]["bytes"]
        assert torch.equal(raw.view(tensor.dtype).view(found[name]["shape"]), tensor)
        for begin, size in ((0, raw.numel()), (1, 1 << 40), (1 << 40, 1), (0, 0)):
            for mapped in (True, False):
                library.file_populate(file, name, begin, size, mapped)
        with pytest.raises(RuntimeError, match="at least 0, got -1 and 2"):
            library.file_populate(file, name, -1, 2)
        library.file_drop(file, name)
        own = library.file_copy(file, name)
        assert torch.equal(own, raw) and own.untyped_storage().resizable()
    assert library.file_verify(file) == len(tensors)
    library.file_close(file)


def test_pages_go_as_ops_read_them(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", {"a": torch.zeros(4096, 4096)})
    file = library.file_open(str(tmp_path / "m.safetensors"))
    raw = library.file_read(file, "a").view(torch.float32).view(4096, 4096)

    def mapped() -> int:  # of all files, as far as this process sees them
        library.quantize(raw, Storage("f8_e4m3").key)
        found = int(Path("/proc/self/status").read_text().split("RssFile:")[1].split()[0]) << 10
        library.file_drop(file, "a")
        return found

    stay = mapped()
    library.file_drop_behind(file, "a")
    with pytest.raises(RuntimeError, match="must hold the tensor, got 'b'"):
        library.file_drop_behind(file, "b")
    assert stay - mapped() > (64 << 20) - (6 << 20)
    library.file_drop_behind(file, "")
    assert abs(stay - mapped()) < 6 << 20
    library.file_close(file)


def test_a_tensor_keeps_its_mapping(tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", {"a": torch.arange(64.0)})
    file = library.file_open(str(tmp_path / "m.safetensors"))
    raw = library.file_read(file, "a")
    view = raw[4:8]
    library.file_close(file)
    (tmp_path / "m.safetensors").unlink()
    del raw
    gc.collect()
    assert view.view(torch.float32).item() == 1.0
    assert "m.safetensors" in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert "m.safetensors" not in Path("/proc/self/maps").read_text()


def test_mapped_codes_are_used_in_place(tmp_path: Path) -> None:
    kind, w = Storage("int8:row"), torch.randn(16, 32)
    codes, scale = library.quantize(w, kind.key)
    weights = [{"name": "w", "storage": kind.name, "shape": [16, 32], "parts": ["w", "w_scale"]}]
    on_disk = json.loads(library.text(library.storage_on_disk("w", kind.key, [16, 32])))
    assert [d["name"] for d in on_disk] == ["w", "w_scale"] and on_disk[0]["dtype"] == "I8"
    text = json.dumps({"tensors": on_disk, "weights": weights})
    writer = library.writer_open(str(tmp_path / "m.safetensors"), text)
    library.writer_write(writer, "w_scale", scale)
    library.writer_write(writer, "w", codes)
    library.writer_finish(writer)
    file = library.file_open(str(tmp_path / "m.safetensors"))
    (weight,) = json.loads(library.text(library.file_describe(file)))["weights"]
    assert (weight["name"], weight["storage"], weight["shape"]) == ("w", "int8:row", [16, 32])
    mapped = [library.file_read(file, part) for part in weight["parts"]]
    x = torch.randn(2, 32)
    mapped_codes, mapped_scale = mapped[0].view(16, 32), mapped[1].view(torch.float32).view(16, 1)
    ours = library.linear(x, mapped_codes, [mapped_scale], kind.key, 16, None)
    assert torch.equal(ours, library.linear(x, codes, [scale], kind.key, 16, None))
    library.file_close(file)


@pytest.mark.parametrize(("begin", "count"), [(0, 40), (8, 16), (40, 0)])
def test_bytes_of_a_tensor_are_mapped_to_be_written(begin: int, count: int, tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", {"pad": torch.arange(3.0), "a": torch.arange(10.0)})
    before = (tmp_path / "m.safetensors").read_bytes()
    file = library.file_open(str(tmp_path / "m.safetensors"))
    raw = library.file_map(file, "a", begin, count)
    whole = torch.arange(10.0).view(torch.uint8)
    assert torch.equal(raw, whole[begin : begin + count])
    library.file_close(file)
    raw.fill_(7)
    assert bool((raw == 7).all())
    assert (tmp_path / "m.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("begin", "count"), [(-1, 4), (0, -1), (0, 41), (41, 0), (4, 2**63 - 1), (2**63 - 1, 1)]
)
def test_bytes_beyond_a_tensor_are_not_mapped(begin: int, count: int, tmp_path: Path) -> None:
    write(tmp_path / "m.safetensors", {"a": torch.arange(10.0), "z": torch.arange(10.0)})
    file = library.file_open(str(tmp_path / "m.safetensors"))
    with pytest.raises(RuntimeError, match=r"^\[out_of_range\] .*bytes of the tensor"):
        library.file_map(file, "a", begin, count)
    library.file_close(file)


def test_discard_leaves_nothing(tmp_path: Path) -> None:
    text = json.dumps({"tensors": [{"name": "a", "dtype": "F32", "shape": [4]}]})
    writer = library.writer_open(str(tmp_path / "m.safetensors"), text)
    library.writer_discard(writer)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda p: library.file_open(str(p / "no")), r"^\[io\] .*no"),
        (lambda p: library.file_read(12345, "a"), r"^\[invalid_argument\] .*open file, got 12345"),
        (lambda p: library.writer_finish(12345), r"^\[invalid_argument\] .*open writer, got 12345"),
        (
            lambda p: library.writer_open(str(p / "m.safetensors"), "{"),
            r"^\[invalid_argument\] .*JSON",
        ),
        (lambda p: library.storage_key("nf5"), r"^\[invalid_argument\] .*nf4.*got 'nf5'"),
        (lambda p: library.storage_describe(-1), r"^\[invalid_argument\] .*got -1"),
    ],
)
def test_refusals(call, text: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=text):
        call(tmp_path)
    assert list(tmp_path.iterdir()) == []
