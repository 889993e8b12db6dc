"""Inspects OpenEnv servers of version 0.2 and later.

The features of a server show only a range of versions. Each session is a WebSocket. To find the server's capacity, the
inspection opens sessions until the server refuses one.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.catalog.inspect import ors
from gateway.catalog.inspect.findings import (
    Capacity,
    Finding,
    Findings,
    default_of,
    fields,
    names_of,
    one_line,
    text_field,
    tools_of,
)
from gateway.catalog.inspect.probe import TRIAL_S, Probe, ProbeSocket, Unanswered
from gateway.core.environment import ObservationMapping, ServerProtocol
from gateway.core.episode import TextBlock
from gateway.core.errors import ConfigError, GatewayError
from gateway.upstreams.action_mapping import example_of
from gateway.upstreams.openenv.actions import without_metadata
from gateway.upstreams.openenv.observations import step_result

METHOD_NOT_FOUND = -32601


def has_form(paths: frozenset[str]) -> bool:
    """Return True if the routes are those of an OpenEnv server. OpenAPI documents do not list its WebSockets."""
    return paths >= {"/schema", "/metadata"} or (paths >= {"/reset", "/step", "/state"} and "/create" not in paths)


async def look(server: Probe, openapi: Mapping[str, Any], *, environment: str = "") -> Findings:
    """Query all that the server reports, and open trial sockets up to its capacity.

    Raises:
        ConfigError: The server's version has no WebSockets, or the server does not have *environment*.
        Unanswered: The server stopped answering.
    """
    schema = await _schema(server)
    metadata = (await server.get("/metadata")).object()
    names = names_of((await server.get("/list_environments")).json())
    chosen = ors.choose(names, environment) if names or environment else ""
    remarks = [ors.several(names, chosen)] if len(names) > 1 else []
    splits = await ors.splits(server, chosen, remarks) if chosen else ()
    version = await _version(server, schema, has_task_api=bool(names))
    ready = "/health" if (await server.get("/health")).status == 200 else ""
    action = schema.get("action")
    listed = await _tools(server)
    # Last, because a server may crash with many sessions. All other answers are there by then.
    asks_tools = not listed and _is_tool_call(action)
    capacity, tried = await try_sockets(server, remarks, action=action, tools=listed, asks_tools=asks_tools)
    tools = listed or tried.tools
    remarks.append(
        "What a reset looks at cannot be asked: a seed and an episode id are assumed, and many images ignore them."
    )
    has_effect, is_same = _effect_of_seeds(tried.seeds)
    if not is_same:
        remarks.append("Two resets with the same seed differ, so that its episodes cannot be reproduced.")
    default, text = default_of(tools)
    if not tools and not _is_tool_call(action):
        text = text_field(action)
    return Findings(
        protocol=ServerProtocol.OPENENV,
        version=version,
        description=_description(metadata),
        environments=tuple(names),
        chosen=chosen,
        ready=ready,
        capacity=capacity,
        splits=splits,
        tools=tuple(str(tool["name"]) for tool in tools),
        fields=() if tools else fields(action),
        default_tool=default,
        text_field=text,
        seeds_do_nothing=not has_effect,
        places=bool(splits),
        reset_s=tried.took_s.get("reset"),
        step_s=tried.took_s.get("step"),
        observed=tuple(sorted(tried.observed)),
        reads=tuple(tried.reads),
        trouble=tried.trouble,
        remarks=tuple(remarks),
    )


def _effect_of_seeds(seen: Sequence[str]) -> tuple[bool, bool]:
    """Return whether another seed changed what was seen, and whether the same seed showed the same."""
    if len(seen) < len(SEEDS):
        return True, True
    one, again, other = seen
    return one != other, one == again


async def _schema(server: Probe) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = (await server.get("/schema")).object()
    if not schema:
        raise ConfigError(
            "an OpenEnv server without /schema, which serves over HTTP only, as version 0.1 does: it has one state for "
            "all its clients, and the gateway does not support it. Build it on openenv-core 0.2 or later"
        )
    return schema


def _description(metadata: Mapping[str, Any]) -> str:
    said, name = metadata.get("description"), metadata.get("name")
    # Without an author's description, the server generates "NAME environment", which is ignored.
    return one_line(said) if isinstance(said, str) and said != f"{name} environment" else ""


async def _version(server: Probe, schema: Mapping[str, Any], *, has_task_api: bool) -> str:
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


async def _tools(server: Probe) -> list[Mapping[str, Any]]:
    """Return the tools of an MCP environment. The server creates a temporary environment outside of its capacity."""
    answer = (await server.post("/mcp", _request("tools/list"))).object()
    return tools_of(answer.get("result"))


def _is_tool_call(action: object) -> bool:
    """Return True if the schema is that of a tool call, as in MCP environments, or names no fields."""
    named = fields(action)
    return not named or {"tool_name", "arguments"} <= set(named)


MOST = 64
"""Maximum number of trial sockets. Each may start a browser."""
FREED_S = 5.0
"""Maximum seconds of wait until the places of closed sockets are free again."""
PAUSE_S = 0.05
READ_CHARS = 400
"""Characters that are shown of what an agent reads."""
SEEDS = (1, 1, 2)
"""Seeds of resets that show whether a seed does anything, and whether it does the same again."""
LONE = Capacity(1, Finding.ASSUMED)
"""Default capacity of OpenEnv servers: one session."""


class _Full(Unanswered):
    """The server refused a session because all its places are taken."""

    def __init__(self, capacity: int) -> None:
        super().__init__(f"it holds {capacity} sessions")
        self.capacity = Capacity(capacity, Finding.BY_SERVER)


@dataclass(slots=True)
class TriedEpisode:
    """What one episode on one socket showed."""

    trouble: str = ""
    """The reason why it failed; empty: it did not."""
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    """The tools of an environment that lists them on its sockets only."""
    observed: set[str] = field(default_factory=set)
    """Paths of the fields in its observations."""
    reads: list[tuple[str, str]] = field(default_factory=list)
    """What an agent of another protocol reads after the reset and after one step, each with what came before."""

    seeds: list[str] = field(default_factory=list)
    """What the resets with the seeds `SEEDS` and a step showed."""
    took_s: dict[str, float] = field(default_factory=dict)
    """Seconds of the slowest ``reset`` and of the slowest ``step``."""

    async def ask(self, socket: ProbeSocket, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a reset or a step (*kind*), and return its reply. Raises ``Unanswered``."""
        begun = time.monotonic()
        reply = await socket.ask({"type": kind, "data": data}, within_s=TRIAL_S)
        self.took_s[kind] = max(self.took_s.get(kind, 0.0), time.monotonic() - begun)
        return reply

    def read(self, after: str, reply: Mapping[str, Any]) -> None:
        """Note what an agent reads of *reply*, an observation frame."""
        result = step_result(json.dumps(reply).encode(), ObservationMapping())
        self.observed.update(result.data or ())
        self.observed.update(f"metadata.{name}" for name in result.metadata or ())
        texts = [one.text if isinstance(one, TextBlock) else f"[image: {one.mime_type}]" for one in result.blocks]
        texts += [f"error: {result.error}"] if result.error is not None else []
        self.reads.append((after, one_line(" | ".join(texts), limit=READ_CHARS)))


async def try_sockets(
    server: Probe, remarks: list[str], *, action: Any, tools: Sequence[Mapping[str, Any]], asks_tools: bool
) -> tuple[Capacity, TriedEpisode]:
    """Play a step on one socket, open further sockets until the server refuses one, and close them all.

    The function returns once a place is free again, because the next step may need it.

    Args:
        action: The schema of an action.
        tools: The known tools; with any, an action is a call of one.
        asks_tools: Query the tools, for environments whose actions are tool calls and that do not list them otherwise.
    """
    sockets: list[ProbeSocket] = []
    tried = TriedEpisode()
    try:
        sockets.append(await _opened(server))
        await _try_episode(sockets[0], tried, action=action, tools=tools, asks_tools=asks_tools)
        capacity = await _fill(server, sockets, remarks)
    except _Full as full:
        remarks.append("All its places were taken by others, so no session was tried.")
        return full.capacity, TriedEpisode()
    except Unanswered as error:
        return LONE, TriedEpisode(trouble=str(error))
    finally:
        for socket in sockets:
            await socket.close()
    if not await _is_free_again(server):
        remarks.append(f"Its places were not free again {FREED_S:g} s after their sockets were closed.")
    return capacity, tried


async def _fill(server: Probe, sockets: list[ProbeSocket], remarks: list[str]) -> Capacity:
    while len(sockets) < MOST:
        try:
            sockets.append(await _opened(server))
        except _Full as full:
            return full.capacity
        except Unanswered as error:
            remarks.append(f"Session {len(sockets) + 1} failed for another reason than a full server: {error}.")
            return Capacity(len(sockets), Finding.IN_DOUBT)
    return Capacity(len(sockets), Finding.AT_LEAST)


async def _opened(server: Probe) -> ProbeSocket:
    """Open one more socket with a session. Raises ``_Full`` or ``Unanswered``."""
    socket = await server.socket("/ws")
    try:
        # A server refuses after the upgrade, with a frame that it sends without a request.
        reply = await socket.ask({"type": "state"})
        data = reply.get("data")
        # ``EXECUTION_ERROR`` means that the session exists, but has no state before its first reset.
        if reply.get("type") == "error" and isinstance(data, Mapping) and data.get("code") != "EXECUTION_ERROR":
            most = data.get("max_sessions")
            if data.get("code") == "CAPACITY_REACHED" and isinstance(most, int) and most > 0:
                raise _Full(most)
            raise Unanswered(_said(data))
    except BaseException:  # also a cancellation: the operator pressed Ctrl-C
        await socket.close()
        raise
    return socket


def _said(data: Mapping[str, Any]) -> str:
    return one_line(f"{data.get('code')}: {data.get('message')}")


async def _try_episode(
    socket: ProbeSocket, tried: TriedEpisode, *, action: Any, tools: Sequence[Mapping[str, Any]], asks_tools: bool
) -> None:
    """Reset an episode, query its tools, and play one step."""
    try:
        reply = await tried.ask(socket, "reset", {})
        if reply.get("type") == "error":
            tried.trouble = f"reset: {_said(reply.get('data') or {})}"
            return
        tried.read("reset", reply)
        if asks_tools:
            listed = await tried.ask(socket, "step", {"type": "list_tools"})
            data = listed.get("data") if listed.get("type") == "observation" else None
            tried.tools = tools_of(data.get("observation") if isinstance(data, Mapping) else None)
        step = _sample_step(action, tools or tried.tools)
        reply = await tried.ask(socket, "step", step)
        if reply.get("type") == "error":
            said = one_line(f"error: {(reply.get('data') or {}).get('message')}", limit=READ_CHARS)
            tried.reads.append((json.dumps(step), said))
        else:
            tried.read(json.dumps(step), reply)
        for seed in SEEDS:
            seen = [await tried.ask(socket, "reset", {"seed": seed}), await tried.ask(socket, "step", step)]
            tried.seeds.append(json.dumps([_without_metadata(one) for one in seen], sort_keys=True))
    except (Unanswered, GatewayError) as error:
        tried.trouble = str(error)


def _without_metadata(reply: Mapping[str, Any]) -> Any:
    """Return the observation of *reply* without its metadata, which often has a new id for each episode."""
    data = reply.get("data")
    observation = data.get("observation") if isinstance(data, Mapping) else None
    return {**observation, "metadata": None} if isinstance(observation, Mapping) else data


def _sample_step(action: Any, tools: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the data of a step that the schema allows."""
    if tools:
        tool = tools[0]
        arguments = example_of(tool.get("inputSchema") or tool.get("input_schema"))
        return {"type": "call_tool", "tool_name": tool["name"], "arguments": arguments}
    return example_of(without_metadata(action)) if isinstance(action, Mapping) else {}


async def _is_free_again(server: Probe) -> bool:
    deadline = asyncio.get_running_loop().time() + FREED_S
    while True:
        try:
            await (await _opened(server)).close()
        except Unanswered:
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(PAUSE_S)
        else:
            return True
