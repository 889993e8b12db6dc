"""ORS bytes for servers that speak something else, so that the ORS front serves every kind of worker.

An upstream that has a prompt, tools and steps gets the rest from `OrsFacade`: calls that run once, answers to
``/call``, ``/prompt``, ``/task_tools``, ``/messages`` and ``/score_group``, and the count of its steps.

Differences from the reference servers: a stream is cut so that no client loses white space; a call whose stream broke
before its task id is found again by its repetition, and does not run twice; results of one session are not shown to
another.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar, Final, Generic, TypeVar

from gateway.core.environment import Environment
from gateway.core.episode import TOOL_FAILED, Action, Block, StepResult
from gateway.core.errors import (
    AuthorFault,
    GatewayError,
    SessionFailed,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
    WorkerFull,
)
from gateway.core.faults import Fault, author_faults
from gateway.core.ids import SessionId
from gateway.core.json_text import dump
from gateway.core.ports.transport import Exchange, Headers, header
from gateway.core.session import Session
from gateway.core.worker import Worker, WorkerSession, WorkerTasks
from gateway.upstreams import ors_bodies as answers
from gateway.upstreams import sse
from gateway.upstreams.action_mapping import Unreadable
from gateway.upstreams.idempotency.call import Call
from gateway.upstreams.idempotency.calls import OnceOnlyCalls
from gateway.upstreams.idempotency.codec import RESULTS
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.idempotency.records import Records
from gateway.upstreams.ors_bodies import Unprocessable, read_call
from gateway.upstreams.session_stats import SessionStats

T = TypeVar("T")

GRACE_S: Final = 0.05
"""A stream opens this late: most calls are faster, and then a failure keeps its status."""
UNKNOWN_TASK_ID: Final = "unknown task_id"
_JSON: Final = ((b"content-type", b"application/json"),)

Frames = tuple[bytes, bytes]
"""An outcome in both forms: as the last events of a stream, and as one JSON object."""


class OrsFacade(ABC):
    """What an upstream gets for its `step`, `prompt` and `tools`; the rest of the seam is its own."""

    raises_by_event: ClassVar[bool] = False
    """Whether a tool that failed is an ``error`` event, after which one SDK ends the session, or ``ok: false``."""

    counts_itself: ClassVar[bool] = False
    """Whether the upstream knows by itself how its sessions went, whichever replica runs their calls."""

    ping_s: ClassVar[float] = sse.PING_S
    """How long a stream is silent at most."""

    def __init__(self, *, recorder: Recorder | None = None) -> None:
        """*recorder* tells other replicas of the calls of this one; it is None if there are no others."""
        self.calls = OnceOnlyCalls[StepResult](None if recorder is None else Records(recorder, RESULTS))
        self.tallies = SessionStats(None if self.counts_itself else recorder)

    # -- what there has to be -------------------------------------------------------------------------------------

    @abstractmethod
    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        """Run *action*, which has the idempotency *key*; the facade calls it once. Raises as ``Upstream.act``."""

    @abstractmethod
    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """See ``Upstream.prompt``."""

    @abstractmethod
    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """See ``Upstream.tools``."""

    async def registered(self, worker: Worker, environment: Environment) -> WorkerTasks:
        """Return no tasks: servers that know tasks by an id are our own."""
        return WorkerTasks()

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """Return nothing: the server says nothing of itself beyond its tools."""
        return {}

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """Return None: the server has no list of its sessions."""
        return None

    async def task_tools(self, session: Session, environment: Environment) -> bytes:
        """The tools of a session, its task's own included, as ``ListToolsOutput``."""
        return await self.tools(worker_of(session), environment)

    async def messages(self, session: Session, environment: Environment) -> bytes:
        """What the agent is told first as a list of ORS messages: the prompt, said by the user."""
        return answers.messages(await self.prompt(session, environment))

    async def score_group(
        self, session: Session, environment: Environment, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Judge a group of candidates; no other protocol has a word for it."""
        return not_offered(environment)

    # -- what there is then ---------------------------------------------------------------------------------------

    async def act(
        self, session: Session, environment: Environment, action: Action, *, key: str | None = None
    ) -> StepResult:
        """See ``Upstream.act``. A caller that leaves does not end the step."""
        run = self._stepping(session, environment, action, key)
        return await self.calls.run(session, spelled(action), run, within_s=environment.timeouts.call_s, key=key)

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """The steps that this replica has seen of the session."""
        return self.tallies.steps(session)

    async def client_state(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        """Nothing: these servers have no word for it."""
        return {}

    def forget(self, session: Session) -> None:
        """Drop what is kept of a session that was closed."""
        self.calls.forget(session)
        self.tallies.forget(session)

    async def forward(
        self, session: Session, environment: Environment, operation: str, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Answer an ORS operation; see ``Upstream.forward``."""
        try:
            if operation == "call":
                return await self._call(session, environment, body, headers)
            if operation == "score_group":
                return await self.score_group(session, environment, body=body, headers=headers)
            within_s = environment.timeouts.call_s
            if operation == "prompt":
                blocks = await within(self.prompt(session, environment), within_s)
                return Whole(200, dump(answers.blocks(blocks)))
            if operation == "task_tools":
                return Whole(200, await within(self.task_tools(session, environment), within_s))
            if operation == "messages":
                return Whole(200, await within(self.messages(session, environment), within_s))
            return Whole(404, dump({"detail": "Not Found"}))
        except Unprocessable as error:
            return Whole(422, dump({"detail": list(error.entries)}))
        except UpstreamError as error:
            if isinstance(error, AuthorFault | UpstreamGone | UpstreamTimeout | WorkerFull):
                raise
            return Whole(500, dump({"detail": error.detail}))

    async def _call(self, session: Session, environment: Environment, body: bytes, headers: Headers) -> Exchange:
        action, task_id = read_call(body, header(headers, b"content-type"))
        key = header(headers, b"idempotency-key") or None
        call: Call[StepResult] | None
        if task_id is not None:
            call = await self.calls.seek(session, task_id, within_s=environment.timeouts.call_s)
        else:
            call = self.calls.begin(
                session,
                spelled(action),
                self._stepping(session, environment, action, key),
                within_s=environment.timeouts.call_s,
                key=key,
            )
            await call.admitted()  # a refusal keeps its status, however long the store took for it
        return await told(self.calls, session, call, headers, self._frames, ping_s=self.ping_s)

    def _stepping(
        self, session: Session, environment: Environment, action: Action, key: str | None
    ) -> Callable[[], Awaitable[StepResult]]:
        async def counted() -> StepResult:
            try:
                return await step()
            finally:
                if key is None:  # the count is written with the outcome of a key
                    await self.tallies.tell(session)

        async def step() -> StepResult:
            place = f"tool:{action.name}" if action.name else "step"
            try:
                result = await self.step(session, environment, action, key=key)
            except Unreadable as error:  # the agent reads it, and tries again
                result = StepResult(error=error.detail, reason="input_validation")
            except AuthorFault as error:
                error.faults = error.faults or author_faults(error.detail, place)
                self.tallies.failed(session)
                raise
            self.tallies.add(session, result)
            if result.reason == TOOL_FAILED and not result.faults:
                return replace(result, faults=author_faults(result.error or "", place))
            return result

        return counted

    def _frames(self, result: StepResult) -> Frames:
        payload = answers.result(result)
        if result.error is not None and result.reason == TOOL_FAILED and self.raises_by_event:
            return sse.event("error", result.error), payload
        return sse.result(payload), payload


async def told(
    calls: OnceOnlyCalls[T],
    session: Session,
    call: Call[T] | None,
    headers: Headers,
    frames: Callable[[T], Frames],
    *,
    ping_s: float = sse.PING_S,
    grace_s: float = GRACE_S,
) -> Exchange:
    """Answer with the outcome of *call*, None being an unknown one: an event stream, or JSON if *headers* want that.

    The stream opens after *grace_s*: what fails sooner is raised.

    Raises:
        GatewayError: what the call ended with, if it did so before the head of the answer.
    """
    accept = header(headers, b"accept")
    wants_json = "application/json" in accept and "text/event-stream" not in accept
    if call is None:
        if wants_json:
            return Whole(200, answers.refusal(UNKNOWN_TASK_ID, "unknown_task_id"))
        return Whole(200, sse.event("error", UNKNOWN_TASK_ID), sse.HEADERS)
    stream = _Stream(calls, session, call, frames, ping_s)
    try:
        if wants_json:
            _, whole = await stream.outcome()
            stream.delivered()
            return Whole(200, whole, faults=stream.faults)
        if await call.over_within(grace_s):
            await stream.outcome()  # raises what it ended with
    except BaseException:
        await stream.aclose()
        raise
    return stream


class Whole:
    """An answer that the gateway makes itself; its body is there already."""

    def __init__(self, status: int, body: bytes, headers: Headers = _JSON, *, faults: tuple[Fault, ...] = ()) -> None:
        self.status = status
        self.headers = headers
        self.faults = faults
        self._body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body."""
        yield self._body

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body."""
        body = b"".join([chunk async for chunk in self.chunks()])
        if len(body) > limit_bytes:
            raise UpstreamError(f"the worker's answer exceeds {limit_bytes} bytes")
        return body

    async def aclose(self) -> None:
        """Nothing is held any more."""


class _Stream(Whole, Generic[T]):
    """An outcome as an event stream, which may still be waited for."""

    def __init__(
        self, calls: OnceOnlyCalls[T], session: Session, call: Call[T], frames: Callable[[T], Frames], ping_s: float
    ) -> None:
        super().__init__(200, b"", sse.HEADERS)
        self._call = call
        self._frames = frames
        self._ping_s = ping_s
        self._listening = ExitStack()
        self._listening.enter_context(calls.listening(session, call))

    async def outcome(self) -> Frames:
        try:
            outcome = await self._call.outcome()
        except SessionFailed as error:
            return sse.event("error", error.detail), answers.refusal(error.detail, error.code)
        except AuthorFault as error:
            self.faults = error.faults
            typed = f"{error.code}: {error.detail}"
            return sse.event("error", typed), answers.refusal(error.detail, error.code)
        if isinstance(outcome, StepResult):
            self.faults = outcome.faults
        elif isinstance(outcome, sse.Event) and outcome.name == "error":
            self.faults = author_faults(outcome.data, "score_group")
        return self._frames(outcome)

    def delivered(self) -> None:
        self._call.was_delivered = True
        self._listening.close()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield events and, while there are none, comments. Raises as ``Exchange.chunks``."""
        head = sse.event("task_id", self._call.task_id)
        if not self._call.is_over:
            yield head
            head = b""
            while not await self._call.over_within(self._ping_s):
                yield sse.PING
        try:
            end, _ = await self.outcome()
        except UpstreamError:
            raise
        except GatewayError as error:
            end = sse.event("error", error.detail)
        yield head + end
        self.delivered()

    async def aclose(self) -> None:
        """Stop listening; the call goes on."""
        self._listening.close()


def not_offered(environment: Environment) -> Exchange:
    """The answer to ``/score_group`` of an environment that has no judge, in the servers' words."""
    detail = f"Environment {str(environment.name)!r} does not implement score_group"
    return Whole(404, dump({"detail": detail}))


def worker_of(session: Session) -> Worker:
    """The worker that *session* is in, as far as a question to it needs one."""
    return Worker(id=session.worker, environment=session.environment, digest="", slots=1, address=session.address)


def spelled(action: Action) -> list[object]:
    """Say what *action* is, in JSON."""
    return [action.name, action.arguments if action.name is not None else None, action.text, action.fields]


async def within(work: Awaitable[T], seconds: float) -> T:
    """Wait for *work* at most so long. Raises ``UpstreamTimeout`` in time, also where the work is slow to end."""
    task = asyncio.ensure_future(work)
    task.add_done_callback(_heard)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            task.cancel()
    if not task.done():
        raise UpstreamTimeout(f"the worker did not answer within {seconds:g} s")
    return task.result()


def _heard(task: asyncio.Future[T]) -> None:
    if not task.cancelled():
        task.exception()  # who waited may have left
