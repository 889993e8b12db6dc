"""Reads and validates the bodies of ORS requests, and writes the bodies of ORS responses.

Validation and its errors have exactly the form of the reference servers. The only difference: a call may also contain a
``text`` or an ``action``, as in the gateway's own images. Results and blocks are written as compact JSON with every key
of the standard.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gateway.core.episode import Action, Block, StepResult, TextBlock
from gateway.core.errors import InvalidRequest
from gateway.core.json_text import dump

_NOT_ONE_SOURCE = "Provide either task_spec or both split and index, not both/neither"
_HALF_A_PAIR = "split and index must both be provided together"

PLATFORM_SECRETS = frozenset(("api_key", "OPENREWARD_API_KEY"))
"""Names of the secrets under which one SDK adds the caller's own platform key to every session."""

Model = TypeVar("Model", bound=BaseModel)


class Unprocessable(Exception):
    """A request body is not valid. ``entries`` is the ``detail`` of the 422 response."""

    def __init__(self, *entries: Mapping[str, Any]) -> None:
        super().__init__(entries)
        self.entries = entries


def validate(model: type[Model], body: bytes, content_type: str | None) -> Model:
    """Parse a request body and validate it as *model*.

    Raises:
        Unprocessable: The body is not valid. The entries are those of the reference servers.
    """
    return _validated(model, read_object(body, content_type))


def _validated(model: type[Model], value: Mapping[str, Any]) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise Unprocessable(*(_entry(dict(entry)) for entry in error.errors(include_url=False))) from None


def read_object(body: bytes, content_type: str | None) -> dict[str, Any]:
    """Read a body that has to be a JSON object. Raises ``Unprocessable``, as `validate` does."""
    if not body:
        raise Unprocessable({"type": "missing", "loc": ["body"], "msg": "Field required", "input": None})
    value = parse_json(body) if is_json(content_type) else body.decode("utf-8", "replace")
    if not isinstance(value, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise Unprocessable({"type": "model_attributes_type", "loc": ["body"], "msg": message, "input": value})
    return value


def parse_json(body: bytes) -> Any:
    """Parse a JSON body.

    Raises:
        Unprocessable: The body is not JSON. The offset counts characters, as in the reference servers.
    """
    try:
        return json.loads(body)
    except json.JSONDecodeError as error:
        raise _json_invalid(error.pos, error.msg) from None
    except UnicodeDecodeError as error:
        raise _json_invalid(error.start, "not UTF-8") from None
    except (RecursionError, ValueError) as error:
        raise _json_invalid(0, str(error)) from None


def is_json(content_type: str | None) -> bool:
    """Return True if a content type, with or without parameters, is JSON."""
    kind = (content_type or "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    answer = {"type": entry["type"], "loc": ["body", *entry["loc"]], "msg": entry["msg"], "input": entry["input"]}
    if "ctx" in entry:
        answer["ctx"] = {key: {} if isinstance(value, Exception) else value for key, value in entry["ctx"].items()}
    return answer


def _json_invalid(position: int, message: str) -> Unprocessable:
    entry = {"type": "json_invalid", "loc": ["body", position], "msg": "JSON decode error", "input": {}}
    return Unprocessable({**entry, "ctx": {"error": message}})


# -- models ----------------------------------------------------------------------------------------------------------


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class CreateSession(_Closed):
    """Body of ``/create``. The fields ``seed`` and ``config`` are the gateway's additions to the standard."""

    env_name: str | None = None
    task_spec: dict[str, Any] | None = None
    split: str | None = None
    index: int | None = None
    secrets: dict[str, str] | None = None
    toolset_name: str | None = None
    seed: int | None = None
    config: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _exactly_one_source(self) -> Self:
        given = (self.split is not None, self.index is not None)
        if self.task_spec is None and given != (True, True):
            raise ValueError(_NOT_ONE_SOURCE)
        if self.task_spec is not None and given == (True, True):
            raise ValueError(_NOT_ONE_SOURCE)
        if self.task_spec is not None and any(given):
            raise ValueError(_HALF_A_PAIR)
        return self


class OfSplit(_Closed):
    """Body of ``/tasks`` and ``/num_tasks``."""

    split: str


class OfTask(_Closed):
    """Body of ``/task``."""

    split: str
    index: int


class OfRange(_Closed):
    """Body of ``/task_range``."""

    split: str
    start: int | None = None
    stop: int | None = None


class _Call(_Closed):
    name: str
    input: dict[str, Any]
    task_id: str | None = None
    text: None = None
    action: None = None


class _Spelled(_Closed):
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
    """Read a body of ``/call``: the action, and the task id if the request resumes an earlier call.

    Raises:
        Unprocessable: The body is not valid. The entries are those of the reference servers.
    """
    value = read_object(body, content_type)
    if value.get("text") is None and value.get("action") is None:
        call = _validated(_Call, value)
        return Action(name=call.name, arguments=call.input), call.task_id
    spelled = _validated(_Spelled, value)
    if spelled.text is not None:
        return Action(text=spelled.text), spelled.task_id
    return Action(fields=spelled.action or {}), spelled.task_id


def read_secrets(header: str | None, body: Mapping[str, str] | None) -> dict[str, str]:
    """Merge the secrets of the ``X-Secrets`` header and of the body. The header takes precedence.

    Raises:
        InvalidRequest: The header is not base64 of ``{NAME: {"value": …}}``. The message never shows its content.
    """
    found = dict(body or {})
    if header:
        try:
            wrapped = json.loads(base64.b64decode(header, validate=True))
            found.update({str(name): _value(entry) for name, entry in wrapped.items()})
        except (binascii.Error, ValueError, AttributeError, TypeError, KeyError, RecursionError):
            raise InvalidRequest('X-Secrets is not base64 of {NAME: {"value": …}}') from None
    return found


def without_platform_keys(secrets: Mapping[str, str]) -> dict[str, str]:
    """Return *secrets* without `PLATFORM_SECRETS`, the caller's platform key that one SDK adds to every session."""
    return {name: value for name, value in secrets.items() if name not in PLATFORM_SECRETS}


def _value(entry: Any) -> str:
    value = entry["value"] if isinstance(entry, dict) else entry
    if not isinstance(value, str):
        raise TypeError
    return value


# -- responses ------------------------------------------------------------------------------------------------------


def block(value: Block) -> dict[str, Any]:
    """Return a block in the form of ORS."""
    if isinstance(value, TextBlock):
        return {"text": value.text, "detail": value.detail, "type": "text"}
    return {"data": value.data, "mimeType": value.mime_type, "detail": value.detail, "type": "image"}


def blocks(values: Sequence[Block]) -> list[dict[str, Any]]:
    """Return a list of blocks in the form of ORS."""
    return [block(value) for value in values]


def result(value: StepResult) -> bytes:
    """Write the result of a call (``RunToolOutput``). A structured observation is added as ``data``."""
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
    """Write the result of a call that has an error instead of an output."""
    return dump({"ok": False, "error": error, "reason": reason or None})


def messages(values: Sequence[Block]) -> bytes:
    """Write a prompt as a conversation with one message, from the user."""
    return dump([{"role": "user", "blocks": blocks(values), "detail": None}])
