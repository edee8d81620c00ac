# SPDX-License-Identifier: Apache-2.0
"""A model's real values in one dtype, tensor by tensor, in the files and under the names that
`save_pretrained` of transformers and diffusers writes: folders that open without Stowage."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from stowage._files.names import DISK_NAMES
from stowage._model.declared import WidePlaces, adapter_paths
from stowage._model.files.configs import CONFIG, replaced, says_quantized
from stowage._model.weights import Held
from stowage._ops import _torch
from stowage._ops import library as ops
from stowage._ops.errors import InvalidArgument
from stowage._ops.numbers.rounding import row_elements, rows_of, spans
from stowage._tensor.stowed import VALUE_DTYPES, StowedTensor

_FINER = 16  # parts of a chunk: larger pieces would stay in the C heap, ten times their size
_TRANSFORMERS, _DIFFUSERS = "model.safetensors", "diffusion_pytorch_model.safetensors"


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in VALUE_DTYPES:
        names = ", ".join(str(legal).removeprefix("torch.") for legal in VALUE_DTYPES)
        raise InvalidArgument(f"stowage.save: dtype must be one of {names}, or None, got {dtype}")


def file_name(model: nn.Module) -> str:
    """Where the library that the model comes from looks for its weights."""
    return _DIFFUSERS if hasattr(model, "save_config") else _TRANSFORMERS


def unsavable(model: nn.Module, every: Iterable[Held]) -> list[str]:
    """Every reason why the values of `model` cannot be written as plain ones."""
    problems = []
    if hasattr(model, "config") and adapter_paths(model):
        problems.append(
            "a model with adapters must be merged first (stowage.integrations.peft."
            "merge_and_unload); PEFT's own save_pretrained writes the adapter"
        )
    for held in every:
        if held.tensor.is_meta:
            problems.append(f"{held.name}: must hold values, got a meta tensor")
        elif held.tensor.dtype not in DISK_NAMES:
            problems.append(
                f"{held.name}: safetensors must have its dtype, got {held.tensor.dtype}"
            )
    return problems


class RealValues:
    """Names, dtypes and shapes of all tensors, and the values one after the other."""

    def __init__(self, model: nn.Module, every: Sequence[Held], dtype: torch.dtype) -> None:
        ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
        wide = WidePlaces(model)
        self._every = [held for held in every if held.name not in ignored]
        self._dtypes = {
            held.name: held.tensor.dtype
            if wide.contain(held.name) or not held.tensor.is_floating_point()
            else dtype
            for held in self._every
        }

    def names(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [(h.name, self._dtypes[h.name], h.tensor.shape) for h in self._every]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor is valid until the next one is asked for: all use the same memory, which is
        as large as the largest of them."""
        sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in self.names()]
        # One buffer: what is freed and asked for again in other sizes stays in the C heap.
        buffer = torch.empty(max(sizes, default=0), dtype=torch.uint8)
        for (name, dtype, shape), size, held in zip(self.names(), sizes, self._every, strict=True):
            if held.tensor.dtype == dtype and not isinstance(held.tensor, StowedTensor):
                yield name, held.tensor.detach()
                continue
            out = buffer[:size].view(dtype)
            _fill(out.view(rows_of(shape), row_elements(shape)), held)
            yield name, out.view(shape)


def _fill(out: torch.Tensor, held: Held) -> None:
    """The values of `held` in the dtype of `out` [rows, columns], a block of rows at a time."""
    read = _reader(held.tensor.detach(), out.shape)
    rows, columns = out.shape
    for span in spans(rows, _FINER * columns):
        out[span] = read(span, out.dtype)
        if out.dtype is torch.float16 and not bool(out[span].isfinite().all()):
            wide = read(span, torch.float32)
            if bool((wide.isfinite() & ~out[span].isfinite()).any()):
                raise InvalidArgument(
                    f"stowage.save: {held.name}: values must be at most 65504 in f16, got "
                    f"{float(wide.abs().nan_to_num(0).amax()):.6g}"
                )


def _reader(
    tensor: torch.Tensor, shape: torch.Size
) -> Callable[[slice, torch.dtype], torch.Tensor]:
    """What gives rows of a tensor [rows, columns] in a dtype."""
    if not isinstance(tensor, StowedTensor):
        plain = tensor.reshape(shape)
        return lambda span, dtype: plain[span].to(dtype)
    (codes, *scales), key, own = tensor.parts.values(), tensor._storage.key, tensor.shape

    def rows(span: slice, dtype: torch.dtype) -> torch.Tensor:
        if not own:
            return tensor.dequantize(dtype).view(1, 1)
        index = torch.arange(span.start, span.stop, device=codes.device)
        found = ops.embedding(index, codes, scales, key, own, dtype)
        return found.view(len(index), shape[1])

    return rows


def own_class(model: nn.Module) -> str:
    """The name of its class, which FSDP2 replaces by one of its own below it."""
    kind = type(model)
    sharded = _torch.fsdp_state(model) is not None and len(kind.__bases__) == 2
    return kind.__bases__[1].__name__ if sharded else kind.__name__


def _name_class(config: Path, name: str) -> None:
    facts = json.loads(config.read_text())
    if facts.get("_class_name") not in (None, name):
        config.write_text(
            json.dumps(facts | {"_class_name": name}, indent=2, sort_keys=True) + "\n"
        )


def _write_config(
    model: Any,
    folder: Path,
    dtype: torch.dtype | None,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """The configuration beside the weights, with the class, the dtype and what is said of resting
    weights. Nothing for a model of neither library; the model's own configuration is not changed.
    """
    config: Any = getattr(model, "config", None)
    if hasattr(model, "save_config"):
        model.save_config(folder)
        _name_class(folder / CONFIG, own_class(model))
    elif hasattr(config, "save_pretrained"):
        written = copy.deepcopy(config)
        written.architectures = [own_class(model)]
        name = "dtype" if "dtype" in written.to_dict() else "torch_dtype"
        if dtype is not None:
            setattr(written, name, str(dtype).removeprefix("torch."))
        if getattr(written, "quantization_config", None) is not None:
            del written.quantization_config
        written.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None and model.can_generate():
            model.generation_config.save_pretrained(folder)
    else:
        return
    if quantization is not None:
        path = folder / CONFIG
        facts = json.loads(path.read_text()) | {"quantization_config": quantization}
        path.write_text(json.dumps(facts, indent=2, sort_keys=True) + "\n")


def config_files(
    model: Any, dtype: torch.dtype | None, quantization: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """What `_write_config` writes, by name."""
    with TemporaryDirectory() as folder:
        _write_config(model, Path(folder), dtype, quantization)
        return {p.name: p.read_bytes() for p in Path(folder).iterdir() if p.is_file()}


def described_anew(
    model: Any, folder: Path, quantization: Mapping[str, Any] | None
) -> AbstractContextManager[None]:
    """Around a writing of weights whose codes are no values to who does not know."""
    path = folder / CONFIG
    if quantization is None and not (path.is_file() and says_quantized(path.read_bytes())):
        return nullcontext()
    return replaced(folder, config_files(model, None, quantization))


def without_old_shards(folder: Path, name: str) -> None:
    """Takes away shards of an earlier save that the index, or its absence, does not name."""
    index = folder / f"{name}.index.json"
    named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
    stem = name.removesuffix(".safetensors")
    for path in folder.glob(f"{stem}-?????-of-?????.safetensors"):
        if path.name not in named:
            os.unlink(path)
