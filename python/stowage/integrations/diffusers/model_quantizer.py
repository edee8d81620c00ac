# SPDX-License-Identifier: Apache-2.0
"""The quantizer that `from_pretrained` and `save_pretrained` of diffusers ask."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.quantizers.base import DiffusersQuantizer as Base
from torch import nn

from stowage._files.sources import FileSource
from stowage._model.files.save import state_dict
from stowage._model.stow import unstow
from stowage._ops.errors import InvalidArgument
from stowage._tensor.stowed import VALUE_DTYPES
from stowage._tiers.disk.engine import engine_of
from stowage._tiers.load import RestingLoad
from stowage._tiers.offload import onload
from stowage.integrations.diffusers.single_file import SingleFile
from stowage.integrations.transformers.config import StowageConfig
from stowage.integrations.transformers.destinations import Destinations, Placed
from stowage.integrations.transformers.meaning import opened
from stowage.integrations.transformers.quantizing import Quantizing


class DiffusersQuantizer(Placed, Base):
    """What diffusers asks while it loads a model whose configuration is a StowageConfig.

    What rests in the files is read first, and its tensors are kept from diffusers; plain weights
    that are to rest are quantized one by one, each when diffusers has it.

    Args:
        quantization_config: of the model.
        kwargs: diffusers' own.

    Example:
        >>> from stowage.integrations.diffusers import DiffusersQuantizer, StowageConfig
        >>> DiffusersQuantizer(StowageConfig("nf4")).is_trainable  # adapters beside it are
        True
    """

    use_keep_in_fp32_modules = True  # of the model

    def __init__(self, quantization_config: StowageConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._said = quantization_config
        self._as_it_is = bool(kwargs.get("pre_quantized", False))  # the checkpoint says it
        self._dtype: torch.dtype | None = None
        self._source: FileSource | None = None
        self._single: SingleFile | None = None
        self._opens = False  # whether the files are known, as they are not from one alone
        self._members: set[str] = set()  # tensors of what rests in the files
        self._resting: set[str] = set()  # the weights that they make
        self._quantizing: Quantizing  # of the model, once it is there
        self._destinations = Destinations(quantization_config)
        self._model: weakref.ref[Any] | None = None

    def update_torch_dtype(self, torch_dtype: Any) -> Any:
        """Notes the dtype that weights work in; None is that of the files.

        Args:
            torch_dtype: asked for.

        Returns:
            The same.

        Raises:
            InvalidArgument: a dtype of codes.
        """
        if torch_dtype is not None and torch_dtype not in VALUE_DTYPES:
            raise InvalidArgument(
                f"StowageConfig: torch_dtype must be one to work in, got {torch_dtype}"
            )
        self._dtype = torch_dtype
        return torch_dtype

    def maybe_update_loaded_keys(
        self, loaded_keys: list[str], checkpoint_files: Sequence[Any]
    ) -> list[str]:
        """Opens the files, and puts names of weights in the place of those of their parts.

        Args:
            loaded_keys: the names of all tensors.
            checkpoint_files: the files.

        Returns:
            What diffusers finds of the model in them.

        Raises:
            InvalidArgument: a configuration that is of a single file.
        """
        if self._said.file is not None:
            raise InvalidArgument(
                f"StowageConfig: from_checkpoint({self._said.file!r}) must be given to "
                "from_single_file, got it for a folder"
            )
        self._opens = True
        files = [str(path) for path in checkpoint_files]
        if not files or not files[0].endswith(".safetensors"):
            return loaded_keys
        source = self._source = opened(files)
        if source is None:
            return loaded_keys
        entries = [entry for entry in source.entries.values() if entry.storage is not None]
        self._members = {*source.markers, *(name for e in entries for name in e.members)}
        self._resting = {entry.name for entry in entries}
        return [name for name in loaded_keys if name not in self._members] + sorted(self._resting)

    def maybe_update_state_dict(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Keeps parts from diffusers.

        Args:
            state_dict: of a file.

        Returns:
            Its plain tensors; of a single file that the configuration names also what stands for
            the others.

        Raises:
            InvalidArgument: codes in a file that it does not name.
        """
        if self._opens:
            return {name: each for name, each in state_dict.items() if name not in self._members}
        if self._said.file is not None:
            self._single = SingleFile(self._said.file, state_dict)
            return self._single.state()
        for name, each in state_dict.items():
            if each.dim() > 1 and each.dtype not in VALUE_DTYPES:
                raise InvalidArgument(
                    f"StowageConfig: {name}: must be values, got {each.dtype}; "
                    "StowageConfig.from_checkpoint(file) takes what rests in a file"
                )
        return state_dict

    def _process_model_before_weight_loading(
        self, model: nn.Module, state_dict: Any = None, **kwargs: Any
    ) -> None:
        self._model = weakref.ref(model)
        self._quantizing = Quantizing(model, self._said, self._as_it_is)
        read, self._source, self._single = self._single or self._source, None, None
        if read is None:
            return
        try:
            if isinstance(read, SingleFile):
                resting = read.resting(model, state_dict)
                self._dtype = self._dtype or torch.get_default_dtype()  # diffusers' own choice
            else:
                resting = RestingLoad(model, read, lambda name: name)
            sizes = resting.sizes()
            self._quantizing.leave(sizes)
            resting.fill(
                compute_dtype=self._dtype,
                exact=self._said.policy.making.exact,
                **self._destinations.of_file(sum(sizes.values())),
            )
        finally:
            read.close()

    def check_if_quantized_param(
        self,
        model: nn.Module,
        param_value: torch.Tensor,
        param_name: str,
        state_dict: dict[str, Any],
        **kwargs: Any,
    ) -> bool:
        """Whether a plain tensor is to rest.

        Args:
            model: of the parameter.
            param_value: its values, in the model's shape.
            param_name: its name.
            state_dict: of the file.
            kwargs: diffusers' own.

        Returns:
            Whether it is.
        """
        return self._quantizing.takes(param_name)

    def create_quantized_param(self, *args: Any, **kwargs: Any) -> Any:
        """Gives the model a parameter that rests.

        Args:
            args: the model, the values, the name, the device, and diffusers' own.
            kwargs: diffusers' own.

        Returns:
            The parameter.
        """
        model, values, name, device, *_ = args
        made = self._quantizing.made(name, values.to(device))
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, made)
        return made

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self._quantizing.finish(model)
        self._destinations.keep(model)
        if "quantization_config" not in model.config:  # of a model from a single file
            model.register_to_config(quantization_config=self._said)
        return model

    def _dequantize(self, model: Any) -> Any:
        if engine_of(model) is not None:
            onload(model)
        unstow(model)
        left = {name: each for name, each in model.config.items() if name != "quantization_config"}
        model._internal_dict = type(model.config)(left)  # register_to_config only adds
        return model

    def get_state_dict_and_metadata(
        self, given: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What `save_pretrained` writes.

        Args:
            given: of the model.
            safe_serialization: whether in files of safetensors.

        Returns:
            The parts of weights under the names that files have for them; nothing for headers.

        Raises:
            InvalidArgument: other files than those of safetensors.
        """
        if not safe_serialization:
            raise InvalidArgument("StowageConfig: save_pretrained must write safetensors files")
        model = None if self._model is None else self._model()
        return given if model is None else state_dict(model), {}

    @property
    def supports_parallel_loading(self) -> bool:
        """Whether files are read side by side: one weight is wide at a time."""
        return False

    @property
    def is_serializable(self) -> bool:
        """Whether `save_pretrained` can write the model: it can."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters train beside the weights: they do."""
        return True
