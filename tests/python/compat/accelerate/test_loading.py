# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every form, into memory and onto the disk; all problems before any change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from dispatched import Rooted, Small
from safetensors.torch import save_file

import stowage
import stowage.compat.accelerate as accelerate
from stowage.compat.accelerate.utils import (
    has_offloaded_params,
    load_checkpoint_in_model,
    load_state_dict,
)

IDS = torch.arange(12).reshape(3, 4)


def made(width: int = 160) -> Rooted:
    torch.manual_seed(0)
    return Rooted(width).eval()


def empty(width: int = 160) -> Rooted:
    """Without values of parameters, and with the buffer that no file has."""
    with accelerate.init_empty_weights():
        model = Rooted(width)
    model.phase = made(width).phase
    return model.eval()


def state() -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in made().state_dict().items()}


def written(folder: Path, form: str) -> Path:
    """What `load_checkpoint_in_model` is given."""
    folder.mkdir(exist_ok=True)
    if form in ("safetensors", "folder"):
        save_file(state(), folder / "model.safetensors", metadata={"format": "pt"})
        return folder if form == "folder" else folder / "model.safetensors"
    if form == "pickle":
        torch.save(state(), folder / "pytorch_model.bin")
        return folder
    shards, index = {"a": {}, "b": {}}, {}
    suffix = "bin" if form == "bin shards" else "safetensors"
    for count, (name, tensor) in enumerate(state().items()):
        shards["ab"[count % 2]][name] = tensor
        index[name] = f"{'ab'[count % 2]}.{suffix}"
    for name, part in shards.items():
        path = folder / f"{name}.{suffix}"
        torch.save(part, path) if suffix == "bin" else save_file(part, path)
    whole = index if form == "bare index" else {"metadata": {}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(whole))
    return folder / "model.safetensors.index.json" if form == "bare index" else folder


FORMS = ["safetensors", "folder", "pickle", "shards", "bin shards", "bare index"]


@pytest.mark.parametrize("where", [None, {"": "cpu"}, "disk", "mixed"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_in_every_place(form: str, where: Any, tmp_path: Path) -> None:
    wanted = made()
    places: Any = where
    if where == "disk":
        places = {"": "disk"}
    elif where == "mixed":
        places = {"": "cpu", "blocks.0": "disk"}
    model = accelerate.load_checkpoint_and_dispatch(
        empty(), written(tmp_path / "from", form), places, offload_folder=tmp_path / "to"
    )
    assert torch.equal(model(IDS), wanted(IDS))
    assert all(not t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert model.head.weight is model.embed.weight
    assert has_offloaded_params(model.blocks[0].first) is (where in ("disk", "mixed"))
    assert has_offloaded_params(model.blocks[1].first) is (where == "disk")
    assert getattr(model, "hf_device_map", None) == places
    # What is in safetensors files of the right dtype stays there: no second copy.
    files = sorted(f.name for f in (tmp_path / "to").glob("*")) if where else []
    copied = form in ("pickle", "bin shards", "bare index") and where in ("disk", "mixed")
    assert files == (["model.safetensors"] if copied else [])


def test_dtypes_are_the_models_or_those_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path, "safetensors")
    model = made().half()
    load_checkpoint_in_model(model, path, {"": "cpu"})
    assert model.scale.dtype == torch.float16
    model = Small()
    save_file(Small().state_dict(), tmp_path / "small.safetensors")
    load_checkpoint_in_model(model, tmp_path / "small.safetensors", {"": "cpu"}, dtype="float16")
    assert model.linear1.weight.dtype == torch.float16
    assert model.norm.num_batches_tracked.dtype == torch.int64
    model = Small()
    load_checkpoint_in_model(
        model, tmp_path / "small.safetensors", {"": "cpu"}, dtype=torch.float16,
        keep_in_fp32_modules=["norm"],
    )  # fmt: skip
    assert model.linear1.weight.dtype == torch.float16
    assert model.norm.weight.dtype == torch.float32
    assert not hasattr(model, "_keep_in_fp32_modules")


def test_another_dtype_for_the_disk_is_written_to_the_folder(tmp_path: Path) -> None:
    path = written(tmp_path / "from", "safetensors")
    made_empty = empty()
    made_empty.phase = made_empty.phase.bfloat16()
    model = accelerate.load_checkpoint_and_dispatch(
        made_empty, path, {"": "disk"}, offload_folder=tmp_path / "to", dtype=torch.bfloat16
    )
    assert (tmp_path / "to" / "model.safetensors").exists()
    assert model.blocks[0].first.weight.dtype == torch.bfloat16
    assert torch.equal(model(IDS), made().to(torch.bfloat16)(IDS))


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
def test_strict_sees_missing_and_unexpected_names(device_map: Any, tmp_path: Path) -> None:
    """Row 53: accelerate sees no missing name."""
    tensors = state()
    del tensors["blocks.1.first.weight"]
    tensors |= {"more": torch.zeros(2), "scale": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    model = made()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"(?s)scale: shape.*first\.weight: .*missing.*more: "
    ) as e:
        load_checkpoint_in_model(model, tmp_path, device_map, strict=True)
    assert str(tmp_path) in str(e.value)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_without_strict_leftovers_are_told_and_what_is_missing_stays(
    tmp_path: Path, caplog: Any
) -> None:
    tensors = {**Small().state_dict(), "more": torch.zeros(2)}
    del tensors["linear2.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = Small()
    kept = model.linear2.bias.clone()
    load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    assert "were not used when filling Small: more" in caplog.text
    assert torch.equal(model.linear2.bias, kept)
    with accelerate.init_empty_weights():
        model = Small()
    with pytest.raises(ValueError, match=r"linear2\.bias: must get a value"):
        load_checkpoint_in_model(model, tmp_path, {"": "cpu"})
    assert model.linear1.weight.is_meta


def test_refusals(tmp_path: Path) -> None:
    path = written(tmp_path / "from", "shards")
    model = made()
    for arguments, text in (
        ({"device_map": {"": "disk"}}, "offload_folder must be given"),
        ({"device_map": {"embed": "cpu"}}, "scale: must have a device"),
        ({"offload_8bit_bnb": True}, r"stowage\.stow"),
        ({"broadcast_from_rank0": True}, "each process"),
    ):
        with pytest.raises((ValueError, NotImplementedError), match=text):
            load_checkpoint_in_model(model, path, **arguments)
    with pytest.raises(ValueError, match="one of auto, balanced"):
        accelerate.load_checkpoint_and_dispatch(model, path, "best")
    (tmp_path / "from" / "b.safetensors").unlink()
    with pytest.raises((ValueError, OSError), match=r"b\.safetensors"):
        load_checkpoint_in_model(model, path)
    with pytest.raises(ValueError, match="must be a file, an index or a folder"):
        load_checkpoint_in_model(model, tmp_path / "nowhere")
    with pytest.raises(ValueError, match="has 0 indices"):
        load_checkpoint_in_model(model, tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(stowage.BadFile, match=r"pytorch_model\.bin"):
        load_checkpoint_in_model(model, tmp_path)


@pytest.mark.parametrize("how", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_maps_are_made_from_limits(how: str, tmp_path: Path) -> None:
    path = written(tmp_path / "from", "safetensors")
    block = 2 * 160 * 161 * 4
    model = accelerate.load_checkpoint_and_dispatch(
        empty(), path, how, {"cpu": 2 * block}, ["Block"], tmp_path / "to", strict=True
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert model.hf_device_map["embed"] == "cpu"
    assert torch.equal(model(IDS), made()(IDS))
    model = accelerate.load_checkpoint_and_dispatch(empty(), path, how)
    assert model.hf_device_map == {"": "cpu"}


def test_weights_that_rest_in_the_file_rest_in_the_model(tmp_path: Path) -> None:
    model = made()
    stowage.stow(model, "int8")
    stowage.save(model, tmp_path / "from")
    loaded = accelerate.load_checkpoint_and_dispatch(
        empty(), tmp_path / "from", {"": "disk"}, offload_folder=tmp_path / "to"
    )
    assert loaded.blocks[0].first.weight.resting == "int8:row"
    assert torch.equal(loaded(IDS), model(IDS))


def test_state_dicts_of_files(tmp_path: Path) -> None:
    wanted = state()
    save_file(wanted, tmp_path / "m.safetensors")
    torch.save(wanted, tmp_path / "m.bin")
    for name in ("m.safetensors", "m.bin"):
        for places in (None, {"": "cpu"}, {"embed": "disk", "blocks": "cpu"}):
            found = load_state_dict(str(tmp_path / name), device_map=places)
            assert all(torch.equal(found[n], t) for n, t in wanted.items())
    found = load_state_dict(str(tmp_path / "m.bin"), {"": "cpu", "embed": "meta"})
    assert found["embed.weight"].is_meta
    assert not found["head.weight"].is_meta
    with pytest.raises(OSError, match=r"gone\.bin"):
        load_state_dict(tmp_path / "gone.bin")
