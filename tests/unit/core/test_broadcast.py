"""Items for many followers: each queue is bounded, drops its oldest items, and ends with its follower."""

from __future__ import annotations

import asyncio
import gc

from gateway.core.broadcast import Broadcast, Following
from gateway.core.ids import SessionId
from gateway.core.session import Notice, SessionEnded


def ended(n: int) -> SessionEnded:
    return SessionEnded(SessionId(f"s{n}"), "lease")


async def rest(following: Following[Notice]) -> list[Notice]:
    return [notice async for notice in following]


async def test_a_slow_follower_loses_its_oldest_notices_and_other_followers_lose_none() -> None:
    notices: Broadcast[Notice] = Broadcast(kept=3)
    slow, quick = notices.follow(), notices.follow()
    heard = []

    for n in range(5):
        notices.publish(ended(n))
        heard.append(await anext(quick))
    notices.close()

    assert heard == [ended(n) for n in range(5)]
    assert await rest(slow) == [ended(2), ended(3), ended(4)]
    assert await rest(quick) == []


async def test_a_waiting_follower_is_woken_by_a_notice_and_by_the_end() -> None:
    notices: Broadcast[Notice] = Broadcast()
    task = asyncio.create_task(rest(notices.follow()))
    await asyncio.sleep(0)

    notices.publish(ended(1))
    await asyncio.sleep(0)
    assert not task.done()
    notices.close()

    assert await task == [ended(1)]


async def test_a_follower_receives_no_notice_from_before_it_followed() -> None:
    notices: Broadcast[Notice] = Broadcast()
    notices.publish(ended(1))

    following = notices.follow()
    notices.publish(ended(2))
    notices.close()

    assert await rest(following) == [ended(2)]


async def test_a_follower_cancelled_at_any_turn_of_its_wait_loses_no_notice() -> None:
    for turns in range(6):
        notices: Broadcast[Notice] = Broadcast()
        following = notices.follow()
        task = asyncio.ensure_future(anext(following))
        await asyncio.sleep(0)
        notices.publish(ended(1))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        notices.close()

        heard = [] if task.cancelled() else [task.result()]
        assert heard + await rest(following) == [ended(1)]


async def test_followers_without_references_are_forgotten() -> None:
    notices: Broadcast[Notice] = Broadcast()
    for _ in range(100):
        notices.follow()
    gc.collect()

    assert len(notices._followers) == 0
