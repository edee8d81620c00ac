# SPDX-License-Identifier: Apache-2.0
"""Models of timm, open_clip and torchaudio, from their own constructors, put to rest in one line.
They import torchvision's and torchaudio's compiled parts, which PyPI has for one torch and CUDA."""

from __future__ import annotations

import copy
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stowage

MODULES = Path(__file__).resolve().parents[2] / "docs/modules.md"


def imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library that is missing is an OSError, another torch many things
        pytest.skip(f"{name} cannot be imported here: {type(error).__name__}: {error}")


def vit() -> tuple[nn.Module, list[torch.Tensor]]:
    timm = imported("timm")
    model = timm.create_model("vit_small_patch16_224", img_size=32, depth=2, num_classes=10)
    return model, [torch.randn(2, 3, 32, 32)]


def convnext() -> tuple[nn.Module, list[torch.Tensor]]:
    model = imported("timm").create_model("convnext_atto", num_classes=10)
    return model, [torch.randn(2, 3, 64, 64)]


def clip() -> tuple[nn.Module, list[torch.Tensor]]:
    theirs = imported("open_clip")
    vision = theirs.CLIPVisionCfg(layers=2, width=128, head_width=64, patch_size=16, image_size=32)
    text = theirs.CLIPTextCfg(context_length=16, vocab_size=128, width=64, heads=2, layers=2)
    ids = torch.randint(1, 128, (2, 16))
    return theirs.CLIP(64, vision, text), [torch.randn(2, 3, 32, 32), ids]


def wav2vec2() -> tuple[nn.Module, list[torch.Tensor]]:
    model = imported("torchaudio").models.wav2vec2_model(
        "group_norm", None, False, 64, 0.0, 16, 4, 2, 4, 0.0, 128, 0.0, 0.0, False, 0.0, None
    )
    return model, [torch.randn(1, 4000)]


def conformer() -> tuple[nn.Module, list[torch.Tensor]]:
    model = imported("torchaudio").models.Conformer(64, 4, 128, 2, 31)
    return model, [torch.randn(2, 20, 64), torch.tensor([20, 15])]


MODELS = {"vit": vit, "convnext": convnext, "clip": clip, "w2v": wav2vec2, "conformer": conformer}


def run(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        found = model(*given)
    every = found if isinstance(found, list | tuple) else [found]
    return torch.cat([t.flatten() for t in every if t is not None and t.is_floating_point()])


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["int8:row", "nf4"])
@pytest.mark.parametrize("kind", MODELS)
def test_their_models_rest(kind: str, storage: str) -> None:
    torch.manual_seed(0)
    model, given = MODELS[kind]()
    plain = copy.deepcopy(model.eval())
    joint = any(name.endswith("in_proj_weight") for name, _ in model.named_parameters())
    rules = {"*in_proj_weight": storage} if joint else {}
    report = stowage.stow(model, storage, rules=rules, exact=True)
    assert len(report.stowed) >= 10
    assert stowage.nbytes(model) < 0.3 * stowage.nbytes(plain)
    dense = copy.deepcopy(model)
    stowage.unstow(dense)
    got, want, near = run(model, given), run(dense, given), run(plain, given)
    if kind == "clip":  # torch's fused attention takes plain tensors alone
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(got, want)
    assert float((got - near).norm()) <= (0.03 if storage == "int8:row" else 0.3) * near.norm()


@pytest.mark.slow
def test_the_listing() -> None:
    for name in ("timm", "open_clip", "torchaudio"):
        imported(name)
    (listing,) = re.findall(r"^```python\n(.*?)^```", MODULES.read_text(), re.S | re.M)
    exec(listing, {})
