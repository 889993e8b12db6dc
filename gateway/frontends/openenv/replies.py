"""Builds replies for OpenEnv clients: observations, tool results, tool lists and errors.

Differences from ORS: blocks become one ``text`` and ``images``, next to the keys of a structured observation. If a tool
called by its name fails, the reply is an observation. If a plain action fails, the reply is an error: stock clients
raise it, and the episode continues.

An error has a code and a message, and states whether the socket stays open.

Clients never retry by themselves, and every error raises in the trainer. So a recoverable error keeps the socket open.
The socket closes only for errors for which a stock server closes it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import uuid
from collections.abc import Container, Mapping, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.episode import EPISODE_FINISHED, Block, ImageBlock, StepResult, TextBlock, without_lone_role
from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    RateLimited,
    SessionClosed,
    SessionError,
    SessionFailed,
    SessionNotFound,
    StoreUnavailable,
    TaskInvalid,
    UpstreamGone,
)
from gateway.core.json_text import dump
from gateway.core.ports.store import WorkerStore
from gateway.core.session import CloseReason
from gateway.frontends.errors import reason_of, retry_after_s, status_of
from gateway.frontends.openenv.frames import Code, FrameError, Json, invalid

RESERVED: Final = frozenset(("reset", "step", "state", "close"))
"""Names of operations that control the episode. OpenEnv's servers have no tools of these names; others may."""
_ERROR_TYPES: Final = {
    "not_found": "tool_not_found",
    "name_collision": "tool_not_found",
    "input_validation": "invalid_args",
}
"""Error types by reason, for tools that did not run. Any other failure is an ``execution_error``."""
_FAULTS: Final = "Tool input validation error: "
_FAULTS_MAX_CHARS: Final = 16_384
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
REPLY_MAX_BYTES: Final = 128 * 2**20
"""Largest reply, unless its largest part is not a text."""
_NOTE_BYTES: Final = 200
_LARGE_CHARS: Final = 2**20
"""Characters from which a text is written once for all its places in a reply, in a thread and in slices of so many:
writing one takes about 5 ms."""
_MARK: Final = uuid.uuid4().hex
"""Stands for a large text while a reply is written."""
_OUTSIDE: Final = frozenset(("reward", "done"))
"""Keys that are next to an observation, never in it."""


def observed(observation: Json, *, reward: float | None = None, done: bool = False) -> Json:
    """Return the data of a reply to reset or step. It repeats the observation's metadata, unless that is empty."""
    data: Json = {"observation": observation, "reward": reward, "done": done}
    if observation.get("metadata"):
        data["metadata"] = observation["metadata"]
    return data


async def framed(kind: str, data: Json) -> list[str]:
    """Return the parts of a reply. A large text is written in a thread, so that other sessions go on meanwhile."""
    return _parts(kind, data) if _large_text(data) is None else await asyncio.to_thread(_parts, kind, data)


def frame(kind: str, data: Json) -> str:
    """Return one reply as text. NaN and infinities, which JSON lacks, become null. The text is valid UTF-8."""
    return "".join(_parts(kind, data))


def _parts(kind: str, data: Json) -> list[str]:
    large = _large_text(data)
    reply = {"type": kind, "data": data if large is None else _with_mark(data, large)}
    try:
        text = _ENCODER.encode(reply)
    except ValueError:
        text = dump(reply).decode()
    if large is None:
        return [text]
    first, *others = text.split(_MARK)  # three others in the result of a tool that was called by its name
    written = _written(large, (REPLY_MAX_BYTES - len(text)) // len(others))
    return [first, *(part for other in others for part in (*written, other))]


def _large_text(data: Json) -> str | None:
    """Return the text of an observation that is so large that writing it blocks other sessions; None: it is not."""
    observation = data.get("observation")
    if not isinstance(observation, dict):
        return None
    result = observation.get("result")
    text = result.get("data") if isinstance(result, dict) else observation.get("text")
    return text if isinstance(text, str) and len(text) > _LARGE_CHARS else None


def _with_mark(value: Any, large: str) -> Any:
    """Return a copy of *value* with `_MARK` in the places of the text *large*."""
    if isinstance(value, dict):
        return {key: _with_mark(inner, large) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_mark(inner, large) for inner in value]
    return _MARK if isinstance(value, str) and len(value) == len(large) and value == large else value


def _written(text: str, max_bytes: int) -> list[str]:
    """Escape *text* for a JSON string. A text above *max_bytes* loses its end, and has a note about that."""
    written, kept = _escaped(text), text
    while (size := sum(map(len, written))) > max_bytes and kept:
        kept = kept[: max(0, len(kept) * (max_bytes - _NOTE_BYTES) // size)]
        left_out = len(text) - len(kept)
        note = f"\n[{left_out} characters left out: a reply has at most {REPLY_MAX_BYTES // 2**20} MiB]"
        written = _escaped(kept + note)
    return written


def _escaped(text: str) -> list[str]:
    """Escape *text* in slices: no other thread runs while one slice is written."""
    starts = range(0, len(text), _LARGE_CHARS)
    return [encode_basestring_ascii(text[at : at + _LARGE_CHARS])[1:-1] for at in starts]


def error_frame(refused: FrameError) -> str:
    """Return the reply to a refused request."""
    return frame("error", {"message": refused.message, "code": refused.code.value, **refused.more})


def first_observation(blocks: Sequence[Block], told: Mapping[str, Any]) -> Json:
    """Return the prompt as an observation. *told* holds the gateway's fields of the task."""
    details = (block.detail["observation"] for block in blocks if block.detail and "observation" in block.detail)
    shown = without_lone_role(blocks) if any("role" in (block.detail or ()) for block in blocks) else blocks
    return observed(_observation(shown, next(details, None), told))


def step_reply(result: StepResult, action: Mapping[str, Any]) -> Json:
    """Return the reply to a plain *action*.

    Raises:
        FrameError: The environment refused the action or failed. The episode continues unchanged.
    """
    if result.error is not None:
        raise _refusal(result, action)
    observation = _observation(result.blocks, result.data, result.metadata or {})
    return observed(observation, reward=result.reward, done=result.finished)


def tool_reply(tool: str, result: StepResult) -> Json:
    """Return the reply to a call of a tool by its name.

    Raises:
        FrameError: The episode is over.
    """
    if result.reason == EPISODE_FINISHED:
        raise _refusal(result, {})
    observation: Json = {"metadata": dict(result.metadata or {}), "tool_name": tool, "result": None, "error": None}
    if result.error is None:
        observation["result"] = tool_result(result)
    else:
        kind = _ERROR_TYPES.get(result.reason, "execution_error")
        observation["error"] = {"error_type": kind, "message": result.error}
    return observed(observation, reward=result.reward, done=result.finished)


def unknown_tool(tool: str) -> StepResult:
    """Return the result of a call of an unknown tool."""
    return StepResult(error=f"Unknown tool: {tool!r}", reason="not_found")


def tool_result(result: StepResult) -> Json:
    """Return a tool's result in MCP's format, without its reward."""
    text = text_of(result.blocks)
    return {
        "content": [_content(block) for block in result.blocks],
        "structured_content": result.data if isinstance(result.data, dict) else {"result": text},
        "meta": None,
        "data": text if result.data is None else result.data,
        "is_error": False,
    }


def listed(tools: Sequence[Json]) -> Json:
    """Return the reply to the action that lists the tools."""
    shown = [{key: tool[key] for key in ("name", "description", "input_schema")} for tool in tools]
    return observed({"metadata": {}, "tools": shown})


def mcp_tools(tools: Sequence[Json]) -> Json:
    """Return the tools in the format of MCP's ``tools/list``."""
    return {
        "tools": [
            {
                "name": tool["name"],
                "title": None,
                "description": tool["description"],
                "inputSchema": tool["input_schema"],
                "outputSchema": None,
                "icons": None,
                "annotations": None,
                "meta": None,
                "execution": None,
            }
            for tool in tools
        ]
    }


def read_tools(listing: Mapping[str, Any], *, without: Container[str] = ()) -> list[Json]:
    """Return the tools of an ORS ``ListToolsOutput``, each with a schema, except the names in *without*."""
    return [
        {
            "name": str(tool["name"]),
            "description": str(tool.get("description") or ""),
            "input_schema": tool.get("input_schema") or {"type": "object", "properties": {}},
        }
        for tool in listing.get("tools", ())
        if tool["name"] not in without
    ]


def text_of(blocks: Sequence[Block]) -> str:
    """Return the text of the text blocks, joined by line breaks."""
    return "\n".join([block.text for block in blocks if isinstance(block, TextBlock)])


def _observation(blocks: Sequence[Block], data: Any, metadata: Mapping[str, Any]) -> Json:
    observation: Json = {"text": text_of(blocks)}
    images = [block for block in blocks if isinstance(block, ImageBlock)]
    if images:
        observation["images"] = [{"data": image.data, "mime_type": image.mime_type} for image in images]
    own: Any = None
    if isinstance(data, dict):
        observation.update((key, value) for key, value in data.items() if key not in _OUTSIDE)
        own = observation.get("metadata")
    elif data is not None:
        observation["data"] = data
    observation["metadata"] = {**own, **metadata} if isinstance(own, dict) else dict(metadata)
    return observation


def _content(block: Block) -> Json:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text, "annotations": None, "meta": None}
    return {"type": "image", "data": block.data, "mimeType": block.mime_type, "annotations": None, "meta": None}


def _refusal(result: StepResult, action: Mapping[str, Any]) -> FrameError:
    message = result.error or "the action failed"
    if result.reason != "input_validation":
        return FrameError(Code.EXECUTION_ERROR, message, status=500)
    entries = _faults(message, action) or [{"type": "value_error", "loc": ["data"], "msg": message, "input": action}]
    told = "; ".join(f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in entries)
    return invalid(entries, f"Invalid action: {message if entries[0]['loc'] == ['data'] else told}")


def _faults(message: str, action: Mapping[str, Any]) -> list[Json]:
    """Parse the pydantic entries, as a Python literal, in an ORS error message. Return an empty list without such."""
    if not message.startswith(_FAULTS) or len(message) > _FAULTS_MAX_CHARS:
        return []
    try:
        listed = ast.literal_eval(message.removeprefix(_FAULTS))
        return [
            {
                "type": str(entry["type"]),
                "loc": [step if isinstance(step, int) else str(step) for step in entry["loc"]],
                "msg": str(entry["msg"]),
                "input": action.get(entry["loc"][0], action) if entry["loc"] else action,
            }
            for entry in listed
        ]
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError):
        return []


NO_EPISODE: Final = "no episode is open on this connection: send reset first"
_ENDED: Final = {
    CloseReason.EXPIRED.value: "it was idle for longer than the environment allows",
    CloseReason.WORKER_LOST.value: "its environment was lost: the worker died",
    CloseReason.OUT_OF_MEMORY.value: "its environment was lost: the worker ran out of memory",
    CloseReason.TIMEOUT.value: "its environment was lost: the worker did not answer a step in time",
    CloseReason.AUTHOR_FAULT.value: "its environment failed: the environment author's code raised an exception",
    CloseReason.SESSION_FAILED.value: "its environment failed: what the episode needs in its worker broke",
    CloseReason.OPEN_FAILED.value: "its reset failed",
    CloseReason.SHUTDOWN.value: "the gateway went away together with its workers",
    CloseReason.OPERATOR.value: "an operator ended it",
}
_CODES: Final[dict[type[GatewayError], Code]] = {
    SessionError: Code.SESSION_ERROR,
    SessionFailed: Code.SESSION_ERROR,
    UpstreamGone: Code.SESSION_ERROR,
    StoreUnavailable: Code.SESSION_ERROR,
    GatewayError: Code.EXECUTION_ERROR,
}
"""Codes by nearest ancestor class. A failure of a single request or step is ``EXECUTION_ERROR``."""


async def refusal(error: GatewayError, environment: Environment, store: WorkerStore) -> FrameError:
    """Return the protocol's error for *error*. For ``PoolExhausted``, *store* supplies the number of sessions."""
    status = status_of(error)
    if isinstance(error, PoolExhausted):
        return await full(error, environment, store)
    if isinstance(error, EnvironmentUnavailable):
        message = f"Environment factory {environment.name!r} failed to create instance. {error.detail}"
        return FrameError(
            Code.FACTORY_ERROR, message, status=status, closes=True, factory_name=environment.name, **marks(error)
        )
    if isinstance(error, RateLimited):
        again = marks(error)
        message = f"{error.detail}; again in {again['retry_after_s']} s"
        return FrameError(Code.EXECUTION_ERROR, message, status=status, **again)
    if isinstance(error, TaskInvalid):
        entries = [
            {"type": "value_error", "loc": ["data", "task", *_place(path)], "msg": message, "input": None}
            for path, message in error.problems
        ]
        return invalid(entries, f"Invalid task: {error.detail}")
    code = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    message = error.detail
    if isinstance(error, SessionNotFound):
        message = NO_EPISODE
    elif isinstance(error, SessionClosed):
        message = f"the episode has ended: {_ENDED.get(error.reason, error.reason)}; send reset to begin another one"
    return FrameError(code, message, status=status, **marks(error))


def marks(error: GatewayError) -> Json:
    """Return the machine-readable fields of an error frame: ``reason`` and ``retry_after_s``, if any."""
    found = {"reason": reason_of(error) or None, "retry_after_s": retry_after_s(error)}
    return {name: mark for name, mark in found.items() if mark is not None}


async def full(error: PoolExhausted, environment: Environment, store: WorkerStore) -> FrameError:
    """Return the error for an opening without a slot in time, with the number of sessions and its maximum."""
    most = environment.pool.slots * environment.pool.max_workers
    try:
        load = (await store.load()).get(environment.name)
        held = sum(entry.used for entry in load.workers) if load is not None else 0
    except StoreUnavailable:
        held = most
    message = (
        f"Server at capacity: {held}/{most} sessions active. Cannot accept new connections. "
        f"({error.detail}; come again later, or raise max_workers)"
    )
    return FrameError(
        Code.CAPACITY_REACHED,
        message,
        status=status_of(error),
        closes=True,
        active_sessions=held,
        max_sessions=most,
        **marks(error),
    )


def _place(path: str) -> list[str]:
    return [part for part in path.split(".") if part]
