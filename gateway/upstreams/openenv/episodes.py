"""Open, reattach, use and end sessions in OpenEnv servers.

From 0.5 on, a session is created over HTTP and a socket is attached to it, so the session outlives sockets and
replicas. Before 0.5, a session is its socket: it ends when the socket breaks, and no other socket ever replaces it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

from gateway.core.addresses import Kind, parse_address
from gateway.core.environment import Environment
from gateway.core.episode import Summary
from gateway.core.errors import (
    AuthorFault,
    InvalidRequest,
    SessionNotFound,
    UpstreamError,
    UpstreamGone,
    WorkerFull,
    author_fault,
)
from gateway.core.json_text import parse
from gateway.core.session import Session
from gateway.upstreams.openenv.capabilities import CapabilityProbe
from gateway.upstreams.openenv.frames import FACTORY, FAILED, FULL, INVALID, SESSION, STATE, fault_of, kind_of, request
from gateway.upstreams.openenv.http import INITIALISING, REFUSED, UNKNOWN_SESSION, Http, Place, RpcError
from gateway.upstreams.openenv.websocket import FrameConnection, LiveSession, NotListening, WebSocketPool

logger = logging.getLogger(__name__)

FULL_S: Final = 2.0
"""Seconds for which an opening retries while the server is full: a closed session may occupy its place a bit longer."""
ATTACH_S: Final = 5.0
"""Seconds for which a session may stay occupied by a lost socket that the server has not noticed."""
SETTLE_S: Final = 1.0
"""Seconds that the end of a session waits for a running step."""
UNDO_S: Final = 30.0
UNDOING_MAX: Final = 4096
PAUSE_S: Final = 0.05


class OpenEnvSessions:
    """Opens and ends sessions in servers."""

    def __init__(self, http: Http, sockets: WebSocketPool, probe: CapabilityProbe) -> None:
        self._http = http
        self._sockets = sockets
        self._probe = probe
        self._undoing: dict[str, asyncio.Task[None]] = {}
        """The undo of each failed opening, by lease, until the session is closed."""

    async def begin(
        self, session: Session, environment: Environment, data: Mapping[str, Any], kept: LiveSession | None = None
    ) -> LiveSession:
        """Create a session of the server, or reuse *kept* of an ended episode, and reset it. See ``Upstream.open``."""
        deadline = time.monotonic() + FULL_S
        while True:
            try:
                return await self._begin(session, environment, data, kept)
            except WorkerFull:
                if kept is not None or time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _begin(
        self, session: Session, environment: Environment, data: Mapping[str, Any], kept: LiveSession | None
    ) -> LiveSession:
        at = Place(session.worker, session.address)
        creating: asyncio.Task[str] | None = None
        sid, line = (kept.sid, kept.line) if kept is not None else ("", None)
        try:
            if line is None:
                if await self._probe.outlives_sockets(at):
                    # A task, because a cancelled opening still needs the new session's id to end the session.
                    creating = asyncio.ensure_future(self._created(at, environment.timeouts.setup_s))
                    sid = await asyncio.shield(creating)
                line = await self._sockets.open(at.address, _target(sid), answer_s=environment.timeouts.call_s)
            first = await _first_reply(line, sid, request("reset", data))
        except BaseException as error:
            if isinstance(error, WorkerFull) and kept is None:
                if line is not None:
                    line.abort()  # the server has closed it
                raise
            undo = self._begin_to_undo(session.lease, at, sid, creating, line)
            if isinstance(error, Exception):  # a cancelled opening is undone in the background
                await asyncio.wait({undo}, timeout=UNDO_S)
            raise
        return LiveSession(session, environment, sid, line, first)

    async def _created(self, at: Place, silence_s: float) -> str:
        try:
            result = await self._http.call(at, "openenv/session/create", silence_s=silence_s, repeats=False)
        except RpcError as error:
            capacity = error.data.get("max_sessions")
            if error.rpc_code == REFUSED and isinstance(capacity, int):
                raise WorkerFull(error.detail, capacity=max(0, capacity)) from error
            if error.rpc_code == REFUSED and "factory_name" in error.data:
                raise _not_made(error.detail) from error
            raise
        if not isinstance(sid := result.get("session_id"), str) or not sid:
            raise UpstreamError("the server made a session without an id")
        return sid

    def _begin_to_undo(
        self, lease: str, at: Place, sid: str, creating: asyncio.Task[str] | None, line: FrameConnection | None
    ) -> asyncio.Task[None]:
        undo = asyncio.ensure_future(self._undo(at, sid, creating, line))
        undo.add_done_callback(_heard)
        self._undoing[lease] = undo
        if len(self._undoing) > UNDOING_MAX:
            oldest = next((lease for lease, task in self._undoing.items() if task.done()), None)
            if oldest is not None:
                del self._undoing[oldest]
        return undo

    async def _undo(
        self, at: Place, sid: str, creating: asyncio.Task[str] | None, line: FrameConnection | None
    ) -> None:
        """Release the session and the socket of a failed opening.

        Raises:
            UpstreamError: The place may still be occupied.
        """
        if line is not None:
            if await line.settle(SETTLE_S):
                await line.close(UNDO_S)
            else:
                line.abort()
        if creating is not None:
            try:
                sid = await creating
            except (RpcError, WorkerFull):
                pass  # the server created no session
            except UpstreamGone as error:
                if error.sent:
                    raise
        if sid:
            await self.end(at, sid, UNDO_S)  # a reset that still runs in the session delays its end
            return
        if line is not None and line.overran:
            raise UpstreamError("a reset still runs in the worker")

    async def undone(self, lease: str, within_s: float) -> bool:
        """Wait until the failed opening of *lease* is undone; return False if there is no such opening.

        Raises:
            UpstreamError: The undo has not ended in time, or the place may still be occupied.
        """
        undo = self._undoing.pop(lease, None)
        if undo is None:
            return False
        await asyncio.wait({undo}, timeout=within_s)
        if not undo.done():
            raise UpstreamError("an earlier request in the worker has not ended yet")
        undo.result()
        return True

    async def attach(self, session: Session, environment: Environment, sid: str, first: bytes) -> LiveSession:
        """Attach to a session that another replica opened, or this replica before a restart.

        *first* is the reply to the session's reset.

        Raises:
            SessionNotFound: The server does not have the session, or is gone itself.
        """
        line, steps = await self._attached(session, environment, sid)
        held = LiveSession(session, environment, sid, line, first)
        held.steps = steps
        held.is_whole = False
        return held

    async def _attached(self, session: Session, environment: Environment, sid: str) -> tuple[FrameConnection, int]:
        deadline = time.monotonic() + ATTACH_S
        while True:
            message = "the server closed the socket"
            try:
                line = await self._sockets.open(
                    session.address, _target(sid), answer_s=environment.timeouts.call_s, within_s=ATTACH_S
                )
            except NotListening as error:
                if parse_address(session.address).kind is Kind.URL:
                    raise
                raise SessionNotFound(f"the session is gone with its server: {error.detail}") from error
            except UpstreamGone:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(PAUSE_S)  # a dying server may still accept connections
                continue
            is_attached = False
            try:
                reply = await line.ask(STATE)
                fault = fault_of(reply)
                is_attached = fault is None or fault.code != SESSION
                if is_attached:
                    return line, _steps(reply)
                message = fault.message if fault is not None else message
            except UpstreamGone:
                pass  # the close may overtake the refusal
            finally:
                if not is_attached:
                    line.abort()
            if "Unknown session_id" in message:
                raise SessionNotFound(message)
            if time.monotonic() >= deadline:
                raise UpstreamError(f"the session can't be attached to: {message}")
            await asyncio.sleep(PAUSE_S)

    async def ask(self, held: LiveSession, frame: bytes) -> bytes:
        """Send *frame* in its turn and return its reply; first replace a broken socket if the session outlived it.

        Raises:
            SessionNotFound: The session is gone, and nothing ran.
            UpstreamGone: The socket broke before the reply to *frame*, or the server is unreachable.
        """
        for _ in range(2):
            line = await self._line(held)
            try:
                reply = await line.ask(frame)
            except UpstreamGone as error:
                if error.sent or held.is_ended:
                    raise
                continue  # the socket broke while the request waited for its turn, so the request was not sent
            if kind_of(reply) == "error" and (fault := fault_of(reply)) is not None and fault.code == SESSION:
                line.abort()
                raise UpstreamGone(f"the worker ended the session: {fault.message}", sent=True)
            return reply
        raise UpstreamGone("the connection to the worker broke", sent=False)

    async def _line(self, held: LiveSession) -> FrameConnection:
        held.check()
        if held.line.is_open:
            return held.line
        if not held.sid:  # another socket would be another episode
            raise SessionNotFound("the session was lost with its socket")
        async with held.attaching:
            before = held.line
            if not before.is_open:
                line, _ = await self._attached(held.session, held.environment, held.sid)
                before.abort()
                held.take(line)
                if held.is_ended:
                    line.abort()
                held.check()
                logger.info("session_attached_again session=%s worker=%s", held.session.id, held.session.worker)
            return held.line

    async def close(self, held: LiveSession, within_s: float) -> Summary:
        """End a session that this replica holds; its place is free afterwards.

        Raises:
            UpstreamError: The place may still be occupied: a step still runs, or the server did not end the session.
        """
        held.is_ended = True
        deadline = time.monotonic() + within_s
        line = held.line
        if not await line.settle(min(SETTLE_S, within_s)):
            line.abort()
            if held.sid:  # the session then ends with its step
                with contextlib.suppress(UpstreamError):
                    await self._http.call(held.at, "openenv/session/close", {"session_id": held.sid})
            raise UpstreamError("a step still runs in the worker")
        if line.overran and not held.sid:
            line.abort()
            raise UpstreamError("a step may still run in the worker: its socket broke meanwhile")
        if not await line.close(max(0.0, deadline - time.monotonic())):
            raise UpstreamError("the worker did not end the session")
        if held.sid:
            await self.end(held.at, held.sid, max(0.0, deadline - time.monotonic()))
        return held.summary

    async def end(self, at: Place, sid: str, within_s: float) -> None:
        """End a session by its id and wait until it is gone; an unknown session counts as gone.

        Raises:
            UpstreamError: The session has not ended in time.
        """
        deadline = time.monotonic() + within_s
        while True:
            left_s = max(PAUSE_S, deadline - time.monotonic())
            try:
                result = await self._http.call(at, "openenv/session/close", {"session_id": sid}, silence_s=left_s)
                if result.get("closed") is True:
                    return
            except RpcError as error:
                if error.rpc_code == UNKNOWN_SESSION:
                    return
                if error.rpc_code != INITIALISING:
                    raise
            if time.monotonic() >= deadline:
                raise UpstreamError("the worker did not end the session: a socket is still attached to it")
            await asyncio.sleep(PAUSE_S)

    async def aclose(self) -> None:
        """Wait briefly for running undos, then cancel them."""
        undoing = set(self._undoing.values())
        if undoing:
            await asyncio.wait(undoing, timeout=SETTLE_S)
        for undo in undoing:
            undo.cancel()


async def _first_reply(line: FrameConnection, sid: str, frame: bytes) -> bytes:
    """Send the reset *frame* and return the observation.

    Raises:
        WorkerFull: The server has no room.
        InvalidRequest: The environment refuses the task.
        AuthorFault: The server could not make the environment, or the environment failed at the task.
        UpstreamError: The reset failed otherwise, or the server's answer can't be read.
    """
    try:
        reply = await line.ask(frame)
    except UpstreamGone as error:
        if not sid and line.close_code == 1000:  # the close overtook the refusal
            raise WorkerFull("the server has no room") from error
        raise
    if kind_of(reply) == "observation":
        return reply
    fault = fault_of(reply)
    if fault is None:
        raise UpstreamError(f"the server answered the reset with a frame of type {kind_of(reply)!r}")
    if fault.code == FULL:
        raise WorkerFull(fault.message, capacity=fault.capacity)
    if fault.code == INVALID:
        raise InvalidRequest(f"the environment refused the reset: {fault.message}")
    if fault.code == FAILED:
        raise author_fault(f"the reset failed: {fault.message}", "reset")
    if fault.code == FACTORY:
        raise _not_made(fault.message)
    raise UpstreamError(f"the reset failed: {fault.message} ({fault.code})")


def _not_made(message: str) -> AuthorFault:
    return author_fault(f"the server can't make an environment: {message}", "constructor")


def _target(sid: str) -> str:
    return f"/ws?session_id={quote(sid, safe='')}" if sid else "/ws"


def _steps(reply: bytes) -> int:
    """Return the number of steps in a state's reply; 0 if it has none."""
    try:
        steps = parse(reply)["data"].get("step_count")
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0
    return steps if type(steps) is int and steps > 0 else 0


def _heard(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # retrieved here, because `undone` may never be called
