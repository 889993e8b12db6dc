"""JSON as the gateway reads and writes it: compact, and without NaN and infinity, which JSON does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

THREAD_BYTES: Final = 4 * 2**20
"""Bytes of JSON above which it is parsed in a thread, so that it does not block other sessions."""


class NotFinite(ValueError):
    """The text or value has NaN or infinity, which JSON does not have."""


def refuse_constant(word: str) -> NoReturn:
    """Refuse a Python constant, as ``parse_constant`` of ``json.loads``."""
    raise NotFinite(f"{word} is not JSON")


# Created once, because json.loads and json.dumps with arguments create a new one for each call.
_DECODER: Final = json.JSONDecoder(parse_constant=refuse_constant)
encode: Final = json.JSONEncoder(separators=(",", ":")).encode
"""Write a value as compact JSON in ASCII. A trainer's text may contain a lone surrogate, which UTF-8 cannot encode."""
_PLAIN: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def parse(text: bytes | str) -> Any:
    """Parse JSON in UTF-8.

    Raises:
        ValueError: The text is not JSON, or is nested too deeply; `NotFinite` for NaN and infinity.
    """
    try:
        return _DECODER.decode(text.decode() if isinstance(text, bytes) else text)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def compact(value: Any) -> bytes:
    """Return the output of `encode` as bytes."""
    return encode(value).encode()


def dump(value: object) -> bytes:
    """Write *value* for clients: text unescaped, NaN and infinity as null, a lone surrogate as an escape."""
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
