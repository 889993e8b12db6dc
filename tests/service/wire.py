"""A trainer's ORS requests and their answers, over plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httpx

EVENT_STREAM = {"Accept": "text/event-stream"}


async def create(client: httpx.AsyncClient, sid: str = "one", **task: Any) -> httpx.Response:
    """Open a session with an inline task."""
    body = {"env_name": task.pop("env_name", "math"), "task_spec": {"question": "1+1", **task}}
    return await client.post("/create", json=body, headers={"X-Session-ID": sid})


async def call(client: httpx.AsyncClient, tool: str = "echo", sid: str = "one", env: str = "math") -> httpx.Response:
    """Call a tool and read its whole answer."""
    return await client.post(
        f"/{env}/call", json={"name": tool, "input": {"x": 1}}, headers={"X-Session-ID": sid, **EVENT_STREAM}
    )


async def delete(client: httpx.AsyncClient, sid: str = "one") -> httpx.Response:
    """End a session."""
    return await client.post("/delete", headers={"X-Session-ID": sid})


def events(text: str) -> list[tuple[str, str]]:
    """Split a whole event stream into pairs (event, data)."""
    found = []
    for block in text.split("\r\n\r\n"):
        fields = [line.partition(": ")[::2] for line in block.split("\r\n") if line and not line.startswith(":")]
        data = "\n".join(value for name, value in fields if name == "data")
        found += [(value, data) for name, value in fields if name == "event"]
    return found


def result(answer: httpx.Response) -> Any:
    """Return the result at the end of a call's event stream."""
    assert answer.status_code == 200, answer.text
    name, data = events(answer.text)[-1]
    assert name == "end", answer.text
    return json.loads(data)


def detail(answer: httpx.Response) -> Any:
    """Return the message of an error response."""
    return answer.json()["detail"]


@contextlib.asynccontextmanager
async def under_way(
    *requests: Coroutine[Any, Any, httpx.Response],
) -> AsyncIterator[list[asyncio.Task[httpx.Response]]]:
    """Run *requests* concurrently with the test, and hang up the unanswered requests at its end."""
    tasks = [asyncio.ensure_future(request) for request in requests]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def hang_up(request: asyncio.Task[httpx.Response]) -> None:
    """Close a request's connection before its response arrives."""
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    assert request.cancelled(), "it was answered before"
