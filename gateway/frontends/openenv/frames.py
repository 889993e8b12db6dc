"""Models and errors of OpenEnv frames. Refusals have exactly the wording of OpenEnv servers.

A frame is JSON text without an id. The n-th reply belongs to the n-th request, so each request gets exactly one reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, field_validator
from pydantic_core import PydanticCustomError

Json = dict[str, Any]


_MARKS: Final = ("reason", "retry_after_s")


class Code(StrEnum):
    """Codes of error frames. Clients show them and distinguish errors by them."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    EXECUTION_ERROR = "EXECUTION_ERROR"
    CAPACITY_REACHED = "CAPACITY_REACHED"
    FACTORY_ERROR = "FACTORY_ERROR"
    SESSION_ERROR = "SESSION_ERROR"


class FrameError(Exception):
    """Ends one request with an error. The socket stays open unless ``closes`` is True."""

    def __init__(self, code: Code, message: str, *, status: int, closes: bool = False, **more: Any) -> None:
        """*status* is the HTTP status. *more* holds fields of the body next to message and code."""
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.closes = closes
        self.more = more

    @property
    def entries(self) -> Sequence[Mapping[str, Any]]:
        """Pydantic's error entries, one for each invalid field. Empty: the error concerns no particular field."""
        entries: Sequence[Mapping[str, Any]] = self.more.get("errors", ())
        return entries

    @property
    def marks(self) -> Json:
        """Reason and retry delay, the fields that HTTP and JSON-RPC errors also contain."""
        return {name: self.more[name] for name in _MARKS if name in self.more}


def invalid(entries: Sequence[Mapping[str, Any]], message: str = "Invalid message") -> FrameError:
    """Return the error for a malformed request. *entries* state type, place, reason and input of each fault."""
    return FrameError(Code.VALIDATION_ERROR, message, status=422, errors=list(entries))


# -- requests -------------------------------------------------------------------------------------------------------


class ResetRequest(BaseModel):
    """Fields of a reset that the gateway reads. All other keys are the environment's configuration."""

    model_config = ConfigDict(extra="allow")

    task: Any = None
    """A task's id, or a task as an object."""
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
        """Fields that the gateway does not read itself."""
        return self.model_extra or {}


class ToolCall(BaseModel):
    """Action that calls a tool by its name."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["call_tool"] = "call_tool"
    tool_name: StrictStr
    arguments: dict[str, Any] = Field(default_factory=dict)
    metadata: dict[str, Any] = Field(default_factory=dict)


class ListTools(BaseModel):
    """Action that requests the list of tools."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["list_tools"] = "list_tools"
    metadata: dict[str, Any] = Field(default_factory=dict)


Model = TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], value: Any, *place: str, explains: bool = True) -> Model:
    """Validate *value* as a *model*. *place* is its path in the request.

    Stock clients show users only the message, so it states the first fault if *explains* is True. Otherwise it is
    a stock server's message.

    Raises:
        FrameError: The value is invalid. The error states the place of each fault.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        entries: list[Json] = [{**entry, "loc": [*place, *entry["loc"]]} for entry in error.errors()]
    first = f"{'.'.join(map(str, entries[0]['loc']))}: {entries[0]['msg']}"
    raise invalid(entries, f"Invalid message: {first}" if explains else "Invalid message")
