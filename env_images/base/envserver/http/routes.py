"""Routing: paths, the worker's token, request bodies and answers.

A path without an environment serves the default environment directly. The reference servers answer it with a redirect.
"""

import re

# The function behind ``hmac.compare_digest``. Importing that module costs a bare server 0.7 MiB.
from _operator import _compare_digest
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from envserver.errors import Refused
from envserver.http import bodies
from envserver.http.connection import Answer, Connection, Pending
from envserver.http.json_text import encode
from envserver.http.messages import JSON, Request, Response, json_response, lines
from envserver.http.responses import Delivery
from envserver.schema.environment_types import OPERATIONS, Kind
from envserver.sessions.session import SETUP_WAIT_S, Session, deleted, starting
from envserver.sessions.sessions import Sessions
from envserver.tasks.registered import Registered
from envserver.tasks.sets import TaskSets
from envserver.version import VERSION

_HEX = re.compile(rb"[0-9a-fA-F]{16,256}")

NOTE_MAX = 8192
"""Maximum length of ``x-session-note``, which a session keeps for its creator."""


class Target(NamedTuple):
    """The destination of a request."""

    request: Request
    connection: Connection
    kind: Kind
    env_name: str
    """The environment's name as spelled in the path."""


Handler: TypeAlias = Callable[[Target], Answer]


class Routes:
    """The server's application."""

    def __init__(
        self,
        *,
        kinds: Mapping[str, Kind],
        tasks: Mapping[str, TaskSets],
        registered: Registered,
        sessions: Sessions,
        delivery: Delivery,
        is_claimable: bool,
        clock: Callable[[], float],
        strict_paths: bool,
    ) -> None:
        self._kinds = kinds
        self._default = next(iter(kinds.values()))
        self._tasks = tasks
        self._registered = registered
        self._sessions = sessions
        self._delivery = delivery
        self._is_claimable = is_claimable
        self._token: bytes | None = None
        self._clock = clock
        self._strict_paths = strict_paths
        self.scorer = ""
        """Version of the scorer, see `envserver.scorer`. The server sets it before it listens."""
        self._names_json = encode(list(kinds))
        self._operations = self._operation_handlers()
        assert self._operations.keys() == OPERATIONS
        # The usual spellings of all paths, so that a request costs one look-up.
        self._paths: dict[bytes, tuple[Mapping[bytes, Handler], Kind, str]] = {}
        for name, handlers in self._root_handlers().items():
            self._paths[f"/{name}".encode()] = (handlers, self._default, self._default.name)
        self._paths[b"//ping"] = self._paths[b"/ping"]  # openreward's client, if its URL ends with a slash
        for name, handlers in self._operations.items():
            self._paths[f"/{name}".encode()] = (handlers, self._default, self._default.name)
            for kind in kinds.values():
                self._paths[f"/{kind.name}/{name}".encode()] = (handlers, kind, kind.name)

    def _root_handlers(self) -> Mapping[str, Mapping[bytes, Handler]]:
        return {
            "health": {b"GET": self._health},
            "version": {b"GET": self._version},
            "list_environments": {b"GET": self._list_environments},
            "sessions": {b"GET": self._list_sessions, b"POST": self._tell_sessions},
            "create_session": {b"POST": self._create_session},
            "delete_session": {b"POST": self._delete_session},
            "create": {b"POST": self._create},
            "ping": {b"POST": self._ping},
            "delete": {b"POST": self._delete},
        }

    def _operation_handlers(self) -> Mapping[str, Mapping[bytes, Handler]]:
        return {
            "tools": {b"GET": self._tools},
            "splits": {b"GET": self._splits},
            "tasks": {b"POST": self._list_tasks},
            "num_tasks": {b"POST": self._num_tasks},
            "task": {b"POST": self._task},
            "task_range": {b"POST": self._task_range},
            "prompt": {b"GET": self._prompt},
            "messages": {b"GET": self._messages},
            "state": {b"GET": self._state},
            "task_tools": {b"GET": self._task_tools},
            "call": {b"POST": self._call},
            "score_group": {b"POST": self._score_group},
            "registered": {b"GET": self._list_registered},
        }

    def __call__(self, request: Request, connection: Connection) -> Answer:
        """Answer *request*.

        Raises:
            Refused: The request is refused. The connection answers this and every other exception.
        """
        if request.path != b"/health":
            self._check_token(request.headers.get(b"x-worker-token"))
        found = self._paths.get(request.path) or self._find(request.path)
        if found is None:
            return self._unknown(request)
        handlers, kind, env_name = found
        handler = handlers.get(request.method)
        if handler is None:
            raise Refused(405, "Method Not Allowed", {"Allow": b", ".join(handlers).decode()})
        return handler(Target(request, connection, kind, env_name))

    def _check_token(self, token: bytes | None) -> None:
        """Let the first token claim a server on a Unix socket.

        Raises:
            Refused: 401: Another token has claimed the server, or *token* is missing or malformed.
        """
        if not self._is_claimable or (token is None and self._token is None):
            return
        if self._token is None and token is not None and _HEX.fullmatch(token):
            self._token = token
        if self._token is None or token is None or not _compare_digest(self._token, token):
            raise Refused(401, "worker token required")

    # -- paths

    def _find(self, path: bytes) -> tuple[Mapping[bytes, Handler], Kind, str] | None:
        """Return the target of an unusually spelled path: upper case, percent signs, an absolute URL."""
        text = path.decode("latin-1")
        if "%" in text:
            from urllib.parse import unquote  # rare, and expensive to import

            text = unquote(text)
        if not text.startswith("/"):
            text = re.sub(r"\Ahttps?://[^/]*", "", text)
        segments = text.split("/")
        if len(segments) == 3 and segments[0] == "" and segments[2] in self._operations:
            kind = self._kinds.get(segments[1].lower())
            if kind is not None:
                return self._operations[segments[2]], kind, segments[1]
        return self._paths.get(text.encode(errors="replace")) if text.encode(errors="replace") != path else None

    def _unknown(self, request: Request) -> Response:
        """Refuse an unknown path, or redirect if only its final slash is wrong."""
        path = request.path.rstrip(b"/")
        if path == request.path or not (path in self._paths or self._find(path)):
            raise Refused(404, "Not Found")
        host = request.headers.get(b"host", b"")
        query = b"?" + request.query if request.query else b""
        location = b"Location: http://%b%b%b\r\n" % (host, path, query)
        return Response(b"", status=307, headers=location)

    # -- the server

    def _health(self, target: Target) -> Response:
        return Response(b'{"status":"ok"}')

    def _version(self, target: Target) -> Response:
        return json_response({"version": VERSION, "build_sha": None})

    async def _list_environments(self, target: Target) -> Response:
        await self._sessions.check_sandboxes()  # a gateway's first request: report unavailable sandboxes here
        return Response(self._names_json)

    def _list_sessions(self, target: Target) -> Response:
        return json_response({"sessions": self._sessions.rows(), "scorer": self.scorer})

    def _tell_sessions(self, target: Target) -> Response:
        return json_response({"sessions": self._sessions.rows(bodies.read(target.request, bodies.IDS)["ids"])})

    # -- discovery

    def _tools(self, target: Target) -> Response:
        return Response(target.kind.tools_json)

    def _splits(self, target: Target) -> Response:
        return Response(target.kind.splits_json)

    async def _list_tasks(self, target: Target) -> Response:
        tasks = await self._tasks[target.kind.name].all(**bodies.read(target.request, bodies.SPLIT))
        return json_response({"tasks": tasks, "env_name": target.env_name})

    async def _num_tasks(self, target: Target) -> Response:
        count = await self._tasks[target.kind.name].count(**bodies.read(target.request, bodies.SPLIT))
        return json_response({"num_tasks": count})

    async def _task(self, target: Target) -> Response:
        task = await self._tasks[target.kind.name].get(**bodies.read(target.request, bodies.TASK))
        return json_response({"task": task, "env_name": target.env_name})

    async def _task_range(self, target: Target) -> Response:
        body = bodies.read(target.request, bodies.TASK_RANGE)
        tasks = await self._tasks[target.kind.name].range(body["split"], body.get("start"), body.get("stop"))
        return json_response({"tasks": tasks, "env_name": target.env_name})

    def _list_registered(self, target: Target) -> Response:
        return json_response(self._registered.listing(target.kind))

    # -- a session's life

    def _create_session(self, target: Target) -> Response:
        return self._delivery.new_session_id(target.request)

    def _delete_session(self, target: Target) -> Response:
        return json_response({"sid": _sid(target.request)})

    def _create(self, target: Target) -> Answer:
        value = bodies.parse(target.request)
        sid = _sid(target.request)
        secrets = target.request.text(b"x-secrets")
        digest = hash((target.request.body, secrets))
        note = target.request.text(b"x-session-note") or ""
        if len(note) > NOTE_MAX:
            raise Refused(400, f"x-session-note is longer than {NOTE_MAX} bytes")
        lease = target.request.text(b"x-session-lease") or ""
        create = replace(
            bodies.checked(bodies.CREATE, value),
            secrets_header=secrets,
            lease=lease,
            note=note,
            tells_faults=b"x-session-faults" in target.request.headers,
            is_whole=b"x-task-is-whole" in target.request.headers,
            digest=digest,
        )
        session = self._sessions.create(sid, create)
        return self._created(session) if session.opened.is_set else self._held(session, self._created_later(session))

    async def _created_later(self, session: Session) -> Response:
        # No deadline: clients have none either, and the author's constructor may take any time.
        while not await session.opened.wait(SETUP_WAIT_S):
            continue
        return self._created(session)

    def _created(self, session: Session) -> Response:
        if session.open_refusal is not None:
            raise session.open_refusal.again()
        if session.state == "closed":
            raise deleted()
        return Response(encode({"sid": session.sid}), headers=JSON + lines({"X-Scorer-Version": self.scorer}))

    def _ping(self, target: Target) -> Response:
        self._sessions.get(_sid(target.request)).used_at = self._clock()
        return Response(b'{"status":"ok"}')

    async def _delete(self, target: Target) -> Response:
        sid = _sid(target.request)
        lease = target.request.text(b"x-session-lease") or ""
        return json_response({"sid": sid, "summary": await self._sessions.delete(sid, lease=lease)})

    # -- in a session

    def _prompt(self, target: Target) -> Answer:
        return self._when_ready(target, lambda session: session.prompt_json)

    def _messages(self, target: Target) -> Answer:
        return self._when_ready(target, lambda session: session.messages_json)

    def _state(self, target: Target) -> Answer:
        return self._when_ready(
            target, lambda session: encode(dict(session.environment.client_state) if session.environment else {})
        )

    def _task_tools(self, target: Target) -> Answer:
        session = self._session(target)
        if session.state == "starting" and not session.kind.has_task_tools:
            return Response(session.task_tools_json)  # nothing to wait for
        return self._when_ready(target, lambda session: session.task_tools_json)

    def _when_ready(self, target: Target, read: Callable[[Session], bytes]) -> Answer:
        session = self._session(target)
        session.check()
        return Response(read(session)) if session.state == "ready" else self._held(session, _ready_later(session, read))

    def _call(self, target: Target) -> Answer:
        value = bodies.parse(target.request)
        session = self._session(target)
        return self._delivery.answer(target.request, target.connection, session, bodies.call_of(value))

    def _score_group(self, target: Target) -> Answer:
        value = bodies.parse(target.request)
        session = self._session(target)
        body = bodies.checked(bodies.SCORE_GROUP, value)
        if not session.kind.scores_groups:
            raise Refused(404, f"Environment {target.env_name!r} does not implement score_group")
        return self._delivery.answer(target.request, target.connection, session, body)

    def _session(self, target: Target) -> Session:
        """Return the session and record the time of this request."""
        session = self._sessions.get(_sid(target.request))
        session.used_at = self._clock()
        if self._strict_paths and target.kind is not session.kind and target.request.path.count(b"/") > 1:
            raise Refused(409, f"the session belongs to environment {session.kind.name!r}")
        return session

    def _held(self, session: Session, work: Coroutine[Any, Any, Response]) -> Pending:
        session.requests += 1

        def release() -> None:
            session.requests -= 1
            session.used_at = self._clock()

        return Pending(work, release)


async def _ready_later(session: Session, read: Callable[[Session], bytes]) -> Response:
    if not await session.settled.wait(SETUP_WAIT_S):
        raise starting()
    session.check()
    return Response(read(session))


def _sid(request: Request) -> str:
    sid = request.text(b"x-session-id")
    if not sid:
        raise Refused(400, "X-Session-ID header is required")
    return sid
