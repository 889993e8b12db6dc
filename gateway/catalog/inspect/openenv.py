"""OpenEnv servers, 0.2 and later; of the versions only ranges can be told, by what each brought."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.catalog.inspect import ors
from gateway.catalog.inspect.findings import Findings
from gateway.catalog.inspect.openenv_sockets import try_sockets
from gateway.catalog.inspect.probe import Server, one_line
from gateway.catalog.inspect.schema import fields, text_field
from gateway.core.environment import Protocol
from gateway.core.errors import ConfigError

METHOD_NOT_FOUND = -32601


def has_form(paths: frozenset[str]) -> bool:
    """Whether a server with these routes is one; WebSockets are in no OpenAPI document."""
    return paths >= {"/schema", "/metadata"} or (paths >= {"/reset", "/step", "/state"} and "/create" not in paths)


async def look(server: Server, openapi: Mapping[str, Any], *, environment: str = "") -> Findings:
    """Ask for everything that can be asked; open sockets of trial, as many as it takes to learn its capacity.

    Raises:
        ConfigError: it is of a version without WebSockets, or has another environment than *environment*.
        Unanswered: it ceased to answer.
    """
    schema = (await server.get("/schema")).object()
    if not schema:
        raise ConfigError(
            "an OpenEnv server of version 0.1: it has one state for all its clients, and no client of today can use "
            "it. Build it on openenv-core 0.2 or later"
        )
    metadata = (await server.get("/metadata")).object()
    names = _names((await server.get("/list_environments")).json())
    chosen = ors.choose(names, environment) if names or environment else ""
    remarks: list[str] = []
    splits = await ors.splits(server, chosen, remarks) if chosen else ()
    version = await _version(server, schema, has_task_api=bool(names))
    ready = "/health" if (await server.get("/health")).status == 200 else ""
    action = schema.get("action")
    listed = await _tools(server)
    # Last, for it is the hardest: a server that dies of many sessions has told all else by then.
    trial = await try_sockets(server, remarks, asks_tools=not listed and _is_tool_call(action))
    tools = listed or _named(trial.tools)
    remarks.append(
        "What a reset looks at cannot be asked: a seed and an episode id are assumed, and many images ignore them."
    )
    default, field = _default(tools, action)
    return Findings(
        protocol=Protocol.OPENENV,
        version=version,
        description=_description(metadata),
        environments=tuple(names),
        chosen=chosen,
        ready=ready,
        capacity=trial.capacity,
        splits=splits,
        tools=tuple(str(tool["name"]) for tool in tools),
        fields=() if tools else fields(action),
        default_tool=default,
        text_field=field,
        places=bool(splits),
        trouble=trial.trouble,
        remarks=tuple(remarks),
    )


def _names(listed: object) -> list[str]:
    return [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []


def _description(metadata: Mapping[str, Any]) -> str:
    said, name = metadata.get("description"), metadata.get("name")
    # What the server makes up where its author wrote nothing is no description.
    return one_line(said) if isinstance(said, str) and said != f"{name} environment" else ""


async def _version(server: Server, schema: Mapping[str, Any], *, has_task_api: bool) -> str:
    if "reset_observation" in schema:
        return "openenv 0.8 or later"
    if has_task_api:
        return "openenv 0.4.1 to 0.7"
    asked = await server.post("/mcp", _request("openenv/session/close"))
    if asked.status != 200:
        return "openenv-core 0.2.0"
    error = asked.object().get("error")
    if isinstance(error, dict) and error.get("code") == METHOD_NOT_FOUND:
        return "openenv-core 0.2.1"
    return "openenv-core 0.2.2 to openenv 0.4.0"


def _request(method: str) -> Mapping[str, Any]:
    return {"jsonrpc": "2.0", "method": method, "params": {}, "id": 1}


async def _tools(server: Server) -> list[Mapping[str, Any]]:
    """The tools of an MCP environment; it makes a throw-away environment for that, outside of its capacity."""
    answer = (await server.post("/mcp", _request("tools/list"))).object()
    return _named(answer.get("result"))


def _named(result: object) -> list[Mapping[str, Any]]:
    listed = result.get("tools") if isinstance(result, Mapping) else None
    if not isinstance(listed, list):
        return []
    return [tool for tool in listed if isinstance(tool, dict) and isinstance(tool.get("name"), str)]


def _is_tool_call(action: object) -> bool:
    """Whether an action of this schema is a call of a tool, as in environments on MCP; or says nothing of itself."""
    named = fields(action)
    return not named or {"tool_name", "arguments"} <= set(named)


def _default(tools: list[Mapping[str, Any]], action: object) -> tuple[str, str]:
    """The tool that a text means, and the field that it fills, where there is no choice."""
    if not tools:
        return "", "" if _is_tool_call(action) else text_field(action)
    if len(tools) > 1:
        return "", ""
    (tool,) = tools
    return str(tool["name"]), text_field(tool.get("inputSchema") or tool.get("input_schema"))
