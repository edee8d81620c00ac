# SPDX-License-Identifier: Apache-2.0
"""Modules with the parameters that a golden file of a dialect is for, and copies of its folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import stowage
from stowage._files.sources import FileSource

GOLDEN = Path(__file__).parents[1] / "golden/dialects"

# The golden folders that are opened, and what each is.
DIALECTS = {
    "comfy-fp8": "comfyui",
    "comfy-mxfp8": "comfyui",
    "comfy-nvfp4": "comfyui",
    "comfy-nvfp4-header": "comfyui",
    "comfy-fp8-scaled": "comfyui-scaled",
    "torchao-int8": "torchao",
    "torchao-float8": "torchao",
    "torchao-intx4": "torchao",
    "torchao-int4": "torchao",
    "fp8-block-f32": "fp8",
    "fp8-block-e8m0": "fp8",
    "ct-fp8-block": "compressed-tensors",
    "ct-fp8-tensor": "compressed-tensors",
    "ct-fp8-channel": "compressed-tensors",
    "ct-int8": "compressed-tensors",
    "ct-int4-g128": "compressed-tensors",
    "ct-int4-channel-ragged": "compressed-tensors",
    "ct-int3-dense": "compressed-tensors",
    "ct-int3-padded": "compressed-tensors",
    "ct-int8-pack": "compressed-tensors",
    "ct-int4-asym-g32": "compressed-tensors",
    "ct-int4-g-idx": "compressed-tensors",
    "gptq-v1": "gptq",
    "gptq-v2": "gptq",
    "gptq-v1-actorder": "gptq",
    "gptq-v2-actorder": "gptq",
    "awq-gemm": "awq",
    "hqq-4bit": "hqq",
    "hqq-4bit-axis0": "hqq",
    "ct-mxfp4": "compressed-tensors",
    "mxfp4-gpt-oss": "mxfp4",
    "deepseek-v4": "fp8",
    "ct-nvfp4": "compressed-tensors",
    "modelopt-nvfp4": "modelopt",
    "ct-mxfp8": "compressed-tensors",
    "modelopt-fp8": "modelopt",
    "modelopt-mxfp8": "modelopt",
    "bnb-int8": "bitsandbytes",
    "bnb-nf4": "bitsandbytes",
    "bnb-nf4-nested": "bitsandbytes",
    "gguf-q8-0": "gguf",
    "gguf-q4-0": "gguf",
    "gguf-q4-k": "gguf",
    "gguf-q6-k": "gguf",
    "gguf-mxfp4": "gguf",
    "gguf-nvfp4": "gguf",
}


def expected(folder: str) -> dict[str, torch.Tensor]:
    """The values that its owner's decoder gives, by the name of the weight; `NAME::WHO` are those
    of another owner, or in another dtype."""
    return load_file(GOLDEN / folder / "expected.safetensors")


def copied(folder: str, to: Path) -> Path:
    """The folder without what is expected of it, which would be a second model."""
    leave = shutil.ignore_patterns("expected.safetensors")
    shutil.copytree(GOLDEN / folder, to / folder, ignore=leave)
    return to / folder


class Stacks(nn.Module):
    """Of stacks of matrices [E, K, O], each product of the first K columns of its input."""

    @property
    def stacks(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.dim() == 3]

    @property
    def in_features(self) -> int:
        return max(stack.shape[1] for stack in self.stacks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        products = (x[:, : w.shape[1]] @ w[e] for w in self.stacks for e in range(len(w)))
        return torch.cat([*products], 1)


def module_of(name: str) -> str:
    """The module of a weight; matrices of Linear modules are called `weight`."""
    return name.rpartition(".")[0]


def _module(like: torch.Tensor) -> nn.Module:
    if like.dim() == 3:
        return Stacks()
    if like.dim() != 2:
        return nn.Module()
    return nn.Linear(like.shape[1], like.shape[0], bias=False, dtype=like.dtype)


def factory(shapes: Mapping[str, torch.Tensor]) -> Callable[[], nn.Module]:
    """Builds a tree of modules that has parameters of these names, shapes and dtypes; matrices
    named `weight` are those of Linear modules."""

    def build() -> nn.Module:
        root = nn.Module()
        for name, like in shapes.items():
            *path, last = name.split(".")
            module = root
            for i, part in enumerate(path):
                if part not in module._modules:
                    is_last = i == len(path) - 1
                    module.add_module(part, _module(like) if is_last else nn.Module())
                module = module.get_submodule(part)
            values = torch.empty(like.shape, dtype=like.dtype)
            setattr(module, last, nn.Parameter(values, like.is_floating_point()))
        return root

    return build


def plain_of(folder: str, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a golden file that are no part of a weight: norms and biases."""
    modules = {name.rpartition(".")[0] for name in weights}
    if folder.startswith("gguf-"):  # one
        source = FileSource(GOLDEN / folder / file_of_model(folder))
        found = {"output_norm.weight": source.read("output_norm.weight").clone()}
        source.close()
        return found
    tensors = load_file(GOLDEN / folder / file_of_model(folder))
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name.endswith((".bias", "_bias"))
        or (name.endswith(".weight") and name.rpartition(".")[0] not in modules)
    }


def file_of_model(folder: str) -> str:
    models = (p for p in (GOLDEN / folder).iterdir() if p.suffix in (".safetensors", ".gguf"))
    (found,) = (p.name for p in models if p.stem != "expected")
    return found


def weights_of(folder: str) -> dict[str, torch.Tensor]:
    """In the shape that the file has, where that is not the model's."""
    said = expected(folder)
    return {name: said.get(f"{name}::padded", v) for name, v in said.items() if "::" not in name}


def opened(folder: str, path: Path, **arguments: object) -> nn.Module:
    weights = weights_of(folder)
    plain = plain_of(folder, weights)
    return stowage.load(factory({**weights, **plain}), path, **arguments)  # type: ignore[arg-type]
