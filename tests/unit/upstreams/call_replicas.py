"""A record of calls that several replicas share, in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gateway.core.errors import StoreUnavailable
from gateway.core.ids import EnvironmentName, Owner, SessionId, WorkerId
from gateway.core.ports.calls import CallChange, CallRecord, CallState, Tally
from gateway.core.session import Session, SessionState
from gateway.stores.memory.calls import MemoryCallStore

SESSION = Session(
    id=SessionId("s"),
    name="s",
    owner=Owner(""),
    environment=EnvironmentName("e"),
    lease="l",
    fingerprint="f",
    idle_s=300.0,
    worker=WorkerId("w"),
    address="",
    state=SessionState.OPEN,
)


class Shared:
    """One store that replicas share, and who of them runs what."""

    def __init__(self) -> None:
        self.store = MemoryCallStore()
        self.run = 1
        self.runner: dict[str, str] = {}
        self.gone: set[str] = set()

    def lose(self) -> None:
        """Lose all data, as a restart may."""
        self.store = MemoryCallStore()
        self.run += 1


class View:
    """A replica's way to the store: it may be cut, and it counts what goes over it."""

    is_shared = True

    def __init__(self, shared: Shared, replica: str) -> None:
        self.replica = replica
        self.is_away = False
        self.loses_answers = False
        self.trips: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self._shared = shared

    async def begin(
        self, session: SessionId, lease: str, *, key: str, digest: str, task_id: str, within_s: float
    ) -> CallRecord | None:
        await self._trip("begin")
        found = await self._shared.store.begin(
            session, lease, key=key, digest=digest, task_id=task_id, within_s=within_s
        )
        if found is None:
            self._shared.runner[task_id] = self.replica
        self._answer()
        return self._seen(found)

    async def write(self, changes: Sequence[CallChange]) -> str:
        await self._trip("write")
        for change in changes:
            self._shared.runner.setdefault(change.task_id, self.replica)
        self._shared.store.replica = self.replica  # to which a count belongs
        await self._shared.store.write(changes)
        self._answer()
        return str(self._shared.run)

    async def look(self, session: SessionId, lease: str, task_id: str) -> CallRecord | None:
        await self._trip("look")
        return self._seen(await self._shared.store.look(session, lease, task_id))

    async def settled(self, session: SessionId, lease: str, task_id: str, *, within_s: float) -> CallRecord | None:
        await self._trip("settled")
        if self._shared.runner.get(task_id) in self._shared.gone:
            within_s = 0
        return self._seen(await self._shared.store.settled(session, lease, task_id, within_s=within_s))

    async def tallies(self, session: SessionId, lease: str) -> Mapping[str, Tally]:
        await self._trip("tallies")
        return await self._shared.store.tallies(session, lease)

    async def aclose(self) -> None: ...

    async def _trip(self, name: str) -> None:
        self.trips.append(name)
        await self.gate.wait()
        if self.is_away:
            raise StoreUnavailable("the store does not answer")

    def _answer(self) -> None:
        if self.loses_answers:
            raise StoreUnavailable("the answer was lost")

    def _seen(self, record: CallRecord | None) -> CallRecord | None:
        if record is None:
            return None
        runner = self._shared.runner[record.task_id]
        is_lost = record.state is CallState.RUNNING and runner in self._shared.gone
        return replace(record, replica=runner, state=CallState.LOST if is_lost else record.state)
