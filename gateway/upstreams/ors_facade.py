"""Answers ORS requests for third-party servers, so that the ORS frontend can serve every kind of worker.

An upstream implements its prompt, tools and steps. `OrsFacade` adds the rest: calls that run once, the count of steps,
and responses to ``/call``, ``/prompt``, ``/task_tools``, ``/messages`` and ``/score_group``.

Differences from the reference servers:
* A stream is cut so that no client loses white space.
* A trainer can repeat a call whose stream broke before the task id arrived. The gateway finds the call again, and does
  not run it twice.
* A session never receives results of another session.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar, Final, Generic, TypeVar

from gateway.core import sse
from gateway.core.environment import Environment
from gateway.core.episode import TOOL_ERROR, Action, Block, StepResult, Summary
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
from gateway.core.ports.upstream import EpisodeResults
from gateway.core.session import Session
from gateway.core.worker import Worker, WorkerSession, WorkerTasks, worker_of
from gateway.upstreams import ors_bodies as answers
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
"""Seconds before a stream opens. Most calls are faster, and a failure in this time keeps its HTTP status."""
UNKNOWN_TASK_ID: Final = "unknown task_id"
_JSON: Final = ((b"content-type", b"application/json"),)

Frames = tuple[bytes, bytes]
"""An outcome in both forms: the last events of a stream, and one JSON object."""


class OrsFacade(ABC):
    """Base class that adds the ORS operations to an upstream with `step`, `prompt` and `tools`.

    The subclass implements the rest of ``Upstream``.
    """

    raises_by_event: ClassVar[bool] = False
    """True if a failed tool is an ``error`` event, after which one SDK ends the session. False: ``ok: false``."""

    counts_itself: ClassVar[bool] = False
    """True if the upstream itself keeps the statistics of its sessions, for calls of all replicas."""

    ping_s: ClassVar[float] = sse.PING_S
    """Longest silence of a stream, in seconds."""

    def __init__(self, *, recorder: Recorder | None = None, results: EpisodeResults | None = None) -> None:
        """Create the upstream.

        Args:
            recorder: Reports its calls to other replicas; None in a single replica.
            results: Keeps the results of finished episodes; None keeps none.
        """
        self.episode_results = results
        self.calls = OnceOnlyCalls[StepResult](None if recorder is None else Records(recorder, RESULTS))
        self.tallies = SessionStats(None if self.counts_itself else recorder)

    # -- implemented by the upstream ------------------------------------------------------------------------------

    @abstractmethod
    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        """Run *action*, which has the idempotency *key*. The facade calls this once. Raises as ``Upstream.act``."""

    @abstractmethod
    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        """Return the first observation; see ``Upstream.prompt``."""

    @abstractmethod
    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        """Return the environment's tool list; see ``Upstream.tools``."""

    async def registered(self, worker: Worker, environment: Environment) -> WorkerTasks:
        """Return no tasks: only servers of the gateway's own images know tasks by an id."""
        return WorkerTasks()

    async def about(self, worker: Worker, environment: Environment) -> Mapping[str, Any]:
        """Return an empty mapping: the server does not describe itself beyond its tools."""
        return {}

    async def sessions(
        self, worker: Worker, environment: Environment, ids: Collection[SessionId] | None = None
    ) -> list[WorkerSession] | None:
        """Return None: the server has no list of its sessions."""
        return None

    async def task_tools(self, session: Session, environment: Environment) -> bytes:
        """Return the tools of a session, including those of its task, as ``ListToolsOutput``."""
        return await self.tools(worker_of(session), environment)

    async def messages(self, session: Session, environment: Environment) -> bytes:
        """Return the prompt as ORS messages: one message, from the user."""
        return answers.messages(await self.prompt(session, environment))

    async def score_group(
        self, session: Session, environment: Environment, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Answer that the environment has no judge: the other protocols cannot score a group of candidates."""
        return not_offered(environment)

    # -- added by the facade --------------------------------------------------------------------------------------

    async def act(
        self,
        session: Session,
        environment: Environment,
        action: Action,
        *,
        key: str | None = None,
        within_s: float | None = None,
    ) -> StepResult:
        """Run an action once; see ``Upstream.act``. The step continues if the caller leaves. Third-party servers do not
        know *within_s*."""
        run = self._stepping(session, environment, action, key)
        return await self.calls.run(session, spelled(action), run, within_s=environment.timeouts.call_s, key=key)

    async def steps(self, session: Session, environment: Environment) -> int | None:
        """Return the number of the session's steps that ran in this replica."""
        return self.tallies.steps(session)

    async def client_state(self, session: Session, environment: Environment) -> Mapping[str, Any]:
        """Return an empty mapping: these servers do not report the state of a session."""
        return {}

    async def keep_result(self, session: Session, summary: Summary | None) -> None:
        """Keep the *summary* of an episode if its environment has ended it."""
        if self.episode_results is not None and summary is not None and summary.finished:
            await self.episode_results.keep(session, summary)

    def forget(self, session: Session) -> None:
        """Drop the calls and statistics of a session that was closed."""
        self.calls.forget(session)
        self.tallies.forget(session)

    async def forward(
        self, session: Session, environment: Environment, operation: str, *, body: bytes, headers: Headers
    ) -> Exchange:
        """Run an ORS operation and return its response; see ``Upstream.forward``."""
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
            await call.admitted()  # a refusal keeps its status, even if the store is slow
        return await told(self.calls, session, call, headers, self._frames, ping_s=self.ping_s)

    def _stepping(
        self, session: Session, environment: Environment, action: Action, key: str | None
    ) -> Callable[[], Awaitable[StepResult]]:
        async def counted() -> StepResult:
            try:
                return await step()
            finally:
                if key is None:  # for a call with a key, the recorder writes the count with the outcome
                    await self.tallies.tell(session)

        async def step() -> StepResult:
            place = f"tool:{action.name}" if action.name else "step"
            try:
                result = await self.step(session, environment, action, key=key)
            except Unreadable as error:  # the agent reads the error, and tries again
                result = StepResult(error=error.detail, reason="input_validation")
            except AuthorFault as error:
                error.faults = error.faults or author_faults(error.detail, place)
                self.tallies.failed(session)
                raise
            self.tallies.add(session, result)
            if result.finished and not self.counts_itself:
                await self.keep_result(session, await self.tallies.summary(session))
            return result

        return counted

    def _frames(self, result: StepResult) -> Frames:
        payload = answers.result(result)
        if result.error is not None and result.reason == TOOL_ERROR and self.raises_by_event:
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
    """Return a response with the outcome of *call*: an event stream, or JSON if *headers* accept only JSON.

    Args:
        call: The call. None answers that the task id is unknown.
        frames: Writes the outcome in both forms.
        ping_s: Longest silence of the stream, in seconds.
        grace_s: Seconds before the stream opens. A call that fails earlier raises its error.

    Raises:
        GatewayError: The call failed before the head of the response was sent.
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
            await stream.outcome()  # raises the error of a failed call
    except BaseException:
        await stream.aclose()
        raise
    return stream


class Whole:
    """A response whose complete body the gateway already holds."""

    is_whole = True
    result = b""
    """Empty: the upstream itself keeps the result of an episode that ended."""

    def __init__(self, status: int, body: bytes, headers: Headers = _JSON, *, faults: tuple[Fault, ...] = ()) -> None:
        self.status = status
        self.headers = headers
        self.faults = faults
        self._body = body

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body in one piece."""
        yield self._body

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body. Raises ``UpstreamError`` if it exceeds *limit_bytes*."""
        body = b"".join([chunk async for chunk in self.chunks()])
        if len(body) > limit_bytes:
            raise UpstreamError(f"the worker's answer exceeds {limit_bytes} bytes")
        return body

    async def aclose(self) -> None:
        """Do nothing: the response holds no connection."""


class _Stream(Whole, Generic[T]):
    """An event stream that waits for the outcome of a call, and ends with it."""

    is_whole = False

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
        """Yield the events, and comments while the call runs. Raises as ``Exchange.chunks``."""
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
        """Stop listening. The call continues to run."""
        self._listening.close()


def not_offered(environment: Environment) -> Exchange:
    """Return the response to ``/score_group`` of an environment without a judge, in the reference servers' words."""
    detail = f"Environment {str(environment.name)!r} does not implement score_group"
    return Whole(404, dump({"detail": detail}))


def spelled(action: Action) -> list[object]:
    """Return *action* as a JSON value, by which a repeated call is recognized."""
    return [action.name, action.arguments if action.name is not None else None, action.text, action.fields]


async def within(work: Awaitable[T], seconds: float) -> T:
    """Wait for *work* and return its result. Raises ``UpstreamTimeout`` after *seconds*, even if *work* ends slowly."""
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
        task.exception()  # the waiting caller may have left
