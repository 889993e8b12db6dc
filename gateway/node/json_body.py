"""JSON that has one meaning only, to us and to the engine, which reads it in another language."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


class Malformed(Exception):
    """A body that cannot be told to mean one thing only."""


def parse(body: bytes) -> dict[str, Any]:
    """Read a JSON object that has one meaning only.

    Raises:
        Malformed: not UTF-8, not one JSON object, a key twice, a number that is none, text with control characters.
    """
    try:
        value = json.loads(body.decode("utf-8"), object_pairs_hook=_unambiguous, parse_constant=_no_number)
        if not isinstance(value, dict):
            raise Malformed("the body is not a JSON object")
        if any(not _is_plain(text) for text in _texts(value)):
            raise Malformed("the body has text with control characters or lone surrogates")
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the body is not JSON: {error}") from error
    return value


def _is_plain(text: str) -> bool:
    # The engine replaces what is not valid Unicode, and C programs behind it end a string at NUL.
    return all(character >= " " and not "\ud800" <= character <= "\udfff" for character in text)


def _texts(value: object) -> Iterator[str]:
    """Every key and string in *value*; without recursion, as its depth is the sender's choice."""
    pending = [value]
    while pending:
        found = pending.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, list):
            pending += found
        elif isinstance(found, dict):
            yield from found
            pending += found.values()


def _unambiguous(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Malformed(f"the key {key[:64]!r} stands twice")
        found[key] = value
    return found


def _no_number(text: str) -> None:
    raise Malformed(f"{text} is no number")
