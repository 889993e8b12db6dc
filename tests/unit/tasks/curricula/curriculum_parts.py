"""Helpers for the tests of curricula and task records: a store that fails on demand, and task registries."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.curriculum import Outcome
from gateway.core.errors import StoreUnavailable
from gateway.core.ids import EnvironmentName
from gateway.core.ports.curricula import Drawn, RecordPage, Turn
from gateway.core.ports.tasks import StoredTask
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.curricula.sampling import Prepared
from gateway.tasks.registry import TaskRegistry

MATH = EnvironmentName("math")
GAME = EnvironmentName("game")


def registry_of(**environments: Sequence[Mapping[str, Any]]) -> TaskRegistry:
    """Return a registry in which each environment has a split ``train``."""
    return TaskRegistry(
        {
            EnvironmentName(name): {"train": [json.dumps(task).encode() for task in tasks]}
            for name, tasks in environments.items()
        }
    )


async def add(registry: TaskRegistry, store: MemoryTaskStore, *tasks: Mapping[str, Any], split: str = "custom") -> None:
    """Register tasks of math at run time."""
    stored = [
        StoredTask(environment=MATH, id=str(task["id"]), split=split, body=json.dumps(task).encode()) for task in tasks
    ]
    await store.put(stored, replace=True)
    await registry.refresh(store)


async def remove(registry: TaskRegistry, store: MemoryTaskStore, id: str) -> None:
    """Remove a task of math that was registered at run time."""
    assert await store.remove(MATH, id)
    await registry.refresh(store)


def weight_of(prepared: Prepared, environment: EnvironmentName, split: str, index: int) -> float:
    """Return the share of draws of a task. It is 0 if the task is not drawn now or not in the curriculum."""
    shares = {(place.environment, place.split, place.index): share for place, share in prepared.heaviest(10**6)}
    return shares.get((environment, split, index), 0.0)


class Store(MemoryCurriculumStore):
    """The memory store behind a simulated network. Each call takes two turns of the event loop, and may fail."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(**limits)
        self.is_away = False
        self.forgets_to_answer = False
        """True if the store notes outcomes but its answer is lost."""
        self.calls: Counter[str] = Counter()

    async def _reach(self, name: str) -> None:
        self.calls[name] += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise StoreUnavailable("the store does not answer")

    async def note(self, outcomes: Sequence[Outcome]) -> int:
        await self._reach("note")
        counted = await super().note(outcomes)
        if self.forgets_to_answer:
            raise StoreUnavailable("the connection broke")
        await asyncio.sleep(0)
        return counted

    async def records(self, environment: EnvironmentName, since: str = "") -> RecordPage:
        await self._reach("records")
        return await super().records(environment, since)

    async def join(self, curriculum: str, handle: int, *, member: str, group_size: int, group_s: float) -> Drawn | Turn:
        await self._reach("join")
        found = await super().join(curriculum, handle, member=member, group_size=group_size, group_s=group_s)
        await asyncio.sleep(0)
        return found

    async def propose(self, curriculum: str, handle: int, turn: Turn, place: bytes, *, member: str) -> Drawn | None:
        await self._reach("propose")
        found = await super().propose(curriculum, handle, turn, place, member=member)
        await asyncio.sleep(0)
        return found

    async def leave(self, curriculum: str, handle: int, *, member: str) -> None:
        await self._reach("leave")
        await super().leave(curriculum, handle, member=member)

    async def state(self, curriculum: str) -> tuple[int, bytes]:
        await self._reach("state")
        found = await super().state(curriculum)
        await asyncio.sleep(0)
        return found

    async def definitions_version(self) -> str:
        await self._reach("definitions_version")
        return await super().definitions_version()

    async def definitions(self) -> tuple[str, dict[str, bytes]]:
        await self._reach("definitions")
        return await super().definitions()
