"""OpenEnv's frames towards servers: requests written, replies read as far as is needed.

A frame is JSON text without an id: the n-th reply belongs to the n-th request. Observations may be 100 MiB large, so a
frame that is only passed on is looked at by its first and its last bytes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from gateway.core.errors import UpstreamError
from gateway.upstreams.calling.faults import author_fault

CLOSE: Final = b'{"type":"close"}'
STATE: Final = b'{"type":"state"}'
PARSED_MAX_BYTES: Final = 2**20
"""A frame that is passed on is parsed for its reward at most up to this size."""

INVALID: Final = "VALIDATION_ERROR"
FAILED: Final = "EXECUTION_ERROR"
FULL: Final = "CAPACITY_REACHED"
FACTORY: Final = "FACTORY_ERROR"
SESSION: Final = "SESSION_ERROR"

_HEAD: Final = re.compile(rb'\s*\{\s*"type"\s*:\s*"([A-Za-z_]{1,32})"')
# Two braces at the very end: these are keys of "data" itself, never of something inside the observation.
_TAIL: Final = re.compile(
    rb'"reward"\s*:\s*(null|true|false|-?(?:0|[1-9][0-9]{0,400})(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,4})?)'
    rb'\s*,\s*"done"\s*:\s*(true|false)\s*\}\s*\}\s*$'
)
_TAIL_BYTES: Final = 256
_NO_NUMBER: Final = re.compile(rb'"reward"\s*:\s*(NaN|-?Infinity)\s*,\s*"done"\s*:\s*(?:true|false)\s*\}\s*\}\s*$')
NOT_RUN: Final = {"tool_not_found": "not_found", "invalid_args": "input_validation"}
"""Types of a tool's error for which it was not run, and our reasons for them."""


class NotFinite(ValueError):
    """A number that is none, where JSON has no word for it: an environment's code made it."""


def _refuse(word: str) -> NoReturn:
    raise NotFinite(f"{word} is no number")


# Made once: json.loads and json.dumps with arguments make one for each call.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)


@dataclass(frozen=True, slots=True)
class Fault:
    """An error frame."""

    code: str
    message: str
    capacity: int = 0
    """Sessions that the server holds at most, where it refused one more; 0: unsaid."""


def compact(value: Any) -> bytes:
    """Write *value* as compact JSON; escaped, as a trainer's text may hold what UTF-8 can't."""
    return _ENCODER.encode(value).encode()


def parse(text: bytes) -> Any:
    """Read JSON. Raises ``ValueError``."""
    try:
        return _DECODER.decode(text.decode())
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def request(kind: str, data: Mapping[str, Any]) -> bytes:
    """Write a request that has data."""
    return compact({"type": kind, "data": dict(data)})


def kind_of(frame: bytes, *, parsed_max: int = PARSED_MAX_BYTES) -> str:
    """The type of a frame; empty where it has none, or does not begin with it and is larger than *parsed_max*."""
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
    """Read an error frame; None if it is another one."""
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


def failed_tool(reply: bytes) -> str:
    """What an observation says of a tool that raised an exception; empty: none did, or it can't be read cheaply."""
    if b'"error_type"' not in reply or len(reply) > PARSED_MAX_BYTES:
        return ""
    try:
        data = observation_of(reply)
        error = data["observation"]["error"]
        is_tools = error["error_type"] not in NOT_RUN and data.get("reward") is None and data.get("done") is not True
        return str(error.get("message") or "the tool failed") if is_tools else ""
    except (UpstreamError, KeyError, TypeError, AttributeError):
        return ""


def check_reward(reply: bytes) -> None:
    """Refuse an observation whose reward is no number; those who pass it on would hand it to a trainer.

    Raises:
        AuthorFault: it is.
    """
    if (found := _NO_NUMBER.search(reply, max(0, len(reply) - _TAIL_BYTES))) is not None:
        raise author_fault(f"the environment gave the reward {found[1].decode()}: it is no finite number", "reward")


def outcome_of(reply: bytes) -> tuple[float | None, bool]:
    """Reward and end that an observation tells; (None, False) where it tells none, or can't be read cheaply."""
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
    """Read a reward: a number, a bool, or None.

    Raises:
        AuthorFault: it is none; it is never made into one.
    """
    if value is None:
        return None
    try:
        if isinstance(value, bool | int | float) and math.isfinite(reward := float(value)):
            return reward
    except OverflowError:
        pass
    raise author_fault(f"{str(value)[:40]!r} is no reward", "reward")


def observation_of(reply: bytes) -> Mapping[str, Any]:
    """The ``data`` of an observation frame.

    Raises:
        AuthorFault: it has a number that is none.
        UpstreamError: it is another one.
    """
    try:
        frame = parse(reply)
        data = frame["data"]
        if frame["type"] != "observation" or not isinstance(data, dict):
            raise ValueError(f"a frame of type {str(frame['type'])[:40]!r}")
    except NotFinite as error:
        raise author_fault(f"the environment's observation can't be used: {error}", "observation") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UpstreamError(f"the server's reply is no observation: {error}") from error
    return data
