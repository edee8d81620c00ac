# SPDX-License-Identifier: Apache-2.0
"""What a small model goes through with its weights at rest: files, copies, gradients."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stowage


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(304, 200), nn.ReLU(), nn.Linear(200, 64)).to(torch.bfloat16)


def saved_copied_and_trained_through(name: str, folder: Path, **how: Any) -> None:
    """Outputs are equal wherever the weights went, and gradients are those of the dense twin."""
    torch.manual_seed(1)  # a hidden value next to 0 may lose its gradient in one of two products
    resting = model()
    stowage.stow(resting, name, **how)
    x = torch.randn(3, 304, dtype=torch.bfloat16)
    y = resting(x)
    stowage.save(resting, folder)
    loaded = model()
    stowage.load(loaded, folder)
    again = copy.deepcopy(resting)
    again.load_state_dict(resting.state_dict())
    for other in (loaded, again, pickle.loads(pickle.dumps(resting))):
        assert str(other[0].weight._storage) == name and torch.equal(other(x), y)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(resting(x).float().sum(), x)
    dense = copy.deepcopy(loaded)
    stowage.unstow(dense)
    (wanted,) = torch.autograd.grad(dense(x).float().sum(), x)
    torch.testing.assert_close(grad.float(), wanted.float(), rtol=0.05, atol=0.05)
