"""The event streams of ORS, read strictly: one space after the colon is the format's, every other is the data's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


class StreamError(Exception):
    """The stream did not end with a result."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event; comments are left out."""

    name: str
    data: str


def events(body: bytes) -> Iterator[Event]:
    """Read a whole stream.

    Raises:
        StreamError: it ends within an event.
    """
    name = ""
    data: list[str] = []
    *lines, rest = body.decode().replace("\r\n", "\n").split("\n")
    for line in lines:
        if not line:
            if name:
                yield Event(name, "\n".join(data))
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
    if name or data or rest:
        raise StreamError("the stream ends within an event")


def result_of(body: bytes) -> Any:
    """The JSON value that a call's chunks and its end make together.

    Raises:
        StreamError: it ended with an ``error`` event, with none, or not with JSON.
    """
    parts: list[str] = []
    for event in events(body):
        if event.name == "error":
            raise StreamError(event.data)
        if event.name in ("chunk", "end"):
            parts.append(event.data)
        if event.name == "end":
            try:
                return json.loads("".join(parts))
            except ValueError as error:
                raise StreamError(f"not JSON: {error}") from error
    raise StreamError("the stream has no end event")
