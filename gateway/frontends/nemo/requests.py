"""Parses requests of NeMo Gym's clients: paths, cookies, and the bodies of seed, tool, verify and close requests.

An invalid body raises `Unprocessable`, whose entries have FastAPI's form. Unknown fields are ignored, because a row of
a data set has fields of other programs.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from gateway.core.curriculum import PREFIX
from gateway.core.environment import Environment
from gateway.core.errors import WrongEnvironment
from gateway.core.json_text import compact, parse
from gateway.tasks.resolver import TaskRequest
from gateway.upstreams.ors_bodies import Unprocessable

Object = dict[str, Any]
ROLLOUT_PREFIX: Final = "ng-rollout"
"""First segment of ``/ng-rollout/{rollout}/{route}``, which clients send if they record their rollouts."""
METADATA: Final = "verifier_metadata"
_PORT: Final = re.compile(r":[0-9]{1,5}\Z")
_SHOWN_CHARS: Final = 100


class _Task(BaseModel):
    """The task of a row, in its ``verifier_metadata``."""

    model_config = ConfigDict(extra="ignore")

    environment: StrictStr | None = None
    id: StrictStr | None = Field(default=None, min_length=1)
    split: StrictStr | None = None
    index: StrictInt | None = None
    seed: StrictInt | None = None
    config: Object | None = None

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if self.id is None and (self.split is None or self.index is None):
            raise ValueError("must name the task: give id, or split and index, as `gateway tasks export` writes them")
        return self


@dataclass(frozen=True, slots=True)
class Seed:
    """The parsed body of ``seed_session``."""

    by_id: TaskRequest | None
    """The request for the task with the row's id. None: the row names it by split and index only."""
    by_place: TaskRequest | None
    """The request for the task at the row's split and index. None: the row names it by its id only."""
    seed: int | None
    config: Object | None
    resources_session_id: str
    """The name that an environment server gave the session. Empty: the session's name is only in its cookie."""
    fingerprint: str
    """A digest of the body, by which the gateway recognizes a repeated request."""


def read_object(body: bytes) -> Object:
    """Return a body, which must be a JSON object. An empty body is an empty object, as a tool without arguments gets.

    Raises:
        Unprocessable: The body is not JSON, or not an object.
    """
    try:
        value = parse(body) if body.strip() else {}
    except ValueError as error:
        raise Unprocessable(_entry("json_invalid", (), f"JSON decode error: {error}")) from None
    if not isinstance(value, dict):
        raise Unprocessable(_entry("dict_type", (), "Input should be a valid dictionary", value))
    return value


def read_seed(body: Object, environment: Environment) -> Seed:
    """Return the task and the options of a row, which is the body, or the field ``task_data`` of an environment server.

    Raises:
        Unprocessable: The row names no task, or a field is invalid.
        WrongEnvironment: The row belongs to another environment.
    """
    name, row = "", body
    place: tuple[str, ...] = (METADATA,)
    if "resources_session_id" in body:
        name = _field(body, "resources_session_id", str)
        row, place = _field(body, "task_data", dict), ("task_data", METADATA)
    if METADATA not in row:
        message = f"Field required: the row's {METADATA} must name the task, as `gateway tasks export` writes it"
        raise Unprocessable(_entry("missing", place, message))
    try:
        task = _Task.model_validate(row[METADATA])
    except ValidationError as error:
        entries = (_entry(one["type"], (*place, *one["loc"]), one["msg"], one["input"]) for one in error.errors())
        raise Unprocessable(*entries) from None
    if task.environment not in (None, environment.name, *environment.env_types):
        raise WrongEnvironment(
            f"{'.'.join(place)}.environment: the row belongs to environment {str(task.environment)[:_SHOWN_CHARS]!r}, "
            f"not to {environment.name!r}"
        )
    by_id = TaskRequest(ids=(task.id,), split=task.split, usual_split=environment.openenv.split) if task.id else None
    is_drawn = by_id is not None and (task.split or "").startswith(PREFIX)  # each request for a place draws a task
    is_placed = task.split is not None and task.index is not None and not is_drawn
    by_place = TaskRequest(split=task.split, index=task.index) if is_placed else None
    return Seed(by_id, by_place, task.seed, task.config, name, hashlib.sha256(compact(body)).hexdigest())


def read_verify(body: Object) -> str:
    """Return the agent's final text in the body of ``verify``, or an empty text if it ended with a tool call.

    Raises:
        Unprocessable: A field that the response repeats is missing, or the agent's response has no list of outputs.
    """
    _field(body, "responses_create_params", dict)
    output = _field(_field(body, "response", dict), "output", list, ("response",))
    for item in reversed(output):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message" and item.get("role") == "assistant":
            return _text(item.get("content"))
        if kind != "reasoning":
            return ""
    return ""


def read_rewards(body: Object) -> list[float]:
    """Return the rewards of the valid samples in the body of ``aggregate_metrics``. Raises `Unprocessable`."""
    rows = _field(body, "verify_responses", list)
    valid = [row for row in rows if isinstance(row, dict) and not row.get("mask_sample")]
    return [float(row["reward"]) for row in valid if isinstance(row.get("reward"), (int, float))]


def _field(body: Object, name: str, kind: type[Any], place: Sequence[str] = ()) -> Any:
    value = body.get(name)
    if isinstance(value, kind) and (value or kind is not str):
        return value
    word = "non-empty string" if kind is str else kind.__name__
    code = "missing" if name not in body else f"{kind.__name__}_type"
    raise Unprocessable(_entry(code, (*place, name), f"Input should be a valid {word}", value))


def _entry(code: str, place: Sequence[str | int], message: str, value: object = None) -> Object:
    return {"type": code, "loc": ["body", *place], "msg": message, "input": value}


def _text(content: object) -> str:
    """Return the text of a message: a string, or its text parts as the one text that they are parts of."""
    if isinstance(content, str):
        return content.strip()
    parts = content if isinstance(content, list) else ()
    texts = (part.get("text") for part in parts if isinstance(part, Mapping))
    return "".join(text for text in texts if isinstance(text, str)).strip()


def place_of(path: str) -> tuple[str, tuple[str, ...]]:
    """Return the environment's name and the route of *path*, both empty if missing.

    NeMo Gym makes a server's address from a host and a port. With the host ``HOST:8080/nemo/math`` and the port 1 it
    requests ``/nemo/math:1/verify``.
    """
    match [segment for segment in path.split("/") if segment][1:]:
        case [name, prefix, _, *rest] if prefix == ROLLOUT_PREFIX:
            pass
        case [name, *rest]:
            pass
        case _:
            return "", ()
    return _PORT.sub("", name).lower(), tuple(rest)


def cookies(headers: Sequence[str], name: str) -> Iterator[str]:
    """Yield the values of all cookies called *name* in ``Cookie`` headers. Clients may send several."""
    for header in headers:
        for pair in header.split(";"):
            key, equals, value = pair.strip().partition("=")
            if equals and key == name:
                yield value.strip('"')
