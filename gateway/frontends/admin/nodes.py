"""Serves operators' routes for the nodes of a cluster, ``/admin/v1/nodes``: list nodes, and start or end a drain."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.errors import BackendError
from gateway.core.placement import NodeId
from gateway.frontends.admin.replies import Body, as_json, operator_of, validated

if TYPE_CHECKING:
    from gateway.backends.swarm.backend import SwarmBackend
    from gateway.backends.swarm.nodes import NodeView

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1024


class Wanted(Body):
    draining: bool


class NodeRoutes:
    """Handlers of the routes. The operators' frontend mounts `routes`."""

    def __init__(self, cluster: SwarmBackend | None) -> None:
        """*cluster* is the backend for several nodes. None: there is a single machine and no node to list."""
        self._cluster = cluster

    def routes(self) -> list[Route]:
        """Return the routes for an application behind the authenticator."""
        return [
            Route("/admin/v1/nodes", self._list, methods=["GET"]),
            Route("/admin/v1/nodes/{id}", self._change, methods=["PUT"]),
        ]

    async def _list(self, _: Request) -> Response:
        return as_json({"nodes": node_rows(self._cluster)})

    async def _change(self, request: Request) -> Response:
        id = request.path_params["id"]
        wanted = await validated(request, Wanted, MAX_BODY_BYTES)
        if self._cluster is None or all(row["id"] != id for row in node_rows(self._cluster)):
            return _refused(404, "unknown_node", f"there is no node {id!r:.100}")
        try:
            await self._cluster.drain(NodeId(id), wanted.draining)
        except BackendError as error:
            return _refused(503, error.code, error.detail)
        logger.info("node_draining node=%s draining=%s by=%s", id, wanted.draining, operator_of(request))
        return as_json(next((row for row in node_rows(self._cluster) if row["id"] == id), {"id": id}))


def node_rows(cluster: SwarmBackend | None) -> list[dict[str, Any]]:
    """Return the nodes of a cluster as rows for operators; none for None."""
    return [_row(view) for view in cluster.nodes()] if cluster is not None else []


def _row(view: NodeView) -> dict[str, Any]:
    """Return a node as a row for operators."""
    report = view.report
    row: dict[str, Any] = {
        "id": view.id,
        "name": view.name,
        "state": view.state.value,
        "silent_s": view.silent_s,
        "address": "{}:{}".format(*view.endpoint) if view.endpoint is not None else "",
    }
    if report is not None:
        row |= {
            "draining": report.is_draining,
            "workers": len(report.workers),
            "containers": report.containers,
            "max_containers": report.max_containers,
            "cpus": report.cpus,
            "memory_bytes": report.memory_bytes,
            "available_bytes": report.available_bytes,
            "images": dict(report.images),
        }
    return row


def _refused(status: int, code: str, detail: str) -> Response:
    return as_json({"detail": detail, "code": code}, status)
