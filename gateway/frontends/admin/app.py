"""For people and their tools: liveness, readiness, metrics, and the operators' view of sessions and workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.catalog.catalog import Catalog
from gateway.core.errors import InvalidRequest, StoreUnavailable
from gateway.core.ports.store import Store
from gateway.core.worker import WorkerState
from gateway.frontends.admin.replies import ERRORS, operator_of
from gateway.metrics import Metrics
from gateway.server import Lifecycle

logger = logging.getLogger(__name__)

MAX_LISTED = 10_000
STORE_S: Final = 1.0
"""How long readiness waits for the store: who asks for it, each few seconds, does not wait for long itself."""


class AdminFrontend:
    """Handlers of the operators' routes."""

    def __init__(
        self,
        *,
        store: Store,
        catalog: Catalog,
        metrics: Metrics,
        lifecycle: Lifecycle,
        routes: Sequence[Route] = (),
    ) -> None:
        """*routes*: further ones for operators."""
        self._routes = routes
        self._store = store
        self._catalog = catalog
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._ping: asyncio.Future[None] | None = None

    def app(self) -> Starlette:
        """The routes as an ASGI application."""
        return Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics_text),
                Route("/admin/v1/sessions", self._sessions),
                Route("/admin/v1/workers", self._workers),
                Route("/admin/v1/environments/{environment}/restart", self._restart, methods=["POST"]),
                *self._routes,
            ],
            exception_handlers=ERRORS,
        )

    async def _healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, _: Request) -> Response:
        """Whether this replica is to be sent requests: without its store too, as it serves the sessions that it knows.

        All replicas have one store. Were they not ready without it, a load balancer would send nobody to any of them.
        """
        if self._lifecycle.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        if trouble := await self._store_trouble():
            return JSONResponse({"status": "degraded", "reason": StoreUnavailable.code, "detail": trouble})
        return JSONResponse({"status": "ok"})

    async def _store_trouble(self) -> str:
        """Why the store does not answer; empty if it does."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(self._store.ping())  # one at a time, however many ask
            self._ping.add_done_callback(lambda ping: ping.cancelled() or ping.exception())  # maybe nobody asks again
        ping = self._ping
        await asyncio.wait({ping}, timeout=STORE_S)
        if not ping.done():
            return f"the store did not answer within {STORE_S:g} s"
        error = ping.exception()
        if error is not None and not isinstance(error, StoreUnavailable):
            raise error
        return error.detail if error is not None else ""

    async def _metrics_text(self, _: Request) -> Response:
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4")

    async def _sessions(self, _: Request) -> Response:
        sessions = await self._store.sessions(limit=MAX_LISTED)
        rows = [
            {
                "id": session.id,
                "name": session.name,
                "environment": session.environment,
                "owner": session.owner,
                "state": session.state.value,
                "worker": session.worker,
                "task": session.task,
            }
            for session in sessions
        ]
        return JSONResponse({"sessions": rows})

    async def _workers(self, _: Request) -> Response:
        loads = await self._store.load()
        rows = [
            {
                "id": entry.worker.id,
                "environment": name,
                "state": entry.worker.state.value,
                "used": entry.used,
                "slots": entry.worker.slots,
                "address": entry.worker.address,
                "idle_s": round(entry.idle_s, 3),
                "age_s": round(entry.age_s, 3),
            }
            for name, load in loads.items()
            for entry in load.workers
        ]
        waiting = {name: load.waiting for name, load in loads.items()}
        return JSONResponse({"workers": rows, "waiting": waiting})

    async def _restart(self, request: Request) -> Response:
        """Drain all workers of the environment and of its splits; the pool starts others as needed.

        Those that start, too: one may have read its code before an edit. So are suspect ones, which are stuck.
        """
        environment = self._catalog.wanted(request.path_params["environment"])
        if environment.server.url:
            raise InvalidRequest(f"{environment.name!r} is a server that somebody else runs: restart it where it runs")
        loads = await self._store.load()
        names = [environment.name, *(split.name for split in environment.splits.values())]
        workers = [entry.worker for name in names if (load := loads.get(name)) is not None for entry in load.workers]
        draining = [
            worker.id
            for worker in workers
            if worker.state is not WorkerState.DRAINING and await self._store.drain_worker(worker.id)
        ]
        logger.info(
            "environment_restarted environment=%s workers=%s by=%s",
            environment.name,
            ",".join(draining),
            operator_of(request),
        )
        return JSONResponse({"environment": environment.name, "draining": draining})
