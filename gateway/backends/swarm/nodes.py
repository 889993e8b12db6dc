"""Keep the directory of nodes: each node's current address, its last report and its state.

A node is identified by the id in its report. Its address may change when its process is replaced. If two addresses
report the same id, the address that started to answer later is used: the other process is about to end.

A node's silence is counted in turns of this process' loop, at most one second per turn. So a process that was frozen
does not count the time of its own pause as its nodes' silence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import httpx

from gateway.backends.swarm.reports import MAX_REPORT_BYTES, Endpoint, Host, read_report
from gateway.core.errors import BackendError
from gateway.core.placement import NodeId, NodeReport

logger = logging.getLogger(__name__)

EVERY_S: Final = 1.0
"""Seconds between two requests for a node's report."""
RETRY_S: Final = 0.25
"""Seconds between two requests to a node that does not answer, so that its return is noticed before it is lost."""
ANSWER_S: Final = 3.0
"""Seconds that a node has to answer. A report takes some milliseconds."""
SILENT_S: Final = 3.0
"""Seconds without an answer after which a node gets no new workers, even if no request has failed yet."""
LOST_S: Final = 8.0
UNHEARD_S: Final = 45.0
"""Seconds after which a node that has workers, and never answered this process, is lost. Nodes and gateways may be
replaced together. A node's name then leads to its new process only after that is healthy and registered."""
RESOLVE_S: Final = 3.0
"""Seconds between two lookups of host names: a service's addresses change when its tasks are replaced."""
LOOK_S: Final = 0.25
CLOSE_S: Final = 0.5
TURN_MAX_S: Final = 1.0
FORGET_S: Final = 3600.0
"""Seconds of silence during which operators still see a lost node."""
MAX_NODES: Final = 1024
CONNECTIONS: Final = 2 * MAX_NODES


class NodeState(Enum):
    """A node's state, as this replica sees it."""

    LIVE = "live"  #: answers
    SILENT = "silent"  #: does not answer, but may come back: its workers count as running
    LOST = "lost"  #: has been silent for so long that its workers count as dead


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A snapshot of a node."""

    id: NodeId
    state: NodeState
    report: NodeReport | None
    """The node's last report; None if the node has never answered."""
    endpoint: Endpoint | None
    silent_s: float
    """Seconds since the node's last report."""

    @property
    def is_live(self) -> bool:
        """Whether the node answers."""
        return self.state is NodeState.LIVE

    @property
    def name(self) -> str:
        """The node's name for people; its id before the first report."""
        return self.report.name if self.report is not None else self.id


@dataclass(slots=True, eq=False)
class _Watch:
    """An address that is polled."""

    endpoint: Endpoint
    since: int = 0
    """Rank of the address by the time when it started to answer, over all addresses; 0 if it does not answer."""
    was_tried: bool = False
    is_asking: bool = False
    error: str = ""
    silent_s: float = 0.0
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Known:
    """A known node."""

    id: NodeId
    report: NodeReport | None = None
    watch: _Watch | None = None
    silent_s: float = 0.0
    is_lost: bool = False


class Nodes:
    """Polls the nodes' reports, in one event loop."""

    def __init__(
        self,
        hosts: Sequence[tuple[str, int]],
        *,
        tls: ssl.SSLContext,
        tls_name: str,
        lost_s: float = LOST_S,
        unheard_s: float = UNHEARD_S,
        every_s: float = EVERY_S,
    ) -> None:
        """Create the directory without connecting to nodes.

        Args:
            hosts: Names or IP addresses, with the port. A name means all of its addresses.
            tls: TLS context with this gateway's certificate, and the authority of nodes' certificates.
            tls_name: The name in nodes' certificates.
            lost_s: Seconds without an answer after which a node is lost.
            unheard_s: Seconds after which a node that never answered is lost; raised to *lost_s* if less.
            every_s: Seconds between two requests for a node's report.
        """
        self.tls = tls
        self.tls_name = tls_name
        self.lost_s = lost_s
        self._unheard_s = max(lost_s, unheard_s)
        self._every_s = every_s
        self._hosts = [Host(name, port) for name, port in hosts]
        self._watches: dict[Endpoint, _Watch] = {}
        self._known: dict[NodeId, _Known] = {}
        self._answered = 0
        self._listeners: list[Callable[[NodeView], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_settled = asyncio.Event()
        self._is_heard = asyncio.Event()
        self._client: httpx.AsyncClient | None = None
        self._is_closed = False

    # -- state ----------------------------------------------------------------------------------------------------

    def views(self) -> list[NodeView]:
        """Return all nodes, sorted by name."""
        return sorted(map(self._view, self._known.values()), key=lambda view: (view.name, view.id))

    def view(self, id: NodeId) -> NodeView | None:
        """Return node *id*; None if it is unknown."""
        known = self._known.get(id)
        return None if known is None else self._view(known)

    def live(self) -> list[NodeReport]:
        """Return the last reports of the nodes that answer."""
        return [view.report for view in self.views() if view.state is NodeState.LIVE and view.report is not None]

    def endpoint(self, id: NodeId) -> Endpoint | None:
        """Return the address of node *id*'s last report; None if the node is lost or unknown, or has never answered."""
        known = self._known.get(id)
        return None if known is None or known.is_lost or known.watch is None else known.watch.endpoint

    def is_expected(self, id: NodeId) -> bool:
        """Return True if node *id* is known and not lost, so that it answers or may answer again."""
        known = self._known.get(id)
        return known is not None and not known.is_lost

    def problems(self) -> str:
        """Describe, for people, why each silent address does not answer."""
        told = [f"{host.name}: {host.error}" for host in self._hosts if host.error]
        told += [
            f"{watch.endpoint.host}:{watch.endpoint.port}: {watch.error}"
            for watch in self._watches.values()
            if watch.error
        ]
        return "; ".join(told) or "no node was asked yet"

    def expect(self, id: NodeId) -> None:
        """Add node *id*, which has a worker and has not answered yet; it is silent, and lost after ``unheard_s``."""
        if id not in self._known and len(self._known) < MAX_NODES:
            self._known[id] = _Known(id)

    def changed(self, listener: Callable[[NodeView], None]) -> None:
        """Call *listener* when a node is found, moves to another address, or is lost."""
        self._listeners.append(listener)

    def corrected(self, id: NodeId, **changes: Any) -> None:
        """Update fields of node *id*'s last report after a change on the node; the next report contains the same."""
        known = self._known.get(id)
        if known is not None and known.report is not None:
            known.report = replace(known.report, **changes)

    # -- running --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start to poll the nodes, unless polling has started."""
        if self._client is None and not self._is_closed:
            limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
            self._client = httpx.AsyncClient(verify=self.tls, limits=limits, trust_env=False, timeout=ANSWER_S)
            self._spawn(self._resolve_for_ever())
            self._spawn(self._look_for_ever())

    async def settled(self) -> None:
        """Start to poll, and wait until every address was polled once, at most until a silent node would be lost."""
        self.begin()
        if self._is_closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.lost_s + ANSWER_S):
                await self._is_settled.wait()

    async def first(self) -> None:
        """Start to poll, and wait until a node has answered, at most ``lost_s`` seconds after `settled`."""
        await self.settled()
        if self._is_closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.lost_s):
                await self._is_heard.wait()

    async def decided(self) -> None:
        """Wait until no node is silent: each answers or is lost."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._unheard_s + ANSWER_S
        while loop.time() < deadline and not self._is_closed:
            if all(view.state is not NodeState.SILENT for view in self.views()):
                return
            await asyncio.sleep(min(LOOK_S, self._every_s))

    async def aclose(self) -> None:
        """Stop polling. Running requests get `CLOSE_S` to end: a request cancelled in its handshake leaks a socket."""
        self._is_closed = True
        asking = {watch.task for watch in self._watches.values() if watch.is_asking and watch.task is not None}
        for task in self._tasks - asking:
            task.cancel()
        if asking:
            await asyncio.wait(asking, timeout=CLOSE_S)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=ANSWER_S)
        if self._client is not None:
            await self._client.aclose()

    # -- requests -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def request(
        self,
        id: NodeId,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        content: bytes | AsyncIterator[bytes] | None = None,
        headers: Mapping[str, str] | None = None,
        silence_s: float = ANSWER_S,
    ) -> AsyncIterator[httpx.Response]:
        """Send a request to node *id* and yield the response with its body unread.

        Raises:
            BackendError: The node is unknown or lost, does not answer, or refuses; the error contains its reason.
        """
        endpoint = self.endpoint(id)
        view = self.view(id)
        name = view.name if view is not None else id
        if endpoint is None or self._client is None:
            raise BackendError(f"node {name} is not there")
        timeout = httpx.Timeout(silence_s, connect=ANSWER_S)
        try:
            async with self._client.stream(
                method,
                endpoint.url(path),
                params=params,
                content=content,
                headers=headers,
                timeout=timeout,
                extensions={"sni_hostname": self.tls_name},
            ) as response:
                if response.status_code >= 300:
                    await response.aread()
                    raise BackendError(f"node {name} answers {response.status_code}: {response.text[:500]}")
                yield response
        except httpx.HTTPError as error:
            raise BackendError(f"node {name} does not answer: {error!r}") from error

    async def _asked(self, endpoint: Endpoint) -> NodeReport:
        assert self._client is not None
        body = bytearray()
        async with (
            asyncio.timeout(ANSWER_S),
            self._client.stream(
                "GET", endpoint.url("/env-gateway/node"), extensions={"sni_hostname": self.tls_name}
            ) as response,
        ):
            if response.status_code != 200:
                raise ValueError(f"answers {response.status_code}")
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > MAX_REPORT_BYTES:
                    raise ValueError(f"its report has more than {MAX_REPORT_BYTES} bytes")
        return read_report(bytes(body))

    # -- loops ----------------------------------------------------------------------------------------------------

    async def _resolve_for_ever(self) -> None:
        while True:
            await asyncio.gather(*(host.resolve() for host in self._hosts))
            wanted = frozenset[Endpoint]().union(*(host.endpoints for host in self._hosts))
            for endpoint in sorted(wanted - self._watches.keys()):
                if len(self._watches) >= MAX_NODES:
                    logger.error("nodes_too_many most=%s", MAX_NODES)
                    break
                watch = self._watches[endpoint] = _Watch(endpoint)
                watch.task = self._spawn(self._watch(watch))
            for endpoint in self._watches.keys() - wanted:
                # An address that still answers is kept: a failing name service must not remove a node.
                watch = self._watches[endpoint]
                if not watch.since and watch.silent_s >= self.lost_s and watch.task is not None:
                    watch.task.cancel()
                    del self._watches[endpoint]
            await asyncio.sleep(RESOLVE_S)

    async def _watch(self, watch: _Watch) -> None:
        loop = asyncio.get_running_loop()
        while True:
            began_at, watch.is_asking = loop.time(), True
            try:
                report = await self._asked(watch.endpoint)
            except (httpx.HTTPError, ValueError, OSError) as error:
                watch.error = str(error) or repr(error)
                watch.since = 0
            except Exception:  # otherwise this address would never be polled again
                logger.exception("node_watch_failed address=%s:%s", *watch.endpoint)
                watch.since = 0
            else:
                if not watch.since:
                    self._answered += 1
                    watch.since = self._answered
                watch.error, watch.silent_s = "", 0.0
                self._heard(watch, report)
            watch.was_tried, watch.is_asking = True, False
            if self._is_closed:
                return
            pause_s = self._every_s if watch.since else min(RETRY_S, self._every_s)
            await asyncio.sleep(max(0.1 * pause_s, began_at + pause_s - loop.time()))

    def _heard(self, watch: _Watch, report: NodeReport) -> None:
        known = self._known.get(report.id)
        if known is None:
            if len(self._known) >= MAX_NODES:
                logger.error("nodes_too_many most=%s", MAX_NODES)
                return
            known = self._known[report.id] = _Known(report.id)
        if known.watch is not None and known.watch.since > watch.since:
            return  # the node's previous process, which is about to end
        self._is_heard.set()
        is_news = known.watch is not watch or known.is_lost
        known.report, known.watch, known.silent_s, known.is_lost = report, watch, 0.0, False
        if is_news:
            logger.info("node_found node=%s name=%s address=%s:%s", report.id, report.name, *watch.endpoint)
            self._tell(known)

    async def _look_for_ever(self) -> None:
        loop = asyncio.get_running_loop()
        looked_at = loop.time()
        while True:
            await asyncio.sleep(min(LOOK_S, self._every_s))
            now = loop.time()
            turn_s, looked_at = min(now - looked_at, TURN_MAX_S), now
            for watch in self._watches.values():
                watch.silent_s += turn_s
            for known in list(self._known.values()):
                self._look(known, turn_s)
            if all(host.was_resolved for host in self._hosts) and self._are_tried():
                self._is_settled.set()

    def _look(self, known: _Known, turn_s: float) -> None:
        known.silent_s += turn_s
        limit_s = self._unheard_s if known.report is None else self.lost_s
        if not known.is_lost and known.silent_s >= limit_s:
            known.is_lost = True
            view = self._view(known)
            logger.error("node_lost node=%s name=%s silent_s=%.1f", known.id, view.name, known.silent_s)
            self._tell(known)
        elif known.is_lost and known.silent_s >= FORGET_S:
            del self._known[known.id]

    def _are_tried(self) -> bool:
        wanted = frozenset[Endpoint]().union(*(host.endpoints for host in self._hosts))
        return wanted <= self._watches.keys() and all(watch.was_tried for watch in self._watches.values())

    def _view(self, known: _Known) -> NodeView:
        state = NodeState.LIVE
        if known.is_lost:
            state = NodeState.LOST
        elif known.watch is None or not known.watch.since or known.silent_s >= max(SILENT_S, 2 * self._every_s):
            state = NodeState.SILENT
        endpoint = known.watch.endpoint if known.watch is not None else None
        return NodeView(
            id=known.id, state=state, report=known.report, endpoint=endpoint, silent_s=round(known.silent_s, 3)
        )

    def _tell(self, known: _Known) -> None:
        for listener in self._listeners:
            listener(self._view(known))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
