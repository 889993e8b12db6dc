"""A forwarder in the usual style: Starlette in front, one `httpx.AsyncClient` behind, both with default settings.

Run as ``httpx_forwarder.py URL``. Its server is uvicorn on uvloop and httptools. There are no sessions and no keys.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length", b"host"))
TIMEOUT_S = 60.0
KEEP_ALIVE_S = 75
"""Seconds that an idle client connection is kept, as in the gateway."""


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Keep one client while the application runs."""
    async with httpx.AsyncClient(base_url=sys.argv[1], timeout=TIMEOUT_S) as client:
        app.state.client = client
        yield


async def forward(request: Request) -> Response:
    """Forward the request, and stream the answer back."""
    client: httpx.AsyncClient = request.app.state.client
    asked = client.build_request(
        request.method,
        httpx.URL(path=request.url.path, query=request.url.query.encode()),
        headers=[(name, value) for name, value in request.headers.raw if name not in HOP_BY_HOP],
        content=await request.body(),
    )
    try:
        answer = await client.send(asked, stream=True)
    except httpx.TimeoutException:
        return PlainTextResponse("the server did not answer in time", 504)
    except httpx.TransportError as error:
        return PlainTextResponse(f"no answer from the server: {error}", 502)
    response = StreamingResponse(answer.aiter_raw(), answer.status_code, background=BackgroundTask(answer.aclose))
    response.raw_headers = [
        (name.lower(), value) for name, value in answer.headers.raw if name.lower() not in HOP_BY_HOP
    ]
    return response


app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST", "DELETE"])], lifespan=lifespan)

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=0, access_log=False, timeout_keep_alive=KEEP_ALIVE_S)
