"""`Gateway` and `AsyncGateway`, their episodes and groups. `plans` has the protocol, and `http` sends its requests."""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import uuid
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, Generic, TypeVar, Unpack

from env_gateway_client.content import Split, StepResult, Tool
from env_gateway_client.errors import GatewayError, SessionNotFound, Unreachable
from env_gateway_client.http import AsyncHttp, SyncHttp
from env_gateway_client.plans import EpisodeState, Group, Options, Plans, Task, Timeouts

logger = logging.getLogger("env_gateway_client")

E = TypeVar("E", bound=EpisodeState)

PING_S: Final = 60.0
"""Seconds between pings of an episode with ``keep_alive``. Environments end sessions after 300 s without a request."""
_CLOSINGS_MAX: Final = 16
"""Episodes of a group that a blocking client ends at the same time."""


class _Group(Sequence[E], Generic[E]):
    """Episodes that were opened together, in no particular order."""

    def __init__(self, name: str, episodes: Sequence[E]) -> None:
        self.name = name
        """The name that the gateway knows the group by."""
        self._episodes = tuple(episodes)

    def __getitem__(self, index: int) -> E:  # type: ignore[override]  # no slices
        return self._episodes[index]

    def __len__(self) -> int:
        return len(self._episodes)


class Episode(EpisodeState):
    """An open episode. A context manager that closes it. Use it from one thread at a time."""

    def __init__(self, gateway: Gateway, environment: str) -> None:
        """Prepare the episode. `Gateway.open` opens it."""
        super().__init__(environment)
        self._gateway = gateway

    def step(self, tool: str, arguments: Mapping[str, Any] | None = None) -> StepResult:
        """Call *tool* once, and return its result. A failed tool is a result with ``ok`` False.

        Raises:
            EpisodeFailed: The episode is over, and has no reward.
            Unavailable: Nothing ran, and the gateway did not become available in time.
            InvalidRequest: Nothing ran, because the request is wrong.
        """
        self.check_open()
        try:
            result = self._gateway.http.run(self._gateway.plans.call(self.id, self.environment, tool, arguments or {}))
        except BaseException as error:
            self.failed(error)
            raise
        self.steps.append(result)
        return result

    call = step

    def ping(self) -> None:
        """Report that the episode is still in use, so that its idle time begins anew."""
        self._gateway.http.run(self._gateway.plans.ping(self.id))

    def close(self) -> None:
        """End the episode, and free its slot. A failure is logged, because the gateway ends idle sessions itself."""
        if not self.is_closed:
            self.is_closed = True
            try:
                self._gateway.http.run(self._gateway.plans.close(self.id))
            except GatewayError as error:
                logger.warning("episode %s was not closed, and will expire: %s", self.id, error)

    def __enter__(self) -> Episode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EpisodeGroup(_Group[Episode]):
    """The episodes of a GRPO group. A context manager that closes all."""

    def close(self) -> None:
        """End all episodes, side by side, because the end of a sandbox takes a while."""
        with ThreadPoolExecutor(max(1, min(_CLOSINGS_MAX, len(self)))) as threads:
            list(threads.map(Episode.close, self))

    def __enter__(self) -> EpisodeGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Gateway:
    """A gateway (or a standard ORS server), used from any number of threads.

    Args:
        url: Root of the gateway, such as ``http://127.0.0.1:8080``.
        key: One of its trainer keys. Empty: the gateway needs none.
        timeouts: Time limits of all waits.
        verify: TLS context, or False to accept any certificate.
        proxy: URL of a proxy. The variables ``HTTP_PROXY`` and so on are not used.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # a frozen value
        verify: ssl.SSLContext | bool = True,
        proxy: str | None = None,
    ) -> None:
        self.plans = Plans(key, timeouts)
        self.http = SyncHttp(url, timeouts, verify, proxy)
        self._kept_alive: weakref.WeakSet[Episode] = weakref.WeakSet()
        self._pinger: threading.Thread | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()

    def environments(self) -> list[str]:
        """List the names of the environments that the key may use."""
        return self.http.run(self.plans.environments())

    def splits(self, environment: str) -> list[Split]:
        """List the splits of *environment*."""
        return self.http.run(self.plans.splits(environment))

    def tools(self, environment: str) -> tuple[Tool, ...]:
        """List the tools that all tasks of *environment* have. An episode may have more."""
        return self.http.run(self.plans.tools(environment))

    def task_count(self, environment: str, split: str) -> int:
        """Count the tasks of a split."""
        return self.http.run(self.plans.task_count(environment, split))

    def tasks(self, environment: str, split: str, start: int = 0, stop: int | None = None) -> list[Task]:
        """List the tasks of a split from index *start* up to *stop*, exclusive: their public view, without answers."""
        return self.http.run(self.plans.tasks(environment, split, start, stop))

    def open(self, environment: str, *, keep_alive: bool = False, **options: Unpack[Options]) -> Episode:
        """Open an episode on a task: by *split* and *index*, or by *task* (an id, a task as an object, or a `Task`).

        Args:
            keep_alive: Ping the episode while it is open, so that the gateway does not end it during long pauses.
            options: See `Options`.

        Raises:
            NoCapacity: No slot became free in time.
            UnknownEnvironment, UnknownTask, InvalidRequest, NotAllowed, NotPermitted: The request is wrong.
            StartFailed: The environment's workers do not start.
            EpisodeFailed: The episode did not begin.
        """
        episode = Episode(self, environment)
        try:
            episode.prompt, episode.tools = self.http.run(self.plans.open(episode.id, environment, options))
        except BaseException as error:
            if not _is_refused(error):
                episode.close()
            raise
        if keep_alive:
            self._keep_alive(episode)
        return episode

    def open_group(
        self, environment: str, size: int, *, name: str = "", keep_alive: bool = False, **options: Unpack[Options]
    ) -> EpisodeGroup:
        """Open *size* episodes on one task, which begin together. If one does not open, close the others and raise.

        Args:
            name: Name of the group. Empty: a random name.
        """
        options["group"] = Group(name or f"group-{uuid.uuid4()}", size)
        episodes: list[Episode] = []
        errors: list[BaseException] = []
        abandoned = threading.Event()

        def member() -> None:
            try:
                episode = self.open(environment, keep_alive=keep_alive, **options)
            except BaseException as error:  # noqa: BLE001  # raised below
                errors.append(error)
                return
            episodes.append(episode)
            if abandoned.is_set():
                episode.close()

        threads = [threading.Thread(target=member, name=f"group-{number}", daemon=True) for number in range(size)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise errors[0]
        except BaseException:
            abandoned.set()  # for a thread that an interrupt left behind
            EpisodeGroup(options["group"][0], list(episodes)).close()
            raise
        return EpisodeGroup(options["group"][0], episodes)

    def close(self) -> None:
        """Close all connections. Close episodes before; the gateway ends the others when they are idle."""
        self._closing.set()
        if self._pinger is not None:
            self._pinger.join(timeout=1.0)
        self.http.close()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _keep_alive(self, episode: Episode) -> None:
        with self._lock:
            self._kept_alive.add(episode)
            if self._pinger is None:
                self._pinger = threading.Thread(target=self._ping_all, name="gateway-pings", daemon=True)
                self._pinger.start()

    def _ping_all(self) -> None:
        while not self._closing.wait(PING_S):
            with self._lock:
                episodes = [episode for episode in self._kept_alive if not episode.is_closed]
            for episode in episodes:
                try:
                    episode.ping()
                except SessionNotFound:  # its next step raises the reason
                    self._kept_alive.discard(episode)
                except Exception as error:  # noqa: BLE001  # the other episodes still need their pings
                    logger.warning("ping of episode %s failed: %s", episode.id, error)


class AsyncEpisode(EpisodeState):
    """An open episode of `AsyncGateway`. An async context manager that closes it."""

    def __init__(self, gateway: AsyncGateway, environment: str) -> None:
        """Prepare the episode. `AsyncGateway.open` opens it."""
        super().__init__(environment)
        self._gateway = gateway

    async def step(self, tool: str, arguments: Mapping[str, Any] | None = None) -> StepResult:
        """Call *tool* once, and return its result. See `Episode.step`."""
        self.check_open()
        plan = self._gateway.plans.call(self.id, self.environment, tool, arguments or {})
        try:
            result = await self._gateway.http.run(plan)
        except BaseException as error:
            self.failed(error)
            raise
        self.steps.append(result)
        return result

    call = step

    async def ping(self) -> None:
        """Report that the episode is still in use, so that its idle time begins anew."""
        await self._gateway.http.run(self._gateway.plans.ping(self.id))

    async def close(self) -> None:
        """End the episode, and free its slot. A cancellation does not interrupt this: it goes on in the background."""
        if not self.is_closed:
            self.is_closed = True
            await asyncio.shield(self._gateway.detached(self._close()))

    async def _close(self) -> None:
        try:
            await self._gateway.http.run(self._gateway.plans.close(self.id))
        except GatewayError as error:
            logger.warning("episode %s was not closed, and will expire: %s", self.id, error)

    async def __aenter__(self) -> AsyncEpisode:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncEpisodeGroup(_Group[AsyncEpisode]):
    """The episodes of a GRPO group. An async context manager that closes all."""

    async def close(self) -> None:
        """End all episodes."""
        await asyncio.gather(*(episode.close() for episode in self))

    async def __aenter__(self) -> AsyncEpisodeGroup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncGateway:
    """As `Gateway`, for asyncio. Use it in one event loop."""

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # a frozen value
        verify: ssl.SSLContext | bool = True,
        proxy: str | None = None,
    ) -> None:
        self.plans = Plans(key, timeouts)
        self.http = AsyncHttp(url, timeouts, verify, proxy)
        self._kept_alive: weakref.WeakSet[AsyncEpisode] = weakref.WeakSet()
        self._pinger: asyncio.Task[None] | None = None
        self._closings: set[asyncio.Task[None]] = set()

    async def environments(self) -> list[str]:
        """List the names of the environments that the key may use."""
        return await self.http.run(self.plans.environments())

    async def splits(self, environment: str) -> list[Split]:
        """List the splits of *environment*."""
        return await self.http.run(self.plans.splits(environment))

    async def tools(self, environment: str) -> tuple[Tool, ...]:
        """List the tools that all tasks of *environment* have. An episode may have more."""
        return await self.http.run(self.plans.tools(environment))

    async def task_count(self, environment: str, split: str) -> int:
        """Count the tasks of a split."""
        return await self.http.run(self.plans.task_count(environment, split))

    async def tasks(self, environment: str, split: str, start: int = 0, stop: int | None = None) -> list[Task]:
        """List the tasks of a split from index *start* up to *stop*, exclusive: their public view, without answers."""
        return await self.http.run(self.plans.tasks(environment, split, start, stop))

    async def open(self, environment: str, *, keep_alive: bool = False, **options: Unpack[Options]) -> AsyncEpisode:
        """Open an episode on a task. See `Gateway.open`."""
        episode = AsyncEpisode(self, environment)
        try:
            plan = self.plans.open(episode.id, environment, options)
            episode.prompt, episode.tools = await self.http.run(plan)
        except BaseException as error:
            if not _is_refused(error):
                await episode.close()
            raise
        if keep_alive:
            self._keep_alive(episode)
        return episode

    async def open_group(
        self, environment: str, size: int, *, name: str = "", keep_alive: bool = False, **options: Unpack[Options]
    ) -> AsyncEpisodeGroup:
        """Open *size* episodes on one task, which begin together. See `Gateway.open_group`."""
        options["group"] = group = Group(name or f"group-{uuid.uuid4()}", size)
        tasks = [asyncio.ensure_future(self.open(environment, keep_alive=keep_alive, **options)) for _ in range(size)]
        try:
            return AsyncEpisodeGroup(group.name, await asyncio.gather(*tasks))
        except BaseException:
            for task in tasks:
                task.cancel()
            found = await asyncio.gather(*tasks, return_exceptions=True)
            opened = [episode for episode in found if isinstance(episode, AsyncEpisode)]
            await AsyncEpisodeGroup(group.name, opened).close()
            raise

    async def close(self) -> None:
        """Wait for the ends of episodes that are under way, and close all connections."""
        if self._pinger is not None:
            self._pinger.cancel()
            with suppress(asyncio.CancelledError):
                await self._pinger
        if self._closings:
            await asyncio.wait(self._closings, timeout=self.plans.timeouts.close_s)
        await self.http.aclose()

    async def __aenter__(self) -> AsyncGateway:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def detached(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Return a task for the end of an episode, which `close` waits for."""
        task = asyncio.ensure_future(work)
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)
        return task

    def _keep_alive(self, episode: AsyncEpisode) -> None:
        self._kept_alive.add(episode)
        if self._pinger is None:
            self._pinger = asyncio.ensure_future(self._ping_all())

    async def _ping_all(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            for episode in [episode for episode in self._kept_alive if not episode.is_closed]:
                try:
                    await episode.ping()
                except SessionNotFound:  # its next step raises the reason
                    self._kept_alive.discard(episode)
                except Exception as error:  # noqa: BLE001  # the other episodes still need their pings
                    logger.warning("ping of episode %s failed: %s", episode.id, error)


def _is_refused(error: BaseException) -> bool:
    """Return True if the server refused the opening for certain, so that there is no session to close."""
    is_refused = isinstance(error, GatewayError) and 400 <= error.status < 500 and not error.may_have_run
    return is_refused or isinstance(error, Unreachable)
