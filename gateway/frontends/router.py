"""Sends each request to the frontend that its path belongs to. `core.routes` has the names."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.routes import ADMIN_SEGMENTS, AREAL_SEGMENTS, OPEN_PATHS, OPENENV_SEGMENT, REPLICA_SEGMENT


class Router:
    """The frontends as one ASGI application; what belongs to no other frontend is ORS'."""

    def __init__(self, *, ors: ASGIApp, admin: ASGIApp, areal: ASGIApp, openenv: ASGIApp, replicas: ASGIApp) -> None:
        self._ors = ors
        self._openenv = openenv
        self._by_segment = dict.fromkeys(ADMIN_SEGMENTS, admin) | dict.fromkeys(AREAL_SEGMENTS, areal)
        self._by_segment |= {OPENENV_SEGMENT: openenv, REPLICA_SEGMENT: replicas}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on. A WebSocket is refused with 403 where no frontend takes any."""
        frontend = self._by_segment.get(segment_of(scope["path"]), self._ors)
        if scope["type"] == "websocket" and frontend is not self._openenv:
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
            return
        await frontend(scope, receive, send)


def segment_of(path: str) -> str:
    """Return the first segment of *path*, which decides whose it is."""
    return path.lstrip("/").partition("/")[0]


def is_open(path: str) -> bool:
    """Return True if *path* needs no key.

    Replicas sign their requests. OpenEnv's clients ask for an environment's health without headers.
    """
    if path in OPEN_PATHS or path.startswith(f"/{REPLICA_SEGMENT}/v1/"):
        return True
    return path.startswith(f"/{OPENENV_SEGMENT}/") and path.endswith("/health") and path.count("/") == 3
