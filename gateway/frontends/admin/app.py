"""Serves operators and their tools: liveness, readiness, metrics, sessions, workers, and restarts of environments."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.catalog.catalog import Catalog
from gateway.core.errors import InvalidRequest, StoreUnavailable, UnknownEpisode, UnknownWorker
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.backend import Backend
from gateway.core.ports.store import Store
from gateway.core.session import CloseReason, Session
from gateway.core.worker import WorkerState
from gateway.frontends.admin.replies import ERRORS, named, numbered, operator_of, queried
from gateway.frontends.openapi.document import openapi_document
from gateway.metrics import Metrics
from gateway.server import Lifecycle
from gateway.sessions.service import Sessions

logger = logging.getLogger(__name__)

MAX_LISTED = 10_000
LOG_LINES: Final = 100
MAX_LOG_LINES: Final = 100_000
END_S: Final = 10.0
"""Seconds that the end of a session waits for its teardown, which then goes on in the background."""
STORE_S: Final = 1.0
"""Seconds that readiness waits for the store. Probes run every few seconds and have short timeouts themselves."""


class AdminFrontend:
    """Handlers of the operators' routes."""

    def __init__(
        self,
        *,
        store: Store,
        sessions: Sessions,
        backend: Backend,
        catalog: Catalog,
        metrics: Metrics,
        lifecycle: Lifecycle,
        routes: Sequence[Route] = (),
    ) -> None:
        """*routes* are further routes for operators."""
        self._routes = routes
        self._store = store
        self._open_sessions = sessions
        self._backend = backend
        self._catalog = catalog
        self._metrics = metrics
        self._lifecycle = lifecycle
        self._ping: asyncio.Future[None] | None = None

    def app(self) -> Starlette:
        """Return the routes as an ASGI application."""
        return Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/openapi.json", self._openapi),
                Route("/metrics", self._metrics_text),
                Route("/admin/v1/sessions", self._sessions),
                Route("/admin/v1/sessions/{id}", self._end_session, methods=["DELETE"]),
                Route("/admin/v1/workers", self._workers),
                Route("/admin/v1/workers/{id}/log", self._worker_log),
                Route("/admin/v1/environments/{environment}/restart", self._restart, methods=["POST"]),
                *self._routes,
            ],
            exception_handlers=ERRORS,
        )

    async def _healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, _: Request) -> Response:
        """Report whether this replica accepts requests. Without the store it still serves the sessions that it knows.

        All replicas share one store. If they were not ready without it, a load balancer would exclude all of them.
        """
        if self._lifecycle.is_draining:
            return JSONResponse({"status": "draining"}, 503)
        if trouble := await self._store_trouble():
            return JSONResponse({"status": "degraded", "reason": StoreUnavailable.code, "detail": trouble})
        return JSONResponse({"status": "ok"})

    async def _store_trouble(self) -> str:
        """Return why the store does not answer. Empty: the store answers."""
        if self._ping is None or self._ping.done():
            self._ping = asyncio.ensure_future(self._store.ping())  # one ping at a time for all requests
            self._ping.add_done_callback(lambda ping: ping.cancelled() or ping.exception())  # marks the error as read
        ping = self._ping
        await asyncio.wait({ping}, timeout=STORE_S)
        if not ping.done():
            return f"the store did not answer within {STORE_S:g} s"
        error = ping.exception()
        if error is not None and not isinstance(error, StoreUnavailable):
            raise error
        return error.detail if error is not None else ""

    async def _openapi(self, _: Request) -> Response:
        """Describe the routes. The description is the same for every gateway of this version, and needs no key."""
        return Response(openapi_document(), media_type="application/json")

    async def _metrics_text(self, _: Request) -> Response:
        return Response(self._metrics.exposition(), media_type="text/plain; version=0.0.4")

    async def _sessions(self, request: Request) -> Response:
        """List live sessions. ``next`` is the value of ``after`` for the next page, or null."""
        query = queried(request, "after", "limit")
        limit = numbered(query, "limit", MAX_LISTED, least=1, most=MAX_LISTED)
        sessions, following = await self._store.session_page(limit=limit, cursor=query.get("after", ""))
        rows = [
            {
                "id": session.id,
                "name": session.name,
                "environment": session.environment,
                "owner": session.owner,
                "state": session.state.value,
                "worker": session.worker,
                **named(session.task),
            }
            for session in sessions
        ]
        return JSONResponse({"sessions": rows, "next": following or None})

    async def _all_sessions(self) -> AsyncIterator[Session]:
        seen, cursor = set[SessionId](), ""
        while True:
            page, cursor = await self._store.session_page(limit=MAX_LISTED, cursor=cursor)
            for session in page:
                if session.id not in seen:
                    seen.add(session.id)
                    yield session
            if not cursor:
                return

    async def _end_session(self, request: Request) -> Response:
        """End a live session by its id, lease or trainer's name. The trainer gets the reason ``operator``."""
        id = request.path_params["id"]
        known = [one async for one in self._all_sessions() if id in (one.id, one.lease, one.name)]
        found = [one for one in known if id in (one.id, one.lease)] or known
        if len(found) > 1:
            owners = ", ".join(f"{one.id} of {one.owner!r}" for one in found)
            raise InvalidRequest(f"several sessions have the name {id!r}: give the id of one of them: {owners}")
        if not found or not await self._open_sessions.end(
            found[0].owner, found[0].name, CloseReason.OPERATOR, wait_s=END_S
        ):
            raise UnknownEpisode(f"there is no open session {id!r}")
        (session,) = found
        logger.info("session_ended session=%s name=%r by=%s", session.id, session.name, operator_of(request))
        return JSONResponse({"id": session.id, "name": session.name, "owner": session.owner})

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

    async def _worker_log(self, request: Request) -> Response:
        """Return the last lines that a worker wrote."""
        id = WorkerId(request.path_params["id"])
        lines = numbered(queried(request, "lines"), "lines", LOG_LINES, least=1, most=MAX_LOG_LINES)
        if await self._store.worker(id) is None:
            raise UnknownWorker(f"there is no worker {id!r}")
        return JSONResponse({"worker": id, "log": await self._backend.logs(id, lines=lines)})

    async def _restart(self, request: Request) -> Response:
        """Drain all workers of the environment and of its variants. The pool starts new workers as needed.

        This includes starting workers, which may have read the code before an edit, and suspect workers, which hang.
        """
        environment = self._catalog.wanted(request.path_params["environment"])
        if environment.server.url:
            raise InvalidRequest(f"{environment.name!r} is a server outside the gateway: restart it there")
        loads = await self._store.load()
        names = [environment.name, *(one.name for one in self._catalog.known.values() if one.base == environment.name)]
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
