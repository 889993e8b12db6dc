"""Write OpenEnv request frames, and read reply frames as far as needed.

A frame is JSON text without an id: the n-th reply belongs to the n-th request. Observations may be 100 MiB large. So
only the first and last bytes of a relayed frame are checked where possible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.episode import TOOL_ERROR
from gateway.core.errors import UpstreamError, author_fault
from gateway.core.json_text import NotFinite, compact, parse

CLOSE: Final = b'{"type":"close"}'
STATE: Final = b'{"type":"state"}'
PARSED_MAX_BYTES: Final = 2**20
"""Bytes of the largest relayed frame that is parsed, for its reward for example."""

INVALID: Final = "VALIDATION_ERROR"
FAILED: Final = "EXECUTION_ERROR"
FULL: Final = "CAPACITY_REACHED"
FACTORY: Final = "FACTORY_ERROR"
SESSION: Final = "SESSION_ERROR"
INTERNAL: Final = -32603
"""JSON-RPC error code that servers return for any exception, including unknown tools."""
NOT_FOUND: Final = "not_found"
INVALID_INPUT: Final = "input_validation"

_HEAD: Final = re.compile(rb'\s*\{\s*"type"\s*:\s*"([A-Za-z_]{1,32})"')
# The two final braces ensure that the keys belong to "data" itself, not to an object inside the observation.
_TAIL: Final = re.compile(
    rb'"reward"\s*:\s*(null|true|false|-?(?:0|[1-9][0-9]{0,400})(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,4})?)'
    rb'\s*,\s*"done"\s*:\s*(true|false)\s*\}\s*\}\s*$'
)
_TAIL_BYTES: Final = 256
_NO_NUMBER: Final = re.compile(rb'"reward"\s*:\s*(NaN|-?Infinity)\s*,\s*"done"\s*:\s*(?:true|false)\s*\}\s*\}\s*$')
_NOT_RUN: Final = {"tool_not_found": NOT_FOUND, "invalid_args": INVALID_INPUT}
"""Error types of tools that were not run, with the gateway's reasons."""
# Servers guess the type from single words of the message, so FastMCP's own messages are matched first.
_SAID_NOT_FOUND: Final = re.compile(r"unknown tool\b|tool not found\b|tool '[^']*' (?:not found|not available)", re.I)
_SAID_INVALID: Final = re.compile(r"\bvalidation errors? for call\[|^input validation error\b", re.I)
_SAID_RAISED: Final = "Error calling tool "
_LISTS: Final = b'"list_tools"'
_LISTS_MAX_BYTES: Final = 256


@dataclass(frozen=True, slots=True)
class Fault:
    """The content of an error frame."""

    code: str
    message: str
    capacity: int = 0
    """Maximum sessions of a server that refused another session; 0 if the server did not state it."""


def request(kind: str, data: Mapping[str, Any]) -> bytes:
    """Return a request frame with *data*."""
    return compact({"type": kind, "data": dict(data)})


def kind_of(frame: bytes, *, parsed_max: int = PARSED_MAX_BYTES) -> str:
    """Return the type of a frame; an empty string if it has none.

    A frame that is larger than *parsed_max* bytes must begin with its type.
    """
    if (head := _HEAD.match(frame, 0, 256)) is not None:
        return head[1].decode()
    if len(frame) > parsed_max:
        return ""
    try:
        value = parse(frame)
    except ValueError:
        return ""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def fault_of(reply: bytes) -> Fault | None:
    """Return the content of an error frame; None for a frame of another type."""
    if kind_of(reply) != "error":
        return None
    try:
        data = parse(reply)["data"]
        capacity = data.get("max_sessions")
        message = str(data.get("message") or "the server gave no reason")
        if isinstance(errors := data.get("errors"), list) and data.get("code") == INVALID:
            message = _explained(message, errors)
        return Fault(str(data.get("code", "")), message, capacity if type(capacity) is int and capacity > 0 else 0)
    except (ValueError, KeyError, TypeError, AttributeError):
        return Fault("", "the server's error can't be read")


def _explained(message: str, errors: list[Any]) -> str:
    entries = [entry for entry in errors[:20] if isinstance(entry, Mapping)]
    told = "; ".join(f"{'.'.join(map(str, entry.get('loc') or ()))}: {entry.get('msg')}" for entry in entries)
    return f"{message}: {told}" if told else message


def acts(frame: bytes) -> bool:
    """Return True if a request acts in the environment: a step that does not list tools, or a JSON-RPC tool call."""
    kind = kind_of(frame)
    if kind == "mcp":
        return _is_tool_call(frame)
    return kind == "step" and not (len(frame) <= _LISTS_MAX_BYTES and _LISTS in frame)


def _is_tool_call(frame: bytes) -> bool:
    if len(frame) > PARSED_MAX_BYTES:
        return True  # only tool calls are that large
    try:
        return bool(parse(frame)["data"]["method"] == "tools/call")
    except (ValueError, KeyError, TypeError):
        return False


def failed_tool(result: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the message and reason of a failed tool call in a step's observation; None if the call succeeded.

    The reason is ``TOOL_ERROR`` if the tool's code raised an exception. The server goes on, so the agent is at fault.
    """
    error, output = result.get("error"), result.get("result")
    if isinstance(error, Mapping):
        message = str(error.get("message") or "the tool failed")
        return message, _reason(message, str(error.get("error_type", "")))
    return _failed_output(output)


def _failed_output(output: object) -> tuple[str, str] | None:
    if not isinstance(output, Mapping) or output.get("is_error", output.get("isError")) is not True:
        return None
    content = output.get("content")
    texts = [item.get("text") for item in content if isinstance(item, Mapping)] if isinstance(content, list) else []
    message = "\n".join(text for text in texts if isinstance(text, str)) or "the tool failed"
    return message, _reason(message, "")


def _reason(message: str, error_type: str) -> str:
    if _SAID_INVALID.search(message):  # first, because FastMCP before 2.10 wraps it in an exception's message
        return INVALID_INPUT
    if _SAID_NOT_FOUND.match(message):
        return NOT_FOUND
    return TOOL_ERROR if message.startswith(_SAID_RAISED) else _NOT_RUN.get(error_type, TOOL_ERROR)


def check_reward(reply: bytes) -> None:
    """Check that an observation's reward is not NaN or infinite, before it is relayed to a trainer.

    Raises:
        AuthorFault: The reward is NaN or infinite.
    """
    if (found := _NO_NUMBER.search(reply, max(0, len(reply) - _TAIL_BYTES))) is not None:
        raise author_fault(f"the environment gave the reward {found[1].decode()}: it is not a finite number", "reward")


def outcome_of(reply: bytes) -> tuple[float | None, bool]:
    """Return an observation's reward and whether it ends the episode.

    Return (None, False) if it has neither or is too large to parse.
    """
    if (tail := _TAIL.search(reply, max(0, len(reply) - _TAIL_BYTES))) is not None:
        return _finite(parse(tail[1])), tail[2] == b"true"
    if len(reply) > PARSED_MAX_BYTES:
        return None, False
    try:
        data = parse(reply).get("data")
    except (ValueError, AttributeError):
        return None, False
    if not isinstance(data, Mapping):
        return None, False
    return _finite(data.get("reward")), data.get("done") is True


def _finite(value: object) -> float | None:
    try:
        return reward_of(value)
    except UpstreamError:
        return None


def reward_of(value: object) -> float | None:
    """Return *value* as a reward, if it is a number, a bool, or None.

    Raises:
        AuthorFault: The value is not a finite number. Other types are never converted.
    """
    if value is None:
        return None
    try:
        if isinstance(value, bool | int | float) and math.isfinite(reward := float(value)):
            return reward
    except OverflowError:
        pass
    raise author_fault(f"{str(value)[:40]!r} is not a reward", "reward")


def observation_of(reply: bytes) -> Mapping[str, Any]:
    """Return the ``data`` of an observation frame.

    Raises:
        AuthorFault: The frame contains NaN or an infinite number.
        UpstreamError: The reply is not an observation frame.
    """
    try:
        frame = parse(reply)
        data = frame["data"]
        if frame["type"] != "observation" or not isinstance(data, dict):
            raise ValueError(f"a frame of type {str(frame['type'])[:40]!r}")
    except NotFinite as error:
        raise author_fault(f"the environment's observation can't be used: {error}", "observation") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UpstreamError(f"the server's reply is not an observation: {error}") from error
    return data
