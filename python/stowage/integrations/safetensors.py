# SPDX-License-Identifier: Apache-2.0
"""safetensors' own writers (`save_file`, `save_model`), and so those of transformers, accelerate
and huggingface_hub: they write the values of resting weights, in the compute dtype, under the
weights' names, as they write plain ones.

The writers read tensors by address, and a resting weight has no address where its values lie.
Before they do, they ask each tensor for its `storage()`; by then three of their functions are given
the dequantized values instead. Those exist until the file is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from stowage._ops.errors import Unsupported
from stowage._ops.storage import StorageName
from stowage._tensor.stowed import StowedTensor

_MARK = "_stowage"  # attribute of a function that knows resting weights


def _bytes(original: Callable[[Any], Any], tensor: Any) -> Any:
    """An array over the values, and who keeps them."""
    return original(tensor.dequantize())


def _end(original: Callable[[Any], Any], tensor: Any) -> int:
    """Behind the address of the tensor, which is 0: weights of one memory are one weight."""
    return 1


def _is_complete(original: Callable[[Any], Any], tensor: Any) -> bool:
    """Whether no other tensor has more of the same memory."""
    return True


_KNOWN: dict[str, Callable[[Callable[[Any], Any], Any], Any]] = {
    "_to_ndarray": _bytes,
    "_end_ptr": _end,
    "_is_complete": _is_complete,
}


def register() -> None:
    """Teaches safetensors, if it is there, what to do with resting weights. Raises Unsupported for
    a safetensors that works in another way."""
    module = sys.modules.get("safetensors.torch")
    if module is None or hasattr(getattr(module, "_to_ndarray", None), _MARK):
        return
    missing = [name for name in _KNOWN if not callable(getattr(module, name, None))]
    if missing:
        raise Unsupported(
            f"stowage: safetensors.torch must have {', '.join(_KNOWN)} to write resting weights, "
            f"misses {', '.join(missing)}; save with stowage.save(model, folder), or give the "
            "plain tensors of stowage.state_dict(model)"
        )
    for name, answer in _KNOWN.items():
        setattr(module, name, _taught(getattr(module, name), answer))


def _taught(original: Callable[[Any], Any], answer: Callable[..., Any]) -> Callable[[Any], Any]:
    def call(tensor: Any) -> Any:
        return answer(original, tensor) if isinstance(tensor, StowedTensor) else original(tensor)

    setattr(call, _MARK, True)
    return call


StorageName.asked.append(register)
