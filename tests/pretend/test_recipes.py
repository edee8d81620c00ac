# SPDX-License-Identifier: Apache-2.0
"""The recipe for a card, with the pretend device as the card."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stowage.planning import machine_key

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"


def test_a_card_smaller_than_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu = {"read": 1e10, "multiply": 1e11}
    card = {"copy": 1e10, "read": 1e12, "multiply": 1e13, "assumed": False}
    rates = {"key": machine_key(), "disk": 2e9, "cached": 4e9, "memcpy": 8e9}
    rates |= {"linear": {"int8": cpu, "f32": cpu}, "accelerators": {"pretend:0": card}}
    monkeypatch.setattr("stowage._tiers.plans.plan.measured_links", lambda *_, **__: rates)
    part = PAGE.read_text().split("\n## A 12 GB card", 1)[1].split("\n## ", 1)[0]
    (code,) = re.findall(r"^```python\n(.*?)^```", part, re.S | re.M)
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace("cuda:0", "pretend:0"), "recipes.md", "exec"), {"__name__": "r"})
    printed = capsys.readouterr().out
    assert "pretend:0" in printed and "predicted" in printed
