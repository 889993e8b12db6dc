"""Serves operators' routes for curricula and task records: ``/admin/v1/curriculum…`` and ``/admin/v1/records``."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.core.curriculum import PREFIX, Outcome, TaskRecord, book_of
from gateway.core.errors import InvalidRequest, UnknownEnvironment
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import MAX_OUTCOMES
from gateway.frontends.admin.flaky import marks_in_force
from gateway.frontends.admin.replies import (
    Body,
    as_json,
    named,
    numbered,
    object_of,
    operator_of,
    queried,
    validated,
)
from gateway.frontends.asgi import MAX_GROUP_SIZE, POLICY_MAX_CHARS
from gateway.tasks.curricula.definitions import to_document
from gateway.tasks.curricula.model import Curriculum, scope_of
from gateway.tasks.curricula.sampling import TaskPlace
from gateway.tasks.curricula.service import MAX_SAMPLE, Curricula
from gateway.tasks.curricula.stages import Standing
from gateway.tasks.curricula.stats import TaskStats
from gateway.tasks.runtime import RuntimeTasks

logger = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 8 * 2**20
SHOWN: Final = 20
"""Default number of tasks in the state of a curriculum: the tasks with the largest shares."""
MAX_SHOWN: Final = 1_000
RECORD_KEYS: Final = (
    *("environment", "task", "scorer", "attempts", "finished", "mean", "deviation"),
    *("steps", "seconds", "seen_at", "policy", "recent"),
)

_Policy = Annotated[str, Field(max_length=POLICY_MAX_CHARS)]


class Sample(Body):
    count: int = Field(default=1, ge=1, le=MAX_SAMPLE)
    group_size: int | None = Field(default=None, ge=1, le=MAX_GROUP_SIZE)
    """Episodes that the trainer opens for each draw. None: the curriculum's group size."""
    environment: str | None = None
    policy: _Policy | None = None


class _Told(Body):
    """An outcome that a trainer reports."""

    environment: str
    task: str | None = Field(default=None, min_length=1, max_length=1024)
    split: str | None = None
    index: int | None = Field(default=None, ge=0)
    reward: float
    finished: bool = True
    steps: int = Field(default=1, ge=1)
    seconds: float = Field(default=0.0, ge=0)
    policy: _Policy | None = None
    key: str = Field(default="", max_length=200)
    """Idempotency key: outcomes with the same key count once. Empty: the outcome always counts."""


class Feedback(Body):
    policy: _Policy | None = None
    outcomes: list[_Told] = Field(default=[], max_length=MAX_OUTCOMES)


class CurriculumRoutes:
    """Handlers of the routes. The operators' frontend mounts `routes`."""

    def __init__(self, *, curricula: Curricula, records: TaskStats, tasks: RuntimeTasks) -> None:
        self._curricula = curricula
        self._records = records
        self._tasks = tasks

    def routes(self) -> list[Route]:
        """Return the routes for an application behind the authenticator."""
        one = "/admin/v1/curriculum/{name}"
        return [
            Route("/admin/v1/curriculum", self._list, methods=["GET"]),
            Route(one, self._state, methods=["GET"]),
            Route(one, self._define, methods=["PUT"]),
            Route(one, self._undefine, methods=["DELETE"]),
            Route(f"{one}/sample", self._sample, methods=["POST"]),
            Route(f"{one}/feedback", self._feedback, methods=["POST"]),
            Route(f"{one}/reset", self._reset, methods=["POST"]),
            Route("/admin/v1/records", self._export, methods=["GET"]),
            Route("/admin/v1/records", self._clear, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        queried(request)
        await self._curricula.refresh()
        rows = [
            {
                "name": known.name,
                "split": PREFIX + known.name,
                "sampler": known.sampler.kind.value,
                "environments": list(known.environments),
                "source": "file" if self._curricula.is_in_file(known.name) else "api",
            }
            for known in self._curricula.all()
        ]
        return as_json({"curricula": rows})

    async def _state(self, request: Request) -> Response:
        query = queried(request, "environment", "tasks")
        known = await self._named(request)
        scope = scope_of(known, _component(query["environment"], known)) if "environment" in query else known
        count = numbered(query, "tasks", SHOWN, most=MAX_SHOWN)
        return as_json(await state_of(known, scope, curricula=self._curricula, records=self._records, count=count))

    async def _define(self, request: Request) -> Response:
        queried(request)
        document = await object_of(request, MAX_BODY_BYTES)
        curriculum = await self._curricula.define(request.path_params["name"], document)
        logger.info("curriculum_defined name=%s by=%s", curriculum.name, operator_of(request))
        return as_json({"name": curriculum.name, "split": PREFIX + curriculum.name, "definition": document})

    async def _undefine(self, request: Request) -> Response:
        await self._curricula.refresh()
        await self._curricula.undefine(name := request.path_params["name"])
        logger.info("curriculum_removed name=%s by=%s", name, operator_of(request))
        return Response(status_code=204)

    async def _sample(self, request: Request) -> Response:
        wish = await validated(request, Sample, MAX_BODY_BYTES)
        known = await self._named(request)
        scope = known if wish.environment is None else scope_of(known, _component(wish.environment, known))
        if wish.policy is not None:
            await self._curricula.tag(known.name, wish.policy)
        draws = await self._curricula.sample(scope, wish.count)
        return as_json(
            {
                "group_size": wish.group_size or known.group_size,
                "policy": await self._curricula.weights.policy(known.name),
                "draws": [
                    {"number": number, "group": f"{scope.name}/{number}", **_place(place)} for number, place in draws
                ],
            }
        )

    async def _feedback(self, request: Request) -> Response:
        wish = await validated(request, Feedback, MAX_BODY_BYTES)
        known = await self._named(request)
        await self._tasks.refresh()
        keys = await self._keys(wish.outcomes, known)
        if wish.policy is not None:
            await self._curricula.tag(known.name, wish.policy)
        names = {EnvironmentName(told.environment) for told in wish.outcomes}
        books = {name: book_of(name, (await self._records.scorers(name))[-1]) for name in names}
        for key, told in zip(keys, wish.outcomes, strict=True):
            self._records.add(
                Outcome(
                    environment=books[EnvironmentName(told.environment)],
                    task=key,
                    reward=told.reward,
                    finished=told.finished,
                    steps=told.steps,
                    seconds=told.seconds,
                    policy=told.policy if told.policy is not None else wish.policy or "",
                    lease=f"told:{known.name}:{told.key}" if told.key else "",
                )
            )
        await self._records.write()
        return as_json({"noted": len(wish.outcomes)})

    async def _named(self, request: Request) -> Curriculum:
        """Return the curriculum in the path, also if another replica has just defined it."""
        await self._curricula.refresh()
        return self._curricula.named(request.path_params["name"])

    async def _keys(self, outcomes: Sequence[_Told], known: Curriculum) -> list[str]:
        """Return the record key of each outcome. Raises ``InvalidRequest``, which lists unknown tasks."""
        keys, problems = [], []
        for number, told in enumerate(outcomes):
            environment = _component(told.environment, known, where=f"outcomes[{number}].environment")
            if (told.task is None) == (told.split is None or told.index is None):
                raise InvalidRequest(f"outcomes[{number}]: either task or split and index say which task it was")
            task = told.task or f"{told.split}/{told.index}"
            key = await self._curricula.record_key(environment, task)
            if key is None:
                problems.append(f"outcomes[{number}]: {environment} has no task {task[:200]!r}")
            keys.append(key or "")
        if problems:
            raise InvalidRequest("; ".join(problems[:SHOWN]) + "; no outcome was noted")
        return keys

    async def _reset(self, request: Request) -> Response:
        known = await self._named(request)
        await self._curricula.reset(known.name)
        logger.info("curriculum_reset name=%s by=%s", known.name, operator_of(request))
        return Response(status_code=204)

    async def _export(self, request: Request) -> Response:
        """Return the records by the current version of the scorer, or by each former one too, the oldest first."""
        query = queried(request, "environment", "former")
        environment = self._environment(query)
        await self._records.write()
        scorers = await self._records.scorers(environment)
        lines = []
        for scorer in scorers if numbered(query, "former", 0, least=0, most=1) else scorers[-1:]:
            records = await self._records.of(environment, scorer)
            lines += [json.dumps(_record(records[task]), separators=(",", ":")) + "\n" for task in sorted(records)]
        return Response("".join(lines), media_type="application/jsonl")

    async def _clear(self, request: Request) -> Response:
        query = queried(request, "environment", "task")
        environment = self._environment(query)
        removed = await self._records.forget(environment, query.get("task", ""))
        logger.info("records_cleared environment=%s number=%d by=%s", environment, removed, operator_of(request))
        return as_json({"removed": removed})

    def _environment(self, query: Mapping[str, str]) -> EnvironmentName:
        name = query.get("environment")
        if name is None:
            raise InvalidRequest("environment: must name the environment whose records to remove")
        if not self._curricula.is_offered(name):
            raise UnknownEnvironment(f"environment: no environment {name[:64]!r} is available")
        return EnvironmentName(name)


async def state_of(
    known: Curriculum, scope: Curriculum, *, curricula: Curricula, records: TaskStats, count: int
) -> dict[str, Any]:
    """Return the present state of a curriculum, or of its *scope*, with the *count* tasks that it draws most often."""
    prepared = (await curricula.weights.of(scope)).prepared
    recorded = {name: await records.of(name) for name in known.environments}
    flaky = [await marks_in_force(curricula.weights.flaky, records, name) for name in known.environments]
    standings = [_standing(standing, scope) for standing in await curricula.weights.standings(scope)]
    standing = standings[0] if standings and not known.sampler.per_component else None
    return {
        "name": known.name,
        "source": "file" if curricula.is_in_file(known.name) else "api",
        "definition": to_document(known),
        "policy": await curricula.weights.policy(known.name),
        "stage": standing["stage"] if standing is not None else None,
        "standing": standing,
        "standings": standings,
        "tasks": prepared.tasks,
        "handles": await curricula.count(scope),
        "flaky": [row for rows in flaky for row in rows],
        "shares": dict(prepared.shares()),
        "heaviest": [
            {**_place(place), "share": share, "record": _record(recorded[place.environment].get(place.task))}
            for place, share in prepared.heaviest(count)
        ],
    }


def _component(name: str, known: Curriculum, *, where: str = "environment") -> EnvironmentName:
    if name not in known.environments:
        raise InvalidRequest(f"{where}: {name[:64]!r} is not one of {', '.join(sorted(known.environments))}")
    return EnvironmentName(name)


def _standing(standing: Standing, scope: Curriculum) -> dict[str, Any]:
    component = None
    if standing.component is not None:
        one = scope.components[standing.component]
        component = {"environment": one.environment, "split": one.split, "tags": list(one.tags)}
    return {**asdict(standing), "component": component}


def _place(place: TaskPlace) -> dict[str, Any]:
    return {"environment": place.environment, "split": place.split, "index": place.index, **named(place.task)}


def _record(record: TaskRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    shown = {name: getattr(record, name) for name in RECORD_KEYS}
    return {**shown, **named(record.task), "policy": record.policy or None, "scorer": record.scorer or None}
