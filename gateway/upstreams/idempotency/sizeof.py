"""How much memory a value takes, roughly: for bounds on what is kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

OBJECT_BYTES: Final = 64
"""Of a number, or of anything that has no size of its own."""


def weight(value: Any) -> int:
    """Estimate the bytes of JSON-like data, dataclasses included; a string counts its characters."""
    total, open_values = 0, [value]
    while open_values:
        one = open_values.pop()
        total += OBJECT_BYTES
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, Mapping):
            open_values += one.keys()
            open_values += one.values()
        elif isinstance(one, Sequence):
            open_values += one
        elif dataclasses.is_dataclass(one):
            open_values += [getattr(one, field.name) for field in dataclasses.fields(one)]
    return total
