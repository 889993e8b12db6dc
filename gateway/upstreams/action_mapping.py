"""Maps actions to tool calls, for servers that accept tool calls only.

An agent may call a tool, send an object, or write a text. For an object the gateway has to choose a tool. For a text it
also has to choose the input field. ``[actions]`` of an environment.toml decides where the tools' schemas do not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.episode import Action
from gateway.core.errors import InvalidRequest

_DEPTH: Final = 8
"""Largest number of nested references and choices that are followed, because a schema may refer to itself."""
_SHOWN: Final = 20
"""Largest number of names in an error message."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as a server lists it."""

    name: str
    input_schema: Mapping[str, Any] | None = None
    """JSON Schema of the tool's input. None if the tool takes no input."""
    description: str = ""


class Unreadable(InvalidRequest):
    """A text that is not an input of its tool. The mistake is the agent's, because the schema lists the fields."""


def tool_call(action: Action, environment: Environment, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]]:
    """Return the name of the tool that *action* calls, and the arguments.

    An action that names its tool passes unchanged, because the server itself checks whether the tool exists.

    Raises:
        InvalidRequest: The tool or the field is ambiguous. The message says what to write into environment.toml.
    """
    if action.name is not None:
        return action.name, dict(action.arguments)
    tool = _default(environment, tools, "a text" if action.text is not None else "an object that names no tool")
    if action.text is None:
        return tool.name, dict(action.fields or {})
    return tool.name, text_argument(action.text, tool.input_schema, environment.actions.text_field)


def text_argument(text: str, schema: Mapping[str, Any] | None, wanted: str) -> dict[str, Any]:
    """Return the tool input that *text* represents, for a tool whose input has *schema*.

    The text fills the field *wanted* (``actions.text_field``). If *wanted* is empty, the text fills the only required
    field, if that field is a string. If the schema requires no field, the text fills the only field, if it is a string.
    If no field qualifies, the text has to be a JSON object with the fields.

    Raises:
        InvalidRequest: No field qualifies, and the text is not a JSON object. The message says what to write into
            environment.toml. The class is `Unreadable` if the schema has fields: a JSON object of them is valid.
    """
    field = wanted or _text_field(schema or {})
    if field:
        return {field: text}
    fields = _object(text)
    if fields is None:
        names = list(_properties(schema or {}))
        kind = Unreadable if names else InvalidRequest
        raise kind(
            f"the gateway cannot decide which field a text fills ({_named(names)}): send a JSON object of them, or "
            "set text_field in [actions] of environment.toml"
        )
    return fields


def _default(environment: Environment, tools: Sequence[Tool], what: str) -> Tool:
    wanted = environment.actions.default_tool
    if wanted:
        return next((tool for tool in tools if tool.name == wanted), Tool(wanted))
    if len(tools) == 1:
        return tools[0]
    raise InvalidRequest(
        f"{what} does not say which of several tools to call ({_named([tool.name for tool in tools])}): call one by "
        "its name, or set default_tool in [actions] of environment.toml"
    )


def _text_field(schema: Mapping[str, Any]) -> str:
    properties = _properties(schema)
    required = [name for name in schema.get("required") or () if name in properties]
    candidates = required or list(properties)
    if len(candidates) == 1 and _is_text(properties[candidates[0]], schema):
        return str(candidates[0])
    return ""


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _is_text(field: object, schema: Mapping[str, Any], depth: int = _DEPTH) -> bool:
    if not isinstance(field, Mapping) or not depth:
        return False
    kind = field.get("type")
    if kind is not None:
        return kind == "string" or (isinstance(kind, list) and "string" in kind)
    reference = field.get("$ref")
    if isinstance(reference, str):
        return _is_text(_referred(reference, schema), schema, depth - 1)
    choices = field.get("anyOf") or field.get("oneOf") or field.get("allOf") or ()
    return any(_is_text(choice, schema, depth - 1) for choice in choices)


def _referred(reference: str, schema: Mapping[str, Any]) -> object:
    found: object = schema
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _object(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _named(names: Sequence[str]) -> str:
    if not names:
        return "none are known"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more
