"""Which field of a tool's or an action's input a text fills, if its JSON Schema leaves no choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN = frozenset(["metadata"])
"""Fields of every OpenEnv action that no agent fills."""


def fields(schema: object) -> tuple[str, ...]:
    """Name the fields of an object's schema, without those that no agent fills."""
    return tuple(name for name in _properties(schema) if name not in HIDDEN)


def text_field(schema: object) -> str:
    """Name the field that a text fills: the only required string, else the only string; empty where that is no one.

    Texts of a closed list (``enum``) do not count: a free text is none of them.
    """
    texts = [name for name in fields(schema) if _is_text(_properties(schema)[name])]
    required = schema.get("required", ()) if isinstance(schema, Mapping) else ()
    needed = [name for name in fields(schema) if isinstance(required, list) and name in required]
    needed_texts = [name for name in texts if name in needed]
    if len(needed_texts) == 1:
        # Another field that must be given would be missing.
        return needed_texts[0] if needed == needed_texts else ""
    return texts[0] if not needed and len(texts) == 1 else ""


def _properties(schema: object) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _is_text(schema: object) -> bool:
    if not isinstance(schema, Mapping) or "enum" in schema or "const" in schema:
        return False
    if schema.get("type") == "string":
        return True
    options = schema.get("anyOf")
    return isinstance(options, list) and any(_is_text(option) for option in options)
