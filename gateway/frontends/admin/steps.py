"""Shows logged calls as steps, in one form for all protocols of workers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core import sse


def steps_of(calls: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return the logged *calls* of an episode as JSON values.

    The first observation has number 0, and steps count from 1. A number that the worker gave a step shows how many
    before it are not recorded, and the numbers go on from it. A call that repeats an earlier one, by the id that the
    server gave it, has the earlier number and ``repeated``. A call whose result came as a stream has ``streamed``.
    """
    steps: list[dict[str, Any]] = []
    numbers: dict[str, int] = {}
    number = 0
    for began_at, seconds, operation, outcome, request, reply, error, faults, *counted in calls:
        step: dict[str, Any] = {"began_at": began_at, "seconds": round(seconds, 6), "operation": operation}
        step |= {"outcome": outcome, "action": action_of(request), **result_of(reply)}
        if isinstance(reply, bytes) and _is_stream(reply):
            step["streamed"] = True
        call_id = step.pop("call_id", "")
        if operation == "prompt":
            step["number"] = 0
        elif call_id in numbers:
            step |= {"number": numbers[call_id], "repeated": True}
        else:
            turn = counted[0] if any(counted) else step.get("turn")
            number = max(number + 1, turn) if isinstance(turn, int) else number + 1
            step["number"] = number
            if call_id:
                numbers[call_id] = number
        if error:
            step["error"] = error
        if faults:
            step["faults"] = [
                dict(zip(("kind", "place", "error", "traceback"), fault, strict=False)) for fault in faults
            ]
        steps.append(step)
    return steps


def action_of(request: Any) -> Any:
    """Return a logged request as a JSON value: a tool call has ``tool`` and ``input``."""
    if isinstance(request, bytes):
        request = _parsed(request)
    if not isinstance(request, Mapping):
        return request
    if isinstance(request.get("name"), str):
        return {"tool": request["name"], "input": request.get("input", request.get("arguments", {}))}
    if request.keys() <= {"type", "data"} and "type" in request:
        return {"frame": request["type"], "data": request.get("data")}
    return dict(request)


def result_of(reply: Any) -> dict[str, Any]:
    """Return a logged reply as JSON values: ``blocks``, ``reward``, ``finished``, ``error`` and others, if present."""
    if isinstance(reply, bytes):
        reply = _streamed(reply) if _is_stream(reply) else _parsed(reply)
    if reply is None:
        return {}
    if isinstance(reply, list):
        return {"blocks": [_block(block) for block in reply]}
    if not isinstance(reply, Mapping):
        return {"text": str(reply)}
    found = dict(reply)
    call_id = {"call_id": found.pop("call_id")} if "call_id" in found else {}
    if "ok" in found:  # an ORS result
        output = found.pop("output", None)
        found.pop("ok")
        found |= output if isinstance(output, Mapping) else {}
    if isinstance(found.get("data"), Mapping) and "type" in found:  # an OpenEnv frame
        data = dict(found["data"])
        found = {"frame": found["type"], "observation": data.pop("observation", None), **data}
        if "done" in found:
            found["finished"] = found.pop("done")
    if isinstance(found.get("blocks"), list):
        found["blocks"] = [_block(block) for block in found["blocks"]]
    return {name: value for name, value in {**found, **call_id}.items() if value is not None}


def _is_stream(reply: bytes) -> bool:
    return reply[:64].lstrip().startswith((b"event:", b"data:", b":"))


def _streamed(body: bytes) -> Any:
    """Return the result of an event stream, with ``call_id``; an incomplete stream has its ``error``."""
    call_id, kind, text, turn = sse.read_result(body)
    found = {"error": text} if kind == "error" else _parsed(text.encode())
    result = found if isinstance(found, Mapping) else {"text": text}
    return {**result, "call_id": call_id, **({"turn": turn} if turn else {})}


def _block(block: Any) -> Any:
    """Return a block of any protocol as ``text``, or as ``image`` and ``mime_type``."""
    if not isinstance(block, Mapping):
        return block
    detail = {} if block.get("detail") is None else {"detail": block["detail"]}
    if block.get("type") == "image":
        return {"image": block.get("data"), "mime_type": block.get("mimeType"), **detail}
    if block.get("type") == "text":
        return {"text": block.get("text"), **detail}
    return dict(block)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body.decode(errors="replace")
