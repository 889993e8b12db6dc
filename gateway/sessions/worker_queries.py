"""Queries workers for their environment's tools, tasks and description, and caches the answers.

The gateway queries one worker of each revision once. Without a running worker, the query claims a slot, so that the
control loop starts a worker as usual. An external server may change at any time, so its answers expire.

Tasks of third-party images are cached in pages. The least recently used pages are dropped first.
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
"""Maximum seconds for one query, and for which its slot is held."""
FRESH_S: Final = 60.0
"""Seconds for which an answer of an external server is valid."""
PAGE: Final = 64
"""Number of tasks in a page. Some servers generate all tasks again for each task that they return."""
PAGES_MAX: Final = 256
BYTES_MAX: Final = 64 * 2**20
"""Maximum bytes of one environment's pages, as compact JSON."""
Page = tuple[bytes, ...]
"""Tasks as compact JSON, which takes a tenth of the memory of Python objects."""


class TaskPages:
    """A bounded cache of pages of one environment's tasks, by split."""

    def __init__(self, *, pages_max: int = PAGES_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._pages_max = pages_max
        self._bytes_max = bytes_max
        self._pages: OrderedDict[tuple[str, int], Page] = OrderedDict()
        self._bytes = 0

    def look_up(self, split: str, start: int, stop: int) -> tuple[dict[int, Page], list[int]]:
        """Return the cached pages of tasks from *start* up to, not including, *stop*, and the missing pages' numbers.

        A page that is not full is the split's last page: numbers after it do not count as missing.
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
        """Cache a page and drop the least recently used pages beyond the bounds. Return the page, cached or not."""
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
        """Return the tasks of *pages* with an index from *start* up to, not including, *stop*."""
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
        """Return True if the answer is of the current revision and, for an external server, fresh."""
        return self.digest == digest and not (environment.server.url and now - self.at > FRESH_S)


class _Known(Generic[T]):
    """The cached answers to one query, by environment. Only the answer of the current revision is kept."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.answers: dict[EnvironmentName, _Answer[T]] = {}
        self.asking: dict[EnvironmentName, asyncio.Lock] = {}

    def get(self, environment: Environment, digest: str) -> _Answer[T] | None:
        """Return the valid answer, or None without one."""
        answer = self.answers.get(environment.name)
        return answer if answer is not None and answer.holds(environment, digest, self._clock()) else None

    def keep(self, environment: Environment, digest: str, told: T) -> _Answer[T]:
        """Cache an answer, valid from now on."""
        answer = self.answers[environment.name] = _Answer(digest, self._clock(), told)
        return answer

    def lock(self, environment: Environment) -> asyncio.Lock:
        """Return the lock of *environment*. Its holder sends the query; other callers wait for the answer."""
        return self.asking.setdefault(environment.name, asyncio.Lock())


@dataclass(frozen=True, slots=True)
class _Pages:
    """The cached counts and pages of the tasks that an environment's workers have."""

    counts: dict[str, int] = field(default_factory=dict)
    """Number of tasks by split, only for splits that were requested."""
    pages: TaskPages = field(default_factory=TaskPages)


class WorkerQueries:
    """Queries workers and caches their answers."""

    def __init__(
        self,
        *,
        store: Store,
        upstreams: Mapping[UpstreamKind, WorkerUpstream],
        closer: SessionCloser,
        waiting: AdmissionGate,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """*waiting*: refuses queries that wait for a slot when this process ends."""
        self._store = store
        self._upstreams = upstreams
        self._closer = closer
        self._waiting = waiting
        # The state: the answers, which are valid for one revision of the environment.
        self._tools: _Known[bytes] = _Known(clock)
        self._registered: _Known[WorkerTasks] = _Known(clock)
        self._about: _Known[Mapping[str, Any]] = _Known(clock)
        self._splits: _Known[list[Split]] = _Known(clock)
        self._tasks: _Known[_Pages] = _Known(clock)

    # -- the environment ------------------------------------------------------------------------------------------

    async def tools(self, environment: Environment) -> bytes:
        """Return the tools as ORS' ``ListToolsOutput``. Raises the errors of ``Store.claim`` and ``Upstream.tools``."""
        return await self._once(self._tools, environment, self._upstreams[environment.wire].tools)

    async def registered(self, environment: Environment) -> WorkerTasks:
        """Return the tasks that the workers provide by id.

        Raises the errors of ``Store.claim`` and ``Upstream.registered``.
        """
        return await self._once(self._registered, environment, self._upstreams[environment.wire].registered)

    async def about(self, environment: Environment) -> Mapping[str, Any]:
        """Return the workers' self-description. Raises the errors of ``Store.claim`` and ``Upstream.about``."""
        return await self._once(self._about, environment, self._upstreams[environment.wire].about)

    # -- its tasks ------------------------------------------------------------------------------------------------

    async def splits(self, environment: Environment) -> list[Split]:
        """Return the workers' splits of tasks. Raises the errors of ``Store.claim`` and ``Upstream.splits``."""
        return await self._once(self._splits, environment, self._upstreams[environment.wire].splits)

    async def count(self, environment: Environment, split: str) -> int:
        """Return the number of tasks in a split of the workers.

        Raises:
            UnknownSplit: The workers have no split of this name. No worker is queried for its count.
            GatewayError: See ``Store.claim`` and ``Upstream.count``.
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
        """Return the tasks from index *start* up to, not including, *stop*, cut at the end of the split.

        Raises:
            UnknownSplit: The workers have no split of this name. No worker is queried for its tasks.
            GatewayError: See ``Store.claim`` and ``Upstream.tasks``.
        """
        await self._require(environment, split)
        digest = environment.digest()
        async with self._tasks.lock(environment):
            pages = self._pages(environment, digest).pages
            found, missing = pages.look_up(split, start, stop)
            if missing:
                ask = self._upstreams[environment.wire].tasks

                async def fetch(worker: Worker, environment: Environment) -> None:
                    for number in missing:  # all pages from one worker, which may run for this query only
                        first = number * PAGE
                        found[number] = pages.keep(
                            split, number, await ask(worker, environment, split, first, first + PAGE)
                        )
                        if len(found[number]) < PAGE:
                            return  # the split's last page

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

    # -- queries --------------------------------------------------------------------------------------------------

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
            state, address = entry.worker.state, entry.worker.address  # no address: its start was cancelled
            if entry.worker.digest == digest and address and state in (WorkerState.READY, WorkerState.DRAINING):
                try:
                    # Even a full worker: a query to a running worker takes no slot.
                    return await _within(ask(entry.worker, environment))
                except UpstreamGone:
                    continue  # this worker is ending, but another may run
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
            if worker is None or worker.digest != digest:  # gone, or outdated and about to be drained
                raise BeingReplaced(f"the workers of {environment.name} are being replaced")
            return await _within(ask(worker, environment))
        finally:
            await self._closer.give_back(session, environment, CloseReason.DELETED, counted=False)


async def _within(answer: Awaitable[T]) -> T:
    """Wait at most `ASKED_S` for *answer*, which uses a worker and never the store."""
    try:
        async with asyncio.timeout(ASKED_S):
            return await answer
    except TimeoutError:
        raise UpstreamTimeout(f"the worker did not answer within {ASKED_S:g} s") from None
