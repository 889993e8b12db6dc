"""Fixtures of the curriculum store's contract, next to those of `store_fixtures`, used with ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.core.ports.curricula import CurriculumStore
from tests.contract.curriculum_worlds import Make, open_store
from tests.contract.store_worlds import RedisWorld, World


@pytest.fixture
async def make(store_world: World) -> AsyncIterator[Make]:
    """Opens curriculum stores of this world, each with limits of its own."""
    opened: list[CurriculumStore] = []

    def make(**limits: Any) -> CurriculumStore:
        opened.append(open_store(store_world, **limits))
        return opened[-1]

    yield make
    for store in opened:
        await store.aclose()


@pytest.fixture
def curricula(make: Make) -> CurriculumStore:
    return make()


@pytest.fixture
async def replicas(redis_world: RedisWorld) -> AsyncIterator[tuple[CurriculumStore, CurriculumStore]]:
    """Two replicas on one Redis."""
    one, other = open_store(redis_world), open_store(redis_world)
    yield one, other
    await one.aclose()
    await other.aclose()
