"""Determine a server's readiness, capacity and session lifetime with trial sockets.

``/health`` returns a constant, and a server refuses a socket only after the upgrade. So a worker is ready when a socket
gets a reply. The refusal of a socket beyond the capacity shows the capacity.

From 0.5 on, ``/ws?session_id=`` attaches to a session. Servers from 0.2.2 to 0.4.1 create such sessions but ignore the
id, and give the socket an environment of its own. No page distinguishes them: 0.4.1 and 0.5.0 have the same OpenAPI. So
a trial socket names a session that does not exist. A server of 0.5 refuses the id before the socket occupies a place.
An older server gives the socket a place, which is released immediately.
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
"""Seconds within which a server must free the places of closed trial sockets."""
CLOSE_S: Final = 30.0
KNOWN_MAX: Final = 4096
ATTEMPTS: Final = 3
"""Attempts of the lifetime trial: the close of a socket may overtake the refusal, and then the trial has no result."""
ATTACH_ANSWER_S: Final = 60.0


class CapabilityProbe:
    """Tests servers' capabilities, and caches the results."""

    def __init__(self, http: Http, sockets: WebSocketPool) -> None:
        self._http = http
        self._sockets = sockets
        self._capacities: OrderedDict[str, int] = OrderedDict()
        self._outliving: OrderedDict[Place, bool] = OrderedDict()
        self._asking: dict[Place, asyncio.Lock] = {}

    async def ready(self, worker: Worker, environment: Environment) -> int:
        """Wait until the worker is ready; return its capacity, 0 if that is not learned. See ``Upstream.ready``."""
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
        """Return if the worker answers ``/health``; see ``Upstream.alive``."""
        at = Place(worker.id, worker.address)
        status = await self._http.status(at, "/health")
        if status != 200:
            raise UpstreamError(f"worker {worker.id} answered {status} to /health")

    async def outlives_sockets(self, at: Place) -> bool:
        """Return True if sessions of the server at *at* outlive their sockets.

        Raises:
            UpstreamError: The server does not answer.
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
        await line.close(FREE_S)  # frees the place that an older server gave
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
                        raise UpstreamError(f"the server answered {status} to /health: it is not an OpenEnv server")
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
        if not environment.server.url:  # third parties may occupy the places of a server with a URL
            await self._freed(at, answer_s)
        return remember(self._capacities, digest, capacity, KNOWN_MAX)

    async def _count(self, at: Place, answer_s: float, *, at_most: int) -> int:
        """Hold up to *at_most* sockets open, and return the capacity that they show."""
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
                    return len(lines)  # the server can't make more environments, whatever capacity it states
            return len(lines)
        finally:
            await _closed(lines)

    async def _trial(self, at: Place, answer_s: float) -> FrameConnection:
        """Open a socket and wait for one reply.

        Raises:
            WorkerFull: The server has no room.
            UpstreamError: The server can't make an environment; the error contains its reason.
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
        """Wait until the server has a place for a new socket."""
        deadline = asyncio.get_running_loop().time() + FREE_S
        while True:
            try:
                await _closed([await self._trial(at, answer_s)])
                return
            except WorkerFull as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise UpstreamError("the server does not release the slots of closed sockets") from error
            await asyncio.sleep(PAUSE_S)


async def _closed(lines: list[FrameConnection]) -> None:
    """Close trial sockets, and wait until the server has closed them too and so freed their places."""
    closing = [asyncio.ensure_future(line.close(CLOSE_S)) for line in lines]
    try:
        if closing:
            await asyncio.wait(closing)
    finally:
        for line, close in zip(lines, closing, strict=True):
            if not close.done():
                close.cancel()
                line.abort()
