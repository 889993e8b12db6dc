"""Serves the ORS protocol at the host's root, because the SDKs drop path prefixes.

The frontend passes calls through as bytes. It serves discovery from the task registry and sessions through
`gateway.sessions.service`.

Deliberate differences from the reference servers:
* Once a byte of a call was sent to a worker, no response has a status >= 500: both SDKs retry those, and the tool would
  run twice. A failure is 410 before the headers, and an ``error`` event after them.
* Paths without an environment are served directly instead of by a 308 redirect.
* A path that names another environment than the session's gets 409 (setting ``strict_paths``).
* With several environments, a create by split and index may name none. The path of the session's first request then
  selects it (setting ``lazy_binding``). One SDK never names it in the create, and would get the wrong environment.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Final
from urllib.parse import quote

from starlette.types import Receive, Scope, Send

from gateway import __version__
from gateway.core import sse
from gateway.core.environment import Environment
from gateway.core.errors import (
    AuthorFault,
    GatewayError,
    InvalidRequest,
    SessionClosed,
    SessionExists,
    SessionFailed,
    SessionNotFound,
    UnknownEnvironment,
    UnknownTask,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.ids import Owner
from gateway.core.json_text import dump
from gateway.core.ports.transport import Exchange
from gateway.core.routes import ORS_OPERATIONS, ORS_ROUTES
from gateway.frontends.asgi import (
    Attended,
    FrontendParts,
    HungUp,
    Refusal,
    catalog_of,
    header,
    headers,
    read_body,
    respond,
    respond_json,
)
from gateway.frontends.errors import ORS_STATUS, headers_of, marks, status_of, told
from gateway.frontends.ors.create import SessionCreator
from gateway.sessions.service import ActiveSession, TrackedResponse
from gateway.upstreams.ors_bodies import (
    CreateSession,
    OfRange,
    OfSplit,
    OfTask,
    Unprocessable,
    is_json,
    parse_json,
    validate,
)

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES: Final = 64 * 2**20
"""Largest response in bytes that is not an event stream, such as a prompt or a tool list. Streams have no limit."""
STARTING_PAUSE_S: Final = 0.5

ONCE: Final = frozenset(("call", "score_group"))
"""Operations that must not run twice. SDKs retry a status >= 500, so a failure that may have run gets 410."""
_POSTS = frozenset(("tasks", "num_tasks", "task", "task_range", "call", "score_group"))
_ROOT_POSTS = frozenset(("create", "delete", "create_session", "delete_session", "ping"))
_ABSENT = frozenset(("docs", "redoc"))
_NO_SESSION = "Active environment not found"


class OrsFrontend:
    """The ORS protocol as an ASGI application."""

    def __init__(
        self, parts: FrontendParts, *, lazy_binding: bool, strict_paths: bool, strip_platform_keys: bool
    ) -> None:
        self._sessions = parts.sessions
        self._queries = parts.queries
        self._lookup = parts.resolver.lookup
        self._catalog = parts.catalog
        self._max_body_bytes = parts.max_body_bytes
        self._strict_paths = strict_paths
        self._creator = SessionCreator(parts, lazy_binding=lazy_binding, strip_platform_keys=strip_platform_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to one request, and turn every error into a body of the protocol."""
        try:
            await self._dispatch(scope, receive, send)
        except Refusal as answer:
            if answer.status == 404 and answer.body["detail"] != _NO_SESSION:
                logger.info("ors_not_found detail=%r", answer.body["detail"])
            await respond_json(send, answer.status, answer.body, answer.extra)
        except Unprocessable as error:
            await respond_json(send, 422, {"detail": list(error.entries)})
        except HungUp:
            pass
        except GatewayError as error:
            if isinstance(error, UnknownEnvironment | UnknownTask):
                logger.info("ors_not_found detail=%r", error.detail)
            # Errors about the request itself have exactly the reference servers' body.
            body = {"detail": told(error), **({} if isinstance(error, InvalidRequest) else marks(error))}
            await respond_json(send, status_of(error, ORS_STATUS), body, headers_of(error))

    # -- routes ---------------------------------------------------------------------------------------------------

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"].lstrip("/")
        if path.endswith("/"):
            raise Refusal(307, "Temporary Redirect", [(b"location", _without_slash(scope))])
        first, _, rest = path.partition("/")
        name = first.lower()
        catalog = catalog_of(scope, self._catalog)
        environment = catalog.offered.get(name)
        if name in ORS_ROUTES and not rest:
            await self._root(name, scope, receive, send)
        elif environment is not None and rest in ORS_OPERATIONS:
            await self._operation(first, environment, rest, scope, receive, send)
        elif name in ORS_OPERATIONS and not rest:
            await self._operation("", self._meant(scope), name, scope, receive, send)
        elif environment is None and rest in ORS_OPERATIONS:
            raise Refusal(404, f"Not Found: {catalog.unknown(first).detail}")
        else:
            raise Refusal(404, f"Not Found: there is no route {scope['path'][:200]!r}")

    async def _root(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        if name in _ABSENT:
            raise Refusal(404, "Not Found")
        _require(scope, "POST" if name in _ROOT_POSTS else "GET")
        if name == "health":
            await respond_json(send, 200, {"status": "ok"})
        elif name == "version":
            await respond_json(send, 200, {"version": __version__, "build_sha": None})
        elif name == "list_environments":
            await respond_json(send, 200, [environment.name for environment in catalog_of(scope, self._catalog)])
        elif name == "create_session":
            await self._create_session(scope, receive, send)
        elif name == "create":
            await self._create(scope, receive, send)
        elif name == "ping":
            await self._ping(scope, send)
        elif name == "delete":
            await self._delete(scope, send)
        else:  # delete_session: create_session keeps no state, so there is nothing to delete
            await respond_json(send, 200, {"sid": _sid(scope)})

    async def _operation(
        self, segment: str, environment: Environment, name: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        _require(scope, "POST" if name in _POSTS else "GET")
        if name in ("call", "prompt", "task_tools", "messages", "score_group"):
            await self._in_session(segment, name, scope, receive, send)
        elif name == "tools":
            async with Attended(scope, receive):
                await respond(send, 200, await self._queries.tools(environment))
        elif name == "splits":
            await self._lookup.refresh()
            async with Attended(scope, receive):
                splits = await self._lookup.splits(environment)
                await respond_json(send, 200, [{"name": split.name, "type": split.type.value} for split in splits])
        else:
            body = await read_body(scope, receive, self._max_body_bytes)
            env_name, content_type = segment or environment.name, header(scope, b"content-type")
            if name != "task":  # a listing needs fresh data; the lookup of a single unknown task refreshes by itself
                await self._lookup.refresh()
            async with Attended(scope, receive):
                try:
                    answer = await self._discover(name, environment, env_name, body, content_type)
                except UnknownTask as error:
                    logger.info("ors_not_found detail=%r", error.detail)
                    raise Refusal(400, error.detail) from None
                await respond(send, 200, answer)

    async def _discover(
        self, name: str, environment: Environment, env_name: str, body: bytes, content_type: str | None
    ) -> bytes:
        """Return the body for ``tasks``, ``num_tasks``, ``task`` or ``task_range`` (*name*). Raises ``UnknownTask``."""
        tail = b',"env_name":' + dump(env_name) + b"}"
        if name == "num_tasks":
            count = await self._lookup.count(environment, validate(OfSplit, body, content_type).split)
            return dump({"num_tasks": count})
        if name == "task":
            one = validate(OfTask, body, content_type)
            return b'{"task":' + await self._lookup.raw(environment, one.split, one.index) + tail
        if name == "tasks":
            tasks = await self._lookup.range(environment, validate(OfSplit, body, content_type).split, None, None)
        else:
            some = validate(OfRange, body, content_type)
            tasks = await self._lookup.range(environment, some.split, some.start, some.stop)
        return b'{"tasks":[' + b",".join(tasks) + b"]" + tail

    def _meant(self, scope: Scope) -> Environment:
        """Return the environment of a path that names none: the one in ``X-Deployment``, else the default."""
        deployment = header(scope, b"x-deployment") or ""
        name = deployment.rstrip("/").rpartition("/")[2].strip().lower()
        catalog = catalog_of(scope, self._catalog)
        return catalog.offered.get(name, catalog.default)

    # -- sessions -------------------------------------------------------------------------------------------------

    async def _create_session(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._max_body_bytes)
        fields = parse_json(body) if body and is_json(header(scope, b"content-type")) else None
        if isinstance(fields, dict) and fields.get("env"):
            # Container variables would need a container for this session alone. Dropping them silently would be worse.
            raise Refusal(400, "env_overrides are not supported here: pass secrets or task configuration instead")
        name = str(uuid.uuid4())
        accept = header(scope, b"accept") or ""
        if "application/json" in accept and "text/event-stream" not in accept:
            await respond_json(send, 200, {"sid": name})
            return
        answer = sse.event("task_id", name) + sse.event("end", "")
        await send({"type": "http.response.start", "status": 200, "headers": list(sse.HEADERS)})
        await send({"type": "http.response.body", "body": answer})

    async def _create(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._max_body_bytes)
        sid = _sid_after_json(scope, body)
        fields = validate(CreateSession, body, header(scope, b"content-type"))
        owner: Owner = scope["gateway.owner"]
        setup = None
        try:
            create = self._creator.read(fields, scope, self._meant(scope))
            if create.environment is None:
                await self._creator.keep(owner, sid, create, scope["gateway.held"].another())
                await respond_json(send, 200, {"sid": sid})
                return
            if self._creator.kept(owner, sid) is not None:
                raise SessionExists(sid)
            async with Attended(scope, receive):  # may query a worker for the task
                setup = await self._creator.resolve(create)
        except (UnknownEnvironment, UnknownTask, InvalidRequest, Refusal):
            if await self._is_active(owner, sid):
                raise Refusal(400, "Session already exists") from None
            raise
        except SessionExists:
            raise Refusal(400, "Session already exists") from None
        if setup is None:
            raise HungUp
        async with Attended(scope, receive) as trainer:
            try:
                await self._creator.open(owner, sid, create, setup, trainer)
            except SessionExists:
                raise Refusal(400, "Session already exists") from None
            await respond_json(send, 200, {"sid": sid})

    async def _is_active(self, owner: Owner, sid: str) -> bool:
        if self._creator.kept(owner, sid) is not None:
            return True
        try:
            await self._sessions.find(owner, sid)
        except (SessionNotFound, SessionClosed):
            return False
        return True

    async def _ping(self, scope: Scope, send: Send) -> None:
        sid, owner = _sid(scope), scope["gateway.owner"]
        if self._creator.kept(owner, sid) is None:
            try:
                await (await self._sessions.find(owner, sid)).touch()
            except SessionNotFound:
                raise Refusal(404, _NO_SESSION) from None
        await respond_json(send, 200, {"status": "ok"})

    async def _delete(self, scope: Scope, send: Send) -> None:
        sid, owner = _sid(scope), scope["gateway.owner"]
        if not self._creator.drop(owner, sid):
            await self._sessions.close(owner, sid)
        await respond_json(send, 200, {"sid": sid})

    # -- operations in a session ----------------------------------------------------------------------------------

    async def _in_session(self, segment: str, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, self._max_body_bytes) if name in ONCE else b""
        sid = _sid_after_json(scope, body)
        owner: Owner = scope["gateway.owner"]
        async with Attended(scope, receive):
            try:
                if self._creator.binds_late:
                    catalog = catalog_of(scope, self._catalog)
                    environment = catalog.offered.get(segment.lower()) or self._meant(scope)
                    await self._creator.bind(owner, sid, environment)
                session = await self._sessions.find(owner, sid)
                environment = session.environment
                if segment and self._strict_paths and environment.name != segment.lower():
                    asked = f"the session belongs to environment {environment.name!r}, not to {segment!r}"
                    raise Refusal(409, asked)
                await self._pass_on(session, environment, name, scope, body, send)
            except SessionNotFound:
                _refuse_malformed(scope, body)
                raise Refusal(404, _NO_SESSION) from None

    async def _pass_on(
        self, session: ActiveSession, environment: Environment, name: str, scope: Scope, body: bytes, send: Send
    ) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + environment.timeouts.call_s
        while True:
            try:
                exchange = await session.forward(name, body=body, headers=scope["headers"])
            except UpstreamError as error:
                raise as_order(error, name) from error
            try:
                if is_starting(exchange) and loop.time() < deadline:
                    # Only the setup runs, so a retry is safe. The gateway waits because some SDKs do not.
                    await asyncio.sleep(STARTING_PAUSE_S)
                    continue
                await self._copy(exchange, name, send, deadline)
                return
            finally:
                await exchange.aclose()

    async def _copy(self, exchange: TrackedResponse, name: str, send: Send, deadline: float) -> None:
        kind = dict(exchange.headers).get(b"content-type", b"")
        if not kind.startswith(b"text/event-stream"):
            await self._copy_whole(exchange, name, send)
            return
        await send({"type": "http.response.start", "status": exchange.status, "headers": list(exchange.headers)})
        if exchange.is_whole:  # most tools are fast: this saves the parts of a stream
            await send({"type": "http.response.body", "body": await exchange.read(MAX_ANSWER_BYTES)})
            return
        try:
            async with asyncio.timeout_at(deadline):
                async for chunk in exchange.chunks():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except (GatewayError, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                await exchange.overran()
            late = UpstreamTimeout("the call took longer than its environment allows")
            text = told(error if isinstance(error, GatewayError) else late)
            logger.warning("call_broken operation=%s error=%s", name, text)
            # The blank line terminates an incomplete event.
            await send(
                {"type": "http.response.body", "body": b"\r\n\r\n" + sse.event("error", text), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b""})

    async def _copy_whole(self, exchange: Exchange, name: str, send: Send) -> None:
        try:
            body = await exchange.read(MAX_ANSWER_BYTES)
        except UpstreamError as error:
            raise as_order(error, name) from error
        may_have_run = name in ONCE and exchange.status >= 500 and not is_starting(exchange)
        status = 410 if may_have_run else exchange.status
        passed = [pair for pair in exchange.headers if pair[0] in (b"content-type", b"retry-after", b"x-backend-state")]
        await respond(send, status, body, passed)


def is_starting(exchange: Exchange | TrackedResponse) -> bool:
    """Return True if the setup of the session still runs, so that the operation did not run."""
    return exchange.status == 503 and (b"x-backend-state", b"starting") in list(exchange.headers)


def _require(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise Refusal(405, "Method Not Allowed", [(b"allow", method.encode())])


def _sid(scope: Scope) -> str:
    values = set(map(str.strip, headers(scope, b"x-session-id")))
    if len(values) > 1:
        raise Refusal(400, "X-Session-ID header is given twice")
    sid = values.pop() if values else ""
    if not sid:
        raise Refusal(400, "X-Session-ID header is required")
    if len(sid) > MAX_SID_CHARS:
        raise Refusal(400, f"X-Session-ID is longer than {MAX_SID_CHARS} characters")
    return sid


MAX_SID_CHARS: Final = 1024
"""Largest length of a session id, which the store keeps. SDKs use 36 characters."""


def _sid_after_json(scope: Scope, body: bytes) -> str:
    """Return the session's id. A malformed body raises first, as in the reference servers."""
    try:
        return _sid(scope)
    except Refusal:
        _refuse_malformed(scope, body)
        raise


def _refuse_malformed(scope: Scope, body: bytes) -> None:
    if body and is_json(header(scope, b"content-type")):
        parse_json(body)


def _without_slash(scope: Scope) -> bytes:
    """Return the URL without its trailing slash: absolute, as in the reference servers.

    The URL is relative if the path contains a key, or behind a proxy, because only the proxy knows the client's URL.
    """
    query = b"?" + scope["query_string"] if scope.get("query_string") else b""
    if scope.get("gateway.keyed") or header(scope, b"x-forwarded-proto") is not None:
        last = scope["path"].rstrip("/").rpartition("/")[2]
        return b"../" + quote(last).encode() + query
    host = header(scope, b"host") or "localhost"
    path: bytes = (scope.get("raw_path") or scope["path"].encode()).rstrip(b"/")
    return f"{scope.get('scheme', 'http')}://{host}".encode("latin-1") + path + query


def as_order(error: UpstreamError, name: str) -> Exception:
    """Return the error to raise for a worker's failure in operation *name*, so that no SDK runs a step twice.

    Steps get 410. The exception is 503 if no byte of the request was sent: nothing ran, and the SDKs may retry.
    """
    if name not in ONCE:
        return error
    if isinstance(error, AuthorFault | SessionFailed):  # a failed session runs no call
        return Refusal(410, told(error), more=marks(error))
    if isinstance(error, UpstreamGone) and not error.sent:
        return Refusal(503, told(error), [(b"retry-after", b"1")], more=marks(error))
    return Refusal(410, f"{told(error)}; the call may have run", more=marks(error))
