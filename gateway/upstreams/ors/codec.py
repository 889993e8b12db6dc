"""Actions and results between our words and ORS': written for ``/call``, read from its answer.

Differences from a plain client: the answer may be one JSON object (our own images) or an event stream (standard
servers, which do not look at ``Accept``); both say the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from gateway.core.episode import TOOL_FAILED, Action, Block, ImageBlock, StepResult, TextBlock
from gateway.core.errors import AuthorFault, SessionFailed, UpstreamError
from gateway.core.faults import Fault

FAILURES: Final = {kind.code: kind for kind in (AuthorFault, SessionFailed)}
"""By the reasons of results that are none, as the session has failed. Our own images give them."""


class NoNumber(ValueError):
    """What should be a number is none, NaN for example: an environment's code made it."""


def _refuse(word: str) -> NoReturn:
    raise NoNumber(f"{word} is no number")


# Made once: json.loads and json.dumps with arguments make one for each call.
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))
_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)


def written(action: Action) -> bytes:
    """The body of ``/call`` that means *action*."""
    body: dict[str, Any]
    if action.name is not None:
        body = {"name": action.name, "input": dict(action.arguments)}
    elif action.text is not None:
        body = {"text": action.text}
    else:
        body = {"action": dict(action.fields or {})}
    # Escaped: a trainer's text may hold what UTF-8 can't (a lone surrogate), and JSON can.
    return _ENCODER.encode(body).encode()


def read_result(
    answer: bytes, content_type: bytes, counted: bytes | None = None, faults: tuple[Fault, ...] = ()
) -> StepResult:
    """Read what ``/call`` answered with status 200.

    Args:
        counted: the number of the turn, where a header has it.
        faults: what headers tell of the author's code.

    Raises:
        AuthorFault: the author's code failed; a reward that is no finite number is never made into one.
        SessionFailed: the session broke in its worker.
        UpstreamError: it is not what ORS allows.
    """
    try:
        turn = None if counted is None else _turn(counted)
        if content_type.startswith(b"text/event-stream"):
            event, data = _last_event(answer.decode())
            if event == "error":
                return StepResult(error=data, reason=TOOL_FAILED, turn=turn, faults=faults)
            if event != "end":
                raise UpstreamError("the worker's answer to the call broke off")
            answer = data.encode()
        return _result(_DECODER.decode(answer.decode()), turn, faults)
    except NoNumber as error:
        raise AuthorFault(f"the tool's result can't be used: {error}", faults=faults) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UpstreamError(f"the worker's answer to the call can't be read: {error}") from error


def read_blocks(value: Any) -> list[Block]:
    """Read a list of blocks, as prompts and results have them.

    Raises:
        UpstreamError: it is none.
    """
    if not isinstance(value, list):
        raise UpstreamError("the worker's blocks are no list")
    try:
        return list(map(_block, value))
    except (TypeError, KeyError, ValueError) as error:
        raise UpstreamError(f"the worker's blocks can't be read: {error}") from error


def _turn(counted: bytes) -> int:
    if not counted.isdigit() or (turn := int(counted)) < 1:
        raise ValueError(f"{counted[:64]!r} is no number of a turn")
    return turn


def _result(value: Mapping[str, Any], turn: int | None, faults: tuple[Fault, ...]) -> StepResult:
    if value["ok"] is not True:
        error, reason = str(value["error"]), str(value.get("reason") or TOOL_FAILED)
        if (failure := FAILURES.get(reason)) is not None:
            raise failure(error, faults=faults)
        return StepResult(error=error, reason=reason, turn=turn, faults=faults)
    output = value["output"]
    return StepResult(
        blocks=tuple(read_blocks(output["blocks"])),
        reward=_reward(output.get("reward")),
        finished=output.get("finished") is True,
        metadata=output.get("metadata"),
        data=output.get("data"),
        turn=turn,
        faults=faults,
    )


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NoNumber(f"{value!r} is no reward")
    if not math.isfinite(value):
        raise NoNumber(f"the reward {value} is no finite number")
    return float(value)


def _block(value: Mapping[str, Any]) -> Block:
    if value["type"] == "text":
        return TextBlock(str(value["text"]), value.get("detail"))
    if value["type"] == "image":
        return ImageBlock(str(value["data"]), str(value["mimeType"]), value.get("detail"))
    raise ValueError(f"{value['type']!r} is no type of block")


def _last_event(stream: str) -> tuple[str, str]:
    """Name and data of the last event; what a standard server cuts into ``chunk`` events is joined to its end."""
    chunks: list[str] = []
    last = ("", "")
    for block in stream.replace("\r\n", "\n").split("\n\n"):
        lines = [line.partition(":")[::2] for line in block.split("\n") if line and not line.startswith(":")]
        name = next((value.strip() for key, value in lines if key == "event"), "")
        data = "\n".join(value.removeprefix(" ") for key, value in lines if key == "data")
        if name == "chunk":
            chunks.append(data)
        elif name:
            last = (name, "".join(chunks) + data if name == "end" else data)
    return last
