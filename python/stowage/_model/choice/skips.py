# SPDX-License-Identifier: Apache-2.0
"""What `skip=` of `stow` and `load` takes, and the named lists of places where rounding shows most.

The lists are globs, held against parameter names and module paths like those of rules. They collect
what the models' own declarations (`_skip_layerwise_casting_patterns` of diffusers,
`_keep_in_fp32_modules` of both libraries) and the recipes of quantization tools agree on. The
defaults of `stow` do not include them: these keep norms, biases and heads plain anyway, and what a
model declares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from stowage._model.patterns import Pattern, check, label, matches
from stowage._model.weights import Held, Site

# The last part of a module's path that makes it a head: it computes the model's answer, rounding
# shows most there, and PEFT trains a copy of it.
HEADS = frozenset({"classifier", "score", "qa_outputs", "classification_head", "lm_head"})

# What picks the experts of a mixture: Mixtral, Qwen and DeepSeek (gate), Switch and GPT-OSS
# (router), Qwen's shared expert. `gate_proj`, a large layer of gated MLPs, is none of them.
ROUTERS = ("router", "gate", "shared_expert_gate")

DIFFUSION: tuple[str, ...] = (
    # The defaults of layerwise casting in diffusers. Norms include the linear layers that compute
    # the shift and scale of adaptive norms (norm1.linear, norm_out.linear).
    "*norm*",
    "*pos_embed*",
    "*patch_embed*",  # patch_embedder, patch_embedding, vace_patch_embedding too
    "proj_in",
    "proj_out",
    "proj_out_?",  # DiT has two
    # First and last layers under their other names: UNets and autoencoders; Flux, Lumina, Hunyuan;
    # Qwen-Image, HiDream; Cosmos.
    "*conv_in",
    "*conv_out",
    "*x_embedder",
    "*img_in",
    "*final_layer",
    # Conditioning that every block reads: PixArt and Allegro (adaln_single), Hunyuan and Flux
    # (context_embedder), Z-Image (cap_embedder), Wan (condition_embedder).
    "*adaln_single",
    "*context_embedder",
    "*cap_embedder",
    "*condition_embedder",
    "*caption_projection",
    "*txt_in",
    # Time, timestep and guidance, a few thousand distinct inputs in all: UNets (time_embedding),
    # Flux and SD3 (time_text_embed), Z-Image (t_embedder), Wan (time_embedder, time_proj).
    "*time_embed*",
    "*time_text_embed*",
    "*time_proj",
    "*timestep_embed*",
    "*t_embedder",
    "*guidance_embed*",
    "*guidance_in",
)

LANGUAGE: tuple[str, ...] = (
    "*norm*",
    "*.ln_*",  # GPT-2: ln_1, ln_2, ln_f
    # Positions: BERT (position_embeddings), BART and Whisper (embed_positions), GPT-2 (wpe), T5
    # (relative_attention_bias).
    "*position_embedding*",
    "*embed_positions*",
    "*pos_embed*",
    "wpe",
    "*.wpe",
    "*relative_attention_bias",
    # Heads; the last one is the decoder's of T5 and BERT's masked language model.
    *sorted(pattern for head in HEADS for pattern in (head, f"*.{head}")),
    "cls",
    "*router",
    *(f"*.{router}" for router in ROUTERS),
)

NAMED: dict[str, tuple[str, ...]] = {"diffusion": DIFFUSION, "language": LANGUAGE}
AUTO = "auto"

Skip = Pattern | Iterable[Pattern] | None


@dataclass(frozen=True)
class Skips:
    """What stays plain whatever a rule says: the caller's patterns, and named lists.

    Args:
        patterns: as rules have them.
        names: of the named lists, or "auto".

    Example:
        >>> from stowage.skips import Skips
        >>> Skips.parse(["2.*", "language"])
        Skips(patterns=('2.*',), names=('language',))
    """

    patterns: tuple[Pattern, ...] = ()
    names: tuple[str, ...] = ()  # of NAMED, or AUTO

    @classmethod
    def parse(cls, skip: Skip) -> Skips:
        """What the argument `skip` of `stow` and `load` means.

        Args:
            skip: one pattern, the name of a list, or a list of both, which is only read.

        Returns:
            The patterns and the names.

        Raises:
            InvalidArgument: `skip` is anything else.
        """
        if skip is None:
            return cls()
        alone = isinstance(skip, str | re.Pattern | type | nn.Module)
        given: list[Any] = [*skip] if isinstance(skip, Iterable) and not alone else [skip]
        for one in given:
            check(one, "skip")
        named = [one for one in given if isinstance(one, str) and (one in NAMED or one == AUTO)]
        return cls(tuple(one for one in given if one not in named), tuple(named))

    def settled(self, model: nn.Module) -> Skips:
        """The same with "auto" replaced by the lists that fit a model.

        Args:
            model: whose classes tell the library that they come from.

        Returns:
            The patterns and the names of lists.
        """
        names = (n for name in self.names for n in (fitting(model) if name == AUTO else (name,)))
        return Skips(self.patterns, tuple(dict.fromkeys(names)))

    def reason(self, held: Held, site: Site) -> str:
        """Why a tensor is skipped.

        A pattern of the caller's counts at each place of a tied weight, a named list only at the
        one that decides.

        Args:
            held: the tensor and its places in the model.
            site: the place that decides.

        Returns:
            A sentence; "" if it is not skipped.
        """
        for pattern in self.patterns:
            if any(contained(pattern, place) for place in held.sites):
                return f"skip {label(pattern)} keeps it plain"
        for name in self.names:
            for glob in NAMED[name]:
                if matches(glob, site):
                    return f"skip {name!r} keeps it plain ({glob})"
        return ""


NO_SKIPS = Skips()


def contained(pattern: Pattern, site: Site) -> bool:
    """Whether `pattern` matches the parameter at `site` or, a type, a module that contains it."""
    if matches(pattern, site):
        return True
    return isinstance(pattern, type) and any(isinstance(m, pattern) for m in site.around)


def fitting(model: nn.Module) -> tuple[str, ...]:
    """The named lists for the library or libraries that classes in `model` come from; every list
    where they come from neither, since the names are those that the field uses."""
    libraries = {base.__module__.split(".")[0] for m in model.modules() for base in type(m).__mro__}
    known = {"diffusers": "diffusion", "transformers": "language"}
    return tuple(known[name] for name in sorted(libraries & known.keys())) or tuple(NAMED)
