"""Whether a server's sessions outlive their sockets: found out once of each worker.

From 0.5 on ``/ws?session_id=`` attaches to a session; 0.2.2 to 0.4.1 make such sessions, but do not look at the id,
and give the socket an environment of its own. No page tells the two apart: 0.4.1 and 0.5.0 have the same OpenAPI. So a
socket asks for a session that there is not. A server that looks refuses it by name, before it takes a place; another
one gives it a place, which is given back at once.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from typing import Final

from gateway.core.errors import UpstreamGone
from gateway.upstreams.openenv.frames import SESSION, STATE, fault_of
from gateway.upstreams.openenv.http import Http, Place
from gateway.upstreams.openenv.websocket import WebSocketPool

KNOWN_MAX: Final = 4096
ATTEMPTS: Final = 3
"""A refusal may be overtaken by the end of its socket, which then tells nothing."""
ANSWER_S: Final = 60.0
CLOSE_S: Final = 10.0


class Lasting:
    """Tells servers whose sessions last from those whose sessions are their sockets."""

    def __init__(self, http: Http, sockets: WebSocketPool) -> None:
        self._http = http
        self._sockets = sockets
        self._known: OrderedDict[Place, bool] = OrderedDict()
        self._asking: dict[Place, asyncio.Lock] = {}

    async def has(self, at: Place) -> bool:
        """Whether sessions of the server at *at* outlive their sockets.

        Raises:
            UpstreamError: it does not answer.
        """
        if (known := self._known.get(at)) is not None:
            return known
        lock = self._asking.setdefault(at, asyncio.Lock())
        try:
            async with lock:
                if (known := self._known.get(at)) is None:
                    known = self._known[at] = await self._ask(at)
                    if len(self._known) > KNOWN_MAX:
                        self._known.popitem(last=False)
                return known
        finally:
            if not lock.locked():
                self._asking.pop(at, None)

    async def _ask(self, at: Place) -> bool:
        if not (await self._http.abilities(at)).may_have_lasting_sessions:
            return False
        for attempt in range(ATTEMPTS):
            try:
                return await self._refuses_strangers(at)
            except UpstreamGone:
                if attempt == ATTEMPTS - 1:
                    raise
        raise AssertionError("unreachable")

    async def _refuses_strangers(self, at: Place) -> bool:
        line = await self._sockets.open(at.address, f"/ws?session_id={uuid.uuid4()}", answer_s=ANSWER_S)
        try:
            fault = fault_of(await line.ask(STATE))
        except BaseException:
            line.abort()
            raise
        await line.close(CLOSE_S)  # where it got a place, that is free now
        return fault is not None and fault.code == SESSION
