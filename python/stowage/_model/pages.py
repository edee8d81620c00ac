# SPDX-License-Identifier: Apache-2.0
"""The page of a report, which the core writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from stowage._ops import library
from stowage._ops.errors import FileError, translated


class Planned(Protocol):
    """A plan: see `stowage.Plan`."""

    def to_json(self) -> str: ...


class Figures(Protocol):
    """What passes took: see `stowage.measured`."""

    def figures(self) -> dict[str, Any]: ...


def write_page(
    path: str | os.PathLike[str],
    document: Mapping[str, Any],
    plan: Planned | None,
    measured: Figures | Mapping[str, Any] | None,
) -> None:
    """`document`: a report as docs/cli.md has it. Raises FileError where it cannot be written."""
    figures = {} if measured is None else measured
    took = dict(figures) if isinstance(figures, Mapping) else figures.figures()
    planned = "" if plan is None else plan.to_json()
    try:
        page = library.text(library.report_html(json.dumps(document), planned, json.dumps(took)))
    except RuntimeError as error:
        raise translated(error) from None
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise FileError(f"{path}: must be writable, got {error.strerror}") from None
