"""A call and its outcome, and an estimate of the memory that an outcome takes."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

from gateway.core.errors import InvalidRequest, PoolExhausted, SessionNotFound, StoreUnavailable, UpstreamGone

T = TypeVar("T")


class Call(Generic[T]):
    """A call in progress or ended. Its outcome is a value or an error."""

    def __init__(
        self, *, digest: str, key: str | None, is_kept: bool, is_recorded: bool = False, task_id: str = ""
    ) -> None:
        self.task_id = task_id or uuid.uuid4().hex
        """The call's id: 32 hexadecimal digits."""
        self.digest = digest
        self.key = key
        self.is_kept = is_kept
        self.is_recorded = is_recorded
        """True if this replica records the call in the store."""
        self.is_elsewhere = False
        """True if another replica runs or ran the call. This replica only waits for the outcome."""
        self.is_forgotten = False
        """True if the call's session ended while the call ran."""
        self.timer: asyncio.TimerHandle | None = None
        """Timer that fails the call at its deadline."""
        self.listeners = 0
        self.was_delivered = False
        self.ended_at: float | None = None
        self.weight = 0
        self._outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._admitted = asyncio.Event()

    def admit(self) -> None:
        """Release the callers that wait in `admitted`."""
        self._admitted.set()

    @property
    def is_undecided(self) -> bool:
        """Return True until the store decides whether this replica runs the call, or waits for another replica."""
        return self.is_recorded and not self._admitted.is_set()

    async def admitted(self) -> None:
        """Wait for the decision whether the call may run here. A refused call then has its outcome."""
        await self._admitted.wait()

    @property
    def error(self) -> Exception | None:
        """The error that the call ended with, or None."""
        found = self._outcome.exception() if self._outcome.done() else None
        return found if isinstance(found, Exception) else None

    @property
    def result(self) -> T | Exception:
        """The outcome of a call that is over."""
        return self.error or self._outcome.result()

    @property
    def was_in_vain(self) -> bool:
        """Return True if the wait for another replica's call ended with an error. Only the store knows the outcome."""
        return self.is_elsewhere and self.error is not None

    @property
    def is_over(self) -> bool:
        """Return True if the call has an outcome."""
        return self._outcome.done()

    async def outcome(self) -> T:
        """Wait for the outcome, and return it or raise the call's error. The call continues if the caller leaves."""
        return await asyncio.shield(self._outcome)

    async def over_within(self, seconds: float) -> bool:
        """Wait for the outcome for at most *seconds*. Return True if it is there."""
        if not self._outcome.done():
            await asyncio.wait({self._outcome}, timeout=seconds)
        return self._outcome.done()

    def outcome_weight(self) -> int:
        """Return the estimated number of bytes of the outcome."""
        error = self._outcome.exception()
        return weight(self._outcome.result() if error is None else str(error))

    def succeed(self, value: T) -> None:
        """Set a value as the outcome, unless the call has an outcome."""
        if not self._outcome.done():
            self._outcome.set_result(value)

    def fail(self, error: Exception) -> None:
        """Set an error as the outcome, unless the call has an outcome."""
        if not self._outcome.done():
            self._outcome.set_exception(error)
            self._outcome.exception()  # marks the error as retrieved, because no caller may be waiting

    def stop_timer(self) -> None:
        """Remove the deadline, because the call has run."""
        if self.timer is not None:
            self.timer.cancel()


def never_ran(error: Exception) -> bool:
    """Return True if *error* proves that nothing ran, so that the same key may be tried again."""
    if isinstance(error, UpstreamGone):
        return not error.sent
    return isinstance(error, (InvalidRequest, SessionNotFound, PoolExhausted, StoreUnavailable))


OBJECT_BYTES: Final = 64
"""Estimated bytes of each value, before the characters of a string are added."""


def weight(value: Any) -> int:
    """Estimate the bytes of JSON-like data, including dataclasses. A string counts its characters."""
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
