"""JSON as the wire wants it: compact, non-ASCII text raw, NaN and infinity as null.

The standard library writes ``NaN``, which no JSON parser but Python's accepts; the slow path that replaces it runs
only when the fast one met such a number.
"""

import json
from collections.abc import Mapping
from enum import Enum
from typing import Any


def encode(value: object) -> bytes:
    """Write *value* as compact UTF-8 JSON.

    Mappings, sets, enum members and whatever has a ``tolist`` (numbers and arrays of numpy) are written as their
    JSON counterparts.

    Raises:
        TypeError: something in *value* has no JSON form.
        RecursionError, ValueError: *value* is nested too deeply, or contains itself.
    """
    try:
        return _STRICT.encode(value).encode()
    except UnicodeEncodeError:  # a lone surrogate: valid in JSON only when escaped
        return _ASCII.encode(value).encode()
    except ValueError as error:
        if "circular" in str(error).lower():
            raise
        return encode(_finite(value))


def canonical(value: object) -> str:
    """Write *value*, which came from JSON, so that equal values have equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if -_INFINITY < value < _INFINITY else None
    if isinstance(value, str | int) or value is None:
        return value
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(_plain(value))


_INFINITY = float("inf")
_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
_ASCII = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=_plain)
