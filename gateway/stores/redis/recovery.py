"""Of the Redis store: what happens after Redis lost data, or came back with an older state.

The data is *whole* while the key ``whole`` names the run of the server that holds it. `rebuilt` writes it, and a script
that needs to know asks the server itself which run this is (``is_whole`` in ``lua/shared/base.lua``). So a Redis that
was emptied is not whole, nor one that was restarted, whatever it loaded, nor one that took over from another. As the
server decides it in the very step that reads or writes, nobody has to notice the loss first, and no connection, pool or
proxy can hide it.

What remains: a primary that is cut off from its replicas says that it is whole, and grants, for as long as gateways
reach it while others reach the one that took over (``min-replicas-to-write`` bounds that). And a server that loses some
of its keys while it runs (evictions: use ``noeviction``) does not know it.

The order of things: each replica's `lead` tells it that the store is not whole; the leader adopts workers and their
sessions, replicas restore those that they serve, claims that waited queue anew by themselves; then the leader calls
`rebuilt`, under the fence that it had when it began. A lead of before a further loss is refused there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gateway.core.ids import SessionId
from gateway.core.session import Session
from gateway.core.worker import Worker
from gateway.stores.redis.records import session_values, text, worker_values

AT_ONCE = 500
"""Notes, sessions or waiting claims in one script: some milliseconds of Redis' time."""
NOTES_S = 10.0
"""How long sessions live at least after a loss of data: replicas write their notes again in the meantime."""


class RedisRecovery:
    """The methods of ``RedisStore`` that register what somebody serves, and say that this was all."""

    async def adopt(self, worker: Worker, sessions: Sequence[Session], *, fence: int) -> list[SessionId]:
        # One script however many they are: until all of them are in, the worker seems to have room.
        values = [value for session in sessions for value in session_values(session)]
        held = await self._run("adopt", *worker_values(worker), len(sessions), *values, fence)
        return [SessionId(text(id)) for id in held]

    async def restore(self, sessions: Sequence[Session]) -> list[SessionId]:
        held: list[SessionId] = []
        for start in range(0, len(sessions), AT_ONCE):
            values = [value for session in sessions[start : start + AT_ONCE] for value in session_values(session)]
            held += [SessionId(text(id)) for id in await self._run("restore", *values)]
        return held

    async def rebuilt(self, *, fence: int) -> None:
        await self._run("rebuilt", NOTES_S, fence)

    async def _run(self, name: str, *arguments: str | float) -> Any:
        raise NotImplementedError
