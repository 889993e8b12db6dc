"""What workers tell of their environment: its tools, the tasks that it has or knows, and itself in its own words.

Asked once of a worker of each make. Where there is none, the asking takes a slot, so that one is started in the usual
way. A server that somebody else runs may change at any time: it is asked again after a while.

Tasks of foreign images, kept page by page: as many as fit, the oldest dropped first.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from gateway.core.environment import Environment, Split, TaskSpec, UpstreamKind
from gateway.core.errors import (
    UpstreamGone,
    UpstreamTimeout,
    unknown_split,
)
from gateway.core.ids import EnvironmentName, Owner
from gateway.core.ports.store import Store
from gateway.core.ports.tasks import BeingReplaced
from gateway.core.ports.upstream import WorkerUpstream
from gateway.core.session import CloseReason, SessionRequest
from gateway.core.worker import Worker, WorkerState, WorkerTasks
from gateway.sessions.cache import session_id
from gateway.sessions.closing import CLEANUP_S, SessionCloser
from gateway.sessions.interruption import AdmissionGate

T = TypeVar("T")
ASKED_S: Final = 60.0
"""How long the slot is held at most that a worker is asked in."""
FRESH_S: Final = 60.0
"""How long an answer of a server that somebody else runs holds."""
PAGE: Final = 64
"""Tasks in a page: some servers make all tasks anew for each one that they hand out."""
PAGES_MAX: Final = 256
BYTES_MAX: Final = 64 * 2**20
"""Of one environment's pages, as compact JSON."""
Page = tuple[bytes, ...]
"""Tasks as compact JSON: a tenth of what they are as objects."""


class TaskPages:
    """The pages of one environment's splits."""

    def __init__(self, *, pages_max: int = PAGES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._pages_max = pages_max
        self._bytes_max = bytes_max
        self._pages: OrderedDict[tuple[str, int], Page] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._pages)

    @property
    def size_bytes(self) -> int:
        """What is kept."""
        return self._bytes

    def look_up(self, split: str, start: int, stop: int) -> tuple[dict[int, Page], list[int]]:
        """The pages that hold tasks from *start* up to, not including, *stop*, by number; and the missing ones.

        No page after the last one is missing: a page that is not full is the last.
        """
        found: dict[int, Page] = {}
        missing: list[int] = []
        for number in range(start // PAGE, -(-stop // PAGE) if stop > start else 0):
            page = self._pages.get((split, number))
            if page is None:
                missing.append(number)
                continue
            self._pages.move_to_end((split, number))
            found[number] = page
            if len(page) < PAGE:
                break
        return found, missing

    def keep(self, split: str, number: int, tasks: Sequence[TaskSpec]) -> Page:
        """Keep a page, dropping the oldest ones beyond the bounds; returns it, kept or not."""
        page = tuple(json.dumps(task, separators=(",", ":")).encode() for task in tasks[:PAGE])
        size = sum(map(len, page))
        self._drop((split, number))
        if size > self._bytes_max:
            return page
        self._pages[split, number] = page
        self._bytes += size
        while len(self._pages) > self._pages_max or self._bytes > self._bytes_max:
            self._drop(next(iter(self._pages)))
        return page

    @staticmethod
    def cut(pages: Mapping[int, Page], start: int, stop: int) -> list[TaskSpec]:
        """The tasks from *start* up to, not including, *stop* that *pages* hold."""
        return [
            json.loads(page[index - number * PAGE])
            for number, page in sorted(pages.items())
            for index in range(max(start, number * PAGE), min(stop, number * PAGE + len(page)))
        ]

    def _drop(self, key: tuple[str, int]) -> None:
        self._bytes -= sum(map(len, self._pages.pop(key, ())))


Question = Callable[[Worker, Environment], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class _Answer(Generic[T]):
    digest: str
    at: float
    told: T

    def holds(self, environment: Environment, digest: str, now: float) -> bool:
        """Whether it is still what a worker would say."""
        return self.digest == digest and not (environment.server.url and now - self.at > FRESH_S)


class _Known(Generic[T]):
    """The answers to one question, by environment; only that of its present make is kept."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.answers: dict[EnvironmentName, _Answer[T]] = {}
        self.asking: dict[EnvironmentName, asyncio.Lock] = {}

    def get(self, environment: Environment, digest: str) -> _Answer[T] | None:
        """The answer that holds; None if there is none."""
        answer = self.answers.get(environment.name)
        return answer if answer is not None and answer.holds(environment, digest, self._clock()) else None

    def keep(self, environment: Environment, digest: str, told: T) -> _Answer[T]:
        """Keep an answer, from now on."""
        answer = self.answers[environment.name] = _Answer(digest, self._clock(), told)
        return answer

    def lock(self, environment: Environment) -> asyncio.Lock:
        """Who holds it asks; the others wait for what it is told."""
        return self.asking.setdefault(environment.name, asyncio.Lock())


@dataclass(frozen=True, slots=True)
class _Pages:
    """What is known of an environment's own tasks."""

    counts: dict[str, int] = field(default_factory=dict)
    """By split; only those that were asked for."""
    pages: TaskPages = field(default_factory=TaskPages)


class WorkerQueries:
    """Asks workers, and remembers what they said."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[UpstreamKind, WorkerUpstream],
        closer: SessionCloser,
        waiting: AdmissionGate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*waiting*: who waits for a slot here."""
        self._store = store
        self._upstreams = upstreams
        self._closer = closer
        self._waiting = waiting
        # The state: what was answered, which holds for as long as workers are made from the same.
        self._tools: _Known[bytes] = _Known(clock)
        self._registered: _Known[WorkerTasks] = _Known(clock)
        self._about: _Known[Mapping[str, Any]] = _Known(clock)
        self._splits: _Known[list[Split]] = _Known(clock)
        self._tasks: _Known[_Pages] = _Known(clock)

    # -- the environment ------------------------------------------------------------------------------------------

    async def tools(self, environment: Environment) -> bytes:
        """The tools of *environment* as ORS' ``ListToolsOutput``. Raises as ``Store.claim`` and ``Upstream.tools``."""
        return await self._once(self._tools, environment, self._upstreams[environment.wire].tools)

    async def registered(self, environment: Environment) -> WorkerTasks:
        """The tasks that its workers know by themselves. Raises as ``Store.claim`` and ``Upstream.registered``."""
        return await self._once(self._registered, environment, self._upstreams[environment.wire].registered)

    async def about(self, environment: Environment) -> Mapping[str, Any]:
        """What its workers tell of themselves. Raises as ``Store.claim`` and ``Upstream.about``."""
        return await self._once(self._about, environment, self._upstreams[environment.wire].about)

    # -- its tasks ------------------------------------------------------------------------------------------------

    async def splits(self, environment: Environment) -> list[Split]:
        """The splits of tasks that its workers have. Raises as ``Store.claim`` and ``Upstream.splits``."""
        return await self._once(self._splits, environment, self._upstreams[environment.wire].splits)

    async def count(self, environment: Environment, split: str) -> int:
        """How many tasks a split of theirs has.

        Raises:
            UnknownSplit: they have none of this name; nobody is asked for it.
            GatewayError: as ``Store.claim`` and ``Upstream.count``.
        """
        await self._require(environment, split)
        digest = environment.digest()
        async with self._tasks.lock(environment):
            known = self._pages(environment, digest)
            if split not in known.counts:
                ask = self._upstreams[environment.wire].count

                async def count(worker: Worker, environment: Environment) -> int:
                    return await ask(worker, environment, split)

                known.counts[split] = await self._ask(environment, digest, count)
            return known.counts[split]

    async def tasks(self, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        """Tasks from index *start* up to, not including, *stop*; those beyond the end are left out.

        Raises:
            UnknownSplit: they have none of this name; nobody is asked for it.
            GatewayError: as ``Store.claim`` and ``Upstream.tasks``.
        """
        await self._require(environment, split)
        digest = environment.digest()
        async with self._tasks.lock(environment):
            pages = self._pages(environment, digest).pages
            found, missing = pages.look_up(split, start, stop)
            if missing:
                ask = self._upstreams[environment.wire].tasks

                async def fetch(worker: Worker, environment: Environment) -> None:
                    for number in missing:  # all that is missing from one worker: it may be there for this only
                        first = number * PAGE
                        found[number] = pages.keep(
                            split, number, await ask(worker, environment, split, first, first + PAGE)
                        )
                        if len(found[number]) < PAGE:
                            return  # the end

                await self._ask(environment, digest, fetch)
        return pages.cut(found, start, stop)

    async def _require(self, environment: Environment, split: str) -> None:
        names = [one.name for one in await self.splits(environment)]
        if split not in names:
            raise unknown_split(split, names)

    def _pages(self, environment: Environment, digest: str) -> _Pages:
        answer = self._tasks.get(environment, digest)
        if answer is None:
            answer = self._tasks.keep(environment, digest, _Pages())
        return answer.told

    # -- asking ---------------------------------------------------------------------------------------------------

    async def _once(self, known: _Known[T], environment: Environment, ask: Question[T]) -> T:
        digest = environment.digest()

        async def learn(worker: Worker, environment: Environment) -> _Answer[T]:
            return known.keep(environment, digest, await ask(worker, environment))

        async with known.lock(environment):
            answer = known.get(environment, digest)
            if answer is None:
                answer = await self._ask(environment, digest, learn)
            return answer.told

    async def _ask(self, environment: Environment, digest: str, ask: Question[T]) -> T:
        load = (await self._store.load()).get(environment.name)
        for entry in load.workers if load is not None else ():
            state, address = entry.worker.state, entry.worker.address  # without one it was given up as it started
            if entry.worker.digest == digest and address and state in (WorkerState.READY, WorkerState.DRAINING):
                try:
                    # Whatever it holds: a question takes no slot.
                    return await _within(ask(entry.worker, environment))
                except UpstreamGone:
                    continue  # it is just going, and another one may be there
        return await self._ask_new(environment, digest, ask)

    async def _ask_new(self, environment: Environment, digest: str, ask: Question[T]) -> T:
        name = f"inquiry-{uuid.uuid4().hex}"
        opening = SessionRequest(
            id=session_id(Owner(""), name),
            name=name,
            owner=Owner(""),
            environment=environment.name,
            lease=uuid.uuid4().hex,
            fingerprint=name,
            idle_s=ASKED_S,
            setup_s=ASKED_S + CLEANUP_S,
            task="(inquiry)",
            is_use=False,
        )
        with self._waiting.here():
            session = await self._store.claim(opening, wait_s=environment.timeouts.open_s)
        try:
            worker = await self._store.worker(session.worker)
            if worker is None or worker.digest != digest:  # it is about to be drained
                raise BeingReplaced(f"the workers of {environment.name} are just being replaced")
            return await _within(ask(worker, environment))
        finally:
            await self._closer.give_back(session, environment, CloseReason.DELETED, counted=False)


async def _within(answer: Awaitable[T]) -> T:
    """Wait for *answer*, which touches a worker and never the store."""
    try:
        async with asyncio.timeout(ASKED_S):
            return await answer
    except TimeoutError:
        raise UpstreamTimeout(f"the worker did not answer within {ASKED_S:g} s") from None
