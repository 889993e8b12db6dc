"""Requests that start an episode, each with the calls that it makes to the store and the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import pytest

from gateway.core.errors import GatewayError, InvalidRequest, UpstreamGone, WorkerFull
from gateway.core.session import CloseReason, Session
from tests.deadlines import HANG_S
from tests.service.openings_world import SOLO, SUMS, Calls, World

CALLS_MAX: Final = 40
"""Number of calls that no request reaches."""


@dataclass(frozen=True)
class Case:
    """A request, its preparation, and the calls that it makes at least."""

    name: str
    request: Callable[[World], Awaitable[Session]]
    calls: set[str]
    before: Callable[[World], Awaitable[Any]] | None = None
    failures: tuple[GatewayError, ...] = ()
    fails: bool = False
    """True if the request fails with a gateway error even if its client does not hang up."""


async def _ended_meanwhile(world: World) -> None:
    async def end(session: Session) -> None:
        closing = await world.store.begin_close(session.id, CloseReason.DELETED)
        assert closing is not None
        await world.store.release(session.id, closing.lease)

    world.rooms.before_open = end


async def _open_then_refuse(world: World) -> None:
    await world.open()
    world.rooms.failures.append(InvalidRequest("no such task"))


CLAIMED: Final = {"claim", "open", "opened"}
GIVEN_BACK: Final = {"begin_close", "close", "release"}
CASES: Final = [
    Case("a free slot", lambda world: world.open(), CLAIMED),
    Case(
        "a task that is refused",
        lambda world: world.open(),
        {"claim", "open", *GIVEN_BACK},
        failures=(InvalidRequest("no such task"),),
        fails=True,
    ),
    Case(
        "a worker that dies",
        lambda world: world.open(),
        CLAIMED | GIVEN_BACK,
        failures=(UpstreamGone("it is gone", sent=True),),
    ),
    Case(
        "a worker without room",
        lambda world: world.open(),
        {*CLAIMED, *GIVEN_BACK, "limit_worker"},
        failures=(WorkerFull("it is full", capacity=1),),
    ),
    Case(
        "one that is deleted meanwhile",
        lambda world: world.open(),
        {*CLAIMED, *GIVEN_BACK, "find"},
        before=_ended_meanwhile,
        fails=True,
    ),
    Case("a first reset", lambda world: world.reset(), CLAIMED | {"begin_close"}),
    Case(
        "a reset in the same slot",
        lambda world: world.reset(),
        {"begin_close", "close", "hand_over", "open", "opened"},
        before=lambda world: world.open(),
    ),
    Case(
        "a reset to another environment",
        lambda world: world.reset(SUMS),
        CLAIMED | GIVEN_BACK,
        before=lambda world: world.open(),
    ),
    Case(
        "a reset of a worker that is used once",
        lambda world: world.reset(SOLO),
        {*CLAIMED, *GIVEN_BACK, "hand_over"},
        before=lambda world: world.open(SOLO),
    ),
    Case(
        "a reset to a task that is refused",
        lambda world: world.reset(),
        {"begin_close", "close", "hand_over", "open", "release"},
        before=_open_then_refuse,
        fails=True,
    ),
]


async def begun(case: Case, calls: Calls) -> tuple[World, asyncio.Task[Session]]:
    """Start *case*'s request in a new world. *calls* count from the start of the request."""
    world = World(calls)
    await world.start()
    stop_at, lose_at, calls.stop_at, calls.lose_at = calls.stop_at, calls.lose_at, 0, 0
    if case.before is not None:
        await case.before(world)
    world.rooms.failures += case.failures
    calls.names.clear()
    calls.stop_at, calls.lose_at = stop_at, lose_at
    return world, asyncio.ensure_future(case.request(world))


async def as_ever(case: Case, world: World, request: asyncio.Task[Session]) -> None:
    """Check the outcome of a request whose client does not hang up."""
    await asyncio.wait({request}, timeout=HANG_S)
    assert request.done()
    if case.fails:
        with pytest.raises(GatewayError):
            await request
        await world.holds_nothing()
    else:
        await request
        await world.holds_one()
