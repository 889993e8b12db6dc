"""The store did what it was asked, and its answer was lost: what is asked again must find what the first try did."""

from __future__ import annotations

from typing import Any

from gateway.core.errors import StoreUnavailable
from gateway.stores.memory.sessions import MemoryStore
from tests.service.stack import stack
from tests.service.wire import create, delete


async def test_a_session_whose_end_was_begun_unheard_is_ended_all_the_same() -> None:
    async with stack(store_patience_s=5.0) as built, built.first.looping(), built.first.serving() as client:
        await create(client)
        lost = lose_answers(built.store, "begin_close", number=1)

        answer = await delete(client)

        assert lost == ["begin_close"]
        assert answer.status_code == 200
        assert await built.first.used() == 0
        assert built.backend.only.sessions == {}


def lose_answers(store: MemoryStore, name: str, *, number: int) -> list[str]:
    """Let the next *number* calls of the operation *name* be done and fail; returns the list of those that were."""
    lost: list[str] = []
    operation = getattr(store, name)

    async def unheard(*arguments: Any, **more: Any) -> Any:
        answer = await operation(*arguments, **more)
        if len(lost) < number:
            lost.append(name)
            raise StoreUnavailable("the store does not answer")
        return answer

    setattr(store, name, unheard)
    return lost
