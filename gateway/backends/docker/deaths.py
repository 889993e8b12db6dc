"""Announce the deaths of an engine's workers with their reasons, from the first reader's call on.

The engine's events usually contain the reason. If not, the watcher waits for a late event and requests the container's
state. It waits briefly, because trainers wait for the announcement, and a reported reason can't be changed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from docker import APIClient
from docker.types import CancellableStream

from gateway.backends.docker import calls
from gateway.backends.docker.container import LABEL_WORKER
from gateway.backends.docker.engine import LOOK_S, Engine, EngineError, connect, open_stream, translated
from gateway.core.broadcast import Broadcast
from gateway.core.ids import WorkerId
from gateway.core.session import CloseReason
from gateway.core.worker import Death

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_THREADS: Final = 8
"""Number of threads that query why a container ended. Each query waits until the engine has cleaned up its container.
So queries must not wait for the threads that start containers, nor for other queries."""
REASON_S: Final = 1.0
"""Seconds for which a death's announcement may wait for the reason. A query of the state takes 15 to 35 ms, so trainers
learn of a worker's death within 150 ms. If twenty workers die together on a loaded machine, it takes 120 to 240 ms, and
more if many engines share few processors. A wrong reason can't be corrected. Interrupted calls wait longer for the
reason (`failure_reasons`)."""
LATE_S: Final = 0.02
"""Seconds to wait for an ``oom`` event after a state without it: the engine handles the event right after the death."""
SILENCE_S: Final = 2.0
"""Seconds of silence after which a query of the state times out. The query's result is not needed any more then, but
its thread may be."""
CLOSE_S: Final = 10.0
"""Seconds that ``aclose`` waits for the events thread."""
PAUSE_S = 0.5
"""Seconds between two attempts to follow an engine that does not answer."""
EVENTS_SILENCE_S = 30.0
"""Seconds of silence after which the event stream is requested again, which costs the engine some milliseconds."""
REMEMBERED = 1024
"""Maximum number of remembered deaths, and of remembered workers in which a process ran out of memory. An engine ends
at most a few dozen containers per second."""
OOM_S = 5.0
"""Seconds within which a container's end counts as caused by an ``oom`` event. The measured delay is 0.04 s, and more
on a loaded machine or if a supervisor notices it first. A later end has another cause: many workers survive it."""
KILLED = 137
"""Exit status after SIGKILL, the signal that the kernel sends when memory runs out."""
DEAD = ["exited", "dead"]


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """An ended container of a worker."""

    id: WorkerId
    container: str
    exit_status: int
    out_of_memory: bool | None
    """Whether it ran out of memory; None while the events do not show it. A late ``oom`` event may show it, or
    `State.OOMKilled` of the container's state, which has no time."""


class DeathWatcher:
    """Announces the deaths of one gateway's workers on one engine."""

    def __init__(
        self,
        url: str,
        labels: Sequence[str],
        *,
        reason_s: float = REASON_S,
        late_s: float = LATE_S,
        silence_s: float = EVENTS_SILENCE_S,
    ) -> None:
        """Create the watcher without connecting to the engine.

        Args:
            url: The engine's socket.
            labels: The workers' labels, ``name=value``.
            reason_s: Seconds for which a death's announcement may wait for the reason.
            late_s: Seconds, within *reason_s*, to wait for an ``oom`` event after a state without it.
            silence_s: Seconds of silence after which the events are requested again.
        """
        self._url = url
        self._labels = labels
        self._reason_s = reason_s
        self._late_s = late_s
        self._silence_s = silence_s
        self._looker = Engine(url, threads=LOOK_THREADS, silence_s=SILENCE_S)
        self._deaths: Broadcast[Death] = Broadcast()
        self._telling: set[asyncio.Task[None]] = set()
        self._ooms: dict[WorkerId, asyncio.Event] = {}
        """For each death that waits for its reason, an event that is set when an ``oom`` event arrives."""
        self._events: DieEvents | None = None
        self._closed = False

    def follow(self) -> AsyncIterator[Death]:
        """Yield the deaths from now on, until `aclose`."""
        if self._events is None and not self._closed:
            self._events = DieEvents(self._url, self._labels, self, silence_s=self._silence_s)
        return self._deaths.follow()

    async def aclose(self) -> None:
        """End the readers after they have read all announced deaths."""
        self._closed = True
        if self._events is not None:
            await asyncio.to_thread(self._events.close, CLOSE_S)
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=2 * self._reason_s)
        self._deaths.close()
        await self._looker.aclose(timeout_s=2 * self._reason_s)

    def take_end(self, ended: ContainerEnd) -> None:
        """Announce a death immediately, or after its reason is known."""
        if ended.out_of_memory is not None:
            self._deaths.publish(death(ended, ended.out_of_memory))
            return
        task = asyncio.create_task(self._tell_why(ended))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        self._ooms[ended.id] = asyncio.Event()

    def take_oom(self, id: WorkerId) -> None:
        """Record an ``oom`` event that arrived after the worker's death."""
        if id in self._ooms:
            self._ooms[id].set()

    def expect_looks(self) -> None:
        """Open the connections for inspecting dead containers, so that the first inspection need not wait for one.

        Needed for engines that may send an ``oom`` event late or never: then only an inspection shows the reason.
        """
        self._looker.warm()

    async def _tell_why(self, ended: ContainerEnd) -> None:
        """Announce a death with its reason, or without it after ``reason_s``."""
        oom = asyncio.create_task(self._ooms[ended.id].wait())
        looking = asyncio.create_task(self._look(ended.container))
        try:
            is_oom = await self._either(oom, looking)
        finally:
            del self._ooms[ended.id]
            oom.cancel()
            looking.cancel()
        self._deaths.publish(death(ended, is_oom))
        await asyncio.wait({oom, looking})

    async def _either(self, oom: asyncio.Task[object], looking: asyncio.Task[bool]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._reason_s
        await asyncio.wait({oom, looking}, timeout=self._reason_s, return_when=asyncio.FIRST_COMPLETED)
        if looking.done() and looking.result():
            return True
        await asyncio.wait({oom}, timeout=max(0.0, min(self._late_s, deadline - loop.time())))
        return oom.done()

    async def _look(self, container: str) -> bool:
        try:
            state = await self._looker.call(partial(calls.state, container=container))
        except EngineError:
            return False
        return bool(state.get("OOMKilled"))


def death(ended: ContainerEnd, out_of_memory: bool) -> Death:
    """Return the announcement of a worker's death."""
    if out_of_memory:
        return Death(ended.id, CloseReason.OUT_OF_MEMORY, f"out of memory (exit status {ended.exit_status})")
    return Death(ended.id, CloseReason.WORKER_LOST, f"exit status {ended.exit_status}")


class DieEvents:
    """Reads the events of one gateway's workers in a thread, and reports each worker's death once.

    The stream blocks while no container dies. It is requested again after a long silence, because a connection may be
    lost without notice. After a broken connection the thread requests the events since the last event, so a restart of
    the engine gate loses none. A restarted engine has forgotten its events. So the thread also lists the containers,
    and reports dead containers that it has not reported yet.
    """

    def __init__(self, url: str, labels: Sequence[str], watcher: DeathWatcher, *, silence_s: float) -> None:
        """Start the reading thread; *watcher* is called in the running event loop."""
        self._url = url
        self._labels = [*labels]
        self._watcher = watcher
        self._loop = asyncio.get_running_loop()
        self._silence_s = silence_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Lock for `close` and the opening of a stream, so that one of them sees the other."""
        self._stream: Any = None
        self._since_ns = time.time_ns()
        self._was_followed = False
        self._tells_of_each_oom = False
        """Whether the engine sends an ``oom`` event before each ``die`` for lack of memory; see `_cause`."""
        self._broken = False
        self._told: OrderedDict[WorkerId, None] = OrderedDict()
        self._out_of_memory: OrderedDict[WorkerId, int] = OrderedDict()
        """Time of the last ``oom`` event in each worker, by the engine's clock (ns)."""
        # A daemon: an engine that accepts a connection and sends nothing must not delay the gateway's end.
        self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the stream and wait for the thread; block for at most *timeout_s* seconds."""
        with self._lock:
            self._closing.set()
            stream = self._stream
        if stream is not None:
            # The SDK reads the socket from a response that the reader may be closing concurrently.
            with suppress(AttributeError, OSError, ValueError):
                stream.close()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._follow()
            except EngineError as error:
                if not self._broken and not self._closing.is_set():
                    logger.warning("engine_events_broken url=%s error=%s", self._url, error)
                self._broken = True
            except Exception:  # no other thread receives deaths, so this one must continue
                if not self._closing.is_set():  # else the stream was closed during a read
                    logger.exception("engine_events_failed url=%s", self._url)
                self._broken = True
            # A stream that was only silent is reopened immediately: a pause would delay the reports of deaths.
            if self._broken or time.monotonic() - began < PAUSE_S:
                self._closing.wait(PAUSE_S)

    def _follow(self) -> None:
        client = connect(self._url, timeout_s=LOOK_S)
        try:
            with translated(self._url):
                self._tells_of_each_oom = client.info().get("CgroupVersion") == "1"
                self._read(client)
        finally:
            self._stream = None
            client.close()

    def _read(self, client: APIClient) -> None:
        filters = {"type": ["container"], "event": ["die", "oom"], "label": self._labels}
        seconds, nanoseconds = divmod(self._since_ns, 10**9)
        query = {"since": f"{seconds}.{nanoseconds:09}", "filters": json.dumps(filters)}
        with open_stream(client, "GET", "events", query, silence_s=self._silence_s) as response:
            # The SDK's own `events` does not expose the response, so `close` could not close it. The stream also ends
            # with its connection, or after too long a silence.
            stream = CancellableStream(response.iter_lines(), response)
            with self._lock:
                self._stream = stream
                if self._closing.is_set():
                    return
            may_have_missed = self._was_followed or self._broken
            self._was_followed = True
            if self._broken:
                logger.info("engine_events_followed url=%s", self._url)
                self._broken = False
            if not self._tells_of_each_oom:
                self._watcher.expect_looks()
            if may_have_missed:
                self._look(client)
            for line in stream:
                self._hear(json.loads(line))

    def _look(self, client: APIClient) -> None:
        """Report dead containers that still exist; called after the stream has started, so that no death is missed."""
        for entry in client.containers(all=True, filters={"label": self._labels, "status": DEAD}):
            id = entry["Labels"].get(LABEL_WORKER)
            if id and id not in self._told:
                status = int(calls.state(client, container=entry["Id"])["ExitCode"])
                self._tell(ContainerEnd(WorkerId(id), entry["Id"], status, None if status == KILLED else False))

    def _hear(self, event: dict[str, Any]) -> None:
        # The time is not compared with the last event's: the engine's clock may be set back, or lag behind this
        # machine's. The engine repeats the last event, as ``since`` includes it, which changes nothing.
        self._since_ns = at_ns = int(event["timeNano"])
        attributes = event["Actor"]["Attributes"]
        id = attributes.get(LABEL_WORKER)
        if not id:
            return
        if event["Action"] == "oom":
            _remember(self._out_of_memory, WorkerId(id), at_ns)
            if id in self._told:
                self._pass_on(self._watcher.take_oom, WorkerId(id))
        else:
            status = int(attributes.get("exitCode") or 0)
            self._tell(
                ContainerEnd(WorkerId(id), event["Actor"]["ID"], status, self._cause(WorkerId(id), status, at_ns))
            )

    def _cause(self, id: WorkerId, status: int, at_ns: int) -> bool | None:
        """Return whether the worker ran out of memory, by an ``oom`` event before ``die``; None if that is unknown.

        A worker may have two containers: an ``oom`` event in either counts for both. With cgroup v2, the shim may be
        notified only after the container's end: the event then follows the death, or never comes. The engine locks a
        container during its cleanup. So a query of the state takes about 30 ms, or 100 to 240 ms if twenty die
        together, and the state is queried only if it may contain more.
        """
        oom_ns = self._out_of_memory.get(id)
        if oom_ns is None:
            return None if status == KILLED and not self._tells_of_each_oom else False
        return status != 0 and at_ns - oom_ns <= OOM_S * 1e9

    def _tell(self, ended: ContainerEnd) -> None:
        if ended.id not in self._told:
            _remember(self._told, ended.id, None)
            self._pass_on(self._watcher.take_end, ended)

    def _pass_on(self, act: Callable[[T], None], found: T) -> None:
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(act, found)


def _remember(known: OrderedDict[WorkerId, Any], id: WorkerId, value: object) -> None:
    known[id] = value
    known.move_to_end(id)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
