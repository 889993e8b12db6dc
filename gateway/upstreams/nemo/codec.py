"""Writes requests of NeMo Gym's resources servers, and reads their responses.

A task is ``{"row": …}`` with a row of the server's data set: ``responses_create_params`` has the agent's input and
tools, and the server's verifier reads the other fields. A null ``seed`` of a row becomes the episode's seed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.environment import Environment
from gateway.core.episode import TOOL_ERROR, Action, StepResult, TextBlock
from gateway.core.errors import InvalidRequest, SessionFailed, UpstreamError
from gateway.core.json_text import dump, encode
from gateway.core.session import SessionSetup
from gateway.upstreams.action_mapping import Tool, Unreadable, example_of, written_call
from gateway.upstreams.json_replies import Json, check_secrets, read, refusal, reward_of

REPLY: Final = "reply"
"""Name of the tool for the agent's own texts, unless ``[actions] default_tool`` is another one."""
TEXT: Final = "text"
"""Its input field."""
RESERVED: Final = frozenset(
    ("seed_session", "close_session", "verify", "aggregate_metrics", "reset", "step", "close", "mcp")
)
"""Routes that are no tools."""
PARAMETERS: Final = "responses_create_params"
_DEPTH: Final = 8
"""Largest number of nested references in a schema that are followed."""
_NO_INPUT: Final = {"type": "object", "properties": {}}
_OF_ROW: Final = frozenset((PARAMETERS, "response", "reward", "mask_sample"))
_TEXTS: Final = frozenset(("input_text", "output_text", "text"))


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server's OpenAPI document says."""

    is_gym: bool
    """True if each action is a ``/step`` with a reward, else a ``/verify`` gives the only reward."""
    tools: tuple[Tool, ...]
    """Routes with a fixed name. Servers with one route for all tools list them in their rows only."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A seeded episode. A session's handle contains it."""

    cookie: str
    """Value of the ``Cookie`` header by which the server knows the episode."""
    row: Json
    observation: str = ""
    """The text of a ``/reset``."""
    closes: bool = False
    """True if the server has a ``/close``."""

    def handle(self) -> str:
        """Write the episode as JSON."""
        return encode({name: getattr(self, name) for name in self.__slots__})

    @classmethod
    def of(cls, handle: str) -> Begun:
        """Read what `handle` wrote. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for other text."""
        value = json.loads(handle)
        return cls(value["cookie"], value["row"], value["observation"], value["closes"])


# -- the server -----------------------------------------------------------------------------------------------------


def is_server(paths: Iterable[str]) -> bool:
    """Return True if the *paths* of an OpenAPI document are a resources server's, of either kind."""
    found = set(paths)
    return found >= {"/seed_session", "/verify"} or found >= {"/reset", "/step", "/aggregate_metrics"}


def server_info(document: Mapping[str, Any]) -> ServerInfo:
    """Read a server's OpenAPI *document*. Raises ``UpstreamError`` if it is no resources server."""
    paths = document.get("paths")
    if not isinstance(paths, Mapping) or not is_server(paths):
        raise UpstreamError("the server has neither /seed_session and /verify nor /reset and /step: no NeMo Gym server")
    tools = []
    for path, operations in paths.items():
        name = path.removeprefix("/")
        post = operations.get("post") if isinstance(operations, Mapping) else None
        if isinstance(post, Mapping) and name not in RESERVED and not set("/{}") & set(name):
            described = post.get("description")
            tools.append(Tool(name, _input_of(post, document), described if isinstance(described, str) else ""))
    return ServerInfo(is_gym="/verify" not in paths, tools=tuple(tools))


def _input_of(post: Mapping[str, Any], document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a route's body with its references resolved, because the document does not go along."""
    try:
        schema = post["requestBody"]["content"]["application/json"]["schema"]
    except (KeyError, TypeError):
        return _NO_INPUT
    found = _resolved(schema, document, _DEPTH)
    return found if isinstance(found, Mapping) else _NO_INPUT


def _resolved(value: Any, document: Mapping[str, Any], depth: int) -> Any:
    if isinstance(value, list):
        return [_resolved(one, document, depth) for one in value]
    if not isinstance(value, Mapping):
        return value
    reference = value.get("$ref")
    if not isinstance(reference, str):
        return {name: _resolved(one, document, depth) for name, one in value.items()}
    found: Any = document
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return _resolved(found, document, depth - 1) if depth and found is not None else {}


# -- the start ------------------------------------------------------------------------------------------------------


def row_of(setup: SessionSetup) -> Json:
    """Return the row of a task.

    Raises:
        InvalidRequest: The task has no valid row, or *setup* has values that the server's API can't express.
    """
    check_secrets(setup.secrets, "NeMo Gym's API")
    if setup.config:
        raise InvalidRequest(f"config: {', '.join(setup.config)} would be lost: a NeMo Gym server takes a row only")
    row = setup.spec.get("row")
    if not isinstance(row, Mapping):
        raise InvalidRequest(
            "row: the task of a NeMo Gym server has a row of its data set here (`gateway tasks import nemo-gym` writes "
            f"such tasks), not {type(row).__name__}"
        )
    parameters = row.get(PARAMETERS)
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(f"row.{PARAMETERS}: must be an object with the agent's input")
    if not isinstance(parameters.get("input"), str | list | None):
        raise InvalidRequest(f"row.{PARAMETERS}.input: must be a text or a list of messages")
    if "seed" in row and row["seed"] is None:
        return {**row, "seed": setup.seed}
    return dict(row)


def conversation(begun: Begun) -> Json:
    """Return the agent's first input as an AReaL observation of type ``messages``."""
    parameters = begun.row[PARAMETERS]
    said = parameters.get("input")
    messages = [_message(one) for one in said if isinstance(one, Mapping)] if isinstance(said, list) else []
    if isinstance(said, str):
        messages = [{"role": "user", "content": said}]
    if isinstance(how := parameters.get("instructions"), str) and how:
        messages.insert(0, {"role": "system", "content": how})
    if begun.observation:
        messages.append({"role": "user", "content": begun.observation})
    return {"type": "messages", "content": messages}


def _message(item: Mapping[str, Any]) -> Json:
    """Return an item of OpenAI's Responses API as a chat message. Earlier calls and their outputs are texts."""
    role = item.get("role")
    if not isinstance(role, str):
        role = "assistant" if item.get("type") == "function_call" else "user"
        return {"role": role, "content": encode(dict(item))}
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(one) for one in content]
    return {"role": "system" if role == "developer" else role, "content": content}


def _part(part: Any) -> Any:
    match part:
        case {"type": str(kind), "text": str(text)} if kind in _TEXTS:
            return {"type": "text", "text": text}
        case {"type": "input_image", "image_url": str(url)}:
            return {"type": "image_url", "image_url": {"url": url}}
    return part


def read_reset(body: bytes) -> tuple[str, bool]:
    """Return the first observation of a ``/reset``, and whether the server has a ``/close``."""
    value = read(body, "reset")
    info = value.get("info")
    closes = isinstance(info, Mapping) and info.get("supports_explicit_close") is True
    observation = value.get("observation")
    return observation if isinstance(observation, str) else "", closes


# -- tools ----------------------------------------------------------------------------------------------------------


def tools_of(row: Mapping[str, Any], told: ServerInfo, environment: Environment) -> tuple[Tool, ...]:
    """Return the tools of an episode: its row's, or the server's if the row has none, and the one for texts."""
    listed = row[PARAMETERS].get("tools")
    tools = [
        Tool(one["name"], one.get("parameters") or _NO_INPUT, one.get("description") or "")
        for one in (listed if isinstance(listed, list) else ())
        if isinstance(one, Mapping) and isinstance(one.get("name"), str)
    ]
    return (*(tools or told.tools), reply_tool(told, environment))


def reply_tool(told: ServerInfo, environment: Environment) -> Tool:
    """Return the tool for the agent's own texts."""
    name = environment.actions.default_tool or REPLY
    what = "Say something to the environment." if told.is_gym else "Give the final answer, which ends the episode."
    schema = {
        "type": "object",
        "properties": {TEXT: {"type": "string"}},
        "required": [TEXT],
        "additionalProperties": False,
    }
    return Tool(name, schema, what)


def tool_list(tools: Sequence[Tool], told: ServerInfo) -> bytes:
    """Return *tools*, of which the last is the one for texts, as an ORS tool list."""
    listed = [
        {"name": one.name, "description": one.description, "input_schema": dict(one.input_schema or _NO_INPUT)}
        for one in tools
    ]
    terminal = None if told.is_gym else listed[-1]
    return dump(
        {"tools": listed, "terminal_tool": terminal, "supports_score_group": False, "message_block_types": None}
    )


# -- steps ----------------------------------------------------------------------------------------------------------


def read_action(action: Action, tools: Sequence[Tool]) -> tuple[str, Mapping[str, Any]] | str:
    """Return the tool and the arguments that *action* calls, or the agent's text.

    Raises:
        Unreadable: The object names no tool.
    """
    reply = tools[-1]
    if action.text is not None:
        called = None if action.is_final else written_call(action.text, tools)
        if called is None:
            return action.text
        name, arguments = called
    elif action.name is not None:
        name, arguments = action.name, dict(action.arguments)
    else:
        name, arguments = reply.name, dict(action.fields or {})
    if name != reply.name:
        return name, arguments
    if arguments.keys() != {TEXT} or not isinstance(text := arguments[TEXT], str):
        raise Unreadable(f"The input of {name!r} is {encode(example_of(reply.input_schema))}, and nothing else.")
    return text


def call_items(name: str, arguments: Mapping[str, Any], number: int) -> list[Json]:
    """Return the call of a tool as output of a model; *number* makes its id unique in the episode."""
    return [
        {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": name,
            "arguments": encode(dict(arguments)),
            "status": "completed",
        }
    ]


def output_item(number: int, output: str) -> Json:
    """Return what the agent reads after the call of this *number*."""
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": output}


def message_items(text: str) -> list[Json]:
    """Return the agent's text as output of a model; an empty text gives no output."""
    if not text:
        return []
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return [{"type": "message", "id": "msg_0", "role": "assistant", "status": "completed", "content": content}]


def with_response(row: Mapping[str, Any], output: Sequence[Json]) -> Json:
    """Return a row with the agent's *output*, the body of ``/verify`` and ``/step``."""
    parameters = row[PARAMETERS]
    response = {
        "id": "resp_0",
        "created_at": time.time(),
        "model": "agent",
        "object": "response",
        "output": list(output),
        "parallel_tool_calls": bool(parameters.get("parallel_tool_calls", True)),
        "tool_choice": parameters.get("tool_choice") or "auto",
        "tools": parameters.get("tools") or [],
    }
    return {**row, "response": response}


def read_call(status: int, body: bytes) -> tuple[StepResult, str]:
    """Read the response of a tool. Return also its text, which an agent of NeMo Gym reads whatever the status is."""
    text = body.decode("utf-8", "replace")
    if 200 <= status < 300:
        data = None
        with contextlib.suppress(ValueError, RecursionError):
            data = json.loads(text)
        return StepResult(blocks=(TextBlock(text),), data=data), text
    reason = {404: "not_found", 405: "not_found", 422: "input_validation"}.get(status, TOOL_ERROR)
    return StepResult(error=refusal(status, body)[0], reason=reason), text


def read_verify(body: bytes, row: Mapping[str, Any]) -> StepResult:
    """Read the response of ``/verify``, which ends the episode. The server's own further fields are the metadata.

    Raises:
        AuthorFault: The reward is not a finite number.
        SessionFailed: The server says that the reward is no valid measurement.
        UpstreamError: The response is not a JSON object.
    """
    value = read(body, "verify")
    if value.get("mask_sample"):
        said = [str(value[name]) for name in ("failure_kind", "failure_reason") if value.get(name)]
        raise SessionFailed(f"the server's reward is not valid: {': '.join(said) or 'it masks the sample'}")
    own = {
        name: one
        for name, one in value.items()
        if one is not None and name not in _OF_ROW and not (name in row and row[name] == one)
    }
    return StepResult(reward=reward_of(value.get("reward")), finished=True, metadata=own or None, data=own or None)


def read_step(body: bytes) -> StepResult:
    """Read the response of ``/step``: the outputs of tools and the observation are texts. Raises as `read_verify`."""
    value = read(body, "step")
    info: Mapping[str, Any] = one if isinstance(one := value.get("info"), Mapping) else {}
    outputs = info.get("tool_outputs")
    texts = [one.get("output") for one in outputs if isinstance(one, Mapping)] if isinstance(outputs, list) else []
    texts.append(value.get("observation"))
    return StepResult(
        blocks=tuple(TextBlock(text) for text in texts if isinstance(text, str) and text),
        reward=reward_of(value.get("reward")),
        finished=value.get("terminated") is True or value.get("truncated") is True,
        metadata=dict(info) or None,
    )
