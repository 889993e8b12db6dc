"""The directory of machines: which there are, under which address each one's process is now, and what it reports.

A node is known by its id, which is in its report; its address may be another one after its process was replaced. Of two
addresses with one id the one that began to answer later holds, as the other is about to go.

Silence is counted in turns of this process, and a turn counts for a second at most: a process that was frozen has
missed its own time, and not its nodes' answers.
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
"""How often a node is asked."""
RETRY_S: Final = 0.25
"""The same of one that does not answer: it is found as soon as it is back, and none is lost between two tries."""
ANSWER_S: Final = 3.0
"""How long it may take to answer; a report takes it some milliseconds."""
SILENT_S: Final = 3.0
"""After so long without a word a node gets no new workers, also where no try has failed yet."""
LOST_S: Final = 8.0
UNHEARD_S: Final = 45.0
"""The same of a node that this process never heard, and that has workers: where nodes' and gateways' processes are
replaced at once, its name leads to the new one only when that is healthy and the net has told of it."""
RESOLVE_S: Final = 3.0
"""How often host names are looked up: services' addresses change as their tasks are replaced."""
LOOK_S: Final = 0.25
CLOSE_S: Final = 0.5
TURN_MAX_S: Final = 1.0
FORGET_S: Final = 3600.0
"""How long operators are shown a node that is lost."""
MAX_NODES: Final = 1024
CONNECTIONS: Final = 2 * MAX_NODES


class NodeState(Enum):
    """What is thought of a node."""

    LIVE = "live"  #: it answers
    SILENT = "silent"  #: it does not, and may be back in a moment: its workers count as running
    LOST = "lost"  #: it did not for so long that its workers are given up


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node, as it is seen now."""

    id: NodeId
    state: NodeState
    report: NodeReport | None
    """The last one; None of a node that is only known by name."""
    endpoint: Endpoint | None
    silent_s: float
    """Since it was heard of last."""

    @property
    def is_live(self) -> bool:
        """Whether it answers."""
        return self.state is NodeState.LIVE

    @property
    def name(self) -> str:
        """For people."""
        return self.report.name if self.report is not None else self.id


@dataclass(slots=True, eq=False)
class _Watch:
    """An address that is asked again and again."""

    endpoint: Endpoint
    since: int = 0
    """Counts up over all addresses, each time that one begins to answer; 0: it does not."""
    was_tried: bool = False
    is_asking: bool = False
    error: str = ""
    silent_s: float = 0.0
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, eq=False)
class _Known:
    """A node, by its id."""

    id: NodeId
    report: NodeReport | None = None
    watch: _Watch | None = None
    silent_s: float = 0.0
    is_lost: bool = False


class Nodes:
    """Asks the nodes; to be used from one event loop."""

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
        """Make no connection yet.

        Args:
            hosts: Names or numbers, with the port; a name stands for all of its addresses.
            tls: With this gateway's certificate, and what nodes' are checked by.
            tls_name: The name in nodes' certificates.
            lost_s: A node that did not answer for so long is lost.
            unheard_s: The same of one that never did; no less than *lost_s*.
            every_s: How often each is asked.
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

    # -- what is known --------------------------------------------------------------------------------------------

    def views(self) -> list[NodeView]:
        """All nodes, by name."""
        return sorted(map(self._view, self._known.values()), key=lambda view: (view.name, view.id))

    def view(self, id: NodeId) -> NodeView | None:
        """The node *id*; None if it is unknown."""
        known = self._known.get(id)
        return None if known is None else self._view(known)

    def live(self) -> list[NodeReport]:
        """The reports of the nodes that answer."""
        return [view.report for view in self.views() if view.state is NodeState.LIVE and view.report is not None]

    def endpoint(self, id: NodeId) -> Endpoint | None:
        """Where the node *id* was heard of last; None if it is lost or unknown."""
        known = self._known.get(id)
        return None if known is None or known.is_lost or known.watch is None else known.watch.endpoint

    def is_expected(self, id: NodeId) -> bool:
        """Whether the node *id* answers, or may do so again."""
        known = self._known.get(id)
        return known is not None and not known.is_lost

    def problems(self) -> str:
        """Say of each address that does not answer why; for people."""
        told = [f"{host.name}: {host.error}" for host in self._hosts if host.error]
        told += [
            f"{watch.endpoint.host}:{watch.endpoint.port}: {watch.error}"
            for watch in self._watches.values()
            if watch.error
        ]
        return "; ".join(told) or "nobody was asked yet"

    def expect(self, id: NodeId) -> None:
        """Know of a node that has not been heard of, as a worker is there: it is silent, and lost after its time."""
        if id not in self._known and len(self._known) < MAX_NODES:
            self._known[id] = _Known(id)

    def changed(self, listener: Callable[[NodeView], None]) -> None:
        """Call *listener* when a node comes, is lost, or is somewhere else."""
        self._listeners.append(listener)

    def corrected(self, id: NodeId, **changes: Any) -> None:
        """Change the last report of the node *id*, by what was done there just now; its next one says the same."""
        known = self._known.get(id)
        if known is not None and known.report is not None:
            known.report = replace(known.report, **changes)

    # -- running --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to ask, if that was not begun."""
        if self._client is None and not self._is_closed:
            limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
            self._client = httpx.AsyncClient(verify=self.tls, limits=limits, trust_env=False, timeout=ANSWER_S)
            self._spawn(self._resolve_for_ever())
            self._spawn(self._look_for_ever())

    async def settled(self) -> None:
        """Begin, and return when every address was asked once; or when one that is silent would be lost."""
        self.begin()
        if self._is_closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.lost_s + ANSWER_S):
                await self._is_settled.wait()

    async def first(self) -> None:
        """Begin, and return when a node has answered; in any case after the time after which nodes are lost."""
        await self.settled()
        if self._is_closed:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.lost_s):
                await self._is_heard.wait()

    async def decided(self) -> None:
        """Return when no node is silent: each answers, or is lost."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._unheard_s + ANSWER_S
        while loop.time() < deadline and not self._is_closed:
            if all(view.state is not NodeState.SILENT for view in self.views()):
                return
            await asyncio.sleep(min(LOOK_S, self._every_s))

    async def aclose(self) -> None:
        """Ask no more. Questions under way may end first, briefly: one broken off in its handshake leaves a socket."""
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
        silence_s: float = ANSWER_S,
    ) -> AsyncIterator[httpx.Response]:
        """Ask the node *id*; the body of its answer is still to be read.

        Raises:
            BackendError: it does not answer, is unknown, or refuses, with its reason.
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
                # One that answers still is asked on: a name service that stumbles takes no machine away.
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
            except Exception:  # protects this node: nobody would ask it again
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
            return  # what it was before, about to go
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
