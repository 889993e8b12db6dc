"""Bodies in, answers out: whole ones, and streams that end when either side hangs up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

import httpx
from starlette.types import Receive, Send

from gateway.node.routes import Refused

Answer = Callable[[Receive, Send], Awaitable[None]]
"""Sends itself."""


async def read_body(receive: Receive, limit_bytes: int) -> bytes:
    """Read the request's body.

    Raises:
        Refused: it has more than *limit_bytes*, or its sender hung up.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused("the request was not sent to its end", status=HTTPStatus.BAD_REQUEST)
        body += message.get("body", b"")
        if len(body) > limit_bytes:
            raise Refused(f"the body has more than {limit_bytes} bytes", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        if not message.get("more_body", False):
            return bytes(body)


async def refuse_body(receive: Receive) -> None:
    """Read the body of a request that has none; some clients send an empty object.

    Raises:
        Refused: it has one.
    """
    if (await read_body(receive, 64)).strip() not in (b"", b"{}", b"null"):
        raise Refused("this request takes no body")


def answer(status: int, content: object, *, closes: bool = False) -> Answer:
    """Answer with JSON: *content*, or bytes that are JSON already (or nothing at all); *closes* the connection."""
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def send_it(receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(len(body)).encode())] if status != HTTPStatus.NO_CONTENT else []
        if body:
            headers.append((b"content-type", b"application/json"))
        if closes or status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            headers.append((b"connection", b"close"))  # else the rest would be read, to no end
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return send_it


def passed_on(response: httpx.Response) -> Answer:
    """Pass the engine's answer on as it comes; ends the engine's side when the client hangs up, and closes it."""

    async def send_it(receive: Receive, send: Send) -> None:
        pumping = asyncio.create_task(_pump(response, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({pumping, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if pumping.done():
                pumping.result()
        finally:
            for task in (pumping, leaving):
                task.cancel()
            await asyncio.wait({pumping, leaving})
            await response.aclose()

    return send_it


async def _pump(response: httpx.Response, send: Send) -> None:
    headers: list[tuple[bytes, bytes]] = [
        (name.lower().encode(), value.encode())
        for name, value in response.headers.items()
        if name.lower() in ("content-type", "content-length", "api-version", "server")
    ]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    async for chunk in response.aiter_raw():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _left(receive: Receive) -> None:
    message: dict[str, Any] = {}
    while message.get("type") != "http.disconnect":
        message = dict(await receive())
