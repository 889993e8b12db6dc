"""Speaks ORS to workers of the gateway's own images, which add a token, a summary and a session list to the standard.

Differences from a plain ORS client:
* The gateway chooses the session's id, because trainers with different keys may choose the same name.
* Every request carries the worker's token, and the gateway sends it once.

A worker keeps its sessions' records, and the gateway rebuilds a store that lost its data from them. The worker's token
signs each record, so a worker can return only records that it received. Without the signature, it could claim another
tenant's session. A record contains no task, secret or key: the owner is the name of a key.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import math
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
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
from gateway.core.faults import (
    FAULT_HEADER,
    FAULTS_HEADER,
    RESULT_HEADER,
    TURN_HEADER,
    Fault,
    FaultKind,
    faults_of,
    read_faults,
)
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.json_text import THREAD_BYTES, compact, parse
from gateway.core.ports.transport import Exchange, Headers, Request, Transport
from gateway.core.ports.upstream import EpisodeResults
from gateway.core.session import Session, SessionSetup, SessionState
from gateway.core.worker import Worker, WorkerSession, WorkerTasks, worker_of
from gateway.upstreams.ors.client import Answer, OrsClient, read, read_blocks, read_result, written
from gateway.upstreams.ors.dialects import secrets_header, split_list, task_count, task_list
from gateway.upstreams.ors_facade import Whole

SILENCE_S: Final = 30.0
"""Seconds of silence after which a worker counts as hung. Workers write a comment every 10 s into an open stream."""
MARGIN_S: Final = 5.0
"""Seconds after a call's deadline at which a worker counts as hung. A healthy worker ends a call at its deadline."""
ANSWER_S: Final = 10.0
"""Seconds that a worker has for a request that it answers from memory."""
READY_PAUSE_S: Final = (0.002, 0.02)
"""Shortest and longest pause, in seconds, between requests to a starting worker. A missing socket costs about 50 us."""
TOKENS_MAX: Final = 10_000
"""Largest number of cached tokens."""
_ACCEPT_JSON: Final = ((b"accept", b"application/json"),)
_REWARDED: Final = b"x-session-rewarded"
_SCORER: Final = b"x-scorer-version"
RECORD_MAX_BYTES: Final = 8192
"""Largest record, in bytes, that a worker keeps. The gateway does not send a longer record."""
_TASK_MAX: Final = 512
"""Largest number of characters of the session's ``task`` in a record."""
_VERSION: Final = re.compile(rb"[0-9a-f]{64}")
_MAC_DIGITS: Final = 32
_PASSED_ON: Final = frozenset((b"content-type", b"idempotency-key", b"x-request-id", b"user-agent"))
"""Headers of a trainer's request, besides ``Accept``, that go to a worker: never keys, cookies or addresses."""


class WorkerClient(OrsClient):
    """Sends requests to workers of the gateway's own images, each with the worker's token."""

    answer_s: ClassVar[float] = ANSWER_S

    def __init__(self, transport: Transport, *, secret: bytes) -> None:
        """Create the client. The tokens of workers are derived from *secret*."""
        super().__init__(transport)
        self._secret = secret
        self._tokens: dict[WorkerId, bytes] = {}

    def token(self, worker: WorkerId) -> bytes:
        """Return the worker's token: HMAC-SHA256 of its id, which a restarted gateway can compute again."""
        known = self._tokens.get(worker)
        if known is None:
            known = hmac.new(self._secret, worker.encode(), hashlib.sha256).hexdigest().encode()
            if len(self._tokens) > TOKENS_MAX:
                self._tokens.clear()
            self._tokens[worker] = known
        return known

    def of(self, session: Session) -> Headers:
        """Return the header that names a session to a worker by the gateway's id. The worker is this gateway's only."""
        return ((b"x-session-id", session.id.encode()),)

    async def send(self, worker: WorkerId, address: str, request: Request, *, silence_s: float) -> Exchange:
        """Send a request and return when the head of the response has arrived. Raises as ``Transport.send``."""
        headers = [(b"x-worker-token", self.token(worker)), *request.headers]
        signed = Request(request.method, request.target, headers, request.body)
        return await self._transport.send(worker, address, signed, silence_s=silence_s)


class OrsUpstream:
    """Speaks ORS to workers of the gateway's own images. Their tokens are derived from *secret*.

    *results* keeps the results of finished episodes; None keeps none. The caller of `forward` keeps them itself.
    """

    def __init__(self, transport: Transport, *, secret: bytes, results: EpisodeResults | None = None) -> None:
        self._client = WorkerClient(transport, secret=secret)
        self._results = results

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Return when the worker answers, accepts the gateway's token, and serves the environment.

        The result is 0, because the worker's response does not contain a capacity.
        """
        began_at = time.monotonic()
        while True:
            try:
                answer = await self._client.ask(worker.id, worker.address, b"/list_environments")
            except (UpstreamGone, UpstreamTimeout):
                least_s, most_s = READY_PAUSE_S  # a twentieth of the wait so far, because openings wait for the worker
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
        """Return the environment's tool list, unchanged from the worker."""
        answer = await self._client.ask(worker.id, worker.address, _path(environment, "tools"))
        if answer.status != 200:
            raise UpstreamError(f"the worker answered {answer.status} to /tools")
        return answer.body

    async def registered(self, worker: Worker, environment: Environment) -> WorkerTasks:
        """Return the tasks that the worker itself knows by id: an empty `WorkerTasks` for a standard server."""
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
        """Return the splits in which the environment's class has tasks. Empty splits are left out."""
        listed = split_list(await self._of_class(worker, environment, "splits"))
        return [split for split in listed if await self.count(worker, environment, split.name)]

    async def count(self, worker: Worker, environment: Environment, split: str) -> int:
        """Return the number of tasks that the environment's class has in a split."""
        return task_count(await self._of_class(worker, environment, "num_tasks", {"split": split}))

    async def tasks(
        self, worker: Worker, environment: Environment, split: str, start: int, stop: int
    ) -> list[TaskSpec]:
        """Return the tasks of a split from index *start* up to *stop*, exclusive."""
        wish = {"split": split, "start": start, "stop": stop}
        return task_list(await self._of_class(worker, environment, "task_range", wish))

    async def _of_class(
        self, worker: Worker, environment: Environment, operation: str, wish: Mapping[str, Any] | None = None
    ) -> Any:
        """Request tasks of the environment's class. The author's code answers, which may take as long as a setup."""
        name, silence_s = environment.worker_name, environment.timeouts.setup_s
        return await self._client.listed(worker, name, operation, wish, headers=_ACCEPT_JSON, silence_s=silence_s)

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """Return the worker's description, with ``default_tool``: an empty mapping for an older image."""
        answer = await self._client.ask(worker.id, worker.address, _path(environment, "registered"))
        return _object(answer, "/registered") if answer.status == 200 else {}

    async def open(self, session: Session, environment: Environment, setup: SessionSetup) -> Session:
        """Open the session in its worker, under the gateway's session id. The handle is empty."""
        wish: dict[str, Any] = {"env_name": environment.worker_name}
        if setup.split and setup.index is not None:  # a task of the environment's class
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
        if setup.of_split:  # the gateway's own task, so it is no reference to a task of the environment's class
            headers.append((b"x-task-is-whole", b"1"))
        place = (session.worker, session.address, b"/create")
        answer = await self._client.ask(*place, body=wish, headers=headers, silence_s=environment.timeouts.setup_s)
        status = answer.status
        if status == 200:
            answer.parsed("/create")  # a worker always answers JSON
            return replace(session, scorer=_scorer(answer.headers.get(_SCORER)))
        detail = answer.detail
        if status == 429:  # the worker holds sessions that the store does not know, so the opening returns to the queue
            raise WorkerFull(detail)
        # The worker is ending, or the release of an earlier opening of this id ended the session. No trainer has seen
        # the session yet, so this worker or another one can open it again.
        if status in (410, 503):
            raise UpstreamGone(detail, sent=True)
        if 400 <= status < 500 and status != 401:
            raise InvalidRequest(detail)
        raise _failure(answer)

    async def close(self, session: Session, environment: Environment, *, keeps: bool = False) -> Summary | None:
        """Close the session in its worker, wait for its teardown, and return its summary."""
        place, silence_s = (session.worker, session.address, b"/delete"), environment.timeouts.close_s
        answer = await self._client.ask(*place, method=b"POST", headers=_leased(session), silence_s=silence_s)
        if answer.status != 200:
            raise UpstreamError(f"the worker answered {answer.status} to /delete: {answer.detail}")
        return _summary(_object(answer, "/delete").get("summary"))

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """Return the worker's list of sessions, or the entries of *ids*. None: a standard server has no list."""
        answer = await self._client.ask(
            worker.id, worker.address, b"/sessions", body=None if ids is None else {"ids": list(ids)}
        )
        if ids is not None and answer.status in (404, 405):  # an older image has only the complete list
            answer = await self._client.ask(worker.id, worker.address, b"/sessions")
        if answer.status == 404:
            return None
        listed, token = answer.parsed("/sessions"), self._client.token(worker.id)
        if answer.status != 200 or not isinstance(listed, Mapping):
            raise UpstreamError(f"the worker answered {answer.status} to /sessions")
        scorer = _scorer(str(listed.get("scorer", "")).encode())
        return [
            WorkerSession(
                id=SessionId(str(entry["sid"])),
                busy=bool(entry["busy"]),
                steps=int(entry["steps"]),
                idle_s=float(entry["idle_s"]),
                session=None if ids is not None else read_record(entry.get("note"), worker, token, scorer=scorer),
            )
            for entry in listed.get("sessions", ())
        ]

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """Return the session's number of steps from the worker's list, or None if the list lacks the session."""
        listed = await self.sessions(worker_of(session), environment, (session.id,))
        return next((one.steps for one in listed or () if one.id == session.id), None)

    async def client_state(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        """Return the state of the session that the environment publishes: an empty mapping for an older image."""
        place = (session.worker, session.address, _path(environment, "state"))
        answer = await self._client.ask(*place, headers=self._client.of(session))
        return _object(answer, "/state") if answer.status == 200 else {}

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """Wait for the task's setup and return the prompt, the first observation of the agent."""
        target, silence_s = _path(environment, "prompt"), environment.timeouts.call_s
        answer = await self._client.settled(session, target, silence_s=silence_s)
        if answer.status != 200:
            raise _failure(answer)
        return read_blocks(answer.parsed("prompt"))

    async def act(
        self,
        session: Session,
        environment: Environment,
        action: Action,
        *,
        key: str | None = None,
        within_s: float | None = None,
    ) -> StepResult:
        """Send an action once and return its result."""
        left_s = environment.timeouts.call_s if within_s is None else min(within_s, environment.timeouts.call_s)
        headers = [
            *_ACCEPT_JSON,
            _step_seconds(left_s),
            *([(b"idempotency-key", key.encode("latin-1", "replace"))] if key else []),
        ]
        # A JSON response arrives in one piece, without comments before it, so the timeout covers the whole call.
        target, silence_s = _path(environment, "call"), environment.timeouts.call_s
        answer = await self._client.settled(session, target, body=written(action), headers=headers, silence_s=silence_s)
        if answer.status == 200:
            turn, rewarded = answer.headers.get(TURN_HEADER), answer.headers.get(_REWARDED)
            found = partial(read_result, answer.body, turn, _faults(answer))
            result = found() if len(answer.body) <= THREAD_BYTES else await asyncio.to_thread(found)
            if self._results is not None and (kept := read_kept(answer.headers.get(RESULT_HEADER, b""))) is not None:
                await self._results.keep(session, kept)
            return result if rewarded is None else replace(result, rewarded=rewarded != b"0")
        if answer.status == 409:
            raise CallConflict(answer.detail)
        if answer.status in (400, 404, 422, 429):
            raise InvalidRequest(answer.detail)
        raise _failure(answer)

    async def forward(
        self, session: Session, environment: Environment, operation: str, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Pass an ORS operation to the worker, and its response back, as unchanged bytes."""
        method = b"POST" if operation in ("call", "score_group") else b"GET"
        passed = [(b"x-session-id", session.id.encode()), *_passed_on(headers)]
        silence_s = environment.timeouts.call_s + MARGIN_S
        if operation == "call":
            passed.append(_step_seconds(environment.timeouts.call_s))
        if method == b"GET" or not _is_whole(passed):
            silence_s = min(SILENCE_S, silence_s)
        target = _path(environment, operation)
        request = Request(method, target, passed, body)
        exchange = await self._client.send(session.worker, session.address, request, silence_s=silence_s)
        if exchange.status == 500 and any(name == FAULT_HEADER for name, _ in exchange.headers):
            raise _failure(await read(exchange))
        if exchange.status == 404:  # the worker knows either no such operation, or no such session
            answer = await read(exchange)
            if answer.is_unknown_session:
                raise SessionNotFound(session.name)
            return Whole(404, answer.body, exchange.headers)
        return exchange


def _object(answer: Answer, what: str) -> Mapping[str, Any]:
    """Return the JSON object in *answer*, or an empty object for other JSON. Raises ``UpstreamError`` if not JSON."""
    found = answer.parsed(what)
    return found if isinstance(found, Mapping) else {}


def _scorer(version: bytes | None) -> str:
    """Return the version of a worker's scorer; empty: an older image sends none, and another text is not a version."""
    return version.decode() if version is not None and _VERSION.fullmatch(version) else ""


def _faults(answer: Answer) -> tuple[Fault, ...]:
    written_faults = answer.headers.get(FAULTS_HEADER)
    return () if written_faults is None else read_faults(written_faults)


def _failure(answer: Answer) -> UpstreamError:
    """Return the error for a failed session. Its class depends on the fault that the worker reports."""
    kinds = {FaultKind.AUTHOR.encode(): AuthorFault, FaultKind.INFRASTRUCTURE.encode(): SessionFailed}
    kind = kinds.get(answer.headers.get(FAULT_HEADER, b""), UpstreamError)
    return kind(answer.detail, faults=_faults(answer))


def _step_seconds(seconds: float) -> tuple[bytes, bytes]:
    """Return the header from which the worker knows how long this replica waits for the end of a step."""
    return b"x-step-seconds", b"%.3f" % seconds


def _path(environment: Environment, operation: str) -> bytes:
    return f"/{environment.worker_name}/{operation}".encode()


def _passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers for the worker, with all ``Accept`` headers as one in lower case.

    Worker and gateway then agree on the form of the answer, and so on how long nothing may arrive.
    """
    passed, accepts = [], []
    for pair in headers:
        if pair[0] == b"accept":
            accepts.append(pair[1])
        elif pair[0] in _PASSED_ON:
            passed.append(pair)
    if accepts:
        passed.append((b"accept", b", ".join(accepts).lower()))
    return passed


def _is_whole(headers: Headers) -> bool:
    """Return True if the worker answers in one piece, without comments before it: the request accepts only JSON."""
    for name, value in headers:
        if name == b"accept":
            return b"application/json" in value and b"text/event-stream" not in value
    return False


def _leased(session: Session) -> list[tuple[bytes, bytes]]:
    """Return the headers with a session's id, and with its lease, which differs from earlier sessions of that id."""
    return [(b"x-session-id", session.id.encode()), (b"x-session-lease", session.lease.encode())]


def read_kept(text: bytes) -> Summary | None:
    """Parse the summary in the answer that ended an episode. None: there is none, or it can't be read."""
    try:
        return _summary(parse(text)) if text else None
    except (ValueError, KeyError, TypeError):
        return None


def _summary(value: object) -> Summary | None:
    if not isinstance(value, Mapping):
        return None
    reward = value["reward"]  # null: the sum is not a finite number, which JSON can't express
    return Summary(
        reward=math.nan if reward is None else float(reward),
        finished=bool(value["finished"]),
        steps=int(value["steps"]),
        seconds=float(value["seconds"]),
        is_rewarded=value.get("rewarded") is not False,  # older images do not send this key
        is_judged=value.get("judged") is True,
        fault=FaultKind(fault) if (fault := value.get("fault")) in set(FaultKind) else None,
        unexpected_error=str(value.get("unexpected") or ""),
        faults=faults_of(faults) if (faults := value.get("faults")) else (),
    )


# -- a session's record, as its worker keeps it -----------------------------------------------------------------------


def write_record(session: Session, token: bytes) -> bytes:
    """Return the record of *session* as a header value, one line of ASCII. Return an empty value if it is too long."""
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


def read_record(note: object, worker: Worker, token: bytes, *, scorer: str = "") -> Session | None:
    """Read a record that *worker* returned. Return None if the gateway did not sign it.

    *scorer*: the version of the worker's scorer.
    """
    if not isinstance(note, str) or not note.isascii():
        return None
    mac, text = note[:_MAC_DIGITS].encode(), note[_MAC_DIGITS:].encode()
    if not hmac.compare_digest(mac, _mac(text, token)):
        return None
    record: Mapping[str, Any] = json.loads(text)  # the signature proves that the gateway wrote it
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
        policy=record.get("policy", ""),  # records of older gateways lack this key
        scorer=scorer,
    )


def _mac(text: bytes, token: bytes) -> bytes:
    return hmac.new(token, b"session-note:" + text, hashlib.sha256).hexdigest()[:_MAC_DIGITS].encode()
