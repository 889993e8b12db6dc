"""JSON as the gateway reads and writes it: compact, and without NaN and infinity, which JSON has no word for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn


class NotFinite(ValueError):
    """NaN or infinity, where JSON has no word for it."""


def refuse_constant(word: str) -> NoReturn:
    """Refuse a constant of Python's, as ``parse_constant`` of ``json.loads``."""
    raise NotFinite(f"{word} is not JSON")


# Made once: json.loads and json.dumps with arguments make one for each call.
_DECODER: Final = json.JSONDecoder(parse_constant=refuse_constant)
encode: Final = json.JSONEncoder(separators=(",", ":")).encode
"""Write a value as compact JSON in ASCII: a trainer's text may hold what UTF-8 can't (a lone surrogate)."""
_PLAIN: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def parse(text: bytes | str) -> Any:
    """Read JSON in UTF-8.

    Raises:
        ValueError: it is none, or nested too deeply; `NotFinite` for NaN and infinity.
    """
    try:
        return _DECODER.decode(text.decode() if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def compact(value: Any) -> bytes:
    """Return what `encode` writes as bytes."""
    return encode(value).encode()


def dump(value: object) -> bytes:
    """Write *value* for clients: text raw, NaN and infinity as null, a lone surrogate as an escape."""
    try:
        return _PLAIN.encode(value).encode()
    except UnicodeEncodeError:
        return compact(_finite(value))
    except ValueError:
        return dump(_finite(value))


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    return [_finite(inner) for inner in value] if isinstance(value, (list, tuple)) else value
