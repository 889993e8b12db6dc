"""Parsing and checking of request bodies and secrets. Refusals have the texts of the reference servers."""

import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from envserver.content import (
    GroupCandidate,
    ImageBlock,
    Message,
    ReasoningBlock,
    TextBlock,
    ToolCallBlock,
    ToolResultBlock,
)
from envserver.errors import Refused
from envserver.http.messages import Request
from envserver.schema.validators import (
    AnyValue,
    Bool,
    Choice,
    DictOf,
    Fault,
    Field,
    Int,
    ListOf,
    Loc,
    Node,
    Shape,
    Str,
    fault,
    optional,
)

NO_BODY = None
"""For the checks, an absent body equals ``null``."""
_NOT_A_MODEL = ("model_attributes_type", "Input should be a valid dictionary or object to extract fields from")
_REFERENCE = {"id", "env_type"}
"""Keys of a task that only names a task of the server."""


@dataclass(frozen=True, slots=True)
class Create:
    """A checked ``/create`` request. Either *task_spec* or both *split* and *index* are set."""

    env_name: str | None = None
    task_spec: dict[str, Any] | None = None
    split: str | None = None
    index: int | None = None
    secrets: dict[str, str] | None = None
    toolset_name: str | None = None
    seed: int | None = None
    config: dict[str, Any] | None = None
    # From the headers.
    secrets_header: str | None = None
    lease: str = ""
    """Lease that separates sessions with the same id. A session with the same id and another lease is orphaned, so the
    server ends it."""
    note: str = ""
    """Text for the list of sessions, which the trainer can read after losing its own state. The last retry's text is
    kept."""
    tells_faults: bool = False
    """Whether answers carry the faults of the author's code, with their tracebacks."""
    is_whole: bool = False
    """Whether *task_spec* is the whole task, even if it consists of an id only. Else, such a task is a reference."""
    digest: int = 0
    """Digest of the request, including its secrets. A retry with the same digest gets the existing session."""

    @property
    def is_reference(self) -> bool:
        """Whether *task_spec* names a task that the server has to find, and contains nothing else."""
        spec = self.task_spec
        if spec is None or self.is_whole or len(spec) > len(_REFERENCE):
            return False
        return isinstance(spec.get("id"), str) and spec.keys() <= _REFERENCE

    @property
    def is_inline(self) -> bool:
        """Whether the trainer wrote the task itself into its request."""
        return self.task_spec is not None and not self.is_whole and not self.is_reference

    def __post_init__(self) -> None:
        has_reference = self.split is not None and self.index is not None
        if (self.task_spec is not None) == has_reference:
            raise ValueError("Provide either task_spec or both split and index, not both/neither")
        if (self.split is None) != (self.index is None):
            raise ValueError("split and index must both be provided together")


class Action(NamedTuple):
    """A requested action in one of three spellings, or ``score`` for a group to judge."""

    spelling: Literal["name", "text", "action", "score"]
    name: str
    """Name of the tool. Empty in the spellings ``text`` and ``action``."""
    given: Any
    """The tool's input, the text, the gym-style dict, or the candidates."""


class CallBody(NamedTuple):
    """A checked ``/call`` or ``/score_group`` body."""

    action: Action
    task_id: str | None


def parse(request: Request) -> Any:
    """Parse the body's JSON. Without a JSON content type, return the body as text, which no model accepts.

    Raises:
        Refused: 422: The JSON is malformed. 400: The body is unreadable.
    """
    if not request.body:
        return NO_BODY
    if not _is_json(request.headers.get(b"content-type", b"")):
        return request.body.decode(errors="replace")
    try:
        return json.loads(request.body)
    except json.JSONDecodeError as error:
        entry = fault("json_invalid", ("body", error.pos), "JSON decode error", {})
        raise Refused(422, [{**entry, "ctx": {"error": error.msg}}]) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, an endless number, or endless nesting
        raise Refused(400, "There was an error parsing the body") from error


def read(request: Request, shape: Shape) -> Any:
    """Parse and check the body.

    Raises:
        Refused: See `parse` and `checked`.
    """
    return checked(shape, parse(request))


def checked(shape: Shape, value: Any) -> Any:
    """Return the result of *shape* for a parsed body.

    Raises:
        Refused: 422: The body does not fit. The detail lists all faults.
    """
    faults: list[Fault] = []
    if value is NO_BODY:
        raise Refused(422, [fault("missing", ("body",), "Field required", None)])
    made = shape.check(value, ("body",), faults)
    if faults:
        raise Refused(422, faults)
    return made


def call_of(value: Any) -> CallBody:
    is_spelled = isinstance(value, dict) and (value.get("text") is not None or value.get("action") is not None)
    body: CallBody = checked(_SPELLED_CALL if is_spelled else _CALL, value)
    return body


def secrets_of(header: str | None, body: dict[str, str] | None) -> dict[str, str]:
    """Merge the secrets of the header and the body. The header takes precedence.

    The header is base64 of ``{"NAME": {"value": "…", "allowed_domains": ["host", …]}}``. No error message contains a
    secret: a malformed header is only called malformed.

    Raises:
        Refused: 400: The header is malformed.
    """
    merged = dict(body or {})
    if header:
        merged.update(_header_secrets(header))
    return merged


def _header_secrets(header: str) -> dict[str, str]:
    try:
        entries = json.loads(binascii.a2b_base64(header, strict_mode=True))
        values = {str(name): entry["value"] for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Refused(400, "malformed X-Secrets header") from None
    if not all(isinstance(value, str) for value in values.values()):
        raise Refused(400, "malformed X-Secrets header")
    return values


def _is_json(content_type: bytes) -> bool:
    kind = content_type.split(b";", 1)[0].strip().lower()
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _call(*, name: str, input: dict[str, Any], task_id: str | None = None, **_: None) -> CallBody:
    return CallBody(Action("name", name, input), task_id)


def _score(*, candidates: list[GroupCandidate], task_id: str | None = None) -> CallBody:
    return CallBody(Action("score", "score_group", candidates), task_id)


def _spelled_call(
    *,
    name: str | None = None,
    input: Any = None,
    text: str | None = None,
    action: dict[str, Any] | None = None,
    task_id: str | None = None,
) -> CallBody:
    if sum((name is not None or input is not None, text is not None, action is not None)) != 1:
        raise ValueError("Provide exactly one of name with input, text, or action")
    if text is not None:
        return CallBody(Action("text", "", text), task_id)
    return CallBody(Action("action", "", action), task_id)


class _Tagged:
    """An object whose ``type`` selects its shape."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = shapes

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [shape.schema() for shape in self._shapes.values()]}

    def check(self, value: Any, loc: Loc, faults: list[Fault], *, lax: bool = True) -> Any:
        tag = value.get("type") if isinstance(value, dict) else None
        shape = self._shapes.get(tag) if isinstance(tag, str) else None
        if shape is None:
            text = f"Input should be an object whose 'type' is one of {', '.join(map(repr, self._shapes))}"
            faults.append(fault("union_tag_invalid", loc, text, value))
            return value
        return shape.check({key: item for key, item in value.items() if key != "type"}, loc, faults, lax=lax)


def _closed(*fields: Field, make: Any = dict) -> Shape:
    return Shape(fields, make, closed=True, not_object=_NOT_A_MODEL)


def _maybe(name: str, node: Node) -> Field:
    return Field(name, optional(node), required=False)


_OBJECT = DictOf(AnyValue())
SPLIT = _closed(Field("split", Str()))
TASK = _closed(Field("split", Str()), Field("index", Int()))
IDS = _closed(Field("ids", ListOf(Str())))
TASK_RANGE = _closed(Field("split", Str()), _maybe("start", Int()), _maybe("stop", Int()))
CREATE = _closed(
    _maybe("env_name", Str()),
    _maybe("task_spec", _OBJECT),
    _maybe("split", Str()),
    _maybe("index", Int()),
    _maybe("secrets", DictOf(Str())),
    _maybe("toolset_name", Str()),
    _maybe("seed", Int()),
    _maybe("config", _OBJECT),
    make=Create,
)
_UNUSED = (_maybe("text", Str()), _maybe("action", _OBJECT))
_CALL = _closed(Field("name", Str()), Field("input", _OBJECT), _maybe("task_id", Str()), *_UNUSED, make=_call)
_SPELLED_CALL = _closed(
    _maybe("name", Str()), _maybe("input", _OBJECT), _maybe("task_id", Str()), *_UNUSED, make=_spelled_call
)
_DETAIL = _maybe("detail", _OBJECT)
_PLAIN_BLOCKS = {
    "text": _closed(Field("text", Str()), _DETAIL, make=TextBlock),
    "image": _closed(
        Field("data", Str()),
        Field("mimeType", Str()),
        _DETAIL,
        make=lambda *, data, mimeType, detail=None: ImageBlock(data, mimeType, detail),
    ),
}
_BLOCKS = _PLAIN_BLOCKS | {
    "reasoning": _closed(Field("text", Str()), _maybe("signature", Str()), _DETAIL, make=ReasoningBlock),
    "tool_call": _closed(
        Field("id", Str()), Field("name", Str()), Field("input", _OBJECT), _DETAIL, make=ToolCallBlock
    ),
    "tool_result": _closed(
        Field("tool_call_id", Str()),
        Field("blocks", ListOf(_Tagged(_PLAIN_BLOCKS))),
        Field("is_error", Bool(), required=False),
        _DETAIL,
        make=ToolResultBlock,
    ),
}
_ROLES = Choice([(role, role) for role in ("system", "user", "assistant")], "literal_error")
_MESSAGE = _closed(Field("role", _ROLES), Field("blocks", ListOf(_Tagged(_BLOCKS))), _DETAIL, make=Message)
_CANDIDATE = _closed(Field("messages", ListOf(_MESSAGE)), _maybe("metadata", _OBJECT), make=GroupCandidate)
SCORE_GROUP = _closed(Field("candidates", ListOf(_CANDIDATE)), _maybe("task_id", Str()), make=_score)
