"""The HTTP routes that trainers, operators and their tools use, each with its parameters, answer and errors.

OpenEnv's WebSockets are not here, because OpenAPI has no words for them. `docs/reference.md` describes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.frontends.admin import episodes
from gateway.frontends.asgi import GROUP_MAX_CHARS, MAX_GROUP_SIZE, POLICY_MAX_CHARS
from gateway.frontends.openapi.schemas import ANY, COUNT, FLAG, JSON, TEXT, Schema, maybe, obj, several

STATUSES: Final[Mapping[int, str]] = {
    400: "The request is wrong; the text states what and where",
    401: "The key is missing or not known",
    403: "The key may not use this environment, or a page of another site sent the request",
    404: "There is no such environment, session, task or other thing",
    409: "The request contradicts an earlier one",
    410: "The gateway ended the session, or the call may have run and its outcome is lost; see `reason`",
    413: "The body is too large",
    422: "The body does not fit its schema",
    429: "No slot is free, or a limit of the key is reached; come again after `Retry-After` seconds",
    500: "A part of the gateway, or the code of the environment's author failed; see `reason`",
    501: "The environment has no splits",
    502: "The connection to the worker broke; see `reason`",
    503: "Workers do not start, or the store does not answer; come again after `Retry-After` seconds",
    504: "The worker did not answer in time",
}
FAILURES: Final = (500, 502, 503, 504)
"""A worker, the store, or code of the environment's author failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One route. Every route with a key also answers 401, 403 and 429."""

    method: str
    path: str
    tag: str
    summary: str
    answer: Schema | str | None = None
    """Body of the answer. None: it has no body, and the status is 204."""
    kind: str = JSON
    body: Schema | str | None = None
    needs_body: bool = True
    errors: Sequence[int] = ()
    query: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, Schema] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()
    """Parameters that the request must have."""
    needs_key: bool = True
    created: bool = False
    """True: the status is 201 if something new was made, else 200."""


SESSION: Final = {"X-Session-ID": {"type": "string", "minLength": 1, "maxLength": 1024, "pattern": "^[!-~]+$"}}
OPENING: Final = {
    "X-Policy-Tag": {"type": "string", "maxLength": POLICY_MAX_CHARS, "pattern": "^[!-~]*$"},
    "X-Group-ID": {"type": "string", "maxLength": GROUP_MAX_CHARS, "pattern": "^[!-~]*$"},
    "X-Group-Size": {"type": "integer", "minimum": 1, "maximum": MAX_GROUP_SIZE},
}
ONCE: Final = {"Idempotency-Key": {"type": "string", "maxLength": 200, "pattern": "^[!-~]*$"}}
_LIMIT: Final = {"type": "integer", "minimum": 1, "maximum": 1_000}
_TASKS: Final = (
    ("tasks", "All tasks of a split: their public view", "OfSplit", "Tasks"),
    ("num_tasks", "Number of tasks of a split", "OfSplit", obj(num_tasks=COUNT)),
    ("task", "A task: its public view", "OfTask", obj(task=ANY)),
    ("task_range", "Some tasks of a split: their public view", "OfRange", "Tasks"),
)
"""Routes of ORS and OpenEnv that list tasks: name, summary, body and answer."""


def _ors() -> Iterator[Route]:
    def ors(method: str, path: str, summary: str, answer: Schema | str, *errors: int, **more: Any) -> Route:
        more.setdefault("needs_key", path != "/health")
        return Route(method=method, path=path, tag="ORS", summary=summary, answer=answer, errors=errors, **more)

    sid: dict[str, Any] = {"headers": SESSION, "needs": frozenset(SESSION)}
    tasks = (400, 404, 413, 422, *FAILURES)
    yield ors("GET", "/health", "Is the gateway alive?", "Status")
    yield ors("GET", "/version", "Version of the gateway", obj(version=TEXT, build_sha=maybe(TEXT)))
    yield ors("GET", "/list_environments", "Names of the environments", several(TEXT))
    yield ors(
        "POST", "/create_session", "A new id for a session", "SessionId", 400, 413, 422, body=ANY, needs_body=False
    )
    yield ors(
        "POST",
        "/create",
        "Open a session on a task: by task_spec, or by split and index",
        "SessionId",
        *(400, 404, 409, 413, 422, *FAILURES),
        body="CreateSession",
        headers={**SESSION, **OPENING, "X-Secrets": TEXT},
        needs=frozenset(SESSION),
    )
    yield ors("POST", "/ping", "Keep a session alive", "Status", 400, 404, *FAILURES, **sid)
    yield ors("POST", "/delete", "End a session", "SessionId", 400, 404, 410, *FAILURES, **sid)
    yield ors("POST", "/delete_session", "Forget the id of a session", "SessionId", 400, **sid)
    for prefix in ("", "/{environment}"):
        yield ors("GET", f"{prefix}/tools", "Tools of all tasks", obj(tools=several("Tool")), 404, *FAILURES)
        yield ors("GET", f"{prefix}/splits", "Splits of tasks", several("Split"), 404, *FAILURES)
        for name, summary, body, answer in _TASKS:
            answer = obj(task=ANY, env_name=TEXT) if name == "task" else answer
            yield ors("POST", f"{prefix}/{name}", summary, answer, *tasks, body=body)
        inside = (400, 404, 409, 410, *FAILURES)
        yield ors("GET", f"{prefix}/prompt", "The first observation", several("Block"), *inside, **sid)
        yield ors(
            "GET", f"{prefix}/task_tools", "Tools of the session's task", obj(tools=several("Tool")), *inside, **sid
        )
        yield ors("GET", f"{prefix}/messages", "The prompt as a conversation", several(ANY), *inside, **sid)
        yield ors(
            "POST",
            f"{prefix}/call",
            "Call a tool, once. A stream of events, or JSON where Accept asks for it",
            "Result",
            *(400, 404, 409, 410, 413, 422, 503),
            body="Call",
            headers={**SESSION, **ONCE},
            needs=frozenset(SESSION),
        )
        yield ors(
            "POST",
            f"{prefix}/score_group",
            "Judge the episodes of a group",
            {},
            *(400, 404, 409, 410, 413, 422, 503),
            body=ANY,
            **sid,
        )


def _areal() -> Iterator[Route]:
    for prefix in ("/areal/{environment}/api", "/api"):
        for method, name, summary, answer, body, headers in (
            ("GET", "task/info", "The environment and its samples", "TaskInfo", None, {}),
            ("POST", "episode/start", "Open an episode on a sample", "Started", "Start", OPENING),
            ("POST", "episode/step", "Act in an episode, once", "Stepped", "Step", ONCE),
            ("POST", "episode/cancel", "End an episode without a reward", "Cancelled", "EpisodeId", {}),
            ("GET", "health", "Load of the environment", "ArealHealth", None, {}),
        ):
            yield Route(
                method=method,
                path=f"{prefix}/{name}",
                tag="AReaL",
                summary=summary,
                answer=answer,
                body=body,
                errors=(400, 404, 500, 503, *(() if body is None else (413,))),
                headers=headers,
            )


def _openenv() -> Iterator[Route]:
    def one(method: str, name: str, summary: str, answer: Schema | str, *errors: int, **more: Any) -> Route:
        path = f"/openenv/{{environment}}/{name}"
        more.setdefault("needs_key", name != "health")
        return Route(
            method=method, path=path, tag="OpenEnv", summary=summary, answer=answer, errors=(404, *errors), **more
        )

    id = {"X-Session-ID": {"type": "string", "maxLength": 255, "pattern": "^[!-~]+$"}}
    tasks = (400, 413, 422, 501, *FAILURES)
    yield one("GET", "health", "Is the environment there?", "Status")
    yield one("GET", "metadata", "Name and description", ANY, *FAILURES)
    yield one("GET", "schema", "Schemas of actions and observations", ANY, *FAILURES)
    yield one("GET", "openapi.json", "The routes of this environment, as a stock server has them", ANY)
    yield one("GET", "list_environments", "The name of this environment", several(TEXT))
    acting = (400, 409, 410, 413, 422, *FAILURES)
    yield one(
        "POST",
        "reset",
        "Begin an episode; without X-Session-ID it ends at once",
        "Observation",
        *acting,
        body="HttpReset",
        needs_body=False,
        headers=id,
    )
    yield one("POST", "step", "Act in the episode of X-Session-ID", "Observation", *acting, body="HttpStep", headers=id)
    yield one("GET", "state", "State of the episode of X-Session-ID", ANY, *acting, headers=id)
    yield one("POST", "mcp", "Tools over JSON-RPC", "RpcReply", 400, 413, *FAILURES, body="Rpc")
    yield one("GET", "{environment_again}/splits", "Splits of tasks", several("Split"), 501, *FAILURES)
    for name, summary, body, answer in _TASKS:
        yield one("POST", f"{{environment_again}}/{name}", summary, answer, *tasks, body=body)


def _operators() -> Iterator[Route]:
    def admin(method: str, path: str, summary: str, answer: Schema | str | None, *errors: int, **more: Any) -> Route:
        return Route(
            method=method,
            path=f"/admin/v1/{path}",
            tag="operators",
            summary=summary,
            answer=answer,
            errors=errors,
            **more,
        )

    for path, summary in (("/healthz", "Is the process alive?"), ("/readyz", "Does the gateway take requests?")):
        errors = (503,) if path == "/readyz" else ()
        yield Route(
            method="GET", path=path, tag="operators", summary=summary, answer="Status", errors=errors, needs_key=False
        )
    yield Route(
        method="GET", path="/metrics", tag="operators", summary="Metrics for Prometheus", answer=TEXT, kind="text/plain"
    )
    rows = {"sessions": "Live sessions", "nodes": "Machines of a cluster"}
    for name, summary in rows.items():
        yield admin("GET", name, summary, obj(**{name: several(ANY)}), 503)
    yield admin("GET", "workers", "Workers", obj(workers=several(ANY), waiting=ANY), 503)
    yield admin("DELETE", "sessions/{id}", "End a live session", obj(id=TEXT, name=TEXT, owner=TEXT), 400, 404, 503)
    log = {"lines": {"type": "integer", "minimum": 1, "maximum": 100_000}}
    yield admin(
        "GET", "workers/{id}/log", "Last lines of a worker", obj(worker=TEXT, log=TEXT), 400, 404, *FAILURES, query=log
    )
    answer = obj(environment=TEXT, draining=several(TEXT))
    yield admin(
        "POST", "environments/{environment}/restart", "Replace the environment's workers", answer, 400, 404, 503
    )
    yield admin("PUT", "nodes/{id}", "Drain a machine, or end its drain", ANY, 400, 404, 413, 503, body="Draining")
    wanted = dict.fromkeys(("environment", "tag", "split", "after"), TEXT) | {"limit": _LIMIT}
    listed = obj(tasks=several("TaskRow"), next=maybe(TEXT))
    yield admin("GET", "tasks", "Tasks of files and of the API", listed, 400, 404, 503, query=wanted)
    flags = dict.fromkeys(("replace", "validate"), FLAG) | dict.fromkeys(("environment", "split"), TEXT)
    added = obj(tasks=several(ANY), signed_by=maybe(TEXT))
    adding = (400, 403, 404, 409, 413, *FAILURES)
    yield admin("POST", "tasks", "Add tasks, all or none", added, *adding, body=ANY, query=flags, created=True)
    tried = obj(results=several(ANY))
    one_environment = {"environment": TEXT}
    yield admin(
        "POST",
        "tasks/validate",
        "Try tasks: open and end an episode of each",
        tried,
        *adding,
        body=ANY,
        query=one_environment,
    )
    yield admin("GET", "tasks/{environment}/{id}", "A task", obj(task=ANY), 400, 404, 503)
    yield admin("DELETE", "tasks/{environment}/{id}", "Remove a task of the API", None, 400, 404, 409, 503)
    curriculum = obj(name=TEXT)
    yield admin("GET", "curriculum", "Curricula", obj(curricula=several(curriculum)), 400, 503)
    shown = {"environment": TEXT, "tasks": {"type": "integer", "minimum": 0, "maximum": 1_000}}
    yield admin(
        "GET",
        "curriculum/{name}",
        "State of a curriculum, and its likeliest draws",
        curriculum,
        400,
        404,
        *FAILURES,
        query=shown,
    )
    yield admin("PUT", "curriculum/{name}", "Define a curriculum", curriculum, 400, 404, 409, 413, *FAILURES, body=ANY)
    yield admin("DELETE", "curriculum/{name}", "Remove a curriculum of the API", None, 400, 404, 409, 503)
    draws = obj(group_size=COUNT, policy=maybe(TEXT), draws=several(ANY))
    changes = (400, 404, 413, *FAILURES)
    yield admin("POST", "curriculum/{name}/sample", "Draw tasks", draws, *changes, body="Sample", needs_body=False)
    yield admin(
        "POST",
        "curriculum/{name}/feedback",
        "Report outcomes",
        obj(noted=COUNT),
        *changes,
        body="Feedback",
        needs_body=False,
    )
    yield admin("POST", "curriculum/{name}/reset", "Restart a curriculum", None, 400, 404, 503)
    of = {"query": {"environment": TEXT}, "needs": frozenset(("environment",))}
    yield admin(
        "GET",
        "records",
        "Records of an environment's tasks, a JSON object a line",
        TEXT,
        400,
        404,
        503,
        kind="application/jsonl",
        **of,
    )
    cleared = {"query": {"environment": TEXT, "task": TEXT}, "needs": frozenset(("environment",))}
    yield admin("DELETE", "records", "Remove records", obj(removed=COUNT), 400, 404, 503, **cleared)
    number = {"type": "number"}
    filters = dict.fromkeys(episodes.TEXTS, TEXT) | dict.fromkeys(("reward_min", "reward_max", "since"), number)
    page = obj(episodes=several("EpisodeRow"), next=maybe(TEXT))
    yield admin(
        "GET",
        "episodes",
        "Recorded episodes, newest first",
        page,
        400,
        *FAILURES,
        query={**filters, "before": TEXT, "limit": _LIMIT},
    )
    yield admin("GET", "episodes/{id}", "An episode with all its steps", "Episode", 404, *FAILURES)
    yield admin("GET", "episodes/{id}/record", "An ended episode, signed", ANY, 400, 404, *FAILURES)
    yield admin("GET", "signing-key", "The public key of records", TEXT, kind="application/x-pem-file")
    yield admin("GET", "blobs/{digest}", "An image of a step", {}, 404, *FAILURES, kind="application/octet-stream")
    replay = {"idle": FLAG, "other_image": FLAG}
    replaying = (400, 404, 409, 410, 413, *FAILURES)
    yield admin(
        "POST", "episodes/{id}/replay", "Play a recorded episode again, and compare", "Replay", *replaying, query=replay
    )
    yield admin(
        "POST",
        "replays",
        "Play the episode in the body again, and compare",
        "Replay",
        *replaying,
        body=ANY,
        query=replay,
    )
    yield admin(
        "GET",
        "flaky",
        "Tasks that audits marked as flaky",
        obj(tasks=several("Flaky")),
        400,
        404,
        503,
        query=one_environment,
    )
    yield admin(
        "POST", "flaky/{environment}/{task}", "Add an audit's counts", "Flaky", 400, 404, 413, 503, body="Audited"
    )
    yield admin("PUT", "flaky/{environment}/{task}", "Mark a task as flaky", "Flaky", 400, 404, 503)
    yield admin("DELETE", "flaky/{environment}/{task}", "Unmark a task", None, 400, 404, 503)


def _rollouts() -> Iterator[Route]:
    yield Route(
        method="POST",
        path="/v1/rollouts",
        tag="rollouts",
        summary="The model's side of episodes",
        answer="Status",
        body="Rollouts",
        errors=(400, 413),
    )


ROUTES: Final = (*_ors(), *_areal(), *_openenv(), *_rollouts(), *_operators())
