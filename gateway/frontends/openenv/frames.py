"""OpenEnv's frames: requests read and refused in the exact words of its servers, replies written.

A frame is JSON text. There are no ids: the n-th reply belongs to the n-th request, so each request gets exactly one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from gateway.core.json_text import dump, parse

Json = dict[str, Any]


_MARKS: Final = ("reason", "retry_after_s")


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Code(StrEnum):
    """Codes of error frames; clients show them, and tell by them what went wrong."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


class FrameError(Exception):
    """Ends one request with an error; the socket stays open unless ``closes``."""

    def __init__(self, code: Code, message: str, *, status: int, closes: bool = False, **more: Any) -> None:
        """*status* is what it is over HTTP; *more* stands beside message and code."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.closes = closes
        self.more = more

    @property
    def entries(self) -> Sequence[Mapping[str, Any]]:
        """What is wrong, place by place, as pydantic says it; empty where it is no matter of places."""
        entries: Sequence[Mapping[str, Any]] = self.more.get("errors", ())
        return entries

    @property
    def marks(self) -> Json:
        """What stands beside message and code over HTTP and JSON-RPC too: why it failed, and when to come again."""
        return {name: self.more[name] for name in _MARKS if name in self.more}


def invalid(entries: Sequence[Mapping[str, Any]], message: str = "Invalid message") -> FrameError:
    """A request of the wrong form: *entries* tell type, place, reason and input of each fault."""
    return FrameError(Code.VALIDATION_ERROR, message, status=422, errors=list(entries))


# -- requests -------------------------------------------------------------------------------------------------------


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Reset(_Closed):
    type: Literal["reset"]
    data: dict[str, Any] = Field(default_factory=dict)


class _Step(_Closed):
    type: Literal["step"]
    data: dict[str, Any]


class _State(_Closed):
    type: Literal["state"]


class _Close(_Closed):
    type: Literal["close"]


class _Mcp(_Closed):
    type: Literal["mcp"]
    data: dict[str, Any]


_MODELS: Final[dict[str, type[_Closed]]] = {
    "reset": _Reset,
    "step": _Step,
    "state": _State,
    "close": _Close,
    "mcp": _Mcp,
}
_WITH_DATA: Final = frozenset(("reset", "step", "mcp"))


def read_frame(text: str | None) -> tuple[str, Json]:
    """Read one request: its type, and its data, ``{}`` where it has none.

    Args:
        text: None stands for a binary frame.

    Raises:
        FrameError: what it is, in a stock server's words.
    """
    if text is None:
        raise FrameError(Code.SESSION_ERROR, "'text'", status=400, closes=True)
    try:
        frame = parse(text)
    except ValueError as error:
        raise FrameError(Code.INVALID_JSON, f"Invalid JSON: {error}", status=400) from None
    if not isinstance(frame, dict):
        kind = type(frame).__name__
        raise FrameError(Code.SESSION_ERROR, f"{kind!r} object has no attribute 'get'", status=400, closes=True)
    kind = frame.get("type", "")
    if not isinstance(kind, str) or kind not in _MODELS:
        raise FrameError(Code.UNKNOWN_TYPE, f"Unknown message type: {_short(kind)}", status=400)
    if kind in _WITH_DATA and len(frame) == 2:  # the way of all good requests; pydantic explains the others
        data = frame.get("data")
        if isinstance(data, dict):
            return kind, data
    read = validated(_MODELS[kind], frame, explains=False)
    return kind, getattr(read, "data", {})


class ResetRequest(BaseModel):
    """What a reset says to the gateway; all other keys are the environment's configuration."""

    model_config = ConfigDict(extra="allow")

    task: Any = None
    """A task's id, or a task."""
    split: StrictStr | None = None
    index: StrictInt | None = None
    seed: StrictInt | None = None
    episode_id: StrictStr | None = Field(default=None, max_length=255)

    @field_validator("task")
    @classmethod
    def _id_or_object(cls, task: Any) -> Any:
        if task is not None and not isinstance(task, (str, dict)):
            raise PydanticCustomError("task_type", "Input should be a task's id, a task as an object, or null")
        return task

    @field_validator("index")
    @classmethod
    def _no_second_choice(cls, index: int | None, info: Any) -> int | None:
        if index is not None and info.data.get("task") is not None:
            raise PydanticCustomError("task_and_index", "Only one of task and index may be given")
        return index

    @property
    def config(self) -> Json:
        """What the gateway has no meaning for."""
        return self.model_extra or {}


class ToolCall(BaseModel):
    """The action that calls a tool by its name."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["call_tool"] = "call_tool"
    tool_name: StrictStr
    arguments: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class ListTools(BaseModel):
    """The action that asks for the tools."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["list_tools"] = "list_tools"
    metadata: dict[str, Any] = Field(default_factory=dict)


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], value: Any, *place: str, explains: bool = True) -> Model:
    """Make *value* a *model*; *place* is where in the request it stands.

    Stock clients show their users the message only, so it *explains* the first fault, unless a stock server's is
    wanted.

    Raises:
        FrameError: it is none, with each fault's place.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        entries: list[Json] = [{**entry, "loc": [*place, *entry["loc"]]} for entry in error.errors()]
    first = f"{'.'.join(map(str, entries[0]['loc']))}: {entries[0]['msg']}"
    raise invalid(entries, f"Invalid message: {first}" if explains else "Invalid message")


def _short(value: object) -> str:
    return str(value)[:200]


# -- replies --------------------------------------------------------------------------------------------------------


def observed(observation: Json, *, reward: float | None = None, done: bool = False) -> Json:
    """What `reset` and `step` answer; the observation's metadata stands beside it too, unless there is none."""
    data: Json = {"observation": observation, "reward": reward, "done": done}
    if observation.get("metadata"):
        data["metadata"] = observation["metadata"]
    return data


def frame(kind: str, data: Json) -> str:
    """One reply as text. What JSON has no word for becomes null; nothing that UTF-8 can't hold is left in it."""
    try:
        return _ENCODER.encode({"type": kind, "data": data})
    except ValueError:
        return dump({"type": kind, "data": data}).decode()


def error_frame(refused: FrameError) -> str:
    """The reply to a request that was refused."""
    return frame("error", {"message": refused.message, "code": refused.code.value, **refused.more})
