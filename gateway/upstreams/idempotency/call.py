"""One run of something, and what came of it.

How much memory a value takes, roughly: for bounds on what is kept.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from gateway.core.errors import InvalidRequest, PoolExhausted, SessionNotFound, StoreUnavailable, UpstreamGone

T = TypeVar("T")


class Call(Generic[T]):
    """One run of something; its outcome is a value or an error."""

    def __init__(
        self, *, digest: str, key: str | None, is_kept: bool, is_recorded: bool = False, task_id: str = ""
    ) -> None:
        self.task_id = task_id or uuid.uuid4().hex
        """32 hexadecimal digits."""
        self.digest = digest
        self.key = key
        self.is_kept = is_kept
        self.is_recorded = is_recorded
        """Whether the store hears of it from here."""
        self.is_elsewhere = False
        """Whether another replica runs it, or ran it; it is only waited for here."""
        self.is_forgotten = False
        """Whether its session ended while it ran."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends it when it takes too long."""
        self.listeners = 0
        self.was_delivered = False
        self.ended_at: float | None = None
        self.weight = 0
        self._outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._admitted = asyncio.Event()

    def admit(self) -> None:
        """Let `admitted` return."""
        self._admitted.set()

    @property
    def is_undecided(self) -> bool:
        """Whether the store has not told yet who runs it: this replica, or another one that it is waited for from."""
        return self.is_recorded and not self._admitted.is_set()

    async def admitted(self) -> None:
        """Wait until it is settled whether the call may run here: what is refused before has its outcome by then."""
        await self._admitted.wait()

    @property
    def error(self) -> Exception | None:
        """What it ended with, if that is an error."""
        found = self._outcome.exception() if self._outcome.done() else None
        return found if isinstance(found, Exception) else None

    @property
    def result(self) -> T | Exception:
        """Its outcome, when it is over."""
        return self.error or self._outcome.result()

    @property
    def was_in_vain(self) -> bool:
        """Whether another replica's call was waited for without a result: only the store knows the last word of it."""
        return self.is_elsewhere and self.error is not None

    @property
    def is_over(self) -> bool:
        """Whether there is an outcome."""
        return self._outcome.done()

    async def outcome(self) -> T:
        """Wait for the outcome, without a hold on the call: who waits may leave. Raises what the run raised."""
        return await asyncio.shield(self._outcome)

    async def over_within(self, seconds: float) -> bool:
        """Wait for the outcome at most so long; whether it is there."""
        if not self._outcome.done():
            await asyncio.wait({self._outcome}, timeout=seconds)
        return self._outcome.done()

    def outcome_weight(self) -> int:
        """How many bytes the outcome takes, roughly."""
        error = self._outcome.exception()
        return weight(self._outcome.result() if error is None else str(error))

    def succeed(self, value: T) -> None:
        """Set the outcome, if there is none yet."""
        if not self._outcome.done():
            self._outcome.set_result(value)

    def fail(self, error: Exception) -> None:
        """Set an error as the outcome, if there is none yet."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._outcome.exception()  # nobody may be there to hear of it

    def stop_timer(self) -> None:
        """Let it take as long as it takes: it has run."""
        if self.timer is not None:
            self.timer.cancel()


def never_ran(error: Exception) -> bool:
    """Whether it is sure that nothing ran, so that the same key may be tried again."""
    if isinstance(error, UpstreamGone):
        return not error.sent
    return isinstance(error, (InvalidRequest, SessionNotFound, PoolExhausted, StoreUnavailable))


OBJECT_BYTES: Final = 64
"""Of a number, or of anything that has no size of its own."""


def weight(value: Any) -> int:
    """Estimate the bytes of JSON-like data, dataclasses included; a string counts its characters."""
    total, open_values = 0, [value]
    while open_values:
        one = open_values.pop()
        total += OBJECT_BYTES
        if isinstance(one, str | bytes):
            total += len(one)
        elif isinstance(one, Mapping):
            open_values += one.keys()
            open_values += one.values()
        elif isinstance(one, Sequence):
            open_values += one
        elif dataclasses.is_dataclass(one):
            open_values += [getattr(one, field.name) for field in dataclasses.fields(one)]
    return total
