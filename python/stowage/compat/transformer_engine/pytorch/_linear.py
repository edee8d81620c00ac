# SPDX-License-Identifier: Apache-2.0
"""transformer_engine.pytorch.Linear: an nn.Linear with its names of arguments and its inits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


class Linear(nn.Linear):
    """Weights of N(0, 0.023^2) by default and a bias of zeros, as there. The rest is nn.Linear."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        init_method: Callable[[Tensor], Any] | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self.init_method = init_method
        super().__init__(in_features, out_features, bias, device=device, dtype=params_dtype)

    def reset_parameters(self) -> None:
        """Draws the weight again."""
        with torch.no_grad():
            if self.init_method is None:
                nn.init.normal_(self.weight, 0.0, 0.023)
            else:
                self.init_method(self.weight)
            if self.bias is not None:
                self.bias.zero_()
