"""Bodies of ``/call``, checked as the reference servers check them: closed models, errors in the protocol's exact form.

Differences from the reference servers: an action may also be a ``text`` or an ``action``, as in our own images.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gateway.core.episode import Action


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
