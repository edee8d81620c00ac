# SPDX-License-Identifier: Apache-2.0
"""Every operator of torch's registry, on a stowed weight and on its dense twin: who reads by dims,
indices and sizes gives the same values or the same kind of error; who writes, in place or to `out`,
is carried through or refused with nothing changed, never lost."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from op_samples import Sample, operators, samples, written
from torch import Tensor
from torch.utils._pytree import tree_leaves

import stowage
from stowage._tensor.views import PACKED

pytestmark = pytest.mark.filterwarnings("ignore")
SHAPES = [(8, 16), (4, 6, 16)]
COUNTS = [2, pytest.param(20, marks=pytest.mark.nightly)]
_NAMING = ("dim", "ind", "size", "start", "end")  # parts of names of arguments that place
# Several writes, each of which rounds.
_RECIPES = ("aten::alpha_dropout_", "aten::feature_alpha_dropout_")


def _reads_by_place(schema: Any) -> bool:
    if schema.is_mutable or not schema.arguments or "empty" in schema.name:
        return False
    first = str(schema.arguments[0].type)
    return first in ("Tensor", "List[Tensor]") and any(
        part in argument.name for argument in schema.arguments for part in _NAMING
    )


def _writes(schema: Any) -> bool:
    return bool(schema.is_mutable and written(schema)) and "empty" not in schema.name


def _outcome(sample: Sample, weight: Tensor) -> tuple[Any, Exception | None]:
    try:
        return sample.run(weight), None
    except Exception as error:
        return None, error


def _calls(ops: list[Any], storage: str, count: int) -> Iterator[tuple[Sample, Tensor]]:
    """Calls, and the weight of each."""
    for op in ops:
        for shape in SHAPES[: 1 if count < 5 else None]:
            for sample in samples(op, shape, count):
                values = torch.rand(shape, generator=torch.Generator().manual_seed(1))
                yield sample, stowage.quantize(values, storage)


def _same(got: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return type(got) is type(wanted) and bool(got == wanted)
    got = got.dequantize() if isinstance(got, PACKED) else got
    if (got.shape, got.dtype) != (wanted.shape, wanted.dtype) or -1 in got.shape:
        return got.shape == wanted.shape  # torch lets as_strided have sizes of -1
    if not (got.is_floating_point() or got.is_complex()):
        return torch.equal(got, wanted)
    return torch.allclose(got, wanted, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("count", COUNTS)
def test_reads_by_dim_index_and_size_are_those_of_the_dense_twin(count: int) -> None:
    ops, wrong, carried = operators(_reads_by_place), {}, Counter[str]()
    for sample, weight in _calls(ops, "int8:row", count):
        dense, refusal = _outcome(sample, weight.dequantize())
        stowed, error = _outcome(sample, weight)
        if refusal is not None:
            if not isinstance(error, type(refusal)):
                wrong[str(sample)] = f"{refusal!r:.80} became {error!r:.80}"
        elif error is not None:
            wrong[str(sample)] = f"{error!r:.80}"
        elif not all(map(_same, tree_leaves(stowed), tree_leaves(dense))):
            wrong[str(sample)] = "values"
        else:
            carried[str(sample.op)] += 1
    assert not wrong
    assert len(ops) > 200 and len(carried) > 100


@pytest.mark.parametrize("count", [1, *COUNTS[1:]])
def test_no_write_in_the_registry_is_lost(count: int) -> None:
    ops, wrong, carried = operators(_writes), {}, Counter[str]()
    for sample, weight in _calls(ops, "int8:row", count):
        before, version = weight.dequantize(), weight._version
        dense = before.clone()
        _, refusal = _outcome(sample, dense)
        _, error = _outcome(sample, weight)
        after = weight.dequantize()
        if error is not None:
            known = isinstance(error, (stowage.StowageError, type(refusal)))
            if not known or not torch.equal(after, before):
                wrong[str(sample)] = f"refused with {error!r:.80}"
        elif refusal is not None or dense.shape != before.shape:
            wrong[str(sample)] = f"carried out, where torch says {refusal!r:.80}"
        else:
            carried[str(sample.op)] += 1
            result = stowage.quantize(dense, "int8:row").dequantize()
            if not _same(after, result) and sample.op._schema.name not in _RECIPES:
                wrong[str(sample)] = "values"
            if dense._version and weight._version == version:
                wrong[str(sample)] = "version"
    assert not wrong
    assert len(ops) > 600 and len(carried) > 200
