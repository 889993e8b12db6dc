"""For people and their tools: liveness, readiness, metrics, and the operators' view of sessions and workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.core.errors import GatewayError
from gateway.core.ports import Store
from gateway.fronts.errors import status_of
from gateway.observe.metrics import Metrics

MAX_LISTED = 10_000


class OpsFront:
    """Handlers of the operators' routes."""

    def __init__(
        self, *, store: Store, metrics: Metrics, is_draining: Callable[[], bool], routes: Sequence[Route] = ()
    ) -> None:
        """*routes*: further ones for operators."""
        self._routes = routes
        self._store = store
        self._metrics = metrics
        self._is_draining = is_draining

    def app(self) -> Starlette:
        """The routes as an ASGI application."""
        return Starlette(
            routes=[
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._metrics_text),
                Route("/admin/v1/sessions", self._sessions),
                Route("/admin/v1/workers", self._workers),
                *self._routes,
            ],
            exception_handlers={GatewayError: _on_error},
        )

    async def _healthz(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _readyz(self, _: Request) -> Response:
        if self._is_draining():
            return JSONResponse({"status": "draining"}, 503)
        await self._store.ping()
        return JSONResponse({"status": "ok"})

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


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, GatewayError)
    return JSONResponse({"detail": error.detail, "code": error.code}, status_of(error))
