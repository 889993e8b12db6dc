"""The store runs an operation, and its answer is lost: a retry must find the effect of the first attempt."""

from __future__ import annotations

from typing import Any

from gateway.core.errors import StoreUnavailable
from gateway.stores.memory.sessions import MemoryStore
from tests.service.stack import stack
from tests.service.wire import create, delete


async def test_a_session_ends_even_if_the_answer_to_its_first_close_is_lost() -> None:
    async with stack(store_patience_s=5.0) as built, built.first.looping(), built.first.serving() as client:
        await create(client)
        lost = lose_answers(built.store, "begin_close", number=1)

        answer = await delete(client)

        assert lost == ["begin_close"]
        assert answer.status_code == 200
        assert await built.first.used() == 0
        assert built.backend.only.sessions == {}


def lose_answers(store: MemoryStore, name: str, *, number: int) -> list[str]:
    """Let the next *number* calls of the operation *name* run and then fail. Return the list of the failed calls."""
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
