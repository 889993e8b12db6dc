"""Readiness, capacity and session lifetime of a server, learned from trial sockets.

``/health`` is constant, and a refusal comes after the upgrade. So a worker is ready when a socket gets a reply, and the
refusal of one socket too many shows its capacity.

From 0.5 on ``/ws?session_id=`` attaches to a session; 0.2.2 to 0.4.1 make such sessions, but ignore the id, and give
the socket an environment of its own. No page tells the two apart: 0.4.1 and 0.5.0 have the same OpenAPI. So a trial
socket asks for a session that does not exist. A server of 0.5 refuses it by name, before it takes a place; an older
server gives it a place, which is returned at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict
from typing import Final

from gateway.core.environment import Environment
from gateway.core.errors import UpstreamError, UpstreamGone, UpstreamTimeout, WorkerFull
from gateway.core.worker import Worker
from gateway.upstreams.openenv.frames import FACTORY, FULL, SESSION, STATE, fault_of
from gateway.upstreams.openenv.http import Http, Place, remember
from gateway.upstreams.openenv.websocket import FrameConnection, WebSocketPool

PAUSE_S: Final = 0.05
TRIALS_MAX: Final = 64
FREE_S: Final = 10.0
"""How long the places of trial sockets may take to be free again."""
CLOSE_S: Final = 30.0
KNOWN_MAX: Final = 4096
ATTEMPTS: Final = 3
"""Attempts of the lifetime trial: the end of a socket may overtake the refusal, and then shows nothing."""
ATTACH_ANSWER_S: Final = 60.0


class CapabilityProbe:
    """Tries servers out, and remembers what it learned."""

    def __init__(self, http: Http, sockets: WebSocketPool) -> None:
        self._http = http
        self._sockets = sockets
        self._capacities: OrderedDict[str, int] = OrderedDict()
        self._outliving: OrderedDict[Place, bool] = OrderedDict()
        self._asking: dict[Place, asyncio.Lock] = {}

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """See ``Upstream.ready``."""
        at = Place(worker.id, worker.address)
        await self._healthy(at, environment)
        answer_s = environment.timeouts.start_s
        while True:
            try:
                capacity = await self._tried(at, environment, answer_s)
                break
            except (UpstreamGone, UpstreamTimeout):
                await asyncio.sleep(PAUSE_S)
        return capacity

    async def alive(self, worker: Worker, environment: Environment) -> None:
        """See ``Upstream.alive``."""
        at = Place(worker.id, worker.address)
        status = await self._http.status(at, "/health")
        if status != 200:
            raise UpstreamError(f"worker {worker.id} answered {status} to /health")

    async def outlives_sockets(self, at: Place) -> bool:
        """Return True if sessions of the server at *at* outlive their sockets.

        Raises:
            UpstreamError: the server does not answer.
        """
        if (known := self._outliving.get(at)) is not None:
            return known
        lock = self._asking.setdefault(at, asyncio.Lock())
        try:
            async with lock:
                if (known := self._outliving.get(at)) is not None:
                    return known
                return remember(self._outliving, at, await self._try_lifetime(at), KNOWN_MAX)
        finally:
            if not lock.locked():
                self._asking.pop(at, None)

    async def _try_lifetime(self, at: Place) -> bool:
        if not (await self._http.abilities(at)).may_have_lasting_sessions:
            return False
        for _ in range(ATTEMPTS - 1):
            with contextlib.suppress(UpstreamGone):
                return await self._refuses_unknown_sessions(at)
        return await self._refuses_unknown_sessions(at)

    async def _refuses_unknown_sessions(self, at: Place) -> bool:
        line = await self._sockets.open(at.address, f"/ws?session_id={uuid.uuid4()}", answer_s=ATTACH_ANSWER_S)
        try:
            fault = fault_of(await line.ask(STATE))
        except BaseException:
            line.abort()
            raise
        await line.close(FREE_S)  # a place that it got is free afterwards
        return fault is not None and fault.code == SESSION

    async def _healthy(self, at: Place, environment: Environment) -> None:
        while True:
            try:
                own = environment.server.ready
                if not own or await self._http.status(at, own) == 200:
                    status = await self._http.status(at, "/health")
                    if status == 200:
                        return
                    if status < 500:
                        raise UpstreamError(f"the server answered {status} to /health: it is no OpenEnv server")
            except (UpstreamGone, UpstreamTimeout):
                pass
            await asyncio.sleep(PAUSE_S)

    async def _tried(self, at: Place, environment: Environment, answer_s: float) -> int:
        if not environment.pool.learns_slots:
            await self._count(at, answer_s, at_most=1)
            return 0
        digest = environment.digest()
        known = self._capacities.get(digest)
        if known is not None:
            await self._count(at, answer_s, at_most=1)
            return known
        capacity = await self._count(at, answer_s, at_most=TRIALS_MAX)
        if not environment.server.url:  # of those somebody else may hold the places
            await self._freed(at, answer_s)
        return remember(self._capacities, digest, capacity, KNOWN_MAX)

    async def _count(self, at: Place, answer_s: float, *, at_most: int) -> int:
        """Open up to *at_most* sockets at once; how many sessions the server holds, as far as that shows."""
        lines: list[FrameConnection] = []
        try:
            while len(lines) < at_most:
                try:
                    lines.append(await self._trial(at, answer_s))
                except WorkerFull as error:
                    return error.capacity or max(1, len(lines))
                except UpstreamError as error:
                    if not lines or isinstance(error, UpstreamGone | UpstreamTimeout):
                        raise
                    return len(lines)  # no more of them can be made, whatever it promises
            return len(lines)
        finally:
            await _closed(lines)

    async def _trial(self, at: Place, answer_s: float) -> FrameConnection:
        """Open a socket and wait for one reply on it.

        Raises:
            WorkerFull: it has no room.
            UpstreamError: it can't make an environment, with its reason.
        """
        line = await self._sockets.open(at.address, "/ws", answer_s=answer_s)
        try:
            try:
                reply = await line.ask(STATE)
            except UpstreamGone as error:
                if line.close_code == 1000:  # the close overtook the refusal
                    raise WorkerFull("the server has no room") from error
                raise
            fault = fault_of(reply)
            if fault is not None and fault.code == FULL:
                raise WorkerFull(fault.message, capacity=fault.capacity)
            if fault is not None and fault.code in (FACTORY, SESSION):
                raise UpstreamError(f"the server can't make an environment: {fault.message}")
        except BaseException:
            line.abort()
            raise
        return line

    async def _freed(self, at: Place, answer_s: float) -> None:
        """Return when a socket gets a place again."""
        deadline = asyncio.get_running_loop().time() + FREE_S
        while True:
            try:
                await _closed([await self._trial(at, answer_s)])
                return
            except WorkerFull as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise UpstreamError(
                        "the server does not give back the places of sockets that were closed"
                    ) from error
            await asyncio.sleep(PAUSE_S)


async def _closed(lines: list[FrameConnection]) -> None:
    """Close trial sockets and wait until the server has, too: their places are free by then."""
    closing = [asyncio.ensure_future(line.close(CLOSE_S)) for line in lines]
    try:
        if closing:
            await asyncio.wait(closing)
    finally:
        for line, close in zip(lines, closing, strict=True):
            if not close.done():
                close.cancel()
                line.abort()
