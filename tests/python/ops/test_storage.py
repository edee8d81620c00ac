# SPDX-License-Identifier: Apache-2.0
"""Storages in Python: parsed once, equal by identity, and laid out as C++ does it."""

import copy
import io
import pickle

import pytest
import torch
from storages import codec, covering

from stowage import InvalidArgument
from stowage._ops import library
from stowage._ops.storage import Storage


def test_one_object_for_each_storage() -> None:
    nf4 = Storage("nf4")
    assert nf4 is Storage("nf4:block64") is Storage(nf4) is Storage.parse("nf4")
    assert nf4 is Storage.from_key(nf4.key)
    assert nf4 is copy.copy(nf4) is copy.deepcopy([nf4])[0] is pickle.loads(pickle.dumps(nf4))
    assert nf4 is not Storage("nf4:block128")
    assert (str(nf4), repr(nf4)) == ("nf4:block64", "Storage('nf4:block64')")


def test_weights_only_load() -> None:
    file = io.BytesIO()
    torch.save({"s": Storage("int8")}, file)
    with torch.serialization.safe_globals([Storage]):
        file.seek(0)
        assert torch.load(file, weights_only=True)["s"] is Storage("int8")


def test_facts() -> None:
    nested = Storage("fp4:block128:nested")
    assert (nested.flat, nested.kind, nested.block, nested.nested) == (True, "block", 128, True)
    assert nested.part_names[0] == "codes" and len(nested.part_names) == 5
    assert len(nested.values) == 16 and nested.values[3] == 1.0
    assert Storage("f8_e4m3").largest == 448.0 and Storage("bf16").codes_dtype == torch.bfloat16


def test_it_does_not_change() -> None:
    with pytest.raises(AttributeError):
        Storage("nf4").block = 32


@pytest.mark.parametrize("text", ["", "nf5", "nf4:row", "int8:none", "f8_e4m3:nested", "NF4"])
def test_typos_list_the_legal_ones(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"f8_e4m3\[:tensor.*nf4\[:block<N>\]") as caught:
        Storage(text)
    assert isinstance(caught.value, ValueError) and f"got '{text}'" in str(caught.value)


SHAPES = ((), (1,), (7,), (0, 3), (3, 0), (33, 65), (5, 3, 7), (2, 3, 4, 5), (33, 66))
NAMES = covering(codec)


@pytest.mark.parametrize("name", NAMES)
def test_layout_is_what_quantize_makes(name: str) -> None:
    kind = Storage(name)
    least = {"row": 1, "block": 1, "row2": 2}.get(kind.kind, 0) if kind.byte_codes else 0
    for shape in SHAPES:
        if len(shape) >= least and not kind.misfit(shape):
            made = [
                (p.dtype, tuple(p.shape)) for p in library.quantize(torch.zeros(shape), kind.key)
            ]
            assert made == [(dtype, size) for _, dtype, size in kind.layout(shape)], shape
