"""Routes each request to a frontend by the first segment of its path. `core.routes` lists the segments."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.core.routes import (
    ADMIN_SEGMENTS,
    AREAL_SEGMENTS,
    DASHBOARD_SEGMENT,
    NEMO_SEGMENT,
    OPEN_PATHS,
    OPENENV_SEGMENT,
    REPLICA_SEGMENT,
    ROLLOUT_SEGMENT,
)
from gateway.frontends.asgi import denial, respond_json

logger = logging.getLogger(__name__)

_REPLICA_PATHS, _OPENENV_PATHS = f"/{REPLICA_SEGMENT}/v1/", f"/{OPENENV_SEGMENT}/"


class Router:
    """All frontends as one ASGI application. A path that belongs to no other frontend goes to ORS."""

    def __init__(
        self,
        *,
        ors: ASGIApp,
        admin: ASGIApp,
        areal: ASGIApp,
        openenv: ASGIApp,
        nemo: ASGIApp,
        rollouts: ASGIApp,
        dashboard: ASGIApp,
        replicas: ASGIApp,
    ) -> None:
        self._ors = ors
        self._openenv = openenv
        self._by_segment = dict.fromkeys(ADMIN_SEGMENTS, admin) | dict.fromkeys(AREAL_SEGMENTS, areal)
        self._by_segment |= {OPENENV_SEGMENT: openenv, NEMO_SEGMENT: nemo}
        self._by_segment |= {ROLLOUT_SEGMENT: rollouts, REPLICA_SEGMENT: replicas, DASHBOARD_SEGMENT: dashboard}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to its frontend. Refuse a WebSocket outside the OpenEnv frontend with 404."""
        frontend = self._by_segment.get(segment_of(scope["path"]), self._ors)
        if scope["type"] == "websocket" and frontend is not self._openenv:
            logger.info("websocket_not_found path=%r", scope["path"][:200])
            detail = f"there is no WebSocket at {scope['path'][:200]!r}: OpenEnv's are at /openenv/ENVIRONMENT/ws"
            await respond_json(denial(send), 404, {"detail": detail})
            return
        await frontend(scope, receive, send)


def segment_of(path: str) -> str:
    """Return the first segment of *path*, which selects the frontend."""
    return path.lstrip("/").partition("/")[0]


def is_open(path: str) -> bool:
    """Return True if *path* needs no key.

    Replicas sign their requests. OpenEnv clients request an environment's health without headers.
    """
    if path in OPEN_PATHS or path.startswith(_REPLICA_PATHS):
        return True
    return path.startswith(_OPENENV_PATHS) and path.endswith("/health") and path.count("/") == 3
