# SPDX-License-Identifier: Apache-2.0
"""How many bytes each model has in memory that it has written to."""

from __future__ import annotations

import weakref

from torch import nn


class Written:
    """Bytes by model. Those of a model that is gone count no more."""

    def __init__(self) -> None:
        self._bytes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._known = (0, 0)  # models, and their bytes: a report of each pass asks

    @property
    def total(self) -> int:
        models, total = self._known
        if len(self._bytes) != models:
            models, total = self._known = (len(self._bytes), sum(self._bytes.values()))
        return total

    def beside(self, model: nn.Module) -> int:
        """Of all other models."""
        return self.total - self._bytes.get(model, 0)

    def put(self, model: nn.Module, size: int) -> None:
        self._bytes[model] = size
        self._known = (0, 0)
