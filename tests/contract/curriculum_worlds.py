"""Helpers of the tests of the curriculum store's contract: stores of a world, outcomes, and complete reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import CurriculumStore, Drawn, Turn
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.stores.redis.curricula import RedisCurriculumStore
from tests.contract.store_worlds import MATH, MemoryWorld, RedisWorld, World

Make = Callable[..., CurriculumStore]

GROUP_S = 600.0


def open_store(world: World, **limits: Any) -> CurriculumStore:
    if isinstance(world, MemoryWorld):
        limits.pop("page_bytes", None)
        return MemoryCurriculumStore(clock=world.clock, **limits)
    assert isinstance(world, RedisWorld)
    return RedisCurriculumStore(world.server.url, prefix=world.prefix, **limits)


def outcome(
    task: str = "train/1",
    reward: float = 1.0,
    *,
    environment: EnvironmentName = MATH,
    finished: bool = True,
    steps: int = 3,
    seconds: float = 1.5,
    policy: str = "",
    lease: str = "",
) -> Outcome:
    return Outcome(
        environment=environment,
        task=task,
        reward=reward,
        finished=finished,
        steps=steps,
        seconds=seconds,
        policy=policy,
        lease=lease,
    )


@dataclass
class Reader:
    """A replica that knows the records of an environment, and requests changes."""

    store: CurriculumStore
    environment: EnvironmentName = MATH
    version: str = ""
    known: dict[str, TaskRecord] = field(default_factory=dict)
    began: int = 0
    """Number of reads that had to start from the beginning."""

    async def read(self) -> Sequence[int]:
        """Read to the end. Return the number of changes of each page."""
        pages: list[int] = []
        while True:
            page = await self.store.records(self.environment, self.version)
            pages.append(len(page.records) + len(page.removed))
            if page.is_whole:
                self.known.clear()
                self.began += 1
            self.known |= {record.task: record for record in page.records}
            for task in page.removed:
                self.known.pop(task, None)
            self.version = page.version
            if page.is_last:
                return pages
            assert len(pages) < 1000, "the pages never end"


async def known(store: CurriculumStore, environment: EnvironmentName = MATH) -> dict[str, TaskRecord]:
    """Return all records of *environment*."""
    reader = Reader(store, environment)
    await reader.read()
    return reader.known


async def joined(
    store: CurriculumStore,
    member: str,
    *,
    handle: int = 0,
    curriculum: str = "easy",
    group_size: int = 2,
    group_s: float = GROUP_S,
) -> Drawn | Turn:
    return await store.join(curriculum, handle, member=member, group_size=group_size, group_s=group_s)


async def drawn(store: CurriculumStore, member: str, *, handle: int = 0, group_size: int = 2) -> int:
    """Open *handle* as a replica does, until there is a draw. Return the draw's number."""
    while True:
        turn = await joined(store, member, handle=handle, group_size=group_size)
        if isinstance(turn, Drawn):
            return turn.number
        found = await store.propose("easy", handle, turn, b"place %d" % turn.number, member=member)
        if found is not None:
            assert found.place == b"place %d" % found.number
            return found.number
