"""A backend whose workers are real HTTP servers in this process, each on its own Unix socket.

The workers speak the worker protocol (ORS with a token, a session list and a summary). A request selects the worker's
misbehavior: a task's ``on_create`` and ``on_delete``, and the name of the called tool. The backend's `Start` selects
how the workers of an environment start.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from gateway.core.environment import Environment
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.leader_lease import LeaderLease
from gateway.core.session import CloseReason
from gateway.core.worker import BackendWorker, Death, Worker
from tests.fakes.raw_http import Connection, RawServer, Request

AUTHOR = "X-Session-Fault: author\r\n"
"""Header of an answer for a fault of the environment's author."""
UNKNOWN = {"detail": "Active environment not found"}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
STILL_STARTING = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nx-backend-state: starting\r\n"
    b'retry-after: 2\r\ncontent-length: 40\r\n\r\n{"detail":"Environment still starting."}'
)


class Start(StrEnum):
    """The fate of a requested worker."""

    READY = "ready"
    REFUSED = "refused"  #: the engine does not start it
    DIES = "dies"  #: it starts, and dies before it answers
    NEVER_READY = "never_ready"  #: it lives, and never answers
    GARBAGE = "garbage"  #: its answers are not HTTP
    STRANGER = "stranger"  #: it serves another environment


@dataclass(slots=True)
class FakeSession:
    """A session as its worker knows it."""

    task: dict[str, Any]
    secrets: str
    """The ``X-Secrets`` header as received."""
    note: str
    """The ``X-Session-Note`` header as received."""
    lease: str = ""
    """The ``X-Session-Lease`` header as received."""
    ran: list[str] = field(default_factory=list)
    """Tools that ran, in order."""
    fault: str = ""
    """The party at fault for the session's failure; empty: it has not failed."""
    kept: dict[str, tuple[bytes, dict[str, Any]]] = field(default_factory=dict)
    """Bodies and outcomes of calls by their idempotency key."""
    busy: int = 0
    idle_s: float = 0.0
    """Idle seconds that the worker's list reports. A test sets them."""


class FakeWorker:
    """One worker: a server on a Unix socket."""

    def __init__(self, worker: Worker, environment: Environment, path: Path, backend: FakeBackend) -> None:
        self.worker = worker
        self.environment = environment
        self.backend = backend
        self.sessions: dict[str, FakeSession] = {}
        self.ran: list[str] = []
        """Tools that ran in any session, including ended sessions."""
        self.created = 0
        self.deleted: list[str] = []
        self.gate = asyncio.Event()
        """Event that releases waiting requests: a create with ``on_create: gate``, a call of ``gate`` or ``quiet``."""
        self.waiting = 0
        """Number of requests that wait at the gate."""
        self.is_awake = asyncio.Event()
        """While this event is cleared, the worker accepts requests but answers none, like stopped processes."""
        self.is_awake.set()
        self.ended_leases: set[str] = set()
        """Leases of sessions that were deleted before they were created."""
        self.knows_leases = True
        """False: it creates a session that was deleted while it waited, like a server of another project."""
        self.listing = asyncio.Event()
        """While this event is cleared, ``GET /sessions`` gets no answer."""
        self.listing.set()
        self.lists_asked = 0
        self.counts_turns = False
        """True if a call's response numbers the turn, as the server of the gateway's own images does."""
        self.scorer = ""
        """Version of its scorer; empty: it reports none, like an older image."""
        self.is_running = True
        self._token = ""
        self._server = RawServer(self._serve, path=path)

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def requests(self) -> list[Request]:
        """All received requests."""
        return self._server.requests

    async def listen(self) -> None:
        await self._server.start()

    async def aclose(self) -> None:
        self.is_running = False
        await self._server.aclose()

    async def fall_silent(self) -> None:
        """Accept no further connections, while the backend still regards the worker as running."""
        await self._server.aclose()

    async def die(self, *, announced: bool = True, reason: CloseReason = CloseReason.WORKER_LOST) -> None:
        """Die with all connections. The backend reports the death and its *reason* if *announced*."""
        await self.aclose()
        if announced:
            self.backend.announce(self.worker.id, reason)

    # -- the protocol ---------------------------------------------------------------------------------------------

    async def _serve(self, connection: Connection) -> None:
        while True:
            request = await connection.request()
            await self.is_awake.wait()
            await self._answer(connection, request)

    async def _answer(self, connection: Connection, request: Request) -> None:
        if self.backend.starts[self.worker.environment] is Start.GARBAGE:
            await connection.send(b"hello, this is not HTTP\r\n\r\n")
            return
        if not self._is_claimed_by(request.headers.get("x-worker-token", "")):
            await _json(connection, 401, {"detail": "another token claimed this worker"})
            return
        match request.method, request.target.strip("/").split("/"):
            case "GET", ["list_environments"]:
                stranger = self.backend.starts[self.worker.environment] is Start.STRANGER
                await _json(connection, 200, ["another"] if stranger else [self.environment.worker_name])
            case "GET", ["sessions"]:
                await self._list(connection)
            case "POST", ["create"]:
                await self._create(connection, request)
            case "POST", ["delete"]:
                await self._delete(connection, request)
            case "GET", [_, "tools"]:
                await _json(connection, 200, {"tools": [{"name": "echo", "description": "", "input_schema": None}]})
            case "POST", [_, "call"]:
                await self._in_session(connection, request, self._call)
            case "GET", [_, "prompt"]:
                await self._in_session(connection, request, self._prompt)
            case "GET", [_, "state"]:
                await self._in_session(connection, request, self._client_state)
            case _:
                await _json(connection, 404, {"detail": "Not Found"})

    def _is_claimed_by(self, token: str) -> bool:
        self._token = self._token or token
        return bool(token) and token == self._token

    async def _list(self, connection: Connection) -> None:
        self.lists_asked += 1
        await self.listing.wait()
        entries = [
            {
                "sid": sid,
                "task": None,
                "steps": len(one.ran),
                "idle_s": one.idle_s,
                "busy": one.busy > 0,
                "note": one.note,
            }
            for sid, one in self.sessions.items()
        ]
        await _json(connection, 200, {"sessions": entries, "scorer": self.scorer})

    async def _create(self, connection: Connection, request: Request) -> None:
        sid, lease = request.headers["x-session-id"], request.headers.get("x-session-lease", "")
        if await self._is_over(connection, lease):
            return
        if sid in self.sessions and self.sessions[sid].lease != lease:
            del self.sessions[sid]  # left behind by an earlier opening
        task: dict[str, Any] = json.loads(request.body)["task_spec"]
        match task.get("on_create", "open"):
            case "refuse":
                await _json(connection, 400, {"detail": "this task is none"})
                return
            case "fail":
                await _json(connection, 500, {"detail": "RuntimeError: the setup failed"})
                return
            case "author":
                await _json(connection, 500, {"detail": "KeyError: 'toop'"}, AUTHOR)
                return
            case "garbage":
                await connection.send(b"\x00\x01\x02\x03\r\n\r\n")
                return
            case "die":
                await self._die_now()
            case "gate":
                await self._wait_while_there(connection)
        if await self._is_over(connection, lease):  # it was deleted while it waited
            return
        if sid in self.sessions:
            await _json(connection, 400, {"detail": "Session already exists"})
            return
        self.created += 1
        note = request.headers.get("x-session-note", "")
        self.sessions[sid] = FakeSession(task, request.headers.get("x-secrets", ""), note, lease)
        await _json(connection, 200, {"sid": sid}, f"X-Scorer-Version: {self.scorer}\r\n" if self.scorer else "")

    async def _is_over(self, connection: Connection, lease: str) -> bool:
        """Refuse to create a session whose lease has ended. Return True if it was refused."""
        if self.knows_leases and lease and lease in self.ended_leases:
            await _json(connection, 410, {"detail": "Session deleted"})
            return True
        return False

    async def _delete(self, connection: Connection, request: Request) -> None:
        sid, lease = request.headers["x-session-id"], request.headers.get("x-session-lease", "")
        session = self.sessions.get(sid)
        if session is None or (lease and session.lease != lease):
            self.ended_leases.add(lease)
            self.deleted.append(sid)
            await _json(connection, 200, {"sid": sid, "summary": None})
            return
        how = session.task.get("on_delete", "end")
        if how == "hang":
            await connection.left()
        if how == "fail":
            await _json(connection, 500, {"detail": "RuntimeError: the teardown failed"})
            return
        self.sessions.pop(sid, None)
        self.deleted.append(sid)
        summary: dict[str, Any] = {"reward": 1.0, "finished": True, "steps": len(session.ran), "seconds": 0.5}
        summary |= session.task.get("summary", {})
        await _json(connection, 200, {"sid": sid, "summary": summary})

    async def _in_session(self, connection: Connection, request: Request, operation: Any) -> None:
        session = self.sessions.get(request.headers["x-session-id"])
        if session is None:
            await _json(connection, 404, UNKNOWN)
            return
        session.busy += 1
        try:
            await operation(connection, request, session)
        finally:
            session.busy -= 1
            session.idle_s = 0.0

    async def _prompt(self, connection: Connection, _: Request, session: FakeSession) -> None:
        if session.task.pop("slow_setup", False):
            await connection.send(STILL_STARTING)
            return
        await _json(connection, 200, [{"text": str(session.task.get("question", "")), "detail": None, "type": "text"}])

    async def _client_state(self, connection: Connection, _: Request, session: FakeSession) -> None:
        shown = session.task.get("config", {}).get("state")
        await _json(connection, 404 if shown is None else 200, shown)

    async def _call(self, connection: Connection, request: Request, session: FakeSession) -> None:
        wish = json.loads(request.body)
        # A text or an object names the tool. These workers do not parse anything else.
        tool = wish.get("name") or wish.get("text") or wish["action"]["tool"]
        if session.task.pop("slow_setup", False):
            await connection.send(STILL_STARTING)  # nothing runs
            return
        if session.fault:
            await _json(connection, 500, {"detail": "the session has failed"}, f"X-Session-Fault: {session.fault}\r\n")
            return
        if (key := request.headers.get("idempotency-key")) is not None and key in session.kept:
            body, answer = session.kept[key]
            await _json(connection, *((200, answer) if body == request.body else (409, {"detail": "another body"})))
            return
        session.fault = {"judge": "author", "break": "infrastructure"}.get(tool, "")
        session.ran.append(tool)
        self.ran.append(tool)
        match tool:
            case "fail":
                await _json(connection, 500, {"detail": "RuntimeError: broken"})
                return
            case "not_implemented":
                await _json(connection, 404, {"detail": "Environment 'math' does not implement that"})
                return
            case "garbage":
                await connection.send(b"ceci n'est pas du HTTP\r\n\r\n")
                return
            case "hang":
                await connection.left()
            case "die":
                await self._die_now()
            case "quiet":
                await self._wait_at_the_gate()
        if request.headers.get("accept") == "application/json":
            turn = f"X-Session-Turn: {len(session.ran)}\r\n" if self.counts_turns else ""
            answer = _outcome(tool, wish.get("input"))
            if key is not None:
                session.kept[key] = request.body, answer
            await _json(connection, 200, answer, turn + _result(tool, session))
            return
        await connection.send(STREAM_HEAD + _chunk(f"event: task_id\r\ndata: {uuid.uuid4().hex}\r\n\r\n".encode()))
        if tool == "die_later":
            await self._die_now()
        if tool == "gate":
            await self._wait_at_the_gate()
        result = _outcome(tool, wish.get("input"))
        turn = f"id: {len(session.ran)}\r\n" if self.counts_turns else ""
        end = f"event: end\r\n{turn}data: {json.dumps(result, separators=(',', ':'))}\r\n\r\n"
        await connection.send(_chunk(end.encode()) + f"0\r\n{_result(tool, session)}\r\n".encode())

    async def _wait_at_the_gate(self) -> None:
        self.waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1

    async def _wait_while_there(self, connection: Connection) -> None:
        """Wait at the gate. A client that leaves ends the request, as in the real server."""
        waits = [asyncio.ensure_future(self._wait_at_the_gate()), asyncio.ensure_future(connection.left())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            is_let_go = waits[0].done()
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        # A client that left just as the gate opened may have sent a delete already, which found no session.
        if not is_let_go or connection.reader.at_eof():
            raise ConnectionAbortedError

    async def _die_now(self) -> None:
        self.backend.spawn(self.die())
        await asyncio.get_running_loop().create_future()  # until the death cancels this


class FakeBackend:
    """A backend that starts and stops `FakeWorker`s."""

    def __init__(self, folder: Path) -> None:
        """Make a backend whose workers' sockets are in *folder*, which must have a short path."""
        self._folder = folder
        self._followers: list[asyncio.Queue[Death]] = []
        self._errands: set[asyncio.Task[None]] = set()
        self.workers: dict[WorkerId, FakeWorker] = {}
        """Workers that were started and not stopped, including dead workers."""
        self.starts: defaultdict[EnvironmentName, Start] = defaultdict(lambda: Start.READY)
        self.asked = 0
        """Number of workers requested so far."""
        self.stopped: list[WorkerId] = []
        self.paused: set[WorkerId] = set()
        self.images: dict[EnvironmentName, str] = {}
        """Image ids that `prepare` returns, by environment."""
        self.may_start = asyncio.Event()
        """While this event is cleared, requested starts wait."""
        self.may_start.set()
        self.is_down = False
        """True while the engine does not answer."""
        self.unstoppable: set[WorkerId] = set()
        """Workers that the engine fails to stop."""
        self.machines = 1
        self.draining: set[WorkerId] = set()
        """Workers whose machine drains."""

    # -- the port -------------------------------------------------------------------------------------------------

    async def start(self, worker: Worker, environment: Environment, lease: LeaderLease | None = None) -> str:
        """See ``Backend.start``."""
        self.asked += 1
        await self.may_start.wait()
        self._answer()
        how = self.starts[environment.name]
        if how is Start.REFUSED:
            raise StartFailed("the engine has no such image")
        started = FakeWorker(worker, environment, self._folder / f"{worker.id}.sock", self)
        self.workers[worker.id] = started
        if how is Start.DIES:
            started.is_running = False
            self.announce(worker.id)
        elif how is not Start.NEVER_READY:
            await started.listen()
        return started.address

    async def stop(self, id: WorkerId) -> None:
        """See ``Backend.stop``."""
        self._answer()
        if id in self.unstoppable:
            raise BackendError(f"{id} can't be stopped")
        worker = self.workers.pop(id, None)
        self.stopped.append(id)
        self.paused.discard(id)
        if worker is not None:
            await worker.aclose()

    async def logs(self, id: WorkerId, *, lines: int = 20) -> str:
        """See ``Backend.logs``."""
        self._answer()
        return f"the last words of {self.workers[id].environment.name}" if id in self.workers else ""

    async def found(self) -> list[BackendWorker]:
        """See ``Backend.found``."""
        self._answer()
        return [
            BackendWorker(
                id=id,
                environment=worker.environment.name,
                digest=worker.worker.digest,
                address=worker.address,
                running=worker.is_running,
            )
            for id, worker in self.workers.items()
        ]

    async def pause(self, id: WorkerId, lease: LeaderLease | None = None) -> None:
        """See ``Backend.pause``. The worker is only marked."""
        self._answer()
        self.paused.add(id)

    async def resume(self, id: WorkerId) -> None:
        """See ``Backend.resume``."""
        self._answer()
        self.paused.discard(id)

    async def prepare(self, environment: Environment) -> str:
        """See ``Backend.prepare``."""
        self._answer()
        return self.images.get(environment.name, "")

    async def deaths(self) -> AsyncIterator[Death]:
        """See ``Backend.deaths``."""
        mine: asyncio.Queue[Death] = asyncio.Queue()
        self._followers.append(mine)
        try:
            while True:
                yield await mine.get()
        finally:
            self._followers.remove(mine)

    def engines(self) -> int:
        """See ``Backend.engines``."""
        return self.machines

    def leaving(self) -> frozenset[WorkerId]:
        """See ``Backend.leaving``."""
        return frozenset(self.draining)

    async def check(self) -> None:
        """See ``Backend.check``."""
        self._answer()

    async def aclose(self) -> None:
        """Stop all workers."""
        await asyncio.gather(*self._errands)
        for worker in self.workers.values():
            await worker.aclose()

    # -- for tests ------------------------------------------------------------------------------------------------

    @property
    def only(self) -> FakeWorker:
        """The only worker."""
        assert len(self.workers) == 1, f"{len(self.workers)} workers"
        return next(iter(self.workers.values()))

    def announce(self, id: WorkerId, reason: CloseReason = CloseReason.WORKER_LOST) -> None:
        """Report the death of a worker to all followers."""
        for follower in self._followers:
            follower.put_nowait(Death(id, reason))

    def spawn(self, errand: Any) -> None:
        """Run a coroutine that outlives its caller."""
        task = asyncio.ensure_future(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _answer(self) -> None:
        if self.is_down:
            raise BackendError("the engine does not answer")


def _outcome(tool: str, given: object) -> dict[str, Any]:
    """Return a tool's result: the end of the episode with a reward, unless the tool's name selects another result."""
    reasons = {
        "refuse": "input_validation",
        "over": "episode_finished",
        "break": "session_failed",
        "error": "tool_error",
        "raise": "tool_failed",
        "judge": "author_fault",
    }
    if tool in reasons:
        return {"ok": False, "error": "that is not an action", "reason": reasons[tool]}
    goes_on = tool == "go_on"
    return {
        "ok": True,
        "output": {
            "blocks": [{"text": json.dumps(given), "detail": None, "type": "text"}],
            "metadata": None,
            "reward": None if goes_on or tool == "null" else 1.0,
            "finished": not goes_on,
        },
    }


def _result(tool: str, session: FakeSession) -> str:
    """Return the header with the episode's summary, if *tool* ended it."""
    if not _outcome(tool, None).get("output", {}).get("finished"):
        return ""
    summary = {"reward": 1.0, "finished": True, "steps": len(session.ran), "seconds": 0.5}
    return f"X-Session-Result: {json.dumps(summary | session.task.get('summary', {}))}\r\n"


async def _json(connection: Connection, status: int, value: object, more: str = "") -> None:
    await connection.answer(json.dumps(value, separators=(",", ":")).encode(), status=status, more=more)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
