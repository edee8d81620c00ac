# SPDX-License-Identifier: Apache-2.0
"""Calls that a type checker must accept, with arguments that stand in variables: the keys of a
Mapping are invariant. Read by mypy in tests/python/test_tools.py, and run by nobody."""

import re

from torch import nn

import stowage


def calls(model: nn.Module, folder: str) -> None:
    globs: dict[str, str] = {"*.weight": "nf4"}
    lists: dict[str, list[str | None]] = {"*.weight": ["nf4", None]}
    kinds: dict[type[nn.Module], str] = {nn.Linear: "nf4"}
    expressions: dict[re.Pattern[str], str] = {re.compile("q_.*"): "nf4"}
    stowage.stow(model, "int8", rules=globs)
    stowage.stow(model, "int8", rules=lists)
    stowage.stow(model, "int8", rules=kinds)
    stowage.stow(model, "int8", rules=expressions)
    stowage.stow(model, rules=globs)
    stowage.load(model, folder, rename=globs)
