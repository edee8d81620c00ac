# SPDX-License-Identifier: Apache-2.0
"""What a model's configuration says of its resting weights."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from stowage._model.choice.policy import Policy
from stowage._model.choice.selection import Rules, Wish
from stowage._model.choice.skips import Skip
from stowage._model.rest.granularity import Blocks, InputCast
from stowage._ops.errors import InvalidArgument


class Method(StrEnum):
    """The name of the quantizer, as both libraries want it."""

    STOWAGE = "stowage"


METHOD = Method.STOWAGE.value
# What concerns this machine or this process, and no file.
_PASSING = ("ram", "plan", "folder")
# What it has of a policy: all but what no file can say, and what `from_pretrained` is told.
_TAKEN = (
    *("storage", "rules", "skip", "allow_unmatched", "max_error", "on_exceed", "budget"),
    *("exact", "keep_nonfinite", "measure", "working", "blocks", "input_cast"),
)


@register_quantization_config(METHOD)
class StowageConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is untyped
    """How the weights of a model of transformers rest.

    `from_pretrained` with it quantizes each weight when it is read: the model is that of
    `stowage.stow` after a plain `from_pretrained`. What `save_pretrained` writes then rests in the
    file, says so in config.json, and `from_pretrained` takes it without an argument, once this
    module is imported.

    Args:
        storage: a storage string, a list of such to choose from by measured errors, a
            `stowage.Policy`, which has this and what follows but for `modules_to_not_convert`, or
            None: weights rest as they do in the file, plain ones stay plain.
        rules: globs over parameter names and module paths to storages, or to None (stay plain); as
            in `stowage.stow`.
        skip: globs of what stays plain, or "diffusion", "language" or "auto".
        allow_unmatched: as in `stowage.stow`.
        max_error: the largest relative error that a weight may have; as in `stowage.stow`.
        on_exceed: as in `stowage.stow`.
        budget: bytes for all resting weights together. With it, with `max_error` or with a list of
            storages the model is loaded plain and then stowed, since all errors are compared.
        exact: makes linear layers bit-equal to dense ones with the dequantized weights.
        keep_nonfinite: keeps NaN and infinities instead of refusing them.
        measure: measures the errors that `stowage.report` shows, which takes a pass over the
            values.
        working: as in `stowage.stow`.
        blocks: as in `stowage.stow`, globs.
        input_cast: as in `stowage.stow`, by globs.
        modules_to_not_convert: names of modules that stay plain, whole or their last parts;
            transformers' word.
        ram: bytes of weights ("2GiB") that are in memory at a time; the rest stays on the disk. Not
            written to config.json, as `plan` and `folder` are not.
        plan: of `stowage.plan` for the checkpoint, or the path of one: of one that rests already.
        folder: where weights that are quantized now lie on the disk, with `ram`.

    Raises:
        InvalidArgument: a misspelt storage, a rule that config.json cannot hold, or arguments that
            contradict each other.

    Example:
        >>> from stowage.integrations.transformers import StowageConfig
        >>> config = StowageConfig("nf4", rules={"*.down_proj": "int8:row"})
        >>> config.to_dict()["storage"]
        'nf4'
    """

    def __init__(
        self,
        storage: Wish | Policy = None,
        rules: Rules | None = None,
        skip: Skip = None,
        *,
        allow_unmatched: bool = False,
        max_error: float | None = None,
        on_exceed: str = "plain",
        budget: int | str | None = None,
        exact: bool = False,
        keep_nonfinite: bool = False,
        measure: bool = True,
        working: str | None = None,
        blocks: Blocks = None,
        input_cast: InputCast = None,
        modules_to_not_convert: Sequence[str] | None = None,
        ram: int | str | None = None,
        plan: str | os.PathLike[str] | None = None,
        folder: str | os.PathLike[str] | None = None,
        quant_method: str = METHOD,
    ) -> None:
        if quant_method != METHOD:
            raise InvalidArgument(
                f"StowageConfig: quant_method must be {METHOD!r}, got {quant_method!r}"
            )
        policy = Policy.of(
            storage,
            "StowageConfig",
            rules=rules,
            skip=skip,
            allow_unmatched=allow_unmatched,
            max_error=max_error,
            on_exceed=on_exceed,
            budget=budget,
            exact=exact,
            keep_nonfinite=keep_nonfinite,
            measure=measure,
            working=working,
            blocks=blocks,
            input_cast=input_cast,
        )
        _check(policy)
        if plan is not None and (ram is not None or not policy.selection.empty):
            raise InvalidArgument(
                "StowageConfig: plan must come without storage, rules and ram, which it decides"
            )
        if folder is not None and ram is None:
            raise InvalidArgument("StowageConfig: folder must come with ram, got folder alone")
        self.quant_method = Method.STOWAGE
        self.policy = policy
        self.modules_to_not_convert = (
            None if modules_to_not_convert is None else list(modules_to_not_convert)
        )
        self.ram = ram
        self.plan = plan
        self.folder = folder
        self.file: str | None = None  # that it is of, by `from_checkpoint`

    def to_dict(self) -> dict[str, Any]:
        """What config.json has of it.

        Returns:
            What differs from the defaults, but for what concerns this machine.
        """
        given = self.policy.to_dict()
        if self.modules_to_not_convert:
            given["modules_to_not_convert"] = self.modules_to_not_convert
        return given | {"quant_method": METHOD}

    @classmethod
    def from_checkpoint(
        cls,
        folder: str | os.PathLike[str],
        *,
        exact: bool = False,
        ram: int | str | None = None,
        plan: str | os.PathLike[str] | None = None,
    ) -> PreTrainedConfig | StowageConfig:
        """The configuration of a model that is published in another form (GPTQ, AWQ, FP8, MXFP4,
        compressed-tensors, ModelOpt, bitsandbytes, HQQ, ...), for `from_pretrained(folder,
        config=...)`: its weights rest as they came, and nothing of it must be installed. Of a
        single file (ComfyUI's forms, GGUF), for `from_single_file(file, quantization_config=...)`
        of diffusers.

        Args:
            folder: the checkpoint's, or the file.
            exact: as above.
            ram: as above.
            plan: as above.

        Returns:
            The model's configuration, whose quantizer is Stowage's; of a file that quantizer's.

        Example:
            >>> from transformers import AutoModelForCausalLM
            >>> from stowage.integrations.transformers import StowageConfig
            >>> config = StowageConfig.from_checkpoint("Qwen3-8B-AWQ")  # doctest: +SKIP
            >>> model = AutoModelForCausalLM.from_pretrained(
            ...     "Qwen3-8B-AWQ", config=config
            ... )  # doctest: +SKIP
        """
        made = cls(exact=exact, ram=ram, plan=plan)
        if os.fspath(folder).endswith((".safetensors", ".gguf")):
            made.file = os.fspath(folder)
            return made
        config = AutoConfig.from_pretrained(folder)
        for part in {id(c): c for c in (config, config.get_text_config(decoder=True))}.values():
            if getattr(part, "quantization_config", None) is not None:
                del part.quantization_config
        passing = {
            name: getattr(made, name) for name in _PASSING if getattr(made, name) is not None
        }
        config.quantization_config = made.to_dict() | passing
        return config


StowageConfig.__module__ = "stowage.integrations.transformers"  # pickles name it


def _check(policy: Policy) -> None:
    """Raises InvalidArgument for what config.json cannot hold, or means nothing there."""
    if policy.compute_dtype is not None:
        raise InvalidArgument(
            "StowageConfig: compute_dtype must be given to from_pretrained, as dtype= "
            f"(torch_dtype= of diffusers), got a policy with {policy.compute_dtype}"
        )
    policy.only("StowageConfig", *_TAKEN).to_dict()
    if policy.selection.empty:
        for name in ("budget", "max_error", "skip"):
            if getattr(policy, name) is not None:
                raise InvalidArgument(
                    f"StowageConfig: {name} must come with storage or rules, got it alone"
                )
