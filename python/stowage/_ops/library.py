# SPDX-License-Identifier: Apache-2.0
"""The compiled library: found, loaded once, and its ops by name.

Where it cannot be loaded, the error says what to install. Schemas: src/torch/library.cpp. An error
is a RuntimeError whose text starts with `[code] `; gradients flow through `dequantize`, `linear`
and `embedding`.
"""

import ctypes
import importlib.util
import os

import torch

from stowage._ops import _torch

_OLDEST_TORCH = (2, 11)


def _torch_version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def _find() -> str:
    # Not by __file__: an editable install keeps the Python files and the binary in two places.
    spec = importlib.util.find_spec("stowage.stowage_torch")
    if spec is None or spec.origin is None:
        raise ImportError(
            "stowage: the compiled part (stowage_torch.so) is missing. Install the package with "
            "`pip install torch-stowage`, or from a checkout with "
            "`pip install --no-build-isolation .`"
        )
    return os.path.realpath(spec.origin)


def _registered() -> bool:
    return bool(_torch.jit_get_schemas_for_operator("stowage::storage_key"))


def load() -> None:
    """Registers the ops of namespace `stowage` with torch. Raises ImportError."""
    if _torch_version() < _OLDEST_TORCH:
        raise ImportError(
            f"stowage: torch 2.11 or newer must be installed, got {torch.__version__}. "
            "Install it with `pip install 'torch>=2.11'`"
        )
    path = _find()
    if _registered():
        # A second registration of the same ops ends the process inside dlopen, without a text.
        if path in torch.ops.loaded_libraries:
            return
        loaded = sorted(torch.ops.loaded_libraries)
        raise ImportError(
            f"stowage: the ops of {path} cannot be loaded, another copy of them is loaded already "
            f"(loaded libraries: {loaded}). Keep one installation on sys.path"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"stowage: {path} cannot be loaded ({error.__cause__ or error}). Reinstall the "
            "package with `pip install --force-reinstall torch-stowage`"
        ) from error


def composite_forced() -> bool:
    """True when STOWAGE_FORCE_ISA asks for stock torch ops instead of our kernels."""
    return os.environ.get("STOWAGE_FORCE_ISA") == "composite"


load()


_ops = torch.ops.stowage

quantize = _ops.quantize.default
dequantize = _ops.dequantize.default
linear = _ops.linear.default
linear_grad_input = _ops.linear_grad_input.default
grouped_rows = _ops.grouped_rows.default
embedding = _ops.embedding.default
amax = _ops.amax.default
measure = _ops.measure.default

storage_key = _ops.storage_key.default
storage_describe = _ops.storage_describe.default
storage_has_matrices = _ops.storage_has_matrices.default
storage_on_disk = _ops.storage_on_disk.default
quantization_config = _ops.quantization_config.default
dialect_files = _ops.dialect_files.default
storage_label = _ops.storage_label.default
info = _ops.info.default
state_describe = _ops.state_describe.default

device_start = _ops.device_start.default
device_working = _ops.device_working.default
device_quantize = _ops.device_quantize.default
device_dequantize = _ops.device_dequantize.default
device_embedding = _ops.device_embedding.default
device_grouped_linear = _ops.device_grouped_linear.default
device_linear = _ops.device_linear.default
device_most_rows = _ops.device_most_rows.default
device_amax = _ops.device_amax.default
device_refused = _ops.device_refused.default

file_open = _ops.file_open.default
file_describe = _ops.file_describe.default
file_read = _ops.file_read.default
file_map = _ops.file_map.default
file_copy = _ops.file_copy.default
file_part = _ops.file_part.default
file_stacks = _ops.file_stacks.default
file_stack_part = _ops.file_stack_part.default
file_parts = _ops.file_parts.default
file_rows = _ops.file_rows.default
tensor_of_part = _ops.tensor_of_part.default
file_header = _ops.file_header.default
file_populate = _ops.file_populate.default
file_drop = _ops.file_drop.default
file_drop_behind = _ops.file_drop_behind.default
file_verify = _ops.file_verify.default
file_check = _ops.file_check.default
file_close = _ops.file_close.default
engine_open = _ops.engine_open.default
engine_keep = _ops.engine_keep.default
engine_expect = _ops.engine_expect.default
engine_want = _ops.engine_want.default
engine_together = _ops.engine_together.default
engine_signature = _ops.engine_signature.default
engine_counts = _ops.engine_counts.default
engine_uses = _ops.engine_uses.default
engine_foresee = _ops.engine_foresee.default
engine_describe = _ops.engine_describe.default
engine_close = _ops.engine_close.default
plan_make = _ops.plan_make.default
plan_text = _ops.plan_text.default
plan_read = _ops.plan_read.default
plan_check = _ops.plan_check.default
plan_html = _ops.plan_html.default
machine_key = _ops.machine_key.default
links_measure = _ops.links_measure.default
crossover_measure = _ops.crossover_measure.default
crossover_now = _ops.crossover_now.default
crossover_use_kept = _ops.crossover_use_kept.default
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
