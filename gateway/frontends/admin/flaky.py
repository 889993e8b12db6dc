"""Serves operators' routes for tasks that audits found flaky, ``/admin/v1/flaky…``: list, mark and unmark."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.catalog.catalog import Catalog
from gateway.core.errors import InvalidRequest, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.frontends.admin.replies import Body, as_json, operator_of, queried, validated
from gateway.tasks.curricula.flaky import FlakyTask, FlakyTasks, interval
from gateway.tasks.curricula.stats import TaskStats

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 2**16


class Audited(Body):
    """The result of an audit of one task."""

    replays: int = Field(ge=1)
    differing: int = Field(ge=1)


class FlakyRoutes:
    """Handlers of the routes. The operators' frontend mounts `routes`."""

    def __init__(self, *, flaky: FlakyTasks, records: TaskStats, catalog: Catalog) -> None:
        self._flaky = flaky
        self._records = records
        self._catalog = catalog

    def routes(self) -> list[Route]:
        """Return the routes."""
        one = "/admin/v1/flaky/{environment}/{task:path}"
        return [
            Route("/admin/v1/flaky", self._list, methods=["GET"]),
            Route(one, self._mark, methods=["PUT"]),
            Route(one, self._unmark, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        query = queried(request, "environment")
        wanted = [self._catalog.wanted(query["environment"])] if "environment" in query else list(self._catalog)
        rows = [row for one in wanted for row in marks_of(one.name, await self._flaky.of(one.name))]
        return as_json({"tasks": rows})

    async def _mark(self, request: Request) -> Response:
        queried(request)
        found = await validated(request, Audited, MAX_BODY_BYTES)
        if found.differing > found.replays:
            raise InvalidRequest(f"differing: {found.differing} is more than the {found.replays} replays")
        environment, task = self._place(request)
        mark = FlakyTask(found.replays, found.differing, time.time())
        await self._flaky.mark(environment, task, mark)
        told = (environment, task, found.differing, found.replays, operator_of(request))
        logger.warning("task_flaky environment=%s task=%r differing=%d replays=%d by=%s", *told)
        return as_json(marks_of(environment, {task: mark})[0])

    async def _unmark(self, request: Request) -> Response:
        queried(request)
        environment, task = self._place(request)
        if not await self._flaky.mark(environment, task, None):
            raise UnknownTask(f"task {task!r} of {environment} is not marked as flaky")
        logger.info("task_not_flaky environment=%s task=%r by=%s", environment, task, operator_of(request))
        return Response(status_code=204)

    def _place(self, request: Request) -> tuple[EnvironmentName, str]:
        """Return the environment and the record key of the task in the path, which is an id or a place."""
        environment = self._catalog.wanted(request.path_params["environment"]).name
        return environment, self._records.key(environment, request.path_params["task"])


def marks_of(environment: EnvironmentName, marks: Mapping[str, FlakyTask]) -> list[dict[str, Any]]:
    """Return marked tasks as JSON values, sorted by name."""
    return [
        {
            "environment": environment,
            "task": task,
            "replays": one.replays,
            "differing": one.differing,
            "rate": one.rate,
            "interval": interval(one.differing, one.replays),
            "marked_at": one.marked_at,
        }
        for task, one in sorted(marks.items())
    ]
