# SPDX-License-Identifier: Apache-2.0
"""torch.library.opcheck on every op: schema, fake, autograd registration, dynamic shapes."""

import json

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.library import opcheck

from stowage._ops import library
from stowage._ops.storage import Storage
from stowage._tensor.products import convolution, grouped

NIGHTLY = [pytest.param(s, marks=pytest.mark.nightly) for s in ("f8_e4m3", "nf4")]
_FORM = 4 << 1 | 8 << 7 | 32 << 13 | 1 << 19 | 8 << 22 | 0o76543210 << 38  # zero points
_DIALECT_MODEL = (
    '{"weights": [{"name": "a.weight", "storage": "f8_e4m3:tensor", "shape": [4, 4], "parts": []}],'
    ' "others": []}'
)
SAMPLED = ("bf16", "int8:block5", "fp4:block32:nested", *NIGHTLY)


@pytest.fixture(params=SAMPLED)
def kind(request: pytest.FixtureRequest) -> Storage:
    return Storage(request.param)


@pytest.fixture
def weight(kind: Storage, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(16, 64, generator=generator).to(device)
    codes, *scales = library.quantize(w, kind.key)
    return codes, scales


def test_quantize(kind, device) -> None:
    opcheck(library.quantize, (torch.randn(16, 64, device=device), kind.key))


def test_dequantize(kind, weight) -> None:
    opcheck(library.dequantize, (*weight, kind.key, (16, 64), torch.bfloat16))


@pytest.mark.parametrize("bias", [False, True])
def test_linear(kind, weight, bias, device) -> None:
    x = torch.randn(3, 64, device=device, requires_grad=True)
    b = torch.randn(16, device=device, requires_grad=True) if bias else None
    opcheck(library.linear, (x, *weight, kind.key, 16, b))
    opcheck(library.linear, (x.detach(), *weight, kind.key, 16, b, True))


def test_linear_grad_input(kind, weight, device) -> None:
    g = torch.randn(3, 16, device=device, requires_grad=True)
    opcheck(library.linear_grad_input, (g, *weight, kind.key, 64))


def test_embedding(kind, weight, device) -> None:
    ids = torch.tensor([[1, 15], [0, 3]], device=device)
    opcheck(library.embedding, (ids, *weight, kind.key, (16, 64), torch.float32))


def test_convolution(kind, device) -> None:
    shape = (8, 4, 3)
    codes, *scales = library.quantize(torch.randn(shape, device=device), kind.key)
    x, bias = torch.randn(2, 4, 9, device=device), torch.randn(8, device=device)
    options = ([1], [1], [1], False, [0], 1)
    weight = (codes, scales, kind.key, list(shape))
    opcheck(convolution.convolution, (x, *weight, bias, *options))
    y = convolution.convolution(x, *weight, bias, *options)
    opcheck(convolution.grad_input, (torch.randn_like(y), x, *weight, *options))


def test_grouped_linear(kind, device) -> None:
    for shape, transposed in (((3, 16, 64), True), ((3, 64, 16), False)):
        codes, *scales = library.quantize(torch.randn(shape, device=device), kind.key)
        offsets = torch.tensor([2, 2, 5], dtype=torch.int32, device=device)
        for exact in (False, True):
            args = (torch.randn(6, 64, device=device), codes, scales, kind.key, list(shape))
            opcheck(grouped.grouped, (*args, offsets, transposed, exact))


def test_grouped_rows(kind) -> None:
    for shape, transposed in (((3, 16, 64), True), ((3, 64, 16), False)):
        codes, *scales = library.quantize(torch.randn(shape), kind.key)
        if library.storage_has_matrices(kind.key, shape):
            args = (torch.randn(6, 64), codes, scales, kind.key, shape, [2, 2, 5], transposed)
            if library.composite_forced():  # of the kernels alone
                with pytest.raises(RuntimeError, match=r"^\[unsupported\]"):
                    library.grouped_rows(*args)
            else:
                opcheck(library.grouped_rows, args, test_utils=("test_schema",))


def test_amax(device) -> None:
    values = [torch.randn(16, 64, device=device), torch.zeros(0, 3, device=device).bfloat16()]
    opcheck(library.amax, (values,))


def test_measure(kind, weight, device) -> None:
    opcheck(library.measure, (torch.randn(16, 64, device=device), *weight, kind.key))


def test_the_direct_spelling(device) -> None:
    kind, x = Storage("int8"), torch.randn(3, 64, device=device)
    codes, scale = library.quantize(torch.randn(16, 64, device=device), kind.key)
    direct = torch.ops.stowage._linear.default
    opcheck(direct, (x, codes, scale, kind.key, 16, None), test_utils=("test_schema",))
    assert torch.equal(
        direct(x, codes, scale, kind.key, 16, None),
        library.linear(x, codes, [scale], kind.key, 16, None),
    )


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (library.storage_key, ("nf4",)),
        (library.storage_describe, (Storage("nf4").key,)),
        (library.storage_has_matrices, (Storage("nf4").key, [2, 16, 64])),
        (library.storage_on_disk, ("w", Storage("nf4").key, [4, 4])),
        (library.storage_label, ("w", Storage("int8").key, [4, 4])),
        (library.state_describe, ("the state", "[]", [])),
        (library.quantization_config, ("[]",)),
        (library.dialect_files, ("fp8", _DIALECT_MODEL)),
        (library.tensor_of_part, (torch.zeros(8, 2, dtype=torch.int8), _FORM)),
        (library.info, ()),
    ],
)
def test_descriptions(op, args) -> None:
    opcheck(op, args, test_utils=("test_schema",))


def test_files(tmp_path) -> None:
    path = str(tmp_path / "m.safetensors")
    declared = json.dumps({"tensors": [{"name": "a", "dtype": "U8", "shape": [3]}]})
    writer = library.writer_open(path, declared)
    # Writing twice is refused, so that the op itself runs once, below the schema checks.
    with SchemaCheckMode():
        library.writer_write(writer, "a", torch.arange(3, dtype=torch.uint8))
    library.writer_finish(writer)
    file = library.file_open(path)
    for op, args in (
        (library.file_check, (file,)),
        (library.file_describe, (file,)),
        (library.file_drop, (file, "a")),
        (library.file_drop_behind, (file, "")),
        (library.file_copy, (file, "a")),
        (library.file_populate, (file, "a", 0, 2)),
        (library.file_read, (file, "a")),
        (library.file_verify, (file,)),
        (library.file_stacks, (file, "[]")),
    ):
        opcheck(op, args, test_utils=("test_schema",))
    engine = library.engine_open(file, 1 << 20, "mapped", 1)
    for op, args in (
        (library.engine_keep, (engine, '["a"]', 1 << 16, 0)),
        (library.engine_expect, (engine, '["a"]')),
        (library.engine_together, ([torch.zeros(4, dtype=torch.uint8)],)),
        (library.engine_want, ([torch.zeros(4, dtype=torch.uint8)], [0, 1], False, True)),
        (library.engine_signature, (engine, 7)),
        (library.engine_foresee, (engine, "{}")),
        (library.engine_uses, (engine,)),
        (library.engine_counts, (engine,)),
        (library.engine_describe, (engine,)),
        (library.trace_start, (4,)),
        (library.trace_stop, ()),
    ):
        opcheck(op, args, test_utils=("test_schema",))
    library.engine_close(engine)
    library.file_close(file)


def test_plans(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STOWAGE_LINKS", str(tmp_path / "links.json"))
    links = library.text(library.links_measure(str(tmp_path), False))
    unit = {"name": "a.weight", "storage": "f32", "shape": [256, 256], "rest": 1 << 18}
    described = {"path": None, "name": "m", "units": [unit | {"rows": False}]}
    request = described | {"ram": 1 << 20, "accelerators": [], "uses": [], "storage": None}
    request |= {"rows": 1, "activations": 0, "works_on_cpu": True, "order": []}
    plan = library.text(library.plan_make(json.dumps(request), links))
    report = '{"stowage_report": 1, "model": "m", "weights": [], "notes": []}'
    for op, args in (
        (library.links_measure, (str(tmp_path), False)),
        (library.machine_key, ()),
        (library.crossover_now, ()),
        (library.crossover_use_kept, ()),
        (library.crossover_measure, ()),
        (library.plan_make, (json.dumps(request), links)),
        (library.plan_read, (plan, "p.json")),
        (library.plan_text, (plan,)),
        (library.plan_html, (plan, '{"seconds": 0, "peak": {}, "bytes": {}}')),
        (torch.ops.stowage.plan_compare.default, (plan, '{"seconds": 1}')),
        (torch.ops.stowage.report_html.default, (report, plan, "{}")),
        (library.plan_check, (plan, json.dumps(described))),
    ):
        opcheck(op, args, test_utils=("test_schema",))
    monkeypatch.setenv("STOWAGE_CROSSOVER", "built_in")
    assert library.crossover_use_kept()


_OPS = (
    "_convolution",
    "_convolution_grad_input",
    "_grouped_linear",
    "grouped_rows",
    "_linear",
    "amax",
    "dequantize",
    "crossover_measure",
    "crossover_now",
    "crossover_use_kept",
    "device_amax",
    "device_dequantize",
    "device_embedding",
    "device_grouped_linear",
    "device_linear",
    "device_most_rows",
    "device_quantize",
    "device_refused",
    "device_start",
    "device_working",
    "dialect_files",
    "embedding",
    "engine_close",
    "engine_counts",
    "engine_describe",
    "engine_expect",
    "engine_foresee",
    "engine_want",
    "engine_keep",
    "engine_open",
    "engine_signature",
    "engine_together",
    "engine_uses",
    "file_check",
    "file_close",
    "file_copy",
    "file_describe",
    "file_drop",
    "file_drop_behind",
    "file_header",
    "file_map",
    "file_open",
    "file_part",
    "file_parts",
    "file_populate",
    "file_read",
    "file_rows",
    "file_stack_part",
    "file_stacks",
    "file_verify",
    "info",
    "linear",
    "linear_grad_input",
    "links_measure",
    "machine_key",
    "measure",
    "plan_check",
    "plan_compare",
    "plan_html",
    "plan_make",
    "plan_read",
    "plan_text",
    "quantization_config",
    "quantize",
    "report_html",
    "state_describe",
    "storage_describe",
    "storage_has_matrices",
    "storage_key",
    "storage_label",
    "storage_on_disk",
    "tensor_of_part",
    "trace_start",
    "trace_stop",
    "writer_discard",
    "writer_finish",
    "writer_open",
    "writer_write",
)


def test_every_op_is_checked_here() -> None:
    """Those of the library. Ops that training writes in Python are nodes of graphs, checked there
    (tests/python/training/test_compile_matrix.py)."""
    known = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("stowage::")}
    known -= set(OPDEFS)
    assert known == {f"stowage::{name}" for name in _OPS}
