"""Builds an environment's self-description over OpenEnv's HTTP: metadata, JSON Schemas and an OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway import __version__
from gateway.core.environment import Environment
from gateway.frontends.openenv.frames import Json

API_VERSION: Final = "1.0.0"
"""Version of the protocol's HTTP API, as in its servers and its validator."""

_METADATA: Final[Json] = {"type": "object", "additionalProperties": True, "title": "Metadata"}
_REWARD: Final[Json] = {
    "anyOf": [{"type": "boolean"}, {"type": "integer"}, {"type": "number"}, {"type": "null"}],
    "default": None,
    "title": "Reward",
}
_OBSERVATION: Final[Json] = {
    "type": "object",
    "title": "Observation",
    "additionalProperties": True,
    "properties": {
        "done": {"type": "boolean", "default": False, "title": "Done"},
        "reward": _REWARD,
        "metadata": _METADATA,
        "text": {"type": "string", "title": "Text"},
        "images": {
            "type": "array",
            "title": "Images",
            "items": {
                "type": "object",
                "properties": {"data": {"type": "string"}, "mime_type": {"type": "string"}},
                "required": ["data", "mime_type"],
            },
        },
    },
}
_STATE: Final[Json] = {
    "type": "object",
    "title": "State",
    "additionalProperties": True,
    "properties": {
        "episode_id": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Episode Id"},
        "step_count": {"type": "integer", "minimum": 0, "default": 0, "title": "Step Count"},
        "task_id": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "Task Id"},
    },
}


def metadata(environment: Environment) -> Json:
    """Return the body of ``GET /metadata``."""
    return {
        "name": environment.name,
        "description": environment.description or f"{environment.name} environment",
        "readme_content": None,
        "version": __version__,
        "author": None,
        "documentation_url": None,
    }


def schemas(tools: Sequence[Json], default_tool: str | None) -> Json:
    """Return the body of ``GET /schema``.

    An action is an input of the default tool, a call of a tool by its name, or the request to list the tools. Without
    *default_tool* a single tool is the default. Of several tools, none is.
    """
    return {
        "action": _action(tools, default_tool),
        "observation": _OBSERVATION,
        "state": _STATE,
        "reset_observation": _OBSERVATION,
    }


def _action(tools: Sequence[Json], default_tool: str | None) -> Json:
    calls = [
        {
            "type": "object",
            "title": f"Call {tool['name']}",
            "additionalProperties": False,
            "properties": {
                "type": {"const": "call_tool"},
                "tool_name": {"const": tool["name"]},
                "arguments": tool["input_schema"],
                "metadata": _METADATA,
            },
            "required": ["type", "tool_name"],
        }
        for tool in tools
    ]
    listing = {
        "type": "object",
        "title": "List tools",
        "additionalProperties": False,
        "properties": {"type": {"const": "list_tools"}, "metadata": _METADATA},
        "required": ["type"],
    }
    plain = [tool["input_schema"] for tool in tools if tool["name"] == default_tool or len(tools) == 1]
    shown = plain[0].get("properties", {}) if plain else {}
    return {"type": "object", "title": "Action", "properties": shown, "anyOf": [*plain, *calls, listing]}


def openapi(environment: Environment) -> Json:
    """Return the body of ``GET /openapi.json``: the paths and their purposes."""
    paths: dict[str, Json] = {}
    for method, path, summary in _PATHS:
        paths.setdefault(path, {})[method] = _operation(summary, path)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": f"OpenEnv environment {environment.name}",
            "version": API_VERSION,
            "description": "Episodes are played over the WebSocket /ws, and tools called at /mcp.",
        },
        "paths": paths,
    }


_PATHS: Final = (
    ("get", "/health", "Whether the server lives"),
    ("get", "/metadata", "Name and description of the environment"),
    ("get", "/schema", "JSON Schemas of actions, observations and states"),
    ("get", "/ws", "A WebSocket: reset, step and state of one episode after the other"),
    ("post", "/reset", "Begin an episode; without X-Session-ID a throw-away one"),
    ("post", "/step", "Act; without X-Session-ID in a throw-away episode"),
    ("get", "/state", "The state of the episode"),
    ("post", "/mcp", "Tools over JSON-RPC"),
    ("get", "/list_environments", "Names of the environments"),
    ("get", "/{env_name}/splits", "Splits of the tasks"),
    ("post", "/{env_name}/tasks", "All tasks of a split"),
    ("post", "/{env_name}/num_tasks", "How many tasks a split has"),
    ("post", "/{env_name}/task", "One task"),
    ("post", "/{env_name}/task_range", "Tasks from start up to, not including, stop"),
)


def _operation(summary: str, path: str) -> Json:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {"200": {"description": "Success", "content": {"application/json": {"schema": {}}}}},
    }
    if "{env_name}" in path:
        operation["parameters"] = [{"name": "env_name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
