# SPDX-License-Identifier: Apache-2.0
"""The files of `offload_state_dict`: the same as accelerate's, and read both ways."""

from __future__ import annotations

import json
import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Rooted, Small
from torch import nn

import stowage
from stowage.compat.accelerate import _files
from stowage.compat.accelerate.utils import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    extract_submodules_state_dict,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)

KINDS = {
    "f32": torch.randn(3, 4),
    "f16": torch.randn(3, 4).half(),
    "bf16": torch.randn(3, 4).bfloat16(),
    "fp8": torch.randn(3, 4).to(torch.float8_e4m3fn),
    "i64": torch.arange(5),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(3, dtype=torch.complex64),
    "0-d": torch.tensor(1.5),
    "zero-size": torch.empty(0, 4),
    "strided": torch.randn(4, 3).t(),
    "learns": nn.Parameter(torch.randn(3)),
    "a/b c": torch.randn(2),
}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    a, b = (t.detach().contiguous().reshape(-1) for t in (one, other))
    return not a.numel() or torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back(kind: str, tmp_path: Path) -> None:
    """Row 48: accelerate fails on requires_grad and "/"."""
    weight = KINDS[kind]
    index = offload_weight(weight, kind, tmp_path, {})
    dtype = str(weight.dtype).removeprefix("torch.")
    assert index == {kind: {"dtype": dtype, "shape": list(weight.shape)}}
    assert _same(load_offloaded_weight(tmp_path / f"{kind}.dat", index[kind]), weight)
    assert offload_weight(weight, kind, tmp_path) is None


def test_accelerate_reads_ours_and_we_read_theirs(tmp_path: Path) -> None:
    peer = pytest.importorskip("accelerate.utils.offload")
    offload_state_dict(tmp_path / "ours", KINDS)
    theirs = peer.OffloadedWeightsLoader(save_folder=str(tmp_path / "ours"))
    assert set(theirs) == set(KINDS)
    assert all(_same(theirs[name], weight) for name, weight in KINDS.items())
    plain = {n: w for n, w in KINDS.items() if n not in ("learns", "a/b c")}
    peer.offload_state_dict(tmp_path / "theirs", plain)
    ours = OffloadedWeightsLoader(save_folder=tmp_path / "theirs")
    assert all(_same(ours[name], weight) for name, weight in plain.items())
    for name in plain:
        files = (tmp_path / side / f"{name}.dat" for side in ("ours", "theirs"))
        assert len({f.read_bytes() for f in files}) == 1 or not plain[name].numel()
    indices = [json.loads((tmp_path / s / "index.json").read_text()) for s in ("ours", "theirs")]
    assert {n: indices[0][n] for n in plain} == indices[1]


def test_one_tensor_is_one_file_under_all_its_names(tmp_path: Path) -> None:
    """Row 42: accelerate writes it once for each name."""
    model = Rooted(8)
    offload_state_dict(tmp_path, model.state_dict())
    one, other = tmp_path / "embed.weight.dat", tmp_path / "head.weight.dat"
    assert os.path.samefile(one, other)
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    assert all(torch.equal(loader[n], w) for n, w in model.state_dict().items())


def test_union_of_memory_and_folder(tmp_path: Path) -> None:
    state = Small().state_dict()
    in_memory = {n: w for n, w in state.items() if "linear1" in n}
    offload_state_dict(tmp_path, {n: w for n, w in state.items() if "linear2" not in n})
    loader = OffloadedWeightsLoader(in_memory, tmp_path)
    assert sorted(loader) == sorted(n for n in state if "linear2" not in n)
    assert len(loader) == len(list(loader))
    assert loader["linear1.weight"] is in_memory["linear1.weight"]
    with pytest.raises(ValueError, match="state_dict, save_folder and index"):
        OffloadedWeightsLoader()


def test_look_ups_obey_the_laws_of_mappings(tmp_path: Path, monkeypatch: Any) -> None:
    offload_state_dict(tmp_path, Small().state_dict())
    loader = OffloadedWeightsLoader(save_folder=tmp_path)
    part = PrefixedDataset(loader, "linear1.")
    assert list(part) == ["weight", "bias"]  # accelerate gives whole names, which it cannot find
    assert len(part) == 2  # and the length of all
    assert dict(part)["bias"].shape == (4,)
    monkeypatch.setattr(_files, "load_offloaded_weight", None)  # `in` reads nothing
    assert "weight" in part
    assert "linear1.weight" in loader
    assert "gone" not in loader


def test_entries_of_safetensors_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"inner.w": torch.arange(6.0)}, tmp_path / "file.safetensors")
    facts = {"safetensors_file": str(tmp_path / "file.safetensors"), "weight_name": "inner.w"}
    loader = OffloadedWeightsLoader(index={"w": {**facts, "dtype": "float16"}}, device="cpu")
    assert torch.equal(loader["w"], torch.arange(6.0).half())


def test_part_of_a_state_by_names() -> None:
    state = {
        "a.1": torch.zeros(1),
        "a.10": torch.ones(1),
        "a.1.b": torch.zeros(2),
        "c": KINDS["f32"],
    }
    assert list(extract_submodules_state_dict(state, ["a.1", "c"])) == ["a.1", "a.1.b", "c"]


def test_half_written_index_does_not_block_the_folder(tmp_path: Path) -> None:
    """Row 52."""
    offload_state_dict(tmp_path, {"a": torch.zeros(2)})
    path = tmp_path / "index.json"
    path.write_text(path.read_text()[:20])
    with pytest.raises(stowage.BadFile, match=r"index\.json: must be a whole JSON file"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.warns(UserWarning, match="replaced"):
        offload_state_dict(tmp_path, {"b": torch.ones(2)})
    assert list(OffloadedWeightsLoader(save_folder=tmp_path)) == ["b"]
    save_offload_index({}, tmp_path)
    (tmp_path / "b.dat").unlink()  # an entry of a file that is gone does not stay
    offload_state_dict(tmp_path, {"c": torch.ones(2)})
    assert list(OffloadedWeightsLoader(save_folder=tmp_path)) == ["c"]


def test_damaged_files_are_refused_by_name_and_size(tmp_path: Path) -> None:
    index = offload_weight(torch.zeros(4), "w", tmp_path, {})
    (tmp_path / "w.dat").write_bytes(b"1234567")
    with pytest.raises(
        stowage.BadFile, match=r"w\.dat: must have 16 bytes for float32 \[4\], has 7"
    ):
        load_offloaded_weight(tmp_path / "w.dat", index["w"])
    with pytest.raises(OSError, match=r"gone\.dat"):
        load_offloaded_weight(tmp_path / "gone.dat", index["w"])
    with pytest.raises(stowage.BadFile, match="float33"):
        load_offloaded_weight(tmp_path / "w.dat", {"dtype": "float33", "shape": [4]})


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """accelerate is killed by SIGBUS."""
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10))
    with pytest.raises(OSError, match="must have 16 bytes free, has 10"):
        offload_weight(torch.zeros(4), "w", tmp_path)
    monkeypatch.undo()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(stowage.FileError, match="No space"):
        offload_weight(torch.zeros(4), "w", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path: Path) -> None:
    resting = stowage.quantize(torch.randn(64, 64), "int8")
    folder = tmp_path / "folder"
    for name, wrong, text in (
        ("w", resting, r"rests as int8.*stowage\.save"),
        ("w", torch.zeros(2, device="meta"), "meta"),
        ("w", torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})), "got Own"),
        ("../../w", torch.zeros(2), "stay in its folder"),
        ("/w", torch.zeros(2), "stay in its folder"),
    ):
        with pytest.raises(ValueError, match=text):
            offload_state_dict(folder, {"first": torch.zeros(2), name: wrong})
    assert not folder.exists()
