"""A call of a store that does not answer is retried for a limited time."""

from __future__ import annotations

import pytest

from gateway.core.errors import SessionNotFound, StoreUnavailable
from gateway.core.retry import patiently


class Asked:
    """A call that fails once with each of *errors* and then succeeds."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.tries = 0

    async def __call__(self) -> str:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answered"


async def test_a_call_is_retried_until_the_store_answers() -> None:
    asked = Asked(StoreUnavailable("away"), StoreUnavailable("away"))
    missed: list[int] = []

    assert await patiently(asked, missed=lambda: missed.append(asked.tries)) == "answered"

    assert asked.tries == 3
    assert missed == [1, 2]


async def test_without_a_retry_time_the_store_is_called_once() -> None:
    asked = Asked(StoreUnavailable("away"))

    with pytest.raises(StoreUnavailable):
        await patiently(asked, for_s=0.0)

    assert asked.tries == 1


async def test_an_error_that_the_store_answered_is_not_retried() -> None:
    asked = Asked(SessionNotFound("one"))

    with pytest.raises(SessionNotFound):
        await patiently(asked)

    assert asked.tries == 1
