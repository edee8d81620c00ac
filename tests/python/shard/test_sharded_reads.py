# SPDX-License-Identifier: Apache-2.0
"""Files as models that are spread before they have values: each process reads its rows."""

from pathlib import Path

import pytest
import sharded_reads
from sharded import run

import stowage

STORAGES = ["nf4", "int8", "f8_e4m3:tensor", "nf4:nested", "int4:block32", "mxfp4", "fp4:block128"]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_models_without_values_and_with_others(world: int, tmp_path: Path) -> None:
    run(world, sharded_reads.spread_first, [None, *STORAGES], str(tmp_path))


def test_checkpoints_into_models_without_values(tmp_path: Path) -> None:
    run(2, sharded_reads.from_a_checkpoint, [None, "nf4", "int8", "nf4:nested"], str(tmp_path))


def test_options_of_fsdp_and_modes(tmp_path: Path) -> None:
    run(2, sharded_reads.with_options, str(tmp_path))


def test_adapters_and_ties_beside(tmp_path: Path) -> None:
    run(2, sharded_reads.beside_what_has_values, str(tmp_path))


def test_training_in_fp8(tmp_path: Path) -> None:
    run(2, sharded_reads.trained_in_fp8, str(tmp_path))


def test_a_model_that_is_whole(tmp_path: Path) -> None:
    sharded_reads.whole_here(str(tmp_path))


def test_a_load_without_values_comes_alone(tmp_path: Path) -> None:
    for options, text in (
        ({"device": "cuda"}, "device must be None or 'meta', got cuda"),
        ({"device": "meta", "mmap": True}, "must come without mmap, ram and plan"),
        ({"device": "meta", "ram": "1MiB"}, "must come without mmap, ram and plan"),
    ):
        with pytest.raises(stowage.InvalidArgument, match=text):
            stowage.load(sharded_reads.Model, tmp_path, **options)  # type: ignore[arg-type]


def test_pairs_that_replicate_each_other(tmp_path: Path) -> None:
    run(4, sharded_reads.replicated, str(tmp_path))


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
def test_tensor_parallelism(shape: tuple[int, int], tmp_path: Path) -> None:
    storages = ["nf4", "int8", "f8_e4m3:tensor", "int4:block32"]
    run(shape[0] * shape[1], sharded_reads.parallel, storages, str(tmp_path), shape)


def test_plain_values_come_to_rest_on_the_way(tmp_path: Path) -> None:
    storages = ["nf4", "int8", "int4:block32", "mxfp8_e4m3", "f8_e4m3"]
    run(3, sharded_reads.quantized_on_the_way, storages, str(tmp_path))


def test_values_that_are_not_finite_are_kept_where_that_is_said(tmp_path: Path) -> None:
    run(2, sharded_reads.not_finite_and_kept, str(tmp_path))


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("of_another_storage", "up.weight: must rest as int8:row, the file has nf4:block64"),
        ("without_a_name", "more.weight: must be in "),
        ("of_all_values", "up.weight: must rest in the file: what int8:tensor"),
        ("not_finite_in_the_last_rows", "up.weight: "),
        ("twice_in_the_file", "the file has different values for table.weight and head.weight"),
        ("cut_short", "model.safetensors"),
    ],
)
def test_every_process_says_the_same(what: str, text: str, tmp_path: Path) -> None:
    said = run(3, sharded_reads.told, getattr(sharded_reads, what), str(tmp_path))
    assert text in said[0], said[0]
    assert len(set(said)) == 1, said


@pytest.mark.parametrize("storage", ["nf4", "int8", "f8_e4m3:block128x128", "nf4:nested"])
def test_each_reads_its_share(storage: str, tmp_path: Path) -> None:
    read, held = run(4, sharded_reads.shares, storage, str(tmp_path))
    assert all(count < 0.26 * held + 32768 for count in read), (read, held)
