# SPDX-License-Identifier: Apache-2.0
"""What load and save refuse: everything at once, before anything changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import stowage


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Conv1d(8, 8, 3))


def write(folder: Path, **changes: Any) -> None:
    """The state of a model with some tensors replaced, or left out where None."""
    state = {name: t.clone() for name, t in make().state_dict().items()}
    state |= {name.replace("__", "."): t for name, t in changes.items()}
    state = {name: t for name, t in state.items() if t is not None}
    safetensors.torch.save_file(state, folder / "model.safetensors")


def unchanged(model: nn.Module, folder: Path, **arguments: Any) -> str:
    """The text of the refusal, after checking that it came before any change."""
    before = {name: (t, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    with pytest.raises(ValueError) as caught:
        stowage.load(model, folder, **arguments)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and torch.equal(tensor, before[name][1])
    return str(caught.value)


def test_every_problem_of_a_file_is_in_one_error(tmp_path: Path) -> None:
    """Peer defect 53: a missing key is always told."""
    bad = torch.randn(8, 8)
    bad[3, 4] = float("nan")
    write(
        tmp_path,
        **{"0__weight": None, "1__weight": bad, "2__bias": torch.zeros(9), "extra__x": bad + 1},
        **{"2__weight": torch.zeros(8, dtype=torch.int64)},
    )
    text = unchanged(make(), tmp_path, storage="nf4", rules={"typo*": "int8"})
    assert str(tmp_path) in text and "nothing was changed" in text
    for line in (
        "rule 'typo*': must match a parameter",
        "0.weight: must be in",
        "1.weight: ",
        "2.bias: shape must be [8], the file has [9]",
        "2.weight: must be float32 values, the file has int64",
        "extra.x: must be in the model, is only in the file",
    ):
        assert line in text
    assert text.count("\n") == 6


def test_storages_that_do_not_fit(tmp_path: Path) -> None:
    model = make()
    stowage.stow(model, "int8")
    stowage.save(model, tmp_path)
    text = unchanged(make(), tmp_path, storage="nf4")
    assert "0.weight: storage must be nf4:block64, the file has int8:row" in text
    assert "restow=True" in text
    same = stowage.load(make, tmp_path, "int8")
    assert torch.equal(same[0].weight.dequantize(), model[0].weight.dequantize())


UNKNOWN = ["nf4:foo", "nf4:torchao:bf8", "int8:torchao", "nf4:block64:foo"]


@pytest.mark.parametrize("storage", UNKNOWN)
def test_a_dialect_that_we_do_not_know(storage: str, tmp_path: Path) -> None:
    """In a call, a manifest and a pickle: what a newer release may write."""
    x = torch.randn(8, 64)
    with pytest.raises(stowage.InvalidArgument, match=f"{storage}|{storage.partition(':')[0]}"):
        stowage.quantize(x, storage)
    weight = stowage.quantize(x, "nf4")
    with pytest.raises(stowage.InvalidArgument):
        stowage.StowedTensor(weight.parts, storage, x.shape, x.dtype)
    rebuild, (parts, _, *facts) = weight.__reduce_ex__(2)
    with pytest.raises(stowage.InvalidArgument):
        rebuild(parts, storage, *facts)
    manifest = {"version": 1, "weights": {"0.weight": {"storage": storage, "shape": [8, 64]}}}
    state = {"0.weight": torch.zeros(256, 1, dtype=torch.uint8), "0.weight.absmax": torch.ones(8)}
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(state, path, metadata={"stowage": json.dumps(manifest)})
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    with pytest.raises(stowage.BadFile) as caught:
        stowage.load(model, tmp_path)
    assert f"storage '{storage}'" in str(caught.value) and "'0.weight'" in str(caught.value)


@pytest.mark.parametrize("kind", ["nf4:foo", "nf5"])
def test_a_quant_state_of_a_dialect_that_we_do_not_know(kind: str, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    stowage.stow(model, "nf4")
    state = dict(stowage.state_dict(model))
    name = "0.weight.quant_state.bitsandbytes__nf4"
    facts = json.loads(bytes(state.pop(name).tolist())) | {"quant_type": kind}
    wrong = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    for key in (name, name.replace("nf4", kind)):
        safetensors.torch.save_file(state | {key: wrong}, tmp_path / "model.safetensors")
        with pytest.raises(stowage.BadFile) as caught:
            stowage.load(nn.Sequential(nn.Linear(64, 8, bias=False)), tmp_path)
        assert kind in str(caught.value) and key in str(caught.value)
        before = model[0].weight.parts
        with pytest.raises(stowage.BadFile, match=f"{key}'.* legal values, got .*{kind}"):
            stowage.load_state_dict(model, state | {key: wrong})
        short = torch.tensor(list(b'{"quant_type": "nf4"}'), dtype=torch.uint8)
        with pytest.raises(
            stowage.BadFile, match="no required key may be missing, got no 'blocksize'"
        ):
            stowage.load_state_dict(model, state | {key: short})
        assert all(model[0].weight.parts[n] is p for n, p in before.items())


def test_shapes_that_no_format_holds(tmp_path: Path) -> None:
    model = nn.Module()
    model.deep = nn.Parameter(torch.zeros((1,) * 9))
    with pytest.raises(ValueError, match=r"deep: .*at most 8 dimensions"):
        stowage.stow(model, rules={"deep": "int8"})


def test_float8_with_a_scale_that_is_not_ours(tmp_path: Path) -> None:
    codes = torch.randn(8, 8).to(torch.float8_e4m3fn)
    write(tmp_path, **{"0__weight": codes, "0__weight_scale_inv": torch.ones(1, 1)})
    text = unchanged(make(), tmp_path)
    assert "0.weight: must be float32 values, the file has float8_e4m3fn" in text
    assert "0.weight_scale_inv: must be in the model" in text


def test_renaming_and_leaving_out(tmp_path: Path) -> None:
    state = {f"model.{name}": t.clone() for name, t in make().state_dict().items()}
    state["model.unused"] = torch.zeros(1)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")

    def rename(name: str) -> str | None:
        return None if name.endswith("unused") else name.removeprefix("model.")

    loaded = stowage.load(make, tmp_path, "int8", rename=rename)
    assert loaded[0].weight.resting == "int8:row"
    assert torch.equal(loaded[2].weight, state["model.2.weight"])
    text = unchanged(make(), tmp_path, rename=lambda name: "0.weight")
    assert "rename must give each a name of its own" in text


def test_not_strict(tmp_path: Path) -> None:
    write(tmp_path, **{"0__bias": None, "extra__x": torch.zeros(1)})
    model = make()
    bias = model[0].bias.detach().clone()
    stowage.load(model, tmp_path, strict=False)
    assert torch.equal(model[0].bias, bias)
    with pytest.raises(ValueError, match=r"0\.bias: must get a value, is on the meta device"):
        stowage.load(make, tmp_path, strict=False)


def test_names_that_the_model_itself_lets_differ(tmp_path: Path) -> None:
    write(tmp_path, **{"0__bias": None, "old__x": torch.zeros(1)})
    model = make()
    model._keys_to_ignore_on_load_missing = [r"0\.bias"]
    model._keys_to_ignore_on_load_unexpected = ["^old"]
    stowage.load(model, tmp_path)


def test_files_that_are_not_there_or_not_whole(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        stowage.load(make, tmp_path / "nowhere")
    with pytest.raises(ValueError, match=str(tmp_path)):
        stowage.load(make, tmp_path)  # an empty folder
    path = stowage.save(make(), tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(stowage.BadFile, match=r"model\.safetensors"):
        stowage.load(make, tmp_path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    stowage.load(make, tmp_path)
    with pytest.raises(stowage.BadFile, match=r"model\.safetensors"):
        stowage.load(make, tmp_path, verify=True)


def test_factories_that_cannot_do_without_values(tmp_path: Path) -> None:
    def factory() -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.bound = layer.weight.abs().max().item()
        return layer

    stowage.save(nn.Linear(2, 2), tmp_path)
    with pytest.raises(stowage.InvalidArgument, match="Build the model and pass it instead"):
        stowage.load(factory, tmp_path)
    assert stowage.load(torch.nn.Module.eval(nn.Linear(2, 2)), tmp_path).weight.shape == (2, 2)
    factory_of_nothing: Any = lambda: 3  # noqa: E731
    with pytest.raises(stowage.InvalidArgument, match="must return a Module, got int"):
        stowage.load(factory_of_nothing, tmp_path)


def test_what_cannot_be_saved_is_told_at_once(tmp_path: Path) -> None:
    """Peer defects 22, 41: a tensor without values is never written."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

    model = nn.Sequential(nn.Linear(2, 2, device="meta"), Extra(2, 2))
    model.register_buffer("odd", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError) as caught:
        stowage.save(model, tmp_path / "new")
    text = str(caught.value)
    assert "0.weight: must hold values, got a meta tensor" in text
    assert "odd: safetensors must have its dtype, got torch.complex128" in text
    assert "1: must hold its state in tensors, has extra state" in text
    assert not list(tmp_path.glob("**/*.safetensors"))


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    model.register_buffer("weight_scale", torch.zeros(1))
    stowage.stow(model, "int8")
    with pytest.raises(ValueError, match="weight_scale: must be the name of one tensor"):
        stowage.save(model, tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OSError):
        stowage.save(make(), tmp_path)


def test_a_failed_save_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stowage._ops import library as ops

    path = stowage.save(make(), tmp_path)
    before = path.read_bytes()
    real, calls = ops.writer_write, []

    def write_once(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*args)

    monkeypatch.setattr(ops, "writer_write", write_once)
    with pytest.raises(KeyboardInterrupt):
        stowage.save(make(), tmp_path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
