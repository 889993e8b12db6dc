"""Closed-loop load: each caller has its own connection, and sends its next request after the last answer.

A caller does not replace a lost connection. From then on it counts errors.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

from bench.load.episodes import WrongAnswer
from bench.load.http1 import Address, Connection, ProtocolError, connect
from bench.reporting.stats import Latencies, latencies

GRACE_S = 60.0
"""Seconds that the last requests of a round may take beyond its end."""
ERRORS_MAX = 20
"""Number of errors in one round after which a caller stops, because it no longer measures load."""
ERROR_PAUSE_S = 0.05
KINDS_MAX = 20
_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
FAILURES = (WrongAnswer, ProtocolError, OSError)

Step: TypeAlias = Callable[[int], Awaitable[None]]
"""One timed request, or several. Its argument is a number that is unique in the round."""


@dataclass(slots=True)
class Round:
    """The result of one round of load."""

    duration_s: float
    samples_s: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    generator_cpu_s: float = 0.0
    """CPU seconds of this process, the load generator."""

    @property
    def rate(self) -> float:
        """Successful steps a second."""
        return len(self.samples_s) / self.duration_s

    def add_error(self, error: Exception) -> None:
        """Count *error* with errors that differ only by an id. Beyond ``KINDS_MAX`` kinds, count it as "others"."""
        kind = _ID.sub("<id>", f"{type(error).__name__}: {error}")[:200]
        self.errors[kind if kind in self.errors or len(self.errors) < KINDS_MAX else "others"] += 1

    def raise_errors(self) -> None:
        """Raise ``WrongAnswer`` with all errors, if there are any."""
        if self.errors:
            raise WrongAnswer("; ".join(f"{count} times {error}" for error, count in self.errors.items()))

    @property
    def latencies(self) -> Latencies:
        """The latencies of the successful steps.

        Raises:
            ValueError: No step succeeded.
        """
        return latencies(self.samples_s)


async def load(steps: Sequence[Step], *, duration_s: float) -> Round:
    """Run a caller for each of *steps*, at least once and until *duration_s* is over. Started steps count.

    Raises:
        TimeoutError: An answer did not come within ``GRACE_S`` after the end.
    """
    became = Round(duration_s)
    numbers = itertools.count()
    with _no_collector():
        began_at, cpu_began = time.perf_counter(), time.process_time()
        async with asyncio.timeout(duration_s + GRACE_S), asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(_caller(step, numbers.__next__, began_at + duration_s, became))
    became.duration_s = time.perf_counter() - began_at
    became.generator_cpu_s = time.process_time() - cpu_began
    return became


async def _caller(step: Step, next_number: Callable[[], int], until: float, became: Round) -> None:
    errors, clock, add = 0, time.perf_counter, became.samples_s.append
    began_at = clock()
    while errors < ERRORS_MAX:
        try:
            await step(next_number())
        except FAILURES as error:
            errors += 1
            became.add_error(error)
            await asyncio.sleep(ERROR_PAUSE_S)
            began_at = clock()
        else:
            ended_at = clock()
            add(ended_at - began_at)
            began_at = ended_at
        if began_at >= until:
            return


async def at_once(steps: Sequence[Step], *, within_s: float) -> Round:
    """Run each of *steps* once, all at the same moment. A sample is the time from that moment to the step's end.

    Raises:
        TimeoutError: A step was not done *within_s*.
    """
    became = Round(0.0)

    async def one(number: int, step: Step) -> None:
        try:
            await step(number)
        except FAILURES as error:
            became.add_error(error)
        else:
            became.samples_s.append(time.perf_counter() - began_at)

    with _no_collector():
        began_at, cpu_began = time.perf_counter(), time.process_time()
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as group:
            for number, step in enumerate(steps):
                group.create_task(one(number, step))
    became.duration_s = time.perf_counter() - began_at
    became.generator_cpu_s = time.process_time() - cpu_began
    return became


@asynccontextmanager
async def connections(address: Address, count: int) -> AsyncIterator[list[Connection]]:
    """Open *count* connections, and close them on leaving."""
    opened: list[Connection] = []
    try:
        for _ in range(count):
            opened.append(await connect(address))
        yield opened
    finally:
        for connection in opened:
            connection.close()


@contextmanager
def _no_collector() -> Iterator[None]:
    """Disable this process's garbage collector during a round, so that it does not affect latencies. Cycles are few."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
