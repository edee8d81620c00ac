# SPDX-License-Identifier: Apache-2.0
"""Resting weights as DTensors, and checkpoints that are loaded by other numbers of processes."""

import json
from pathlib import Path

import fresh
import pytest
import sharded
import sharded_files
import torch
from ranks import on_ranks
from safetensors.torch import load_file
from sharded import run
from torch.distributed import checkpoint as checkpoints
from torch.distributed.checkpoint import FileSystemReader

import stowage
from stowage._model.reports.table import bytes_text

pytestmark = pytest.mark.slow
READ_WITHOUT_US = """
import json, sys, torch
from torch.distributed.checkpoint import FileSystemReader, load
facts = FileSystemReader(sys.argv[1]).read_metadata().state_dict_metadata
state = {n: torch.empty(f.size, dtype=f.properties.dtype) for n, f in facts.items()}
load(state, checkpoint_id=sys.argv[1])
manifest = json.loads(bytes(state["stowage.manifest"].tolist()))
assert manifest["0.up.base.weight"]["shape"] == [7, 33], manifest
assert state["0.up.base.weight.records"].shape == (7, 19)
assert "stowage" not in sys.modules
"""


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=[] if n == 3 else NIGHTLY) for n in (1, 2, 3, 4)]
)
def test_dtensors(world: int) -> None:
    run(world, sharded_files.replicated_and_sharded, "nf4:nested", (7, 33))
    if world == 3:
        run(world, sharded_files.replicated_and_sharded, "f8_e4m3:row", (2, 64))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[bytes]]:
    """What four processes saved."""
    folder = str(tmp_path_factory.mktemp("four"))
    return folder, run(4, sharded_files.saved, folder, "nf4:nested", (7, 33), 2)


@pytest.mark.parametrize(
    "world", [pytest.param(n, marks=[] if n == 3 else NIGHTLY) for n in (1, 2, 3)]
)
def test_other_numbers_of_processes_load_the_same_bytes(
    four: tuple[str, list[bytes]], world: int, tmp_path: Path
) -> None:
    folder, want = four
    found, _ = run(world, sharded_files.loaded, folder, "nf4:nested", (7, 33), True)
    assert found == want
    there = str(tmp_path)
    assert run(world, sharded_files.saved, there, "nf4:nested", (7, 33), 0)
    back, _ = run(4, sharded_files.loaded, there, "nf4:nested", (7, 33), True)
    assert back == sharded.bytes_of(sharded.blocks("nf4:nested", (7, 33)))


def test_a_model_that_is_not_spread_loads_them_too(four: tuple[str, list[bytes]]) -> None:
    folder, want = four
    found, losses = run(1, sharded_files.loaded, folder, "nf4:nested", (7, 33), False)
    assert found == want
    assert losses == run(2, sharded_files.loaded, folder, "nf4:nested", (7, 33), True)[1]


def test_save_writes_flat_bytes(four: tuple[str, list[bytes]]) -> None:
    folder, _ = four
    found = load_file(f"{folder}/flat/model.safetensors")
    model = sharded.blocks("nf4:nested", (7, 33))
    want = stowage.state_dict(model)
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        if ".base." in name:  # frozen
            assert torch.equal(found[name], tensor), name
    stowage.load(model, f"{folder}/flat")


def test_values_and_flat_bytes_are_those_of_the_model_in_one_process(tmp_path: Path) -> None:
    whole = sharded_files.mixed()
    run(2, sharded_files.saved_values, str(tmp_path))
    stowage.save(whole, tmp_path / "whole/flat")
    stowage.save(whole, tmp_path / "whole/values", dtype=torch.bfloat16)
    for kind, name in (("flat", "model"), ("values", "diffusion_pytorch_model")):
        found = load_file(tmp_path / kind / f"{name}.safetensors")
        want = load_file(tmp_path / f"whole/{kind}" / f"{name}.safetensors")
        assert found.keys() == want.keys() and "1.weight" in found
        assert all(torch.equal(found[key], want[key]) for key in want), kind
    config = json.loads((tmp_path / "values/config.json").read_text())
    assert config == {"_class_name": "Declared", "width": 33}


def test_reports_say_what_is_here_and_what_travels() -> None:
    answers = on_ranks(3, sharded_files.reported)
    rows = [rows for rows, _, _ in answers]
    want = ["rows 0-2 of 7", "rows 3-5 of 7", "rows 6-6 of 7"]
    assert [row["0.weight"][0] for row in rows] == want
    assert [row["1.bias"][0] for row in rows][2] == "rows 4-4 of 5"
    wires = {name: wire for name, (_, wire, _, _) in rows[0].items()}
    assert wires["0.weight"] == "nf4:block64:nested" and wires["1.weight"] == "f8_e4m3:row"
    assert wires["1.bias"] == "float32" and wires["2.weight"] == "bfloat16"
    for name, (_, _, _, whole) in rows[0].items():
        here = [row[name][2] for row in rows]
        shared = 4 * (256 + 1 + 1) if name == "0.weight" else 0  # map, scale and offset: in each
        assert sum(here) - 2 * shared == whole, name
    for _, text, total in answers:
        assert f"of these {bytes_text(total)} are here" in text


def test_records_are_read_without_us(four: tuple[str, list[bytes]]) -> None:
    folder, _ = four
    fresh.run(READ_WITHOUT_US, f"{folder}/records").check_returncode()


@pytest.mark.parametrize(
    ("storage", "shape", "dtype", "text"),
    [
        ("nf4", (7, 33), torch.float32, "0.up.base.weight: storage must be nf4:block64, got nf4"),
        ("nf4:nested", (7, 34), torch.float32, "0.up.base.weight: shape must be [7, 34], got [7"),
        ("nf4:nested", (7, 33), torch.bfloat16, "0.up.a: must be torch.bfloat16 [4, 33], got"),
    ],
)
def test_what_differs_is_named(
    four: tuple[str, list[bytes]],
    storage: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    text: str,
) -> None:
    assert text in run(2, sharded_files.load_refused, four[0], storage, shape, dtype)


def state_of(folder: str) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, by torch alone."""
    facts = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {name: torch.empty(f.size, dtype=f.properties.dtype) for name, f in facts.items()}
    checkpoints.load(state, checkpoint_id=folder)
    return state


@pytest.mark.parametrize(
    ("storage", "part"),
    [("nf4:nested", "nested_map"), pytest.param("int8:tensor", "scale", marks=NIGHTLY)],
)
def test_parts_that_rows_share_and_that_differ_are_named(
    storage: str, part: str, tmp_path: Path
) -> None:
    run(2, sharded_files.saved, str(tmp_path), storage, (7, 33), 0)
    state, name = state_of(f"{tmp_path}/records"), f"0.up.base.weight.{part}"
    changes = {
        "of another save": {name: state[name] * 2},
        "f64": {name: state[name].double()},
        "more": {name: torch.zeros(3)},
        "none": {},
    }
    for kind, change in changes.items():
        others = {n: tensor for n, tensor in state.items() if n != name}
        checkpoints.save(others | change, checkpoint_id=tmp_path / kind)
    folders = [str(tmp_path / kind) for kind in changes]
    texts = run(2, sharded_files.refusals, folders, storage)
    want = ["must be what was saved beside the records", "must be torch.float32 ["]
    want += [want[1], "must be in the checkpoint, is not"]
    for text, words in zip(texts, want, strict=True):
        assert f"{name}: {words}" in text


def test_all_kinds_of_weights_in_one_checkpoint(tmp_path: Path) -> None:
    run(2, sharded_files.records_of_mixed, str(tmp_path))
    read = READ_WITHOUT_US.partition("assert manifest")[0]
    fresh.run(read, tmp_path).check_returncode()


@pytest.mark.nightly
@pytest.mark.parametrize("storage", ["int8:tensor", "f8_e4m3:row", "int8:block16", "bf16"])
def test_every_storage_in_other_numbers_of_processes(storage: str, tmp_path: Path) -> None:
    want = run(4, sharded_files.saved, str(tmp_path), storage, (7, 33), 1)
    for world in (1, 2, 3, 4):
        assert run(world, sharded_files.loaded, str(tmp_path), storage, (7, 33), True)[0] == want


def test_saving_while_training_goes_on(tmp_path: Path) -> None:
    run(2, sharded_files.saved_async, str(tmp_path))
