"""ORS towards workers: our own images, which add a token, a summary and a session list to the standard.

Differences from a plain ORS client: the session's id is the gateway's own (trainers of different keys may choose the
same name), every request carries the worker's token, and a request is sent once.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Final

from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.episode import Action, Block, StepResult, Summary
from gateway.core.errors import (
    AuthorFault,
    CallConflict,
    InvalidRequest,
    SessionFailed,
    SessionNotFound,
    UnknownSplit,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    WorkerFull,
)
from gateway.core.faults import FAULT_HEADER, FAULTS_HEADER, Fault, FaultKind, faults_of, read_faults
from gateway.core.ids import SessionId, WorkerId
from gateway.core.ports.transport import Exchange, Headers, Request, Transport
from gateway.core.session import Session, SessionSetup
from gateway.core.worker import Worker, WorkerSession, WorkerTasks
from gateway.upstreams.ors import session_record as notes
from gateway.upstreams.ors.codec import read_blocks, read_result, written
from gateway.upstreams.ors.dialects import split_list, task_count, task_list
from gateway.upstreams.ors_facade import Whole

SILENCE_S: Final = 30.0
"""Workers write a comment every 10 s into an open stream, so this much silence is a worker that hangs."""
MARGIN_S: Final = 5.0
"""A worker that lives ends a call itself when its time is over; this long after it, the worker hangs."""
ANSWER_S: Final = 10.0
"""For requests that a worker answers from memory."""
MAX_ANSWER_BYTES: Final = 128 * 2**20
"""OpenEnv's clients take observations of 100 MiB."""
READY_PAUSE_S: Final = (0.002, 0.02)
"""Least and most between two looks at a worker that starts; to try a socket that is not there yet costs some 50 us."""
STARTING_PAUSE_S: Final = 0.5
"""Before a worker is asked again that answered that a session's setup still runs; it holds a request 25 s itself."""
_JSON: Final = ((b"content-type", b"application/json"), (b"accept", b"application/json"))

UNKNOWN_SESSION: Final = b"Active environment not found"
"""How a worker says that it does not know a session."""
_PASSED_ON: Final = frozenset((b"content-type", b"accept", b"idempotency-key", b"x-request-id", b"user-agent"))
"""Headers of a trainer's request that a worker may see; never keys, cookies or addresses."""


class OrsUpstream:
    """Speaks ORS to workers over *transport*; *secret* is what their tokens are derived from."""

    def __init__(self, transport: Transport, *, secret: bytes) -> None:
        self._transport = transport
        self._secret = secret
        self._tokens: dict[WorkerId, bytes] = {}

    def token(self, worker: WorkerId) -> bytes:
        """The worker's token: HMAC-SHA256 of its id, so that a restarted gateway can compute it again."""
        known = self._tokens.get(worker)
        if known is None:
            known = hmac.new(self._secret, worker.encode(), hashlib.sha256).hexdigest().encode()
            if len(self._tokens) > 10_000:
                self._tokens.clear()
            self._tokens[worker] = known
        return known

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return when the worker answers, is claimed by us, and serves the environment."""
        began_at = time.monotonic()
        while True:
            try:
                status, names = await self._json(worker.id, worker.address, b"GET", b"/list_environments")
            except (UpstreamGone, UpstreamTimeout):
                least_s, most_s = READY_PAUSE_S  # a twentieth of the wait so far: an opening waits for this, too
                await asyncio.sleep(min(most_s, max(least_s, (time.monotonic() - began_at) / 20)))
                continue
            if status == 401:
                raise UpstreamError(
                    f"worker {worker.id} was claimed with another token (was the gateway's secret replaced?)"
                )
            if status != 200:
                raise UpstreamError(f"worker {worker.id} answered {status} to /list_environments: {_detail(names)}")
            if not isinstance(names, list) or environment.worker_name not in names:
                raise UpstreamError(f"worker {worker.id} serves {names!r}, not {environment.worker_name!r}")
            return 0

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if the worker answers."""
        await self.ready(worker, environment)

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """The environment's tool list, as the worker writes it."""
        exchange = await self._send(worker.id, worker.address, b"GET", _path(environment, "tools"))
        try:
            body = await exchange.read(MAX_ANSWER_BYTES)
        finally:
            await exchange.aclose()
        if exchange.status != 200:
            raise UpstreamError(f"the worker answered {exchange.status} to /tools")
        return body

    async def registered(self, worker: Worker, environment: Environment) -> WorkerTasks:
        """The tasks that the worker knows by itself; none if it is a standard server."""
        target = _path(environment, "registered")
        status, answer = await self._json(worker.id, worker.address, b"GET", target)
        if status == 404:
            return WorkerTasks()
        if status != 200 or not isinstance(answer, Mapping):
            raise UpstreamError(f"the worker answered {status} to /registered: {_detail(answer)}")
        tasks = [entry for entry in answer.get("tasks", ()) if isinstance(entry, Mapping)]
        modules = [entry for entry in answer.get("modules", ()) if isinstance(entry, Mapping)]
        return WorkerTasks(
            tasks={str(entry.get("id")): entry for entry in tasks},
            failed={str(entry.get("module")): str(entry["error"]) for entry in modules if entry.get("error")},
            config_keys=tuple(map(str, keys)) if isinstance(keys := answer.get("config_keys"), list) else None,
        )

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """Those in which its class has tasks by itself: a class without any lists an empty split too."""
        listed = split_list(await self._of_class(worker, environment, b"GET", "splits"))
        return [split for split in listed if await self.count(worker, environment, split.name)]

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """How many tasks the class has in a split."""
        return task_count(await self._of_class(worker, environment, b"POST", "num_tasks", {"split": split}))

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Tasks of a split by their places."""
        wish = {"split": split, "start": start, "stop": stop}
        return task_list(await self._of_class(worker, environment, b"POST", "task_range", wish))

    async def _of_class(
        self,
        worker: Worker,
        environment: Environment,
        method: bytes,
        operation: str,
        wish: Mapping[str, Any] | None = None,
    ) -> Any:
        """Ask for tasks that the class has by itself; its author's code answers, which may take as long as a setup."""
        status, answer = await self._json(
            worker.id,
            worker.address,
            method,
            _path(environment, operation),
            _JSON,
            json.dumps(wish).encode() if wish is not None else b"",
            silence_s=environment.timeouts.setup_s,
        )
        if status == 400:
            raise UnknownSplit(_detail(answer))
        if status != 200:
            raise UpstreamError(f"the worker answered {status} to /{operation}: {_detail(answer)}")
        return answer

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """The name of its default tool, as ``default_tool``; nothing of an older image."""
        status, answer = await self._json(worker.id, worker.address, b"GET", _path(environment, "registered"))
        return answer if status == 200 and isinstance(answer, Mapping) else {}

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> str:
        """Open the session in its worker, under the id that it has here."""
        wish: dict[str, Any] = {"env_name": environment.worker_name}
        if setup.split and setup.index is not None:  # one of those that its class has by itself
            wish |= {"split": setup.split, "index": setup.index}
        else:
            wish["task_spec"] = setup.spec
        if setup.seed is not None:
            wish["seed"] = setup.seed
        if setup.config is not None:
            wish["config"] = setup.config
        headers = [*_leased(session), (b"content-type", b"application/json")]
        if setup.secrets:
            headers.append((b"x-secrets", _encode_secrets(setup.secrets)))
        if note := notes.written(session, self.token(session.worker)):
            headers.append((b"x-session-note", note))
        headers.append((FAULTS_HEADER, b"1"))
        # Escaped: a trainer's text may hold what UTF-8 can't (a lone surrogate), and JSON can.
        body = json.dumps(wish, separators=(",", ":")).encode()
        exchange = await self._send(
            session.worker,
            session.address,
            b"POST",
            b"/create",
            headers,
            body,
            silence_s=environment.timeouts.setup_s,
        )
        status, known, text = await _read(exchange)
        answer = _parsed(text, "/create")
        if status == 200:
            return ""
        detail = _detail(answer)
        if status == 429:  # it holds sessions that the store does not know of: the opening waits its turn again
            raise WorkerFull(detail)
        # It is ending, or the session was ended in it meanwhile by who gave an earlier opening of its id back: another
        # worker, or this one, can take what nobody has seen anything of yet.
        if status in (410, 503):
            raise UpstreamGone(detail, sent=True)
        if 400 <= status < 500 and status != 401:
            raise InvalidRequest(detail)
        raise _failure(detail, known)

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Close the session in its worker, waiting for its teardown."""
        status, answer = await self._json(
            session.worker,
            session.address,
            b"POST",
            b"/delete",
            _leased(session),
            silence_s=environment.timeouts.close_s,
        )
        if status != 200:
            raise UpstreamError(f"the worker answered {status} to /delete: {_detail(answer)}")
        return _summary(answer.get("summary")) if isinstance(answer, Mapping) else None

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """The worker's own list of sessions, or what it says of *ids*; None if it is a standard server, without one."""
        status, answer = 405, None
        if ids is not None:
            body = json.dumps({"ids": list(ids)}).encode()
            status, answer = await self._json(worker.id, worker.address, b"POST", b"/sessions", _JSON, body)
        if status in (404, 405):  # for all; or its image is an older one, which knows that question only
            status, answer = await self._json(worker.id, worker.address, b"GET", b"/sessions")
        if status == 404:
            return None
        if status != 200 or not isinstance(answer, Mapping):
            raise UpstreamError(f"the worker answered {status} to /sessions")
        return [
            WorkerSession(
                id=SessionId(str(entry["sid"])),
                busy=bool(entry["busy"]),
                steps=int(entry["steps"]),
                idle_s=float(entry["idle_s"]),
                session=None if ids is not None else notes.read(entry.get("note"), worker, self.token(worker.id)),
            )
            for entry in answer.get("sessions", ())
        ]

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """How many steps the session has seen, as the worker's list says."""
        worker = Worker(id=session.worker, environment=session.environment, digest="", slots=1, address=session.address)
        listed = await self.sessions(worker, environment, (session.id,))
        return next((one.steps for one in listed or () if one.id == session.id), None)

    async def client_state(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        """What the environment shows of the session's state; nothing where its image is an older one."""
        target = _path(environment, "state")
        status, answer = await self._json(session.worker, session.address, b"GET", target, _session(session))
        return answer if status == 200 and isinstance(answer, Mapping) else {}

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """What the agent is told first, when the task's setup is done."""
        status, known, body = await self._settled(session, environment, b"GET", "prompt")
        if status != 200:
            raise _failure(_detail(_parsed(body, "prompt")), known)
        return read_blocks(_parsed(body, "prompt"))

    async def act(
        self, session: Session, environment: Environment, action: Action, *, key: str | None = None
    ) -> StepResult:
        """Run an action, once."""
        headers = [*_JSON, *([(b"idempotency-key", key.encode("latin-1", "replace"))] if key else [])]
        status, known, body = await self._settled(session, environment, b"POST", "call", headers, written(action))
        if status == 200:
            kind, turn, faults = known.get(b"content-type", b""), known.get(b"x-session-turn"), _faults(known)
            result, rewarded = read_result(body, kind, turn, faults), known.get(b"x-session-rewarded")
            return result if rewarded is None else replace(result, rewarded=rewarded != b"0")
        detail = _detail(_parsed(body, "call"))
        if status == 410:  # deleted while the call waited for its turn
            raise SessionNotFound(detail)
        if status == 409:
            raise CallConflict(detail)
        if status in (400, 404, 422, 429):
            raise InvalidRequest(detail)
        raise _failure(detail, known)

    async def _settled(
        self,
        session: Session,
        environment: Environment,
        method: bytes,
        operation: str,
        headers: Headers = (),
        body: bytes = b"",
    ) -> tuple[int, Mapping[bytes, bytes], bytes]:
        """Send a request until the worker no longer says that the session's setup runs (then nothing else did).

        Returns status, headers and body. Raises ``SessionNotFound`` if the worker does not know the session.
        """
        while True:
            exchange = await self._send(
                session.worker,
                session.address,
                method,
                _path(environment, operation),
                [*_session(session), *headers],
                body,
                silence_s=environment.timeouts.call_s,  # an answer in JSON comes in one piece, with nothing before it
            )
            status, known, answer = await _read(exchange)
            if status == 404 and UNKNOWN_SESSION in answer:
                raise SessionNotFound(session.name)
            if status != 503 or known.get(b"x-backend-state") != b"starting":
                return status, known, answer
            await asyncio.sleep(STARTING_PAUSE_S)

    async def forward(
        self, session: Session, environment: Environment, operation: str, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Pass an operation on, bytes for bytes."""
        method = b"POST" if operation in ("call", "score_group") else b"GET"
        passed = [*_session(session), *[pair for pair in headers if pair[0] in _PASSED_ON]]
        silence_s = environment.timeouts.call_s + MARGIN_S
        if method == b"GET" or not _is_whole(passed):
            silence_s = min(SILENCE_S, silence_s)
        exchange = await self._send(
            session.worker, session.address, method, _path(environment, operation), passed, body, silence_s=silence_s
        )
        if exchange.status == 500 and (FAULT_HEADER, FaultKind.AUTHOR.encode()) in exchange.headers:
            _, known, answer = await _read(exchange)
            raise _failure(_detail(_parsed(answer, operation)), known)
        if exchange.status == 404:  # it may mean the operation, or that the session is gone
            _, _, answer = await _read(exchange)
            if UNKNOWN_SESSION in answer:
                raise SessionNotFound(session.name)
            return Whole(404, answer, exchange.headers)
        return exchange

    async def pass_frame(self, session: Session, environment: Environment, message: bytes) -> bytes:
        """ORS is passed on by `forward`."""
        raise NotImplementedError

    async def _send(
        self,
        worker: WorkerId,
        address: str,
        method: bytes,
        target: bytes,
        headers: Headers = (),
        body: bytes = b"",
        *,
        silence_s: float = ANSWER_S,
    ) -> Exchange:
        request = Request(method, target, [(b"x-worker-token", self.token(worker)), *headers], body)
        return await self._transport.send(worker, address, request, silence_s=silence_s)

    async def _json(
        self,
        worker: WorkerId,
        address: str,
        method: bytes,
        target: bytes,
        headers: Headers = (),
        body: bytes = b"",
        *,
        silence_s: float = ANSWER_S,
    ) -> tuple[int, Any]:
        exchange = await self._send(worker, address, method, target, headers, body, silence_s=silence_s)
        status, _, text = await _read(exchange)
        return status, _parsed(text, target.decode())


async def _read(exchange: Exchange) -> tuple[int, Mapping[bytes, bytes], bytes]:
    """Read an answer whole, and close it: its status, headers and body."""
    try:
        body = await exchange.read(MAX_ANSWER_BYTES)
    finally:
        await exchange.aclose()
    return exchange.status, dict(exchange.headers), body


def _faults(headers: Mapping[bytes, bytes]) -> tuple[Fault, ...]:
    return read_faults(headers.get(FAULTS_HEADER, b"[]"))


def _failure(detail: str, headers: Mapping[bytes, bytes]) -> UpstreamError:
    """Why a session failed, by who its worker says is at fault."""
    kinds = {FaultKind.AUTHOR.encode(): AuthorFault, FaultKind.INFRASTRUCTURE.encode(): SessionFailed}
    return kinds.get(headers.get(FAULT_HEADER, b""), UpstreamError)(detail, faults=_faults(headers))


def _parsed(text: bytes, what: str) -> Any:
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError) as error:
        raise UpstreamError(f"the worker's answer to {what} is not JSON") from error


def _path(environment: Environment, operation: str) -> bytes:
    return f"/{environment.worker_name}/{operation}".encode()


def _is_whole(headers: Headers) -> bool:
    """Whether a worker answers in one piece, with nothing before it, as it does where only JSON is accepted."""
    accept = b",".join(value for name, value in headers if name == b"accept").lower()
    return b"application/json" in accept and b"text/event-stream" not in accept


def _session(session: Session) -> list[tuple[bytes, bytes]]:
    return [(b"x-session-id", session.id.encode())]


def _leased(session: Session) -> list[tuple[bytes, bytes]]:
    """As `_session`; and which of the sessions that have had this id is meant."""
    return [*_session(session), (b"x-session-lease", session.lease.encode())]


def _encode_secrets(secrets: Mapping[str, str]) -> bytes:
    wrapped = {name: {"value": value} for name, value in secrets.items()}
    return base64.b64encode(json.dumps(wrapped, separators=(",", ":")).encode())


def _detail(answer: object) -> str:
    detail = answer.get("detail") if isinstance(answer, Mapping) else None
    if isinstance(detail, list):  # what is wrong with a body: entries of pydantic's form
        return "; ".join(str(entry.get("msg")) for entry in detail if isinstance(entry, Mapping))
    return detail if isinstance(detail, str) else "the worker gave no reason"


def _summary(value: object) -> Summary | None:
    if not isinstance(value, Mapping):
        return None
    reward = value["reward"]  # null: the sum is no finite number, which JSON has no word for
    return Summary(
        reward=math.nan if reward is None else float(reward),
        finished=bool(value["finished"]),
        steps=int(value["steps"]),
        seconds=float(value["seconds"]),
        is_rewarded=value.get("rewarded") is not False,  # which older images do not tell
        is_judged=value.get("judged") is True,
        fault=FaultKind(fault) if (fault := value.get("fault")) in set(FaultKind) else None,
        faults=faults_of(value.get("faults")),
    )
