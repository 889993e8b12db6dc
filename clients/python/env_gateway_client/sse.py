"""Reads the event streams of standard ORS servers. The gateway itself answers this client with JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from env_gateway_client.content import StepResult, failed_call, read_json, read_result
from env_gateway_client.errors import EpisodeFailed, lost_in_stream


class Incomplete(Exception):
    """A stream ended before the outcome. ``task_id`` identifies the call; empty: the stream did not get that far."""

    def __init__(self, task_id: str) -> None:
        super().__init__(task_id)
        self.task_id = task_id


def outcome(body: bytes) -> StepResult:
    """Return the outcome in the event stream of a call.

    Raises:
        Incomplete: The stream ended before the outcome.
        EpisodeFailed: The stream reports that the episode is over.
    """
    parts: list[str] = []
    for event, data in _events(body):
        if event == "error":
            error = lost_in_stream(data)
            if error is not None:
                raise error
            if data == "unknown task_id":
                raise EpisodeFailed("the server no longer keeps the outcome of this call", may_have_run=True)
            return failed_call(data, "tool_error")
        if event in ("chunk", "end"):
            parts.append(data)
        if event == "end":
            found: Any = read_json("".join(parts).encode("utf-8", "surrogatepass"), "a call")
            return read_result(found)
    raise Incomplete(task_id(body))


def task_id(body: bytes) -> str:
    """Return the call's id in a stream that may be incomplete. Empty: the id did not arrive."""
    return next((data for event, data in _events(body) if event == "task_id"), "")


def _events(body: bytes) -> Iterator[tuple[str, str]]:
    """Yield name and data of each complete event. A blank line completes an event."""
    event, data = "", list[str]()
    # Not `splitlines`: it also splits at characters that a JSON text may hold, such as U+2028.
    for line in body.decode("utf-8", "replace").replace("\r\n", "\n").split("\n")[:-1]:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not line:
            if event:
                yield event, "\n".join(data)
            event, data = "", []
        elif name == "event":
            event = value
        elif name == "data":
            data.append(value)
