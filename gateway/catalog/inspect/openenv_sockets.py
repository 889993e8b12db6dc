"""OpenEnv's sessions: each is a WebSocket. How many a server holds is learned by opening one more than that."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gateway.catalog.inspect.findings import Capacity, Told
from gateway.catalog.inspect.probe import Server, Socket, Unanswered, one_line

MOST = 64
"""Sockets of trial: each may be a browser."""
FREED_S = 5.0
"""How long the places of closed sockets may take to be free again."""
PAUSE_S = 0.05
LONE = Capacity(1, Told.ASSUMED)
"""What OpenEnv servers hold that are told nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of the sockets."""

    capacity: Capacity
    trouble: str = ""
    tools: Mapping[str, Any] = field(default_factory=dict)
    """Of an MCP environment: an observation with its ``tools``."""


async def try_sockets(server: Server, remarks: list[str], *, asks_tools: bool) -> Trial:
    """Reset an episode on one socket, open others until one is refused, and close them all.

    Returns once a place is free again: what comes next may need it. *asks_tools* is for environments whose actions are
    calls of tools, where nothing else tells which.
    """
    sockets: list[Socket] = []
    try:
        first = await _opened(server, sockets)
        if not isinstance(first, Mapping):
            if first.capacity.told is Told.BY_SERVER:
                remarks.append("All its places were taken by others, so no session was tried.")
                return Trial(capacity=first.capacity)
            return first
        trouble, tools = await _try_episode(sockets[0], asks_tools=asks_tools)
        capacity = await _fill(server, sockets, remarks)
    finally:
        for socket in sockets:
            await socket.close()
    if not await _is_free_again(server):
        remarks.append(f"Its places were not free again {FREED_S:g} s after their sockets were closed.")
    return Trial(capacity=capacity, trouble=trouble, tools=tools)


async def _fill(server: Server, sockets: list[Socket], remarks: list[str]) -> Capacity:
    while len(sockets) < MOST:
        more = await _opened(server, sockets)
        if isinstance(more, Mapping):
            continue
        if more.capacity.told is Told.BY_SERVER:
            return more.capacity
        remarks.append(f"Session {len(sockets) + 1} at once failed, and not for want of a place: {more.trouble}.")
        break
    return Capacity(len(sockets), Told.AT_LEAST)


async def _opened(server: Server, sockets: list[Socket]) -> Mapping[str, Any] | Trial:
    """Open one more, which is put into *sockets*; or say what was answered instead."""
    try:
        socket = await server.socket("/ws")
    except Unanswered as error:
        return Trial(capacity=LONE, trouble=str(error))
    try:
        # A server refuses after the upgrade, by a frame that comes unasked.
        reply = await socket.ask({"type": "state"})
    except Unanswered as error:
        await socket.close()
        return Trial(capacity=LONE, trouble=str(error))
    refused = _refusal(reply)
    if refused is None:
        sockets.append(socket)
        return reply
    await socket.close()
    return refused


def _refusal(reply: Mapping[str, Any]) -> Trial | None:
    """Why there is no session behind a socket whose first reply is this; None: there is one.

    An ``EXECUTION_ERROR`` means a session whose state cannot be told before its first reset.
    """
    data = reply.get("data")
    if reply.get("type") != "error" or not isinstance(data, Mapping) or data.get("code") == "EXECUTION_ERROR":
        return None
    most = data.get("max_sessions")
    if data.get("code") == "CAPACITY_REACHED" and isinstance(most, int) and most > 0:
        return Trial(capacity=Capacity(most, Told.BY_SERVER))
    return Trial(capacity=LONE, trouble=_said(data))


def _said(data: Mapping[str, Any]) -> str:
    return one_line(f"{data.get('code')}: {data.get('message')}")


async def _try_episode(socket: Socket, *, asks_tools: bool) -> tuple[str, Mapping[str, Any]]:
    """Reset, and ask for tools; why the reset failed, or nothing, and what was answered about tools."""
    try:
        reply = await socket.ask({"type": "reset", "data": {}})
        if reply.get("type") == "error":
            return f"reset: {_said(reply.get('data') or {})}", {}
        if not asks_tools:
            return "", {}
        listed = await socket.ask({"type": "step", "data": {"type": "list_tools"}})
    except Unanswered as error:
        return str(error), {}
    data = listed.get("data") if listed.get("type") == "observation" else None
    observation = data.get("observation") if isinstance(data, Mapping) else None
    return "", observation if isinstance(observation, Mapping) else {}


async def _is_free_again(server: Server) -> bool:
    deadline = asyncio.get_running_loop().time() + FREED_S
    while True:
        sockets: list[Socket] = []
        try:
            if isinstance(await _opened(server, sockets), Mapping):
                return True
        finally:
            for socket in sockets:
                await socket.close()
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(PAUSE_S)
