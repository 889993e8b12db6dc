"""ORS towards workers: our own images, which add a token, a summary and a session list to the standard.

Differences from a plain ORS client: the session's id is the gateway's own (trainers of different keys may choose the
same name), every request carries the worker's token, and a request is sent once.

A worker keeps its sessions' records for us: a store that lost its data is rebuilt from them. A record is signed with
the worker's token, so that a worker can give back what it was told and nothing else: it could otherwise name another
tenant's session as its own. No task, no secret and no key is in it; the owner is the name of a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final

from gateway.core.environment import Environment, Split, TaskSpec
from gateway.core.episode import Action, Block, StepResult, Summary
from gateway.core.errors import (
    AuthorFault,
    CallConflict,
    InvalidRequest,
    SessionFailed,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    WorkerFull,
)
from gateway.core.faults import FAULT_HEADER, FAULTS_HEADER, Fault, FaultKind, faults_of, read_faults
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.json_text import compact
from gateway.core.ports.transport import Exchange, Headers, Request, Transport
from gateway.core.session import Session, SessionSetup, SessionState
from gateway.core.worker import Worker, WorkerSession, WorkerTasks
from gateway.upstreams.ors.client import Answer, OrsClient, of, read, read_blocks, read_result, written
from gateway.upstreams.ors.dialects import secrets_header, split_list, task_count, task_list
from gateway.upstreams.ors_facade import Whole

SILENCE_S: Final = 30.0
"""Workers write a comment every 10 s into an open stream, so this much silence is a worker that hangs."""
MARGIN_S: Final = 5.0
"""A worker that lives ends a call itself when its time is over; this long after it, the worker hangs."""
ANSWER_S: Final = 10.0
"""For requests that a worker answers from memory."""
READY_PAUSE_S: Final = (0.002, 0.02)
"""Least and most between two looks at a worker that starts; to try a socket that is not there yet costs some 50 us."""
TOKENS_MAX: Final = 10_000
_ACCEPT_JSON: Final = ((b"accept", b"application/json"),)
_REWARDED: Final = b"x-session-rewarded"
RECORD_MAX_BYTES: Final = 8192
"""What a worker keeps; a session with a longer record (a task's id may be long) is noted without its task."""
_TASK_MAX: Final = 512
_MAC_DIGITS: Final = 32
_PASSED_ON: Final = frozenset((b"content-type", b"accept", b"idempotency-key", b"x-request-id", b"user-agent"))
"""Headers of a trainer's request that a worker may see; never keys, cookies or addresses."""


class WorkerClient(OrsClient):
    """Sends requests to workers of our own images, each with the worker's token."""

    answer_s: ClassVar[float] = ANSWER_S

    def __init__(self, transport: Transport, *, secret: bytes) -> None:
        """*secret*: what the tokens are derived from."""
        super().__init__(transport)
        self._secret = secret
        self._tokens: dict[WorkerId, bytes] = {}

    def token(self, worker: WorkerId) -> bytes:
        """The worker's token: HMAC-SHA256 of its id, so that a restarted gateway can compute it again."""
        known = self._tokens.get(worker)
        if known is None:
            known = hmac.new(self._secret, worker.encode(), hashlib.sha256).hexdigest().encode()
            if len(self._tokens) > TOKENS_MAX:
                self._tokens.clear()
            self._tokens[worker] = known
        return known

    async def send(
        self,
        worker: WorkerId,
        address: str,
        method: bytes,
        target: bytes,
        headers: Headers = (),
        body: bytes = b"",
        *,
        silence_s: float,
    ) -> Exchange:
        """Send a request and return when its head is there. Raises as ``Transport.send``."""
        request = Request(method, target, [(b"x-worker-token", self.token(worker)), *headers], body)
        return await self._transport.send(worker, address, request, silence_s=silence_s)


class OrsUpstream:
    """Speaks ORS to workers over *transport*; *secret* is what their tokens are derived from."""

    def __init__(self, transport: Transport, *, secret: bytes) -> None:
        self._client = WorkerClient(transport, secret=secret)

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return when the worker answers, is claimed by us, and serves the environment."""
        began_at = time.monotonic()
        while True:
            try:
                answer = await self._client.ask(worker.id, worker.address, b"/list_environments")
            except (UpstreamGone, UpstreamTimeout):
                least_s, most_s = READY_PAUSE_S  # a twentieth of the wait so far: an opening waits for this, too
                await asyncio.sleep(min(most_s, max(least_s, (time.monotonic() - began_at) / 20)))
                continue
            if answer.status == 401:
                raise UpstreamError(
                    f"worker {worker.id} was claimed with another token (was the gateway's secret replaced?)"
                )
            if answer.status != 200:
                told = f"answered {answer.status} to /list_environments: {answer.detail}"
                raise UpstreamError(f"worker {worker.id} {told}")
            names = answer.parsed("/list_environments")
            if not isinstance(names, list) or environment.worker_name not in names:
                raise UpstreamError(f"worker {worker.id} serves {names!r}, not {environment.worker_name!r}")
            return 0

    async def alive(self, worker: Worker, environment: Environment, *, busy_counts: bool = True) -> None:
        """Return if the worker answers."""
        await self.ready(worker, environment)

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """The environment's tool list, as the worker writes it."""
        answer = await self._client.ask(worker.id, worker.address, _path(environment, "tools"))
        if answer.status != 200:
            raise UpstreamError(f"the worker answered {answer.status} to /tools")
        return answer.body

    async def registered(self, worker: Worker, environment: Environment) -> WorkerTasks:
        """The tasks that the worker knows by itself; none if it is a standard server."""
        answer = await self._client.ask(worker.id, worker.address, _path(environment, "registered"))
        if answer.status == 404:
            return WorkerTasks()
        found = answer.parsed("/registered")
        if answer.status != 200 or not isinstance(found, Mapping):
            raise UpstreamError(f"the worker answered {answer.status} to /registered: {answer.detail}")
        tasks = [entry for entry in found.get("tasks", ()) if isinstance(entry, Mapping)]
        modules = [entry for entry in found.get("modules", ()) if isinstance(entry, Mapping)]
        return WorkerTasks(
            tasks={str(entry.get("id")): entry for entry in tasks},
            failed={str(entry.get("module")): str(entry["error"]) for entry in modules if entry.get("error")},
            config_keys=tuple(map(str, keys)) if isinstance(keys := found.get("config_keys"), list) else None,
        )

    async def splits(self, worker: Worker, environment: Environment) -> list[Split]:
        """Those in which its class has tasks by itself: a class without any lists an empty split too."""
        listed = split_list(await self._of_class(worker, environment, "splits"))
        return [split for split in listed if await self.count(worker, environment, split.name)]

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """How many tasks the class has in a split."""
        return task_count(await self._of_class(worker, environment, "num_tasks", {"split": split}))

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Tasks of a split by their places."""
        wish = {"split": split, "start": start, "stop": stop}
        return task_list(await self._of_class(worker, environment, "task_range", wish))

    async def _of_class(
        self, worker: Worker, environment: Environment, operation: str, wish: Mapping[str, Any] | None = None
    ) -> Any:
        """Ask for tasks that the class has by itself; its author's code answers, which may take as long as a setup."""
        name, silence_s = environment.worker_name, environment.timeouts.setup_s
        return await self._client.listed(worker, name, operation, wish, headers=_ACCEPT_JSON, silence_s=silence_s)

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """The name of its default tool, as ``default_tool``; nothing of an older image."""
        answer = await self._client.ask(worker.id, worker.address, _path(environment, "registered"))
        return _object(answer, "/registered") if answer.status == 200 else {}

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
        headers = _leased(session)
        if setup.secrets:
            headers.append(secrets_header(setup.secrets))
        if note := write_record(session, self._client.token(session.worker)):
            headers.append((b"x-session-note", note))
        headers.append((FAULTS_HEADER, b"1"))
        place = (session.worker, session.address, b"/create")
        answer = await self._client.ask(*place, body=wish, headers=headers, silence_s=environment.timeouts.setup_s)
        status = answer.status
        if status == 200:
            answer.parsed("/create")  # anything else than JSON is no answer of a worker's
            return ""
        detail = answer.detail
        if status == 429:  # it holds sessions that the store does not know of: the opening waits its turn again
            raise WorkerFull(detail)
        # It is ending, or the session was ended in it meanwhile by who gave an earlier opening of its id back: another
        # worker, or this one, can take what nobody has seen anything of yet.
        if status in (410, 503):
            raise UpstreamGone(detail, sent=True)
        if 400 <= status < 500 and status != 401:
            raise InvalidRequest(detail)
        raise _failure(answer)

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Close the session in its worker, waiting for its teardown."""
        place, silence_s = (session.worker, session.address, b"/delete"), environment.timeouts.close_s
        answer = await self._client.ask(*place, method=b"POST", headers=_leased(session), silence_s=silence_s)
        if answer.status != 200:
            raise UpstreamError(f"the worker answered {answer.status} to /delete: {answer.detail}")
        return _summary(_object(answer, "/delete").get("summary"))

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """The worker's own list of sessions, or what it says of *ids*; None if it is a standard server, without one."""
        answer = await self._client.ask(
            worker.id, worker.address, b"/sessions", body=None if ids is None else {"ids": list(ids)}
        )
        if ids is not None and answer.status in (404, 405):  # its image is an older one, which knows only the other
            answer = await self._client.ask(worker.id, worker.address, b"/sessions")
        if answer.status == 404:
            return None
        listed, token = answer.parsed("/sessions"), self._client.token(worker.id)
        if answer.status != 200 or not isinstance(listed, Mapping):
            raise UpstreamError(f"the worker answered {answer.status} to /sessions")
        return [
            WorkerSession(
                id=SessionId(str(entry["sid"])),
                busy=bool(entry["busy"]),
                steps=int(entry["steps"]),
                idle_s=float(entry["idle_s"]),
                session=None if ids is not None else read_record(entry.get("note"), worker, token),
            )
            for entry in listed.get("sessions", ())
        ]

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """How many steps the session has seen, as the worker's list says."""
        worker = Worker(id=session.worker, environment=session.environment, digest="", slots=1, address=session.address)
        listed = await self.sessions(worker, environment, (session.id,))
        return next((one.steps for one in listed or () if one.id == session.id), None)

    async def client_state(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        """What the environment shows of the session's state; nothing where its image is an older one."""
        place = (session.worker, session.address, _path(environment, "state"))
        answer = await self._client.ask(*place, headers=of(session))
        return _object(answer, "/state") if answer.status == 200 else {}

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """What the agent is told first, when the task's setup is done."""
        target, silence_s = _path(environment, "prompt"), environment.timeouts.call_s
        answer = await self._client.settled(session, target, silence_s=silence_s)
        if answer.status != 200:
            raise _failure(answer)
        return read_blocks(answer.parsed("prompt"))

    async def act(
        self, session: Session, environment: Environment, action: Action, *, key: str | None = None
    ) -> StepResult:
        """Run an action, once."""
        headers = [*_ACCEPT_JSON, *([(b"idempotency-key", key.encode("latin-1", "replace"))] if key else [])]
        # An answer in JSON comes in one piece, with nothing before it.
        target, silence_s = _path(environment, "call"), environment.timeouts.call_s
        answer = await self._client.settled(session, target, body=written(action), headers=headers, silence_s=silence_s)
        if answer.status == 200:
            kind, turn = answer.headers.get(b"content-type", b""), answer.headers.get(b"x-session-turn")
            result, rewarded = read_result(answer.body, kind, turn, _faults(answer)), answer.headers.get(_REWARDED)
            return result if rewarded is None else replace(result, rewarded=rewarded != b"0")
        if answer.status == 409:
            raise CallConflict(answer.detail)
        if answer.status in (400, 404, 422, 429):
            raise InvalidRequest(answer.detail)
        raise _failure(answer)

    async def forward(
        self, session: Session, environment: Environment, operation: str, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Pass an operation on, bytes for bytes."""
        method = b"POST" if operation in ("call", "score_group") else b"GET"
        passed = [(b"x-session-id", session.id.encode()), *[pair for pair in headers if pair[0] in _PASSED_ON]]
        silence_s = environment.timeouts.call_s + MARGIN_S
        if method == b"GET" or not _is_whole(passed):
            silence_s = min(SILENCE_S, silence_s)
        target = _path(environment, operation)
        exchange = await self._client.send(
            session.worker, session.address, method, target, passed, body, silence_s=silence_s
        )
        if exchange.status == 500 and (FAULT_HEADER, FaultKind.AUTHOR.encode()) in exchange.headers:
            raise _failure(await read(exchange))
        if exchange.status == 404:  # it may mean the operation, or that the session is gone
            answer = await read(exchange)
            if answer.is_unknown_session:
                raise SessionNotFound(session.name)
            return Whole(404, answer.body, exchange.headers)
        return exchange


def _object(answer: Answer, what: str) -> Mapping[str, Any]:
    """The object that *answer* holds; an empty one if it holds anything else. Raises ``UpstreamError``: no JSON."""
    found = answer.parsed(what)
    return found if isinstance(found, Mapping) else {}


def _faults(answer: Answer) -> tuple[Fault, ...]:
    written_faults = answer.headers.get(FAULTS_HEADER)
    return () if written_faults is None else read_faults(written_faults)


def _failure(answer: Answer) -> UpstreamError:
    """Why a session failed, by who its worker says is at fault."""
    kinds = {FaultKind.AUTHOR.encode(): AuthorFault, FaultKind.INFRASTRUCTURE.encode(): SessionFailed}
    kind = kinds.get(answer.headers.get(FAULT_HEADER, b""), UpstreamError)
    return kind(answer.detail, faults=_faults(answer))


def _path(environment: Environment, operation: str) -> bytes:
    return f"/{environment.worker_name}/{operation}".encode()


def _is_whole(headers: Headers) -> bool:
    """Whether a worker answers in one piece, with nothing before it, as it does where only JSON is accepted."""
    accept = b",".join(value for name, value in headers if name == b"accept").lower()
    return b"application/json" in accept and b"text/event-stream" not in accept


def _leased(session: Session) -> list[tuple[bytes, bytes]]:
    """Name a session, and which of those that have had its id is meant."""
    return [*of(session), (b"x-session-lease", session.lease.encode())]


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
        faults=faults_of(faults) if (faults := value.get("faults")) else (),
    )


# -- a session's record, as its worker keeps it -----------------------------------------------------------------------


def write_record(session: Session, token: bytes) -> bytes:
    """Write the record of *session* as a header's value: one line of ASCII. Empty if it is too long."""
    record = {
        "id": session.id,
        "name": session.name,
        "owner": session.owner,
        "environment": session.environment,
        "lease": session.lease,
        "fingerprint": session.fingerprint,
        "idle_s": session.idle_s,
        "task": session.task[:_TASK_MAX],
        "episode": session.episode,
        "policy": session.policy,
    }
    text = compact(record)
    note = _mac(text, token) + text
    return note if len(note) <= RECORD_MAX_BYTES else b""


def read_record(note: object, worker: Worker, token: bytes) -> Session | None:
    """Read a record that *worker* gave back; None if it is none of ours."""
    if not isinstance(note, str) or not note.isascii():
        return None
    mac, text = note[:_MAC_DIGITS].encode(), note[_MAC_DIGITS:].encode()
    if not hmac.compare_digest(mac, _mac(text, token)):
        return None
    record: Mapping[str, Any] = json.loads(text)  # signed by us, so it is what was written
    return Session(
        id=SessionId(record["id"]),
        name=record["name"],
        owner=Owner(record["owner"]),
        environment=EnvironmentName(record["environment"]),
        lease=record["lease"],
        fingerprint=record["fingerprint"],
        idle_s=record["idle_s"],
        worker=worker.id,
        address=worker.address,
        state=SessionState.OPEN,
        task=record["task"],
        episode=record["episode"],
        policy=record.get("policy", ""),  # one of a gateway before this key was
    )


def _mac(text: bytes, token: bytes) -> bytes:
    return hmac.new(token, b"session-note:" + text, hashlib.sha256).hexdigest()[:_MAC_DIGITS].encode()
