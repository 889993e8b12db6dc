"""The request path: opens sessions, runs calls in them and ends them.

It uses the store and the workers, never the backend. The control loop in `gateway.pool` starts and stops workers.
A call keeps its session busy and has a deadline. The end of the session interrupts the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from gateway.core.environment import Environment, UpstreamKind
from gateway.core.episode import EPISODE_FINISHED, Action, Block, StepResult, Summary
from gateway.core.errors import (
    GatewayError,
    SessionClosed,
    SessionError,
    SessionNotFound,
    StoreUnavailable,
    UpstreamError,
    UpstreamGone,
    UpstreamTimeout,
)
from gateway.core.faults import INTERNAL_HEADERS, TURN_HEADER, Fault
from gateway.core.ids import Owner, SessionId
from gateway.core.ports.step_log import CONTENT_BYTES, Content
from gateway.core.ports.transport import Exchange, Headers
from gateway.core.ports.upstream import SessionUpstream
from gateway.core.retry import STORE_PATIENCE_S, patiently
from gateway.core.session import CloseReason, EpisodeRequest, Session
from gateway.metrics import answer_outcome, call_outcome, faults_outcome
from gateway.sessions.cache import CachedSession, SessionCache, session_id
from gateway.sessions.call_parts import LOGGED, NOT_RUN, CallParts
from gateway.sessions.closing import Missed, SessionCloser, log_faults
from gateway.sessions.failure_reasons import SessionMoved
from gateway.sessions.interruption import CallScope, Interrupted
from gateway.sessions.last_replies import LastReplies, LastReply, LastRequest
from gateway.sessions.opening import SessionOpener
from gateway.sessions.turns import without_reward
from gateway.upstreams.ors.own import read_kept

T = TypeVar("T")
DRAIN_PAUSE_S = 0.02
NOTED_S = 2.0
"""Seconds that a call that took too long waits until the store knows it."""
REPEAT_PAUSE_S = 0.1
REPEAT_WAIT_S = 2.0
"""Seconds that the repeat of a last request waits for the replica that ends the episode, which may be lost."""


class _End:
    """An end in progress: its summary, and whether the store does not answer since."""

    def __init__(self) -> None:
        self.summary: Summary | None = None
        self.is_told = False
        self.is_away: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def missed(self) -> None:
        if self.is_told and not self.is_away.done():
            self.is_away.set_result(None)


class Sessions:
    """Opens, serves and ends sessions for all frontends."""

    def __init__(
        self,
        *,
        opener: SessionOpener,
        closer: SessionCloser,
        cache: SessionCache,
        calls: CallParts,
        replies: LastReplies,
        patience_s: float = STORE_PATIENCE_S,
    ) -> None:
        """*patience_s*: seconds for which a store that does not answer, or is being rebuilt, is retried."""
        self._opener = opener
        self._closer = closer
        self._replies = replies
        self._cache = cache
        self._calls = calls
        self._patience_s = patience_s

    # -- open -----------------------------------------------------------------------------------------------------

    async def open(self, request: EpisodeRequest) -> ActiveSession:
        """Start an episode in a slot of its own; see `SessionOpener.open`."""
        return ActiveSession(await self._opener.open(request), self._calls)

    async def reset(self, request: EpisodeRequest) -> ActiveSession:
        """End the session's current episode, if any, and start another in the same slot; see `SessionOpener.reset`."""
        return ActiveSession(await self._opener.reset(request), self._calls)

    # -- close --------------------------------------------------------------------------------------------------

    async def close(self, owner: Owner, name: str, *, reply: LastReply | None = None) -> Summary | None:
        """End an episode, wait for its teardown and return its summary.

        Return None if the episode does not exist, has already ended, or its worker is gone. A started end completes
        even if the trainer disconnects. Once the summary is known, a store that does not answer delays the end only.

        Args:
            reply: The reply to this request, for `repeated`.
        """
        id, end = session_id(owner, name), _End()
        finishing = await self._begin_end(
            id, CloseReason.DELETED, told=self._keeping(id, reply, end), missed=end.missed
        )
        if finishing is None:
            return None
        either: set[asyncio.Future[Any]] = {finishing, end.is_away}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return finishing.result() if finishing.done() else end.summary

    async def finish(self, owner: Owner, name: str, reply: bytes, *, request: LastRequest, wait_s: float) -> None:
        """Keep the reply that ends an episode for repeats of its *request*, and end the episode.

        Wait at most *wait_s* seconds for its teardown. While the store does not answer, both go on in the background:
        the trainer gets its reward now.
        """
        id = session_id(owner, name)

        async def ended(missed: Missed) -> None:
            await self._replies.keep(id, request.written(reply), missed=missed)
            finishing = await self._begun_end(id, CloseReason.DELETED, missed=missed)
            if finishing is not None:
                await asyncio.wait({finishing}, timeout=wait_s)

        await self._closer.through(id, ended)

    async def repeated(
        self, owner: Owner, name: str, request: LastRequest, *, reply: LastReply | None = None
    ) -> bytes | None:
        """Return the reply that ended an episode, if *request* repeats the one that got it.

        If the episode's end is not complete, wait for it. If its replica was lost, end the episode with *reply*.

        Raises:
            CallConflict: An earlier request with the same key had another body.
        """
        id, waited_s = session_id(owner, name), 0.0
        while request.key:
            session = None if reply is None else await self._replies.ending(id)
            if (kept := await self._replies.kept(id)) is not None:  # asked last: it is kept before the session is gone
                return request.read(kept)
            if session is None:
                return None
            if waited_s >= REPEAT_WAIT_S:
                told = self._keeping(id, reply, _End())
                finishing = self._closer.go_on(
                    id, self._closer.finish(session, self._cache.environment_of(session), told=told)
                )
                await asyncio.wait({finishing})
                reply = None
            await asyncio.sleep(REPEAT_PAUSE_S)
            waited_s += REPEAT_PAUSE_S
        return None

    def _keeping(
        self, id: SessionId, reply: LastReply | None, end: _End
    ) -> Callable[[Summary | None], Awaitable[None]]:
        async def told(summary: Summary | None) -> None:
            end.summary, end.is_told = summary, True
            if reply is not None:
                await self._replies.keep(id, reply(summary), missed=end.missed)

        return told

    async def end(self, owner: Owner, name: str, reason: CloseReason, *, wait_s: float) -> bool:
        """End an episode and wait at most *wait_s* seconds for its teardown, which then continues in the background.

        Calls that run in the session, at any replica, are cancelled. Return False if there is no episode to end.
        """
        finishing = await self._begin_end(session_id(owner, name), reason)
        if finishing is None:
            return False
        await asyncio.wait({finishing}, timeout=wait_s)
        return True

    async def _begin_end(
        self, id: SessionId, reason: CloseReason, **finish: Any
    ) -> asyncio.Task[Summary | None] | None:
        # Shielded: if the trainer's disconnect cancelled the end, the session would stay CLOSING until it is due.
        return await asyncio.shield(self._closer.go_on(id, self._begun_end(id, reason, **finish)))

    async def _begun_end(
        self, id: SessionId, reason: CloseReason, *, missed: Missed | None = None, **finish: Any
    ) -> asyncio.Task[Summary | None] | None:
        """Begin an end, and return the task that completes it; *finish* are arguments of `SessionCloser.finish`."""
        entry = self._cache.get(id)
        session = await self._closer.begin(id, reason, patience_s=self._patience_s, missed=missed)
        if entry is not None:
            self._cache.forget(id, entry.session.lease)  # after `begin`: the calls cancelled here ask the store why
            entry.end()
        if session is None:
            return None
        environment = entry.environment if entry else self._cache.environment_of(session)
        return self._closer.go_on(id, self._closer.finish(session, environment, missed=missed, **finish))

    # -- find -----------------------------------------------------------------------------------------------------

    async def find(self, owner: Owner, name: str) -> ActiveSession:
        """Look up an open session in this replica's cache, then in the store.

        Raises:
            SessionNotFound: The session is unknown, not open yet, ended by its trainer, or of another API key.
            SessionClosed: The gateway ended the session; the error has the reason.
        """
        return ActiveSession(await self._cache.find(session_id(owner, name)), self._calls)

    # -- the end of this process ----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """Wait at most *timeout_s* seconds until no call runs in this replica; then write the last activity notes."""
        deadline = time.monotonic() + timeout_s
        # Polling: this runs once, at shutdown. An event would add work to every call.
        while time.monotonic() < deadline and self._cache.is_busy():  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_PAUSE_S)
        await self._closer.settle(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(StoreUnavailable):
            await self._cache.write_notes()


class ActiveSession:
    """An open session, as a frontend uses it.

    Every call raises:
        SessionNotFound, SessionClosed: The session has ended, possibly while the call ran.
        UpstreamTimeout: The call took longer than *within_s* seconds. It may continue in the worker.
        UpstreamGone: The worker is gone. Only if ``sent`` is False is it certain that nothing ran.
        UpstreamError: The worker failed.
        RateLimited: The key's limit of calls per second lets no call start in time. Nothing ran.
    """

    __slots__ = ("_cached", "_parts")

    def __init__(self, cached: CachedSession, parts: CallParts) -> None:
        self._cached = cached
        self._parts = parts

    @property
    def session(self) -> Session:
        """The session, as in the store."""
        return self._cached.session

    @property
    def environment(self) -> Environment:
        """The environment that the trainer requested. The session may run in a variant of it for one split."""
        own = self._cached.environment
        return self._parts.catalog.named(own.base) if own.base else own

    async def touch(self) -> None:
        """Restart the session's idle time."""
        self._cached = await self._parts.cache.renewed(self._cached)
        self._cached.stir()

    async def act(self, action: Action, *, within_s: float, key: str | None = None) -> StepResult:
        """Run *action* and return its result. Also raises CallConflict and InvalidRequest, see ``Upstream.act``."""
        return await self._ask(
            "call", within_s, lambda upstream, *at: upstream.act(*at, action, key=key, within_s=within_s), action
        )

    async def prompt(self, *, within_s: float) -> list[Block]:
        """Return the agent's first prompt, after the task's setup."""
        return await self._ask("prompt", within_s, lambda upstream, *at: upstream.prompt(*at))

    async def pass_frame(self, frame: bytes, *, within_s: float) -> bytes:
        """Send one frame of the worker's own protocol and return the reply; see ``FrameUpstream.pass_frame``."""
        operation = "call" if frame else "prompt"
        frames = self._parts.frames
        return await self._ask(operation, within_s, lambda _, session, at: frames.pass_frame(session, at, frame), frame)

    async def client_state(self, *, within_s: float) -> Mapping[str, Any]:
        """Return the session's state as the environment publishes it."""
        return await self._ask("state", within_s, lambda upstream, *at: upstream.client_state(*at))

    async def steps(self, *, within_s: float) -> int:
        """Return the session's number of steps, as the worker counts them."""

        async def ask(upstream: SessionUpstream, session: Session, environment: Environment) -> int:
            steps = await upstream.steps(session, environment)
            if steps is None:
                raise SessionNotFound(session.name)
            return steps

        return await self._ask("steps", within_s, ask)

    async def play(self, action: Action, *, within_s: float, key: str = "") -> tuple[StepResult, int]:
        """Run *action*; return its result and the turn's number, from 1.

        The number is 0 if the episode was already over and the worker gives none. A step that ran counts as a turn even
        if its trainer disconnected. The gateway's own workers ensure this. Third-party workers do not count turns, so
        their steps continue in the background.
        """
        playing = self._play(action, within_s, key)
        if self._cached.environment.wire is UpstreamKind.OWN:
            return await playing
        task = asyncio.ensure_future(playing)
        self._parts.playing.add(task)
        task.add_done_callback(self._played)
        return await asyncio.shield(task)

    async def _play(self, action: Action, within_s: float, key: str) -> tuple[StepResult, int]:
        result = await self.act(action, within_s=within_s, key=key or None)
        if result.reason == EPISODE_FINISHED:
            return result, result.turn or 0
        if result.turn is not None:  # the worker counts turns
            if result.finished and result.rewarded is False:
                raise without_reward(self._cached, result.turn)
            return result, result.turn
        return result, await self._parts.turns.taken(self._cached, result, key=key)

    def _played(self, task: asyncio.Task[tuple[StepResult, int]]) -> None:
        self._parts.playing.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as retrieved: the trainer that waited may have disconnected

    async def forward(self, operation: str, *, body: bytes, headers: Headers) -> TrackedResponse:
        """Forward an ORS operation to the worker. The session stays busy until the response is closed."""

        async def send(call: Call) -> TrackedResponse:
            session, environment = call.cached.session, call.cached.environment
            upstream = self._parts.upstreams[environment.wire]
            watch = _Forward()
            watch.task = asyncio.current_task()
            call.cached.forwards.add(watch)
            try:
                exchange = await upstream.forward(session, environment, operation, body=body, headers=headers)
            except asyncio.CancelledError:
                if not watch.is_ended or watch.task is None or watch.task.uncancel():  # the trainer left, too
                    raise
                raise await call.why_ended() from None
            except SessionNotFound as error:  # the worker's reply
                raise await self._parts.reasons.of_unknown(call.cached) from error
            except UpstreamTimeout:
                await call.note_late()
                raise
            finally:
                call.cached.forwards.discard(watch)
            return TrackedResponse(exchange, call)

        return await self._run(operation, send, body)

    async def _ask(
        self,
        operation: str,
        within_s: float,
        ask: Callable[[SessionUpstream, Session, Environment], Awaitable[T]],
        request: Content = None,
    ) -> T:
        """Send a request to the worker and return its complete answer; *request* is what the step log keeps of it."""

        async def run(call: Call) -> T:
            cached, environment = call.cached, call.cached.environment
            try:
                with CallScope(cached.watchers, within_s):
                    answer = await ask(self._parts.upstreams[environment.wire], cached.session, environment)
            except Interrupted as interrupted:
                if interrupted.cause == "ended":
                    raise await self._parts.reasons.of_end(cached) from None
                raise UpstreamTimeout(f"the worker did not answer within {within_s:g} s") from None
            except SessionNotFound as error:  # the worker's reply
                raise await self._parts.reasons.of_unknown(cached) from error
            if isinstance(answer, StepResult):
                call.report(answer.faults)
            call.end(answer_outcome(answer), answer)
            return answer

        return await self._run(operation, run, request)

    async def _run(self, operation: str, run: Callable[[Call], Awaitable[T]], request: Content) -> T:
        """Run one call. On success, *run* ends the call, or returns a response that ends it when closed."""
        self._cached = await self._parts.cache.renewed(self._cached)
        try:
            return await self._run_once(operation, run, request)
        except SessionMoved as moved:  # the old worker reported that the call did not run: a retry cannot run it twice
            self._cached = moved.entry
            return await self._run_once(operation, run, request)

    async def _run_once(self, operation: str, run: Callable[[Call], Awaitable[T]], request: Content) -> T:
        call = Call(self._cached, operation, self._parts, request)
        try:
            if operation == "call" and (per_s := self._parts.keys.calls_per_s.get(self.session.owner)):
                await self._wait(call, per_s)
            return await run(call)
        except BaseException as error:
            await call.fail(error)
            raise

    async def _wait(self, call: Call, per_s: float) -> None:
        """Wait for the call's time, at most until the session ends. The session stays busy meanwhile."""
        try:
            with CallScope(call.cached.watchers, None):
                await asyncio.sleep(self._parts.rates.book(self.session.owner, per_s, self._cached.environment))
        except Interrupted:
            raise await self._parts.reasons.of_end(call.cached) from None


class _Forward:
    """Cancels the task that waits for the head of a forwarded call's response, because an operator ended the session.

    It has no constructor, and is no `CallScope`, because each ORS call makes one.
    """

    task: asyncio.Task[Any] | None = None
    is_ended = False

    def end(self) -> None:
        """Cancel the task."""
        if self.task is not None and not self.is_ended:
            self.is_ended = True
            self.task.cancel()


class Call:
    """One call in a session. The session is busy until the call ends."""

    __slots__ = ("_began_at", "_faults", "_operation", "_parts", "_request", "cached")

    def __init__(self, cached: CachedSession, operation: str, parts: CallParts, request: Content) -> None:
        """Start the call and mark the session as busy. *request* is what the step log keeps."""
        self.cached = cached
        self._operation = operation
        self._parts = parts
        self._request = request
        self._faults: Sequence[Fault] = ()
        self._began_at = time.monotonic()
        cached.begin()

    def report(self, faults: Sequence[Fault]) -> None:
        """Log *faults* once: a repeated call reports the same faults."""
        if faults:
            self._faults = faults
        if faults and faults[-1] is not self.cached.reported:
            self.cached.reported = faults[-1]
            log_faults(self.cached.session, faults)

    async def explain(self, error: BaseException) -> None:
        """Log the faults that *error* carries. Raises the errors of `FailureReasons.explain`."""
        if isinstance(error, UpstreamError):
            self.report(error.faults)
        if isinstance(error, UpstreamGone):
            await self._parts.reasons.explain(self.cached, error)

    async def note_late(self) -> None:
        """Note in the store that this call took too long. Wait for it, but not long: it goes on in the background."""
        if self._operation == "call":
            session = self.cached.session
            noting = self._parts.closer.go_on(session.id, self._noted_late(session, self.cached.environment))
            await asyncio.wait({noting}, timeout=NOTED_S)

    async def _noted_late(self, session: Session, environment: Environment) -> None:
        with contextlib.suppress(GatewayError):  # a worker that does not answer is found by the control loop
            steps = await self._parts.upstreams[environment.wire].steps(session, environment)
            if steps is not None:
                await patiently(lambda: self._parts.store.note_late(session.id, session.lease, steps))

    async def keep_result(self, written: bytes) -> None:
        """Keep the result of the episode that this call ended, as the worker wrote it."""
        summary = read_kept(written)
        if summary is not None:
            await self._parts.results.keep(self.cached.session, summary)

    async def why_ended(self) -> Exception:
        """Return the error for a call that the session's end interrupted."""
        try:
            return await self._parts.reasons.of_end(self.cached)
        except SessionError as error:
            return error

    async def fail(self, error: BaseException) -> None:
        """End a call that failed with *error*. Raises the errors of `explain`."""
        told = error
        try:
            await self.explain(error)
        except (SessionClosed, SessionMoved) as better:
            told = better
            raise
        finally:
            # A call in a session that moved is repeated in the new one.
            self.end(call_outcome(told), NOT_RUN if isinstance(told, SessionMoved) else None, told)

    def end(self, outcome: str, reply: Any = None, error: BaseException | None = None, headers: Headers = ()) -> None:
        """End the call; *outcome* is one of ``metrics.CALLS``. The step log gets the *reply*, or the *error*.

        *headers* of the reply may have the worker's number of the call.
        """
        cached = self.cached
        cached.finish()
        if self._operation == "call":
            seconds = cached.quiet_since - self._began_at
            self._parts.metrics.call_ended(cached.environment.name, outcome, seconds)
        if cached.is_logged and self._operation in LOGGED and reply is not NOT_RUN:
            asked, began_at, ended_at = self._request, self._began_at, cached.quiet_since
            lease, operation, turn = cached.session.lease, self._operation, 0
            if type(reply) is bytes and reply.startswith(b"{"):  # a stream has the number itself
                for name, value in headers:
                    if name == TURN_HEADER and value.isdigit():
                        turn = int(value[:9])
            self._parts.log.called(
                (lease, operation, began_at, ended_at, outcome, asked, reply, error, self._faults, turn)
            )


class TrackedResponse:
    """A worker's response to a call. Closing the response ends the call."""

    result = b""
    """Empty: only the gateway reads the result of an episode."""
    _error: BaseException | None = None
    _kept: bytes | list[bytes] | None = None
    """What was read of the body, for the step log."""
    _kept_bytes = 0

    def __init__(self, exchange: Exchange, call: Call) -> None:
        self._exchange = exchange
        self._call = call
        self._chunks: AsyncIterator[bytes] | None = None
        self._outcome = "left"
        self._is_closed = False
        self.status = exchange.status
        self.is_whole = exchange.is_whole
        self.headers: Headers = [pair for pair in exchange.headers if not pair[0].startswith(INTERNAL_HEADERS)]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults that the worker reported; see ``Exchange.faults``."""
        return self._exchange.faults

    def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body's chunks as they arrive. Raises SessionClosed if the session ends meanwhile."""
        return self

    def __aiter__(self) -> TrackedResponse:
        return self

    async def __anext__(self) -> bytes:
        if self._chunks is None:
            self._chunks, self._kept = self._exchange.chunks(), []
        try:
            with CallScope(self._call.cached.forwards, None):
                chunk = await anext(self._chunks)
        except StopAsyncIteration:
            await self._complete()
            raise
        except Interrupted:
            self._error = await self._call.why_ended()
            self._outcome = call_outcome(self._error)
            raise self._error from None
        except UpstreamError as error:
            await self._explain(error)
            raise
        if isinstance(self._kept, list) and self._kept_bytes < CONTENT_BYTES:
            self._kept.append(chunk)
            self._kept_bytes += len(chunk)
        return chunk

    async def overran(self) -> None:
        """Note that the reader stopped: the call took longer than its environment allows."""
        self._error = UpstreamTimeout("the call took longer than its environment allows")
        self._outcome = call_outcome(self._error)
        await self._call.note_late()

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body, at most *limit_bytes*. Raises the errors of `chunks`."""
        try:
            body = await self._exchange.read(limit_bytes)
        except UpstreamError as error:
            await self._explain(error)
            raise
        self._kept = body
        await self._complete()
        return body

    async def _complete(self) -> None:
        """Note that the response is complete, log the faults that it reports, and keep an ended episode's result."""
        faults = self._exchange.faults
        self._outcome = faults_outcome(faults, other="ok")
        self._call.report(faults)
        if self._exchange.result:
            await self._call.keep_result(self._exchange.result)

    async def _explain(self, error: UpstreamError) -> None:
        self._error = error
        try:
            await self._call.explain(error)
        except SessionClosed as better:
            self._error = better
            raise
        finally:
            self._outcome = call_outcome(self._error)

    async def aclose(self) -> None:
        """Close the exchange and end the call.

        If the trainer disconnected, the worker continues the call. The control loop asks the worker before the session
        can expire.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._exchange.aclose()
        finally:
            # 503: the session's setup still runs.
            reply = NOT_RUN if self.status == 503 else self._kept
            self._call.end(self._outcome, reply, self._error, self.headers)
