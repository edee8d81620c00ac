# SPDX-License-Identifier: Apache-2.0
"""`accelerate.utils.modeling`: sizes, ties, device maps, tensors by name, and checkpoints."""

from __future__ import annotations

from typing import Any

from stowage.compat.accelerate._checkpoints import load_state_dict
from stowage.compat.accelerate._loading import load_checkpoint_in_model
from stowage.compat.accelerate._maps import (
    calculate_maximum_sizes,
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    compute_module_sizes,
    compute_module_total_buffer_size,
    convert_file_size_to_int,
    dtype_byte_size,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    get_module_leaves,
    get_module_size_with_ties,
    infer_auto_device_map,
    retie_parameters,
)
from stowage.compat.accelerate._peer import forwarded
from stowage.compat.accelerate._state import (
    align_module_device,
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    has_offloaded_params,
)
from stowage.compat.accelerate._tensors import (
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)

__all__ = [
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "check_tied_parameters_on_same_device",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_leaves",
    "get_module_size_with_ties",
    "get_non_persistent_buffers",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "infer_auto_device_map",
    "load_checkpoint_in_model",
    "load_state_dict",
    "named_module_tensors",
    "retie_parameters",
    "set_module_tensor_to_device",
]


def __getattr__(name: str) -> Any:
    return forwarded("accelerate.utils.modeling", name)
