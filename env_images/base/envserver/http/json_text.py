"""JSON for the wire: compact, with raw non-ASCII text, and with null for NaN and infinity.

The standard library writes ``NaN``, which only Python's JSON parser accepts. The slow path that replaces such numbers
runs only if the fast path meets one.
"""

import json
import uuid
from collections.abc import Mapping
from enum import Enum
from typing import Any


def encode(value: object) -> bytes:
    """Return *value* as compact UTF-8 JSON.

    Mappings, sets, enum members and objects with a ``tolist`` (numbers and arrays of numpy) become their JSON
    counterparts.

    Raises:
        TypeError: A part of *value* has no JSON form.
        RecursionError, ValueError: *value* is nested too deeply, or contains itself.
    """
    try:
        return _STRICT.encode(value).encode()
    except UnicodeEncodeError:  # a lone surrogate is valid in JSON only in escaped form
        return _ASCII.encode(value).encode()
    except ValueError as error:
        if "circular" in str(error).lower():
            raise
        return encode(_finite(value))


def encode_result(output: Mapping[str, Any]) -> bytes:
    """Return a tool's successful result as JSON. *output* has ``blocks``.

    Long texts are written in slices: while one is written, no other thread of the server runs.
    """
    long = [text for block in output["blocks"] if isinstance(text := block.get("text"), str) and len(text) > LONG_CHARS]
    if not long:
        return encode({"ok": True, "output": output})
    blocks = [{**block, "text": _MARK} if block.get("text") in long else block for block in output["blocks"]]
    first, *others = encode({"ok": True, "output": {**output, "blocks": blocks}}).split(_MARK.encode())
    slices = ([text[at : at + LONG_CHARS] for at in range(0, len(text), LONG_CHARS)] for text in long)
    escaped = (b"".join([encode(part)[1:-1] for part in parts]) for parts in slices)
    return b"".join((first, *(part for pair in zip(escaped, others, strict=True) for part in pair)))


def canonical(value: object) -> str:
    """Return *value* as JSON text, equal for equal values. *value* must come from JSON."""
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


LONG_CHARS = 2**20
"""Characters of a text that are written at a time: about 5 ms."""
_MARK = uuid.uuid4().hex
"""Stands for a long text while the rest of a result is written."""
_INFINITY = float("inf")
_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_plain)
_ASCII = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=_plain)
