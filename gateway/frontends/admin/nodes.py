"""Operators' routes for the machines of a cluster: which there are, which take workers: ``/admin/v1/nodes``."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.core.errors import BackendError
from gateway.frontends.asgi import BodyTooLarge, drop_body, read_body

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1024

Rows = Callable[[], Sequence[Mapping[str, Any]]]
"""Each node as operators see it; ``id`` is among its fields."""
Drain = Callable[[str, bool], Awaitable[None]]
"""Lets a node take no more workers, or take them again. Raises ``BackendError``."""


class NodeRoutes:
    """Handlers of the routes; `routes` is what the operators' front mounts."""

    def __init__(self, *, rows: Rows, drain: Drain) -> None:
        """Wire the handlers; a gateway of one machine has no rows."""
        self._rows = rows
        self._drain = drain

    def routes(self) -> list[Route]:
        """The routes, for an application below the door."""
        return [
            Route("/admin/v1/nodes", self._list, methods=["GET"]),
            Route("/admin/v1/nodes/{id}", self._change, methods=["PUT"]),
        ]

    async def _list(self, _: Request) -> Response:
        return JSONResponse({"nodes": [dict(row) for row in self._rows()]})

    async def _change(self, request: Request) -> Response:
        id = request.path_params["id"]
        try:
            body = await read_body(request.scope, request.receive, MAX_BODY_BYTES)
        except BodyTooLarge:
            await drop_body(request.receive)
            return _refused(413, "too_large", "the body is too large")
        try:
            wanted = json.loads(body)
        except ValueError:
            return _refused(400, "invalid_request", "the body is no JSON")
        if not isinstance(wanted, dict) or wanted.keys() != {"draining"} or not isinstance(wanted["draining"], bool):
            return _refused(400, "invalid_request", 'draining: {"draining": true} or {"draining": false} is wanted')
        if all(row["id"] != id for row in self._rows()):
            return _refused(404, "unknown_node", f"there is no node {id!r:.100}")
        try:
            await self._drain(id, wanted["draining"])
        except BackendError as error:
            return _refused(503, error.code, error.detail)
        logger.info("node_draining node=%s draining=%s by=%s", id, wanted["draining"], _operator(request))
        return JSONResponse(next((dict(row) for row in self._rows() if row["id"] == id), {"id": id}))


def _refused(status: int, code: str, detail: str) -> Response:
    return JSONResponse({"detail": detail, "code": code}, status)


def _operator(request: Request) -> str:
    """The name of the operator's key; empty where there are no keys."""
    return str(request.scope.get("gateway.owner", ""))
