# SPDX-License-Identifier: Apache-2.0
"""What griffe, which reads docstrings for the site, must know of ours."""

import re
from typing import Any

import griffe
import site_reference  # which the hook has imported


def comment(field: griffe.Attribute) -> str:
    """What stands behind a field, in its line."""
    line = field.lines_collection[field.filepath][field.lineno - 1] if field.lineno else ""
    found = re.search(r"  #:? (?!type:|noqa)(.+)$", line)
    return found[1] if found else "as above"


def link(match: re.Match[str]) -> str:
    """To what a docstring names, where a page explains it."""
    return f"[{match[0]}][{match[1]}]" if match[1] in site_reference.explained() else match[0]


class Reading(griffe.Extension):
    """An `Example:` is a listing; fields of a record are a list of what their comments say."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Put the fields of a record into its docstring."""
        fields = [m for m in cls.members.values() if m.is_attribute and m.annotation]
        told = [f for f in fields if not f.docstring and not f.name.startswith("_")]
        if cls.docstring and told:
            lines = [f"    {f.name} ({f.annotation}): {comment(f)}" for f in told]
            section = "\n".join(["Attributes:", *lines])
            text, *example = cls.docstring.value.split("\n\nExample:")
            cls.docstring.value = "\n\nExample:".join([f"{text}\n\n{section}", *example])
            for field in told:
                cls.del_member(field.name)

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Let an example be a listing, and pages and public names that are named be links."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.M)
            text = re.sub(r"\bdocs/([\w-]+)\.md", r"[\1.md](../\1.html)", text)
            obj.docstring.value = re.sub(r"`(stowage\.[\w.]+)`", link, text)
