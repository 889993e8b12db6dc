"""Maps actions to tool calls, for servers that accept tool calls only.

An agent may call a tool, send an object, or write a text. For an object the gateway has to choose a tool. A text may be
a call of a tool as JSON. For any other text the gateway has to choose a tool and its input field. ``[actions]`` of an
environment.toml decides where the tools' schemas do not.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
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
    """A text that is no action. The agent reads the message, which shows a form that is one, and tries again."""


def tool_call(action: Action, environment: Environment, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]]:
    """Return the name of the tool that *action* calls, and the arguments.

    An action that names its tool passes unchanged, because the server itself checks whether the tool exists. A text may
    contain a call as JSON: ``{"name": …, "arguments": …}``, alone, in a fenced block, or in ``<tool_call>``.

    Raises:
        Unreadable: The text is neither a call nor an input of the only tool.
        InvalidRequest: The object names no tool, and there are several.
    """
    if action.name is not None:
        return action.name, dict(action.arguments)
    if action.text is None:
        return _default(environment, tools, "an object that names no tool").name, dict(action.fields or {})
    if (call := written_call(action.text, tools)) is not None:
        return call
    if not environment.actions.default_tool and len(tools) != 1:
        raise Unreadable(f"This is no call of a tool. {_form_of_calls(tools)}")
    tool = _default(environment, tools, "a text")
    return tool.name, text_argument(action.text, tool.input_schema, environment.actions.text_field)


def text_argument(text: str, schema: Mapping[str, Any] | None, wanted: str) -> dict[str, Any]:
    """Return the tool input that *text* represents, for a tool whose input has *schema*.

    The text fills the field *wanted* (``actions.text_field``). If *wanted* is empty, it fills the only required field,
    or if the schema requires none, the only field. The field is a string, or a number, a boolean or an enumeration that
    the text names. Otherwise the text has to be a JSON object with the fields.

    Raises:
        Unreadable: The text is neither a value of that field nor a JSON object.
    """
    form = schema or {}
    field = wanted or _only_field(form)
    if field:
        value = _value_of(text, _properties(form).get(field, {"type": "string"}), form)
        if value is not None:
            return {field: value}
    fields = _object(text)
    if fields is None:
        raise Unreadable(f"This is no action. Reply with a JSON object such as {_json(example_of(form))}")
    return fields


def example_of(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return an input with the required fields of *schema*, or with all if it requires none."""
    form = schema or {}
    properties = _properties(form)
    required = [name for name in form.get("required") or () if name in properties]
    return {str(name): _example(properties[name], form) for name in required or properties}


def instructions(tools: Sequence[Tool], environment: Environment, *, terminal: str = "") -> str:
    """Return what an agent that acts by texts has to know: the form of an action, and the tools with their schemas.

    It is empty if there are no tools. *terminal* is the server's tool for final texts, if it has one.
    """
    if not tools:
        return ""
    lines = [f"You act by calling tools. Reply with JSON such as {_json(_call_of(tools[0]))}."]
    name = environment.actions.default_tool or terminal or (tools[0].name if len(tools) == 1 else "")
    default = next((tool for tool in tools if tool.name == name), None)
    if default is not None and (field := environment.actions.text_field or _only_field(default.input_schema or {})):
        lines.append(f"Any other reply is the input {field!r} of {name!r}.")
    for tool in tools:
        lines.append(f"{tool.name}: {tool.description}".rstrip(": "))
        lines.append(f"input: {_json(_shown(tool))}")
    return "\n".join(lines)


def _call_of(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "arguments": example_of(tool.input_schema)}


def _shown(tool: Tool) -> Mapping[str, Any]:
    return {name: value for name, value in (tool.input_schema or {}).items() if name not in ("title", "$schema")}


def _example(field: object, schema: Mapping[str, Any]) -> Any:
    for one in _choices(field, schema):
        if "enum" in one or "const" in one:
            return one["const"] if "const" in one else next(iter(one["enum"]), None)
        match _types(one):
            case ["integer" | "number", *_]:
                return one.get("minimum", 0)
            case ["boolean", *_]:
                return True
            case ["array", *_]:
                return []
            case ["object", *_]:
                return {}
            case ["string", *_]:
                return "…"
    return "…"


_CALLS: Final = re.compile(r"<tool_call>(.*?)</tool_call>|```(?:json|tool_call)?[ \t]*\n(.*?)```", re.S)
"""Where models write calls as JSON."""


def written_call(text: str, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
    """Return the call that a text contains, or None.

    Raises:
        Unreadable: It contains several calls.
    """
    found = [found[1] if found[1] is not None else found[2] for found in _CALLS.finditer(text)] or [text]
    calls = [call for one in found if (call := _as_call(_object(one), tools)) is not None]
    if len(calls) > 1:
        raise Unreadable(f"Only one tool can be called at a time, and the text has {len(calls)} calls.")
    return calls[0] if calls else None


def _as_call(given: Mapping[str, Any] | None, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
    """Return *given* as a call if it has its form. The only tool's own input may have it, too, and is not a call."""
    if given is None or not isinstance(name := given.get("name"), str) or given.keys() - {"name", "arguments", "id"}:
        return None
    if len(tools) == 1 and name != tools[0].name and "name" in _properties(tools[0].input_schema or {}):
        return None
    arguments = given.get("arguments", {})
    if isinstance(arguments, str):  # as OpenAI's API writes them
        arguments = _object(arguments)
    return (name, dict(arguments)) if isinstance(arguments, Mapping) else None


def _form_of_calls(tools: Sequence[Tool]) -> str:
    if not tools:
        return "The environment offers no tools."
    return (
        f"Reply with JSON such as {_json(_call_of(tools[0]))}. The tools are {_named([tool.name for tool in tools])}."
    )


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


def _only_field(schema: Mapping[str, Any]) -> str:
    properties = _properties(schema)
    candidates = [name for name in schema.get("required") or () if name in properties] or list(properties)
    return str(candidates[0]) if len(candidates) == 1 else ""


def _value_of(text: str, field: object, schema: Mapping[str, Any]) -> Any:
    """Return the value of *field* that *text* names; None if it names none."""
    said = text.strip()
    for one in _choices(field, schema):
        if "enum" in one or "const" in one:
            values = [one["const"]] if "const" in one else one["enum"]
            if (named := next((value for value in values if str(value) == said), None)) is not None:
                return named
            if "string" in _types(one):
                return text  # the server refuses it, and names the values
            continue
        for kind in _types(one):
            if kind == "string":
                return text
            with contextlib.suppress(ValueError, RecursionError):
                value = json.loads(said)
                if (kind == "boolean" and isinstance(value, bool)) or (
                    not isinstance(value, bool)
                    and ((kind == "integer" and isinstance(value, int)) or (kind == "number" and _is_number(value)))
                ):
                    return value
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _choices(field: object, schema: Mapping[str, Any], depth: int = _DEPTH) -> Iterator[Mapping[str, Any]]:
    """Yield the schemas that a field's value may have, with references and choices resolved."""
    if not isinstance(field, Mapping) or not depth:
        return
    if isinstance(reference := field.get("$ref"), str):
        yield from _choices(_referred(reference, schema), schema, depth - 1)
        return
    choices = field.get("anyOf") or field.get("oneOf") or field.get("allOf")
    if isinstance(choices, list) and "type" not in field:
        for choice in choices:
            yield from _choices(choice, schema, depth - 1)
        return
    if not isinstance(field.get("enum", []), list):
        return
    yield field


def _types(field: Mapping[str, Any]) -> list[str]:
    kind = field.get("type")
    return [one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str) and one != "null"]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
