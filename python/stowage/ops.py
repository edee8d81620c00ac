# SPDX-License-Identifier: Apache-2.0
"""The compiled ops, by name. Schemas: src/torch/library.cpp. An error is a RuntimeError whose text
starts with `[code] `; gradients flow through `dequantize`, `linear` and `embedding`.
"""

import ctypes

import torch

from stowage import _library, _torch  # noqa: F401  the first registers the ops

_ops = torch.ops.stowage

quantize = _ops.quantize.default
dequantize = _ops.dequantize.default
linear = _ops.linear.default
linear_grad_input = _ops.linear_grad_input.default
embedding = _ops.embedding.default
amax = _ops.amax.default
measure = _ops.measure.default

storage_key = _ops.storage_key.default
storage_describe = _ops.storage_describe.default
storage_on_disk = _ops.storage_on_disk.default
quantization_config = _ops.quantization_config.default
storage_label = _ops.storage_label.default
info = _ops.info.default
state_describe = _ops.state_describe.default

file_open = _ops.file_open.default
file_describe = _ops.file_describe.default
file_read = _ops.file_read.default
file_map = _ops.file_map.default
file_populate = _ops.file_populate.default
file_drop = _ops.file_drop.default
file_verify = _ops.file_verify.default
file_check = _ops.file_check.default
file_close = _ops.file_close.default
engine_open = _ops.engine_open.default
engine_keep = _ops.engine_keep.default
engine_expect = _ops.engine_expect.default
engine_signature = _ops.engine_signature.default
engine_counts = _ops.engine_counts.default
engine_describe = _ops.engine_describe.default
engine_close = _ops.engine_close.default
plan_make = _ops.plan_make.default
plan_text = _ops.plan_text.default
plan_read = _ops.plan_read.default
plan_check = _ops.plan_check.default
plan_html = _ops.plan_html.default
machine_key = _ops.machine_key.default
links_measure = _ops.links_measure.default
trace_start = _ops.trace_start.default
trace_stop = _ops.trace_stop.default
writer_open = _ops.writer_open.default
writer_write = _ops.writer_write.default
writer_finish = _ops.writer_finish.default
writer_discard = _ops.writer_discard.default


def plan_compare(plan: str, measured: str) -> torch.Tensor:
    """A sentence, as bytes: JSON of a plan beside JSON of what a pass took."""
    made: torch.Tensor = _ops.plan_compare.default(plan, measured)
    return made


def report_html(report: str, plan: str, measured: str) -> torch.Tensor:
    """A page, as bytes, of a report's JSON; `plan` is "" for none."""
    made: torch.Tensor = _ops.report_html.default(report, plan, measured)
    return made


def text(given: torch.Tensor) -> str:
    """What an op gave as bytes: torch never frees what one returns as str."""
    while _torch.is_functorch_wrapped_tensor(given):  # a transform of torch.func wraps results
        given = _torch.get_unwrapped(given)
    return ctypes.string_at(given.data_ptr(), given.nbytes).decode()
