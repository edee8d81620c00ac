# SPDX-License-Identifier: Apache-2.0
"""A right call of every op of torch.ops.stowage: what the fuzzer bends. An op without one is not
fuzzed, and tests/torch/test_fuzzed_ops.py fails until it has one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from scenes import COMPUTE, LINKS, MEASURED, NAMES, REPORT, STORAGES, VALUES, Scene, request

from stowage._ops import library
from stowage._ops.storage import Storage


def _quantize(s: Scene) -> tuple[Any, ...]:
    kind, rows, columns = s.matrix()
    return torch.randn(rows, columns).to(s.random.choice(VALUES)), kind.key, s.random.random() < 0.5


def _dequantize(s: Scene) -> tuple[Any, ...]:
    kind, *shape = s.matrix()
    return (*s.weight(kind, *shape), kind.key, shape, s.random.choice(VALUES))


def _linear(s: Scene) -> tuple[Any, ...]:
    kind, rows, columns = s.matrix()
    dtype = s.random.choice(COMPUTE)
    bias = torch.randn(rows).to(dtype) if s.random.random() < 0.5 else None
    x = torch.randn(*s.batch(), columns).to(dtype)
    return x, *s.weight(kind, rows, columns), kind.key, rows, bias, s.random.random() < 0.2


def _linear_direct(s: Scene) -> tuple[Any, ...]:
    while True:
        x, codes, scales, key, rows, bias, _ = _linear(s)
        if len(scales) == 1:
            return x, codes, scales[0], key, rows, bias


def _grad_input(s: Scene) -> tuple[Any, ...]:
    kind, rows, columns = s.matrix()
    g = torch.randn(*s.batch(), rows).to(s.random.choice(COMPUTE))
    return g, *s.weight(kind, rows, columns), kind.key, columns, s.random.random() < 0.2


def _embedding(s: Scene) -> tuple[Any, ...]:
    kind, *shape = s.matrix()
    ids = torch.randint(shape[0], s.batch(), dtype=s.random.choice((torch.int64, torch.int32)))
    return (ids, *s.weight(kind, *shape), kind.key, shape, s.random.choice(VALUES))


def _measure(s: Scene) -> tuple[Any, ...]:
    kind, *shape = s.matrix()
    return torch.randn(shape), *s.weight(kind, *shape), kind.key


def _amax(s: Scene) -> tuple[Any, ...]:
    count = s.random.randint(0, 4)
    return ([torch.randn(s.batch()).to(s.random.choice(VALUES)) for _ in range(count)],)


def _convolution(s: Scene) -> tuple[Any, ...]:
    kind = Storage(s.random.choice([n for n in STORAGES if "torchao" not in n]))
    shape = [4, 2, 3]
    weight = (*s.weight(kind, *shape), kind.key, shape)
    return torch.randn(2, 4, 9), *weight, torch.randn(4), [1], [1], [1], False, [0], 2


def _convolution_grad(s: Scene) -> tuple[Any, ...]:
    x, *weight, _, stride, padding, dilation, transposed, more, groups = _convolution(s)
    options = (stride, padding, dilation, transposed, more, groups)
    return torch.randn(2, 4, 9), x, *weight, *options


def _grouped(s: Scene) -> tuple[Any, ...]:
    kind = Storage(s.random.choice([n for n in STORAGES if "torchao" not in n]))
    shape = [3, 16, 64]
    weight = (*s.weight(kind, *shape), kind.key, shape)
    return torch.randn(6, 64), *weight, torch.tensor([2, 2, 5]), True, False


def _rows_of_groups(s: Scene) -> tuple[Any, ...]:
    shape = [3, 16, 64]
    kinds = [Storage(name) for name in STORAGES if "torchao" not in name]
    kind = s.random.choice([k for k in kinds if library.storage_has_matrices(k.key, shape)])
    x = torch.randn(6, 64).to(s.random.choice(COMPUTE))
    return x, *s.weight(kind, *shape), kind.key, shape, [2, 2, 5], True


def _trace_start(s: Scene) -> tuple[Any, ...]:
    s.closers.append(library.trace_stop)
    return (64,)


def _trace_stop(s: Scene) -> tuple[Any, ...]:
    library.trace_start(8)
    return ()


def _fact(kind: Storage) -> dict[str, Any]:
    """A weight as the manifest of a file names it."""
    parts = ["w.weight"] if kind.kind == "none" else ["w.weight", "w.weight_scale"]
    shape = [64, 64]
    return {"name": "w.weight", "storage": kind.name, "shape": shape, "parts": parts}


_FORM = 8 << 1 | 8 << 7 | 8 << 13 | 1 << 20 | 0o76543210 << 38  # bytes, transposed


def _state(scene: Scene) -> tuple[Any, ...]:
    """The tensors of a plain state, with the bytes of those that are small."""
    tensors = {
        "w": ("F8_E4M3", [4, 64], 256),
        "w_scale": ("F32", [4, 1], 16),
        "b": ("F32", [4], 16),
    }
    listed = [
        {"name": name, "dtype": dtype, "shape": shape, "bytes": size}
        for name, (dtype, shape, size) in tensors.items()
    ]
    values = [torch.zeros(size, dtype=torch.uint8) for _, _, size in tensors.values()]
    return "a state", json.dumps(listed), values


SAMPLES: dict[str, Callable[[Scene], tuple[Any, ...]]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "linear": _linear,
    "_linear": _linear_direct,
    "linear_grad_input": _grad_input,
    "embedding": _embedding,
    "amax": _amax,
    "measure": _measure,
    "_convolution": _convolution,
    "_convolution_grad_input": _convolution_grad,
    "_grouped_linear": _grouped,
    "grouped_rows": _rows_of_groups,
    "storage_key": lambda s: (s.storage().name,),
    "storage_describe": lambda s: (s.storage().key,),
    "storage_has_matrices": lambda s: (Storage("int8:row2").key, [3, 16, 64]),
    "storage_on_disk": lambda s: ("w", s.storage().key, [4, 64]),
    "dialect_files": lambda s: (
        "fp8",
        json.dumps({"weights": [_fact(Storage("f8_e4m3:tensor"))], "others": []}),
    ),
    "storage_label": lambda s: ("w", s.storage().key, [64, 64]),
    "quantization_config": lambda s: (json.dumps([_fact(s.storage())]),),
    "state_describe": _state,
    "info": lambda s: (),
    "machine_key": lambda s: (),
    "crossover_now": lambda s: (),
    "crossover_use_kept": lambda s: (),
    "crossover_measure": lambda s: (),
    "file_open": lambda s: (s.written,),
    "file_describe": lambda s: (s.file(),),
    "file_read": lambda s: (s.file(), "m0.weight"),
    "file_copy": lambda s: (
        s.file(),
        "m0.weight",
        s.random.choice([0, 3]),
        s.random.choice([-1, 5]),
    ),
    "file_map": lambda s: (s.file(), "m0.weight", 0, s.random.choice([0, 64])),
    "file_part": lambda s: (
        s.peer_file(),
        "model.layers.0.self_attn.q_proj.weight",
        s.random.randrange(3),
        "F16",
        s.random.random() < 0.5,
    ),
    "file_parts": lambda s: (
        s.peer_file(),
        "model.layers.0.self_attn.q_proj.weight",
        s.random.choice(["F16", "BF16"]),
    ),
    "file_stacks": lambda s: (s.peer_file(), s.stacks()),
    "file_stack_part": lambda s: (s.stacked_file(), "stack", s.random.randrange(3)),
    "file_rows": lambda s: (
        s.peer_file(),
        "model.layers.0.self_attn.q_proj.weight",
        *s.random.choice([(0, 0), (0, 1), (3, 40), (32, 64)]),
        s.random.choice(["F16", "BF16"]),
    ),
    "tensor_of_part": lambda s: (torch.zeros(s.batch()[-1], 16, dtype=torch.uint8), _FORM),
    "file_header": lambda s: (s.file(), 0),
    "file_populate": lambda s: (s.file(), "m0.weight", 0, 64, s.random.random() < 0.5),
    "file_drop": lambda s: (s.file(), "m0.weight"),
    "file_drop_behind": lambda s: (s.file(), s.random.choice(("m0.weight", ""))),
    "file_verify": lambda s: (s.file(),),
    "file_check": lambda s: (s.file(),),
    "file_close": lambda s: (s.file(),),
    "engine_open": lambda s: (s.file(), 1 << 20, "automatic", 1, 0.5, False, '["m1.weight"]', "{}"),
    "engine_keep": lambda s: (s.engine(), NAMES, 1 << 19, 1 << 14),
    "engine_expect": lambda s: (s.engine(), NAMES),
    "engine_together": lambda s: ([torch.zeros(*s.batch(), 4), torch.zeros(2)],),
    "engine_want": lambda s: (
        [torch.zeros(*s.batch(), 4)],
        [0, 2, -1],
        *(s.random.random() < 0.5 for _ in "ab"),
    ),
    "engine_foresee": lambda s: (s.engine(), '{"m1.weight": [3, 1]}'),
    "engine_uses": lambda s: (s.engine(),),
    "engine_signature": lambda s: (s.engine(), 7),
    "engine_counts": lambda s: (s.engine(),),
    "engine_describe": lambda s: (s.engine(),),
    "engine_close": lambda s: (s.engine(),),
    "plan_make": lambda s: (request(s.random.choice((None, s.written))), json.dumps(LINKS)),
    "plan_text": lambda s: (s.plan,),
    "plan_read": lambda s: (s.plan, "plan"),
    "plan_check": lambda s: (s.plan, request(None)),
    "plan_html": lambda s: (s.plan, MEASURED),
    "plan_compare": lambda s: (s.plan, MEASURED),
    "report_html": lambda s: (REPORT, s.random.choice(("", s.plan)), MEASURED),
    "links_measure": lambda s: (str(s.folder), False),
    "trace_start": _trace_start,
    "trace_stop": _trace_stop,
    "writer_open": lambda s: (s.path(), s.declaration()),
    "writer_write": lambda s: (s.writer(), "a", torch.zeros(12, dtype=torch.uint8)),
    "writer_finish": lambda s: (s.finished(),),
    "writer_discard": lambda s: (s.writer(),),
}
# Nodes of graphs of a training step, written in Python: a number that only the graph has says which
# layer they belong to, and no other is right.
_T = torch.ones(())
NEVER_RIGHT: dict[str, Callable[[Scene], tuple[Any, ...]]] = {
    "before_block": lambda s: (_T, _T.long() - 9),
    "behind_block": lambda s: (_T, _T.long() - 9),
    "before_backward_of_block": lambda s: (_T, _T.long() - 9),
    "delayed_scale": lambda s: (_T, _T.long() - 9, 0),
    "delayed_weight_scale": lambda s: (_T.long() - 9,),
}
# Nor is any call for a device where there is none.
_WEIGHT = ([0, 0], Storage("int8:row").key, [4, 64])  # addresses, storage, shape
NEVER_RIGHT |= {
    "device_start": lambda s: (0, json.dumps({"driver": str(s.folder), "compilers": []})),
    "device_quantize": lambda s: (0, 0, 0, "F32", *_WEIGHT[1:], _WEIGHT[0], 0),
    "device_dequantize": lambda s: (0, 0, *_WEIGHT, 0, "BF16"),
    "device_embedding": lambda s: (0, 0, *_WEIGHT, 0, True, 1, 0, "BF16", 0),
    "device_linear": lambda s: (0, 0, *_WEIGHT, 0, 1, 0, 0, "BF16"),
    "device_most_rows": lambda s: (0, *_WEIGHT[1:], "BF16"),
    "device_grouped_linear": lambda s: (0, 0, *_WEIGHT, 0, 1, 0, 0, 0, "BF16"),
    "device_amax": lambda s: (0, 0, [0], "F32", [4], 0),
    "device_refused": lambda s: (0, 0, 0),
}
SAMPLES |= {"device_working": lambda s: _WEIGHT[1:]}
SAMPLES |= NEVER_RIGHT | {"read_after": lambda s: (torch.ones(3), _T)}
# They hand what they are given to ops of torch.
IN_PYTHON = {
    "_convolution",
    "_convolution_grad_input",
    "_grouped_linear",
    "read_after",
    *NEVER_RIGHT,
}
# What is left as it is, by op and argument: measuring a machine takes seconds.
KEPT = {"links_measure": {"path", "anew"}}
