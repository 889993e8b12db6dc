"""Actions, results and summaries as JSON, for one replica that asks another; and handles, by which one finds it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

from gateway.core.episode import Action, StepResult, Summary
from gateway.core.errors import SessionNotFound, UpstreamError
from gateway.core.faults import FaultKind
from gateway.core.json_text import compact, parse
from gateway.upstreams.idempotency.codec import result_of_json, result_to_json

FIRST_MAX_BYTES: Final = 32 * 2**10
"""A larger first observation is known to the replica that opened the session only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """How any replica finds a session."""

    sid: str = ""
    """Its id in the server; empty: it is its socket, and lives as long as the holder's."""
    holder: str = ""
    """The URL of the replica that has the socket; empty: there are no others."""
    first: bytes = b""
    """The reply to its reset; empty: only the holder has it."""

    def written(self) -> str:
        """As the store keeps it."""
        first = self.first.decode() if len(self.first) <= FIRST_MAX_BYTES else ""
        return compact({"sid": self.sid, "at": self.holder, "first": first}).decode()


def read_handle(text: str) -> Handle:
    """Read a session's handle.

    Raises:
        SessionNotFound: it has none that can be read: nobody opened it.
    """
    try:
        value = parse(text.encode())
        return Handle(sid=str(value["sid"]), holder=str(value["at"]), first=str(value["first"]).encode())
    except (ValueError, KeyError, TypeError) as error:
        raise SessionNotFound("the session has no handle") from error


def write_action(action: Action, key: str | None) -> bytes:
    """Write an action and its idempotency key."""
    return compact(
        {
            "name": action.name,
            "arguments": dict(action.arguments),
            "text": action.text,
            "fields": None if action.fields is None else dict(action.fields),
            "key": key,
        }
    )


def read_action(message: bytes) -> tuple[Action, str | None]:
    """Read what `write_action` wrote."""
    value = parse(message)
    action = Action(name=value["name"], arguments=value["arguments"], text=value["text"], fields=value["fields"])
    return action, value["key"]


def write_result(result: StepResult) -> bytes:
    """Write what an action came to."""
    return compact(result_to_json(result))


def read_result(message: bytes) -> StepResult:
    """Read what `write_result` wrote. Raises ``UpstreamError``."""
    try:
        return result_of_json(parse(message))
    except (ValueError, KeyError, TypeError) as error:
        raise UpstreamError(f"the other replica's answer can't be read: {error}") from error


def write_summary(summary: Summary | None) -> bytes:
    """Write how an episode went."""
    if summary is None:
        return compact(None)
    told = asdict(summary)
    for name, usual in (("is_whole", True), ("is_judged", False)):
        if told[name] is usual:
            del told[name]  # replicas of an older version can't read it
    return compact(told)


def read_summary(message: bytes) -> Summary | None:
    """Read what `write_summary` wrote. Raises ``UpstreamError``."""
    try:
        value = parse(message)
        if value is None:
            return None
        fault = FaultKind(value["fault"]) if value.get("fault") else None
        return Summary(**{**value, "fault": fault, "faults": ()})
    except (ValueError, TypeError) as error:
        raise UpstreamError(f"the other replica's answer can't be read: {error}") from error
