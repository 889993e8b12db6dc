"""Bodies of ``/call``, checked as the reference servers check them: closed models, errors in the protocol's exact form.

Differences from the reference servers: an action may also be a ``text`` or an ``action``, as in our own images.

Results and blocks, written as ORS answers have them: compact JSON, every key of the standard always there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gateway.core.episode import Action, Block, StepResult, TextBlock


class Unprocessable(Exception):
    """A body that is not what it should be; ``entries`` is the answer's ``detail``."""

    def __init__(self, *entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.entries = entries


class _Call(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    input: dict[str, Any]
    task_id: str | None = None
    text: None = None
    action: None = None


class _Spelled(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str | None = None
    input: dict[str, Any] | None = None
    text: str | None = None
    action: dict[str, Any] | None = None
    task_id: str | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = (self.name is not None or self.input is not None, self.text is not None, self.action is not None)
        if sum(given) != 1:
            raise ValueError("Provide exactly one of name with input, text, or action")
        return self


def read_call(body: bytes, content_type: str) -> tuple[Action, str | None]:
    """Read what is to be done, and the task id of a call that is asked for again.

    Raises:
        Unprocessable: with the entries that the reference servers answer.
    """
    value = read_object(body, content_type)
    try:
        if value.get("text") is None and value.get("action") is None:
            call = _Call.model_validate(value)
            return Action(name=call.name, arguments=call.input), call.task_id
        spelled = _Spelled.model_validate(value)
    except ValidationError as error:
        raise Unprocessable(*(_entry(dict(entry)) for entry in error.errors(include_url=False))) from None
    if spelled.text is not None:
        return Action(text=spelled.text), spelled.task_id
    return Action(fields=spelled.action or {}), spelled.task_id


def read_object(body: bytes, content_type: str) -> dict[str, Any]:
    """Read a body that has to be a JSON object. Raises as `read_call`."""
    if not body:
        raise Unprocessable({"type": "missing", "loc": ["body"], "msg": "Field required", "input": None})
    value = _parsed(body) if _is_json(content_type) else body.decode("utf-8", "replace")
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise Unprocessable({"type": "model_attributes_type", "loc": ["body"], "msg": message, "input": value})
    return value


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise _malformed(error.pos, error.msg) from None
    except UnicodeDecodeError as error:
        raise _malformed(error.start, "not UTF-8") from None
    except (RecursionError, ValueError) as error:
        raise _malformed(0, str(error)) from None


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    answer = {"type": entry["type"], "loc": ["body", *entry["loc"]], "msg": entry["msg"], "input": entry["input"]}
    if "ctx" in entry:
        answer["ctx"] = {key: {} if isinstance(value, Exception) else value for key, value in entry["ctx"].items()}
    return answer


def _malformed(position: int, message: str) -> Unprocessable:
    entry = {"type": "json_invalid", "loc": ["body", position], "msg": "JSON decode error", "input": {}}
    return Unprocessable({**entry, "ctx": {"error": message}})


_PLAIN: Final = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, allow_nan=False)
_ESCAPED: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def dump(value: Any) -> bytes:
    """Write *value* as the reference servers do: text raw, a number that is none as null."""
    try:
        return _PLAIN.encode(value).encode()
    except UnicodeEncodeError:  # a lone surrogate, which UTF-8 can't carry and JSON can
        return _ESCAPED.encode(value).encode()
    except ValueError:
        return dump(_finite(value))


def block(value: Block) -> dict[str, Any]:
    """A block in the protocol's words."""
    if isinstance(value, TextBlock):
        return {"text": value.text, "detail": value.detail, "type": "text"}
    return {"data": value.data, "mimeType": value.mime_type, "detail": value.detail, "type": "image"}


def blocks(values: Sequence[Block]) -> list[dict[str, Any]]:
    """A list of blocks."""
    return [block(value) for value in values]


def result(value: StepResult) -> bytes:
    """What came of a call (``RunToolOutput``); a structured observation is added where there is one."""
    if value.error is not None:
        return refusal(value.error, value.reason)
    output: dict[str, Any] = {
        "blocks": blocks(value.blocks),
        "metadata": value.metadata,
        "reward": None if value.reward is None else float(value.reward),
        "finished": value.finished,
    }
    if value.data is not None:
        output["data"] = value.data
    return dump({"ok": True, "output": output})


def refusal(error: str, reason: str) -> bytes:
    """Why a call has no output."""
    return dump({"ok": False, "error": error, "reason": reason or None})


def messages(values: Sequence[Block]) -> bytes:
    """A prompt as a conversation of one message."""
    return dump([{"role": "user", "blocks": blocks(values), "detail": None}])


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
