"""Serves operators' routes for audited tasks, ``/admin/v1/flaky…``: list marks, add an audit's counts, mark, unmark."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.catalog.catalog import Catalog
from gateway.core.errors import InvalidRequest, UnknownTask
from gateway.core.ids import EnvironmentName
from gateway.core.task_name import TaskName
from gateway.frontends.admin.replies import Body, as_json, named, operator_of, queried, validated
from gateway.tasks.curricula.flaky import AuditedTask, DifferingEpisode, FlakyTasks, interval
from gateway.tasks.curricula.stats import TaskStats

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 2**16
MAX_COUNT: Final = 10**9


class Differs(Body):
    """An episode whose replay had another reward or another end."""

    episode: str = Field(min_length=1, max_length=200)
    recorded: float | None = None
    replayed: float | None = None


class Audited(Body):
    """The counts of an audit of one task."""

    replays: int = Field(ge=1, le=MAX_COUNT)
    differing: int = Field(ge=0, le=MAX_COUNT)
    scorer: str | None = Field(None, max_length=200)
    """Version of the scorer that judged the replays; None: the current one."""
    episodes: list[Differs] = Field([], max_length=100)


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
            Route(one, self._add, methods=["POST"]),
            Route(one, self._mark, methods=["PUT"]),
            Route(one, self._unmark, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        query = queried(request, "environment")
        wanted = [self._catalog.wanted(query["environment"])] if "environment" in query else list(self._catalog)
        rows = [row for one in wanted for row in await marks_in_force(self._flaky, self._records, one.name)]
        return as_json({"tasks": rows})

    async def _add(self, request: Request) -> Response:
        """Add the counts of an audit; respond with the sums of all audits."""
        queried(request)
        found = await validated(request, Audited, MAX_BODY_BYTES)
        if found.differing > found.replays:
            raise InvalidRequest(f"differing: {found.differing} is more than the {found.replays} replays")
        environment, task = self._place(request)
        sums = await self._flaky.add(
            environment,
            task,
            replays=found.replays,
            differing=found.differing,
            episodes=[DifferingEpisode(one.episode, one.recorded, one.replayed) for one in found.episodes],
            scorer=found.scorer,
        )
        return as_json(marks_of(environment, {task: sums})[0])

    async def _mark(self, request: Request) -> Response:
        queried(request)
        environment, task = self._place(request)
        operator = operator_of(request)
        found = await self._flaky.mark(environment, task, by=operator)
        told = (environment, task, found.differing, found.replays, operator)
        logger.warning("task_flaky environment=%s task=%r differing=%d replays=%d by=%s", *told)
        return as_json(marks_of(environment, {task: found})[0])

    async def _unmark(self, request: Request) -> Response:
        queried(request)
        environment, task = self._place(request)
        if not await self._flaky.forget(environment, task):
            raise UnknownTask(f"no audit found that task {task!r} of {environment} differs: it has no mark")
        logger.info("task_not_flaky environment=%s task=%r by=%s", environment, task, operator_of(request))
        return Response(status_code=204)

    def _place(self, request: Request) -> tuple[EnvironmentName, str]:
        """Return the environment and the record key of the task in the path, which is an id or a place."""
        environment = self._catalog.wanted(request.path_params["environment"]).name
        return environment, self._records.key(environment, request.path_params["task"])


async def marks_in_force(flaky: FlakyTasks, records: TaskStats, environment: EnvironmentName) -> list[dict[str, Any]]:
    """Return the marked tasks of *environment* as JSON values, without those whose line has changed since."""
    marks = await flaky.of(environment)
    found = {task: records.find(environment, TaskName.of(task).id) for task in marks}
    return marks_of(environment, {task: marks[task] for task, now in found.items() if now in (None, task)})


def marks_of(environment: EnvironmentName, tasks: Mapping[str, AuditedTask]) -> list[dict[str, Any]]:
    """Return audited tasks as JSON values, sorted by name."""
    return [
        {
            "environment": environment,
            **named(task),
            "scorer": one.scorer or None,
            "replays": one.replays,
            "differing": one.differing,
            "rate": one.differing / one.replays,
            "interval": interval(one.differing, one.replays),
            "episodes": [episode._asdict() for episode in one.episodes],
            "changed_at": one.changed_at,
            "marked_at": one.marked_at,
            "marked_by": one.marked_by or None,
        }
        for task, one in sorted(tasks.items())
    ]
