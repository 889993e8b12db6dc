"""A store that does not answer is asked again, for a while."""

from __future__ import annotations

import pytest

from gateway.core.errors import SessionNotFound, StoreUnavailable
from gateway.core.retry import patiently


class Asked:
    """Fails with *errors*, one at each try, and then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.tries = 0

    async def __call__(self) -> str:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answered"


async def test_it_is_asked_until_it_answers() -> None:
    asked = Asked(StoreUnavailable("away"), StoreUnavailable("away"))
    missed: list[int] = []

    assert await patiently(asked, missed=lambda: missed.append(asked.tries)) == "answered"

    assert asked.tries == 3
    assert missed == [1, 2]


async def test_without_patience_it_is_asked_once() -> None:
    asked = Asked(StoreUnavailable("away"))

    with pytest.raises(StoreUnavailable):
        await patiently(asked, for_s=0.0)

    assert asked.tries == 1


async def test_what_it_answers_is_no_reason_to_ask_again() -> None:
    asked = Asked(SessionNotFound("one"))

    with pytest.raises(SessionNotFound):
        await patiently(asked)

    assert asked.tries == 1
