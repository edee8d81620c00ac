# SPDX-License-Identifier: Apache-2.0
"""The quantizer that `from_pretrained` and `save_pretrained` of transformers ask."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from stowage._files.sources import FileSource
from stowage._model.choice.policy import Policy
from stowage._model.files.save import state_dict
from stowage._model.reports.report import remember
from stowage._model.rest.formation import Making, from_values
from stowage._model.sizes import nbytes
from stowage._model.stow import stow, unstow
from stowage._model.weights import Choice, Inventory
from stowage._ops.errors import InvalidArgument, raise_problems
from stowage._ops.storage import Storage
from stowage._tensor.stowed import VALUE_DTYPES
from stowage._tiers.disk.engine import engine_of
from stowage._tiers.load import RestingLoad
from stowage._tiers.offload import onload
from stowage.integrations.transformers.at_rest import AtRest, renaming
from stowage.integrations.transformers.config import METHOD, StowageConfig
from stowage.integrations.transformers.destinations import Destinations

_IGNORED = "_keys_to_ignore_on_load_unexpected"


@register_quantizer(METHOD)
class StowageQuantizer(HfQuantizer):  # type: ignore[misc]  # transformers is untyped
    """What transformers asks while it loads a model whose configuration is a StowageConfig.

    Weights that rest in the file are read by `stowage.load`'s reader, whatever form the file has,
    and handed to transformers in the places of the tensors that they are made of. Plain ones that
    are to rest are quantized one by one, each when transformers has it.

    Args:
        quantization_config: of the model.
        kwargs: transformers' own.
    """

    def __init__(self, quantization_config: StowageConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._said = quantization_config
        self._files: list[str] = []
        self._dtype: torch.dtype | None = None
        self._choices: dict[str, Choice] = {}
        self._resting: dict[str, int] = {}  # bytes, by name of a parameter
        self._policy: Policy | None = None
        self._destinations = Destinations(quantization_config)
        self._before: dict[str, Any] = {}  # attributes of the model
        # transformers reads in threads what needs no work. Nothing does here: tensors are views of
        # the mapped files until they are quantized, one at a time.
        self.pre_quantized = False

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype that weights work in, which codes are not.

        Args:
            dtype: asked for, or that of the first tensor of the file.

        Returns:
            That, or bf16.
        """
        self._dtype = dtype if dtype in VALUE_DTYPES else torch.bfloat16
        return self._dtype

    def update_device_map(self, device_map: Any) -> Any:
        """Takes what is to be on a disk out of the map.

        Args:
            device_map: of `from_pretrained`.

        Returns:
            What is left for transformers.
        """
        return self._destinations.taken(device_map)

    def adjust_max_memory(self, max_memory: dict[Any, Any]) -> dict[Any, Any]:
        """Takes the limit for the CPU's memory, which the engine keeps.

        Args:
            max_memory: of `from_pretrained`, or what is free.

        Returns:
            What is left for transformers.
        """
        return self._destinations.limited(max_memory)

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Notes the places of all modules, once they are known.

        Args:
            args: none.
            kwargs: `device_map` among them.
        """
        self._destinations.note(kwargs.get("device_map"))

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._files = list(kwargs.get("checkpoint_files") or ())
        self._policy = policy = _policy(model, self._said)
        if policy is None:
            return
        choices = policy.choices(Inventory(model))
        raise_problems("StowageConfig", policy.idle_rules(choices))
        if not self._said.compares:
            self._choices = {c.held.name: c for c in choices if c.storage is not None}

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """Fills what rests in the files, and leads their tensors to it.

        Args:
            weight_conversions: those of the model.
            model: on the meta device.

        Returns:
            The same behind ours.
        """
        conversions = [*weight_conversions, *self.get_weight_conversions()]
        if not self._files or not self._files[0].endswith(".safetensors"):
            return conversions
        source = _opened(self._files)
        if not any(entry.storage for entry in source.entries.values()):
            source.close()
            return conversions
        resting = RestingLoad(model, source, renaming(model, conversions))
        self._resting = resting.sizes()
        for name in self._resting:
            self._choices.pop(name, None)
        if source.markers:
            self._before[_IGNORED] = getattr(model, _IGNORED, None)
            names = map(re.escape, source.markers)
            setattr(model, _IGNORED, [*(self._before[_IGNORED] or ()), *names])

        def fill() -> dict[str, str]:
            try:
                return resting.fill(
                    compute_dtype=self._dtype,
                    exact=self._said.exact,
                    **self._destinations.of_file(sum(self._resting.values())),
                )
            finally:
                source.close()

        return [AtRest(fill, conversions, self._destinations.device_of), *conversions]

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Whether a plain tensor is to rest.

        Args:
            model: of the parameter.
            param_name: its name.
            kwargs: none.

        Returns:
            Whether it is.
        """
        return param_name in self._choices

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of each element, as the parameter will rest.

        Args:
            model: of the parameter.
            param_name: its name.
            param: on the meta device.

        Returns:
            The bytes, scales among them.
        """
        choice, count = self._choices.get(param_name), max(param.numel(), 1)
        if param_name in self._resting:
            return self._resting[param_name] / count
        if choice is not None and choice.storage is not None:
            layout = choice.storage.for_values(param.dtype).layout(tuple(param.shape))
            return sum(torch.Size(sizes).numel() * d.itemsize for _, d, sizes in layout) / count
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        """What quantizes a tensor.

        Returns:
            The operation.
        """
        how = Making(None, self._said.exact, self._said.keep_nonfinite, self._said.measure)
        return Stow(self._choices, how)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, value in self._before.items():
            setattr(model, name, value)
        self._before = {"_weight_conversions": getattr(model, "_weight_conversions", None)}
        if self._before["_weight_conversions"] is not None:
            given = self._before["_weight_conversions"]
            self._before["_weight_conversions"] = [c for c in given if not isinstance(c, AtRest)]
        model._weight_conversions = []  # parts of weights have the model's names in files
        if self._policy is not None:
            self._finish(model, self._policy)
        self._destinations.keep(model)
        model.get_memory_footprint = _Footprint(model)
        return model

    def _finish(self, model: Any, policy: Policy) -> None:
        """Lets rest what is plain and is to rest: no file had it, or it was made of several
        tensors, or the errors of all decide; says of the others why they do not."""
        said, choices = self._said, policy.choices(Inventory(model))
        plain = [choice for choice in choices if not choice.held.rests]
        if said.compares or any(choice.storage is not None for choice in plain):
            stow(
                model,
                policy,
                max_error=said.max_error,
                budget=said.budget,
                exact=said.exact,
                keep_nonfinite=said.keep_nonfinite,
                measure=said.measure,
            )
            return
        for choice in plain:
            remember(choice.held, choice.held.tensor, choice.reason, None)

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        if engine_of(model) is not None:
            onload(model)
        unstow(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        model.__dict__.pop("get_memory_footprint", None)
        for name, value in self._before.items():
            setattr(model, name, value)
        return model

    def get_state_dict_and_metadata(
        self, model: Any
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """What `save_pretrained` writes.

        Args:
            model: any of ours.

        Returns:
            The parts of weights under the names that files have for them; nothing for headers.
        """
        return state_dict(model), {}

    def is_serializable(self) -> bool:
        """Whether `save_pretrained` can write the model.

        Returns:
            True.
        """
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters train beside the weights: they do."""
        return True

    @property
    def is_compileable(self) -> bool:
        """Whether the model compiles: it does."""
        return True


class Stow(ConversionOps):  # type: ignore[misc]  # transformers is untyped
    """Quantizes what transformers has made of the tensors of a file.

    Args:
        choices: by name of a parameter.
        how: weights are made.
    """

    def __init__(self, choices: Mapping[str, Choice], how: Making) -> None:
        self._choices, self._how = choices, how

    def __deepcopy__(self, memo: Any) -> Stow:
        return self  # of each parameter a copy is made

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The parameters that rest, and the others as they came.

        Args:
            input_dict: values by name of a parameter.
            source_patterns: of the file.
            target_patterns: of the model.
            kwargs: transformers' own.

        Returns:
            By name of a parameter.
        """
        made = {}
        for name, given in input_dict.items():
            values = given[0] if isinstance(given, list) else given
            choice = self._choices.get(name)
            if choice is None or choice.storage is None:
                made[name] = values
                continue
            weight, loss = from_values(values, choice.storage, self._how, values.dtype)
            remember(choice.held, weight, choice.reason, loss)
            made[name] = weight
        return made


def _policy(model: nn.Module, said: StowageConfig) -> Policy | None:
    """What a configuration means for a model."""
    if said.storage is None and not said.rules:
        return None
    rules = {**(said.rules or {}), **_of_experts(model, said.storage)}
    return Policy.parse(said.storage, rules, said.every_skip(_skipped(model, said)))


def _of_experts(model: nn.Module, storage: Any) -> dict[str, Any]:
    """Rules for stacks of experts, which the defaults take no more than other parameters of modules
    that are none of torch's. Each row of a matrix has a scale where each row of a weight would."""
    if storage is None:
        return {}
    each = [Storage.parse(one) for one in ([storage] if isinstance(storage, str) else storage)]
    own = [s.name.replace(":row", ":row2", 1) if s.kind == "row" else s.name for s in each]
    return {
        f"{path}.{name}": own if len(own) > 1 else own[0]
        for path, module in model.named_modules()
        if hasattr(module, "_apply_gate") and hasattr(module, "is_concatenated")
        for name, stack in module.named_parameters(recurse=False)
        if stack.dim() == 3
    }


def _skipped(model: nn.Module, said: StowageConfig) -> list[str]:
    """Globs of modules that are not converted. Raises InvalidArgument for a name that none has."""
    found, paths = [], [path for path, _ in model.named_modules() if path]
    for name in said.modules_to_not_convert or ():
        globs = [one for one in (name, f"*.{name}") if fnmatch.filter(paths, one)]
        if not globs:
            raise InvalidArgument(
                "StowageConfig: modules_to_not_convert must name modules of the model, got "
                f"{name!r}"
            )
        found += globs
    return found


def _opened(files: Sequence[str]) -> FileSource:
    """A checkpoint, by its folder: its index and its configuration are there. Raises
    InvalidArgument where other files are found there."""
    source = FileSource(os.path.dirname(files[0]))
    found, wanted = ({*map(os.path.realpath, paths)} for paths in (source.paths, files))
    if found == wanted:
        return source
    source.close()
    if len(files) == 1:
        return FileSource(files[0])
    raise InvalidArgument(
        f"StowageConfig: {source.where} must have the files that transformers reads, such as "
        f"{sorted(wanted - found or wanted)[0]}, has {', '.join(sorted(found))}"
    )


class _Footprint:
    """In the place of a model's `get_memory_footprint`, which would count the compute dtype."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, return_buffers: bool = True) -> int:
        every = nbytes(self._model)
        return every if return_buffers else every - sum(map(nbytes, self._model.buffers()))
