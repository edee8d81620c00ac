# SPDX-License-Identifier: Apache-2.0
"""The quantizer that `from_pretrained` and `save_pretrained` of transformers ask."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer

from stowage._model.files.save import state_dict
from stowage._model.sizes import nbytes
from stowage._model.stow import unstow
from stowage._ops.errors import InvalidArgument, Unsupported
from stowage._shard.local_shards import is_spread
from stowage._tensor.stowed import VALUE_DTYPES
from stowage._tiers.disk.engine import engine_of
from stowage._tiers.load import RestingLoad
from stowage._tiers.offload import onload
from stowage.integrations.transformers.at_rest import AtRest, renaming
from stowage.integrations.transformers.config import METHOD, StowageConfig
from stowage.integrations.transformers.destinations import Destinations, Placed
from stowage.integrations.transformers.meaning import opened
from stowage.integrations.transformers.quantizing import Quantizing

_IGNORED = "_keys_to_ignore_on_load_unexpected"


@register_quantizer(METHOD)
class StowageQuantizer(Placed, HfQuantizer):  # type: ignore[misc]  # transformers is untyped
    """What transformers asks while it loads a model whose configuration is a StowageConfig.

    Weights that rest in the file are read by `stowage.load`'s reader, whatever form the file has,
    and handed to transformers in the places of the tensors that they are made of. Plain ones that
    are to rest are quantized one by one, each when transformers has it.

    Args:
        quantization_config: of the model.
        kwargs: transformers' own.

    Raises:
        InvalidArgument: a configuration that is of a single file.

    Example:
        >>> from stowage.integrations.transformers import StowageConfig, StowageQuantizer
        >>> StowageQuantizer(StowageConfig("nf4")).is_trainable  # adapters beside it are
        True
    """

    def __init__(self, quantization_config: StowageConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if quantization_config.file is not None:
            raise InvalidArgument(
                f"StowageConfig: from_checkpoint({quantization_config.file!r}), of a file, is for "
                "from_single_file of diffusers; transformers takes that of a folder"
            )
        self._said = quantization_config
        self._as_it_is = bool(kwargs.get("pre_quantized", False))  # the checkpoint says it
        self._files: list[str] = []
        self._quantizing: Quantizing  # of the model, once it is there
        self._dtype: torch.dtype | None = None
        self._resting: dict[str, int] = {}  # bytes, by name of a parameter
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

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Notes the places of all modules, once they are known.

        Args:
            args: none.
            kwargs: `device_map` among them.
        """
        self._destinations.note(kwargs.get("device_map"))

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        self._files = list(kwargs.get("checkpoint_files") or ())
        self._quantizing = Quantizing(model, self._said, self._as_it_is)

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
        source = opened(self._files)
        if source is None:
            return conversions
        try:
            resting = RestingLoad(model, source, renaming(model, conversions))
        except BaseException:
            source.close()
            raise
        self._resting = resting.sizes()
        self._quantizing.leave(self._resting)
        if source.markers:
            self._before[_IGNORED] = getattr(model, _IGNORED, None)
            names = map(re.escape, source.markers)
            setattr(model, _IGNORED, [*(self._before[_IGNORED] or ()), *names])

        def fill() -> dict[str, str]:
            try:
                return resting.fill(
                    compute_dtype=self._dtype,
                    exact=self._said.policy.making.exact,
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

        Raises:
            Unsupported: a weight that is spread over processes.
        """
        taken = self._quantizing.takes(param_name)
        if taken and is_spread(model.get_parameter(param_name)):
            raise Unsupported(
                f"StowageConfig: {param_name} must be whole to rest, is spread over processes; "
                "load the model without tp_plan, and take stowage.sharding"
            )
        return taken

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        """Bytes of each element, as the parameter will rest.

        Args:
            model: of the parameter.
            param_name: its name.
            param: on the meta device, in its own shape.

        Returns:
            The bytes, scales among them.
        """
        if param_name in self._resting:
            return self._resting[param_name] / max(param.numel(), 1)
        if self._quantizing.takes(param_name):
            return self._quantizing.bytes_of(param_name, param) / max(param.numel(), 1)
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        """What quantizes a tensor.

        Returns:
            The operation.
        """
        return Stow(self._quantizing)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        for name, value in self._before.items():
            setattr(model, name, value)
        self._before = {"_weight_conversions": getattr(model, "_weight_conversions", None)}
        if self._before["_weight_conversions"] is not None:
            given = self._before["_weight_conversions"]
            self._before["_weight_conversions"] = [c for c in given if not isinstance(c, AtRest)]
        model._weight_conversions = []  # parts of weights have the model's names in files
        self._quantizing.finish(model)
        self._destinations.keep(model)
        model.get_memory_footprint = _Footprint(model)
        return model

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
        quantizing: of the model.
    """

    def __init__(self, quantizing: Quantizing) -> None:
        self._quantizing = quantizing

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
        values = {
            name: given[0] if isinstance(given, list) else given
            for name, given in input_dict.items()
        }
        return {name: self._quantizing.made(name, each) for name, each in values.items()}


class _Footprint:
    """In the place of a model's `get_memory_footprint`, which would count the compute dtype."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, return_buffers: bool = True) -> int:
        every = nbytes(self._model)
        return every if return_buffers else every - sum(map(nbytes, self._model.buffers()))
