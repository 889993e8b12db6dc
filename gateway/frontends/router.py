"""Sends each request to the frontend that its path belongs to; `core.routes` says which."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.routes import ADMIN_SEGMENTS, AREAL_SEGMENTS, OPENENV_SEGMENT, REPLICA_SEGMENT, segment_of


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
