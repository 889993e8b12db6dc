"""Serves operators' routes for tasks at run time, ``/admin/v1/tasks…``: add, list, read, remove and try tasks."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import anyio
from envserver.generic.task import is_name
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment
from gateway.core.errors import BodyTooLarge, GatewayError, InvalidRequest
from gateway.core.ids import PROBER, EnvironmentName
from gateway.core.json_text import dump
from gateway.core.ports.tasks import MAX_AT_ONCE, MAX_TASK_BYTES, BundleRefused, BundleStamp
from gateway.core.session import CloseReason, EpisodeRequest
from gateway.frontends.admin.replies import as_json, body_of, flagged, numbered, operator_of, queried
from gateway.frontends.asgi import Attended, HungUp
from gateway.sessions.service import Sessions
from gateway.tasks.bundles import Bundle, is_bundle, read_bundle
from gateway.tasks.documents import listed, read_json, read_json_lines, read_yaml
from gateway.tasks.registry import TaskEntry
from gateway.tasks.resolver import session_setup
from gateway.tasks.runtime import Checked, RuntimeTasks
from gateway.tasks.signing import NotSigned, TrustedKeys
from gateway.tasks.task_ref import TaskRef

MAX_LISTED = 1_000
MAX_PROBED = 100
"""Largest number of tasks that one request tries. Each trial takes a slot, and the request waits for all trials."""
PROBES_AT_ONCE = 4
PROBE_S = 120.0
"""Seconds that the trial of one task may take, including the wait for a slot."""
PROBES_S = 600.0
"""Seconds that all trials of a request may take together. The rest is reported as not tried."""
YAML_TYPES = frozenset(("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml"))
LINES_TYPES = frozenset(("application/jsonl", "application/x-ndjson", "application/x-jsonlines"))

LOGGED = 10
"""Number of tasks of one upload that the log lists by name."""

logger = logging.getLogger(__name__)

PROBE_END_S: Final = 30.0
"""Seconds that the trial of a task waits for the teardown."""


@dataclass(frozen=True, slots=True)
class _Upload:
    """Uploaded tasks that fit the schema, the split that all get (or an empty text), and the stamp of their bundle."""

    tasks: Sequence[Checked]
    split: str
    bundle: BundleStamp | None
    """None: no trusted key signed the tasks."""


class TaskProbe:
    """Tries tasks: opens an episode of each task in a worker, and ends it."""

    def __init__(self, sessions: Sessions, catalog: Catalog) -> None:
        self._sessions = sessions
        self._catalog = catalog

    async def outcome(self, one: Checked) -> dict[str, Any]:
        """Open an episode of a task, await its prompt, and end it. Return ``ok`` and, on failure, code and detail."""
        try:
            with anyio.fail_after(PROBE_S):
                await self._play(one.environment, one.task)
        except GatewayError as error:
            return {"ok": False, "code": error.code, "detail": error.detail}
        except TimeoutError:
            return {"ok": False, "code": "not_tried", "detail": f"no first prompt within {PROBE_S:g} s"}
        return {"ok": True}

    async def _play(self, environment: Environment, task: dict[str, Any]) -> None:
        environment = self._catalog.named(environment.name)  # the current configuration
        name = f"probe-{secrets.token_hex(8)}"
        try:
            session = await self._sessions.open(
                EpisodeRequest(
                    owner=PROBER,
                    name=name,
                    environment=environment,
                    setup=session_setup(environment, TaskRef(spec=task)),
                    fingerprint=name,
                    protocol="probe",
                )
            )
            await session.prompt(within_s=environment.timeouts.setup_s)
        finally:
            with anyio.move_on_after(PROBE_END_S, shield=True):
                await self._sessions.end(PROBER, name, CloseReason.DELETED, wait_s=PROBE_END_S)


class TaskRoutes:
    """Handlers of the routes. The operators' frontend mounts `routes`."""

    def __init__(
        self,
        *,
        tasks: RuntimeTasks,
        max_body_bytes: int,
        trusted: TrustedKeys,
        signatures: Literal["optional", "required"],
        instance: str,
        probe: TaskProbe,
    ) -> None:
        """Create the handlers.

        Args:
            tasks: Registry of tasks and its store.
            max_body_bytes: Size limit of an upload. A larger upload gets 413.
            trusted: Keys whose signatures are trusted.
            signatures: ``required``: only bundles that a trusted key signed are accepted.
            instance: Name of this gateway, to which a bundle may be bound.
            probe: Opens an episode of a task and ends it.
        """
        self._tasks = tasks
        self._max_body_bytes = max_body_bytes
        self._trusted = trusted
        self._signatures = signatures
        self._instance = instance
        self._probe = probe

    def routes(self) -> list[Route]:
        """Return the routes for an application behind the authenticator."""
        one = "/admin/v1/tasks/{environment}/{id:path}"
        return [
            Route("/admin/v1/tasks", self._list, methods=["GET"]),
            Route("/admin/v1/tasks", self._add, methods=["POST"]),
            Route("/admin/v1/tasks/validate", self._validate, methods=["POST"]),
            Route(one, self._get, methods=["GET"]),
            Route(one, self._remove, methods=["DELETE"]),
        ]

    async def _list(self, request: Request) -> Response:
        query = queried(request, "environment", "tag", "split", "after", "limit")
        await self._tasks.refresh()
        environment = query.get("environment")
        entries, after = self._tasks.registry.listing(
            environment=self._named(environment) if environment else None,
            tag=query.get("tag") or None,
            split=query.get("split") or None,
            after=query.get("after", ""),
            limit=numbered(query, "limit", 100, least=1, most=MAX_LISTED),
        )
        return as_json({"tasks": [_row(entry) for entry in entries], "next": after or None})

    async def _get(self, request: Request) -> Response:
        environment, id = self._named(request.path_params["environment"]), request.path_params["id"]
        entry = await self._tasks.sure(lambda: self._tasks.registry.entry(environment, id))
        return as_json({**_row(entry), "task": entry.task})

    async def _add(self, request: Request) -> Response:
        query = queried(request, "environment", "split", "replace", "validate")
        split, replace = query.get("split", ""), flagged(query, "replace")
        if split and not is_name("split", split):
            raise InvalidRequest("split: must have only letters, digits, dots, dashes and underscores")
        upload = await self._upload(request, environment=query.get("environment", ""), split=split)
        if flagged(query, "validate"):
            refusals = [result for result in await self._tried(request, upload) if not result["ok"]]
            if refusals:
                return as_json({"detail": "tasks cannot be played", "code": "task_refused", "results": refusals}, 400)
        bundle, signed_by = upload.bundle, upload.bundle.key if upload.bundle is not None else ""
        registered = await self._tasks.register(upload.tasks, split=upload.split, replace=replace, bundle=bundle)
        rows = [
            {"environment": r.environment, "id": r.id, "split": r.split, "index": r.index, "replaced": not r.is_new}
            for r in registered
        ]
        logger.info("tasks_added tasks=%s by=%s signed_by=%s", _named_tasks(rows), operator_of(request), signed_by)
        status = 201 if any(r.is_new for r in registered) else 200
        return as_json({"tasks": rows, "signed_by": signed_by or None}, status)

    async def _validate(self, request: Request) -> Response:
        query = queried(request, "environment")
        upload = await self._upload(request, environment=query.get("environment", ""))
        return as_json({"results": await self._tried(request, upload)})

    async def _remove(self, request: Request) -> Response:
        environment, id = self._named(request.path_params["environment"]), request.path_params["id"]
        await self._tasks.unregister(environment, id)
        logger.info("task_removed environment=%s id=%s by=%s", environment, id, operator_of(request))
        return Response(status_code=204)

    def _named(self, environment: str) -> EnvironmentName:
        """Return the environment's name for that name or an alias. Return an unknown name unchanged."""
        return self._tasks.registry.environment_of(environment) or EnvironmentName(environment)

    async def _upload(self, request: Request, *, environment: str, split: str = "") -> _Upload:
        body, kind = await body_of(request, self._max_body_bytes, *YAML_TYPES, *LINES_TYPES)
        # A task takes about 0.1 ms. Thousands of tasks in the event loop would delay this replica's trainers.
        return await anyio.to_thread.run_sync(self._read, body, kind, environment, split)

    def _read(self, body: bytes, kind: str, environment: str, split: str) -> _Upload:
        bundle, is_signed = None, False
        if kind in LINES_TYPES:
            documents = read_json_lines(body, where="line")
        else:
            document = read_yaml(body) if kind in YAML_TYPES else read_json(body)
            if is_bundle(document):
                bundle, is_signed = self._vouched(document)
                self._check_use(bundle, environment=environment, split=split)
                environment, split = bundle.environment, bundle.split
                documents = [(f"tasks[{number}]", task) for number, task in enumerate(bundle.tasks)]
            else:
                documents = listed(document)
        if not is_signed and self._signatures == "required":
            raise NotSigned("tasks are accepted only in bundles signed by a trusted key")
        if not documents:
            raise InvalidRequest("there is no task")
        if len(documents) > MAX_AT_ONCE:
            raise InvalidRequest(f"{len(documents)} tasks in one request; the maximum is {MAX_AT_ONCE}")
        if len(body) > MAX_TASK_BYTES and any(len(dump(task)) > MAX_TASK_BYTES for _, task in documents):
            raise BodyTooLarge(f"a task exceeds {MAX_TASK_BYTES} bytes")
        tasks = self._tasks.check(documents, environment=environment)
        stamp = bundle.stamp(self._named(environment)) if bundle is not None and is_signed else None
        return _Upload(tasks, split, stamp)

    def _vouched(self, document: object) -> tuple[Bundle, bool]:
        """Return a bundle, and True if a trusted key signed it. False: signatures are optional, and its key is unknown.

        Raises the errors of `TrustedKeys.verify`.
        """
        try:
            return self._trusted.verify(document), True
        except NotSigned:
            if self._signatures == "required":
                raise
            return read_bundle(document), False

    def _check_use(self, bundle: Bundle, *, environment: str, split: str) -> None:
        """Raise ``BundleRefused`` if the bundle is not for this gateway, time, or the query's environment and split."""
        bundle.check_use(instance=self._instance, now=datetime.now(UTC))
        asked = (
            ("environment", self._named(environment), self._named(bundle.environment)),
            ("split", split, bundle.split),
        )
        for name, given, signed in asked:
            if given not in ("", signed):
                raise BundleRefused(
                    f"the upload names the {name} {given!r:.100}, but the bundle is signed for "
                    f"{repr(signed) if signed else 'that of each task'}: leave {name} out of the query, or sign the "
                    f"tasks again with --{name} {given:.100}"
                )

    async def _tried(self, request: Request, upload: _Upload) -> list[dict[str, Any]]:
        """Try each task. Return the outcomes in the order of the tasks."""
        if len(upload.tasks) > MAX_PROBED:
            raise InvalidRequest(f"{len(upload.tasks)} tasks to try in one request; the maximum is {MAX_PROBED}")
        told: dict[int, dict[str, Any]] = {}
        room = anyio.CapacityLimiter(PROBES_AT_ONCE)

        async def try_one(number: int, one: Checked) -> None:
            async with room:
                told[number] = await self._probe.outcome(one)

        async with Attended(request.scope, request.receive) as operator:
            with anyio.move_on_after(PROBES_S):
                async with anyio.create_task_group() as group:
                    for number, one in enumerate(upload.tasks):
                        group.start_soon(try_one, number, one)
        if operator.left:
            raise HungUp
        late = {"ok": False, "code": "not_tried", "detail": f"not tried within {PROBES_S:g} s"}
        return [
            {"environment": one.environment.name, "id": one.id, **told.get(number, late)}
            for number, one in enumerate(upload.tasks)
        ]


def _named_tasks(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return tasks for the log: names of the first `LOGGED` tasks, and the number of the rest."""
    names = ",".join(f"{row['environment']}/{row['id']}" for row in rows[:LOGGED])
    return names if len(rows) <= LOGGED else f"{names}+{len(rows) - LOGGED}"


def _row(entry: TaskEntry) -> dict[str, Any]:
    task = entry.task
    return {
        "environment": entry.environment,
        "id": task.get("id"),
        "split": entry.split,
        "index": entry.index,
        "name": task.get("name"),
        "tags": task.get("tags") or [],
        "version": task.get("version"),
        "source": "run time" if entry.is_stored else "file",
        "signed_by": entry.signed_by or None,
    }
