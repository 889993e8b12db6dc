"""Find the actions of an image, and translate an agent's action into a ``step``.

A Gym image has one action, which the gateway offers as the tool ``step``. An image whose actions are tool calls offers
its tools. A step calls them as well, because only steps return rewards.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.episode import Action, StepResult
from gateway.core.errors import UpstreamError
from gateway.core.json_text import compact
from gateway.upstreams.action_mapping import Tool, text_argument, tool_call, written_call
from gateway.upstreams.openenv.frames import INTERNAL, request
from gateway.upstreams.openenv.http import Http, Place, RpcError, remember

STEP: Final = "step"
_DESCRIPTION: Final = "Take one action in the environment."
_TOOL_ACTIONS: Final = frozenset(("Action", "CallToolAction", "ListToolsAction"))
"""Action classes that accept tool calls. A server with any other class rejects a tool call as malformed."""
_RUNS_EPISODES: Final = frozenset(("reset", "step", "state", "close"))
"""Names reserved for the episode's control. A tool of the image with such a name is not offered."""
KNOWN_MAX: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The actions of one image revision."""

    has_tools: bool
    """Whether actions are tool calls. If not, there is one tool, ``step``, whose input is the action."""
    tools: tuple[Tool, ...]
    listed: Mapping[str, Any] | None = None
    """The image's own answer to MCP's ``tools/list``; None if its actions are no tool calls."""

    @property
    def listing(self) -> bytes:
        """The tools in the format of ORS' ``ListToolsOutput``."""
        return compact(
            {
                "tools": [
                    {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
                    for tool in self.tools
                ]
            }
        )


class Forms:
    """Queries the form of each image revision once."""

    def __init__(self, http: Http) -> None:
        self._http = http
        self._known: OrderedDict[str, Form] = OrderedDict()

    async def of(self, at: Place, digest: str) -> Form:
        """Return the form of the image with *digest*; query the worker at *at* if it is not cached."""
        return self._known.get(digest) or remember(self._known, digest, await self._asked(at), KNOWN_MAX)

    async def _asked(self, at: Place) -> Form:
        status, schemas = await self._http.get(at, "/schema")
        schema = schemas.get("action") if isinstance(schemas, Mapping) else None
        if status != 200 or not isinstance(schema, Mapping):
            raise UpstreamError(f"the worker answered {status} to /schema, and no schema of its actions")
        if _is_tool_call(schema) and (await self._http.abilities(at)).has_mcp:
            try:
                listed = await self._http.call(at, "tools/list")
                return Form(has_tools=True, tools=_read_tools(listed.get("tools")), listed=listed)
            except RpcError as error:
                if error.rpc_code != INTERNAL or "does not support MCP" not in error.detail:
                    raise
        step = Tool(name=STEP, description=_DESCRIPTION, input_schema=without_metadata(schema))
        return Form(has_tools=False, tools=(step,))


def _is_tool_call(schema: Mapping[str, Any]) -> bool:
    properties = schema.get("properties")
    return schema.get("title") in _TOOL_ACTIONS or (isinstance(properties, Mapping) and "tool_name" in properties)


def _read_tools(listed: Any) -> tuple[Tool, ...]:
    if not isinstance(listed, list):
        raise UpstreamError("the worker's list of tools can't be read")
    return tuple(
        Tool(
            name=tool["name"],
            description=str(tool.get("description") or ""),
            input_schema=_schema(tool.get("inputSchema") or tool.get("input_schema")),
        )
        for tool in listed
        if isinstance(tool, Mapping) and isinstance(tool.get("name"), str) and tool["name"] not in _RUNS_EPISODES
    )


def _schema(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"type": "object", "properties": {}}


def without_metadata(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return an action's schema without ``metadata``, a field that all actions inherit and no agent fills."""
    properties = schema.get("properties")
    cleaned = dict(schema)
    if isinstance(properties, Mapping):
        cleaned["properties"] = {name: value for name, value in properties.items() if name != "metadata"}
    required = schema.get("required")
    if isinstance(required, list):
        cleaned["required"] = [name for name in required if name != "metadata"]
    return cleaned


def step_frame(action: Action, environment: Environment, form: Form) -> bytes | StepResult:
    """Return the request frame of *action*, or the error result of a call to an unknown tool.

    Raises:
        InvalidRequest: The action can't be mapped to a tool and its input.
    """
    data = _tool_data(action, environment, form) if form.has_tools else _gym_data(action, environment, form)
    return data if isinstance(data, StepResult) else request("step", data)


def _gym_data(action: Action, environment: Environment, form: Form) -> Mapping[str, Any] | StepResult:
    if action.fields is not None:
        return action.fields
    name, arguments = action.name, action.arguments
    if action.text is not None:
        call = written_call(action.text, form.tools)
        if call is None:
            return text_argument(action.text, form.tools[0].input_schema, environment.actions.text_field)
        name, arguments = call
    return arguments if name in (STEP, environment.actions.default_tool) else _unknown(str(name))


def _tool_data(action: Action, environment: Environment, form: Form) -> Mapping[str, Any] | StepResult:
    fields = action.fields
    if fields is not None and fields.get("type") in ("call_tool", "list_tools"):
        return fields  # already the data of a step
    if action.name in _RUNS_EPISODES:
        return _unknown(str(action.name))  # other unknown names may be newer than the list, so the server decides
    name, arguments = tool_call(action, environment, form.tools)
    return {"type": "call_tool", "tool_name": name, "arguments": arguments}


def _unknown(name: str) -> StepResult:
    return StepResult(error=f"Unknown tool: {name!r}", reason="not_found")
