"""Deaths of an engine's workers, each with its reason: followed from the first reader on.

The reason is in the events, as a rule. Where it is not, a late event is waited for, and the engine is asked for the
container's state; for a moment only, as trainers wait for the announcement, and what they were told can't be changed.
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

from gateway.backends.broadcast import DeathBroadcast
from gateway.backends.docker import calls
from gateway.backends.docker.container import LABEL_WORKER
from gateway.backends.docker.engine import LOOK_S, Engine, EngineError, connect, open_stream, translated
from gateway.core.ids import WorkerId
from gateway.core.session import CloseReason
from gateway.core.worker import Death

logger = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_THREADS: Final = 8
"""Threads that look why a container ended: they must not wait for those that start others, nor for each other, as each
look waits until the engine has tidied up after its container."""
REASON_S: Final = 1.0
"""How long a death may be kept back for its reason. A look takes 15 to 35 ms, so trainers hear of a worker's death
within 150 ms; where twenty die at once on a loaded machine it takes 120 to 240 ms, and more where many engines share
few processors. A wrong reason can't be taken back, and the calls that broke off wait for it longer (`verdicts`)."""
LATE_S: Final = 0.02
"""How long an ``oom`` event is waited for once the state knew of none: the engine handles it right after the death."""
SILENCE_S: Final = 2.0
"""The engine's longest within a look; nobody waits for its outcome any more, but the thread may be needed."""
CLOSE_S: Final = 10.0
"""How long ``aclose`` waits for the events thread."""
PAUSE_S = 0.5
"""Between two attempts to follow an engine that does not answer."""
EVENTS_SILENCE_S = 30.0
"""How long a stream may be silent until it is asked for anew; that costs the engine some milliseconds."""
REMEMBERED = 1024
"""Workers that died, and workers of which a process ran out of memory; an engine ends a few dozen a second at most."""
OOM_S = 5.0
"""A container that ends within this time of a process in it that was out of memory ended of that: 0.04 s here, and
more on a loaded machine, or where a supervisor notices it first. Later it is another story: many workers live on."""
KILLED = 137
"""The exit status of what got SIGKILL, which is what the kernel does where memory ran out."""
DEAD = ["exited", "dead"]


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """A worker's container that ended."""

    id: WorkerId
    container: str
    exit_status: int
    out_of_memory: bool | None
    """None: the events don't tell so far. A late ``oom`` event may, or the container's state: see `State.OOMKilled`,
    which does not say when."""


class DeathWatcher:
    """Announces the deaths of one gateway's workers."""

    def __init__(
        self,
        url: str,
        labels: Sequence[str],
        *,
        reason_s: float = REASON_S,
        late_s: float = LATE_S,
        silence_s: float = EVENTS_SILENCE_S,
    ) -> None:
        """Make no connection yet.

        Args:
            url: The engine's socket.
            labels: Of the workers, ``name=value``.
            reason_s: How long a death may be kept back for its reason.
            late_s: How much of that an ``oom`` event may come later than a state that knows of none.
            silence_s: How long the events may be silent until they are requested again.
        """
        self._url = url
        self._labels = labels
        self._reason_s = reason_s
        self._late_s = late_s
        self._silence_s = silence_s
        self._looker = Engine(url, threads=LOOK_THREADS, silence_s=SILENCE_S)
        self._deaths = DeathBroadcast()
        self._telling: set[asyncio.Task[None]] = set()
        self._ooms: dict[WorkerId, asyncio.Event] = {}
        """Of deaths that are kept back: set when an ``oom`` event came."""
        self._events: DieEvents | None = None
        self._closed = False

    def follow(self) -> AsyncIterator[Death]:
        """Yield what dies from now on, until `aclose`."""
        if self._events is None and not self._closed:
            self._events = DieEvents(self._url, self._labels, self, silence_s=self._silence_s)
        return self._deaths.follow()

    async def aclose(self) -> None:
        """End the readers once they have read what was announced before."""
        self._closed = True
        if self._events is not None:
            await asyncio.to_thread(self._events.close, CLOSE_S)
        if self._telling:
            await asyncio.wait(set(self._telling), timeout=2 * self._reason_s)
        self._deaths.close()
        await self._looker.aclose(timeout_s=2 * self._reason_s)

    def take_end(self, ended: ContainerEnd) -> None:
        """Announce a death, now or as soon as its reason is known."""
        if ended.out_of_memory is not None:
            self._deaths.add(death(ended, ended.out_of_memory))
            return
        task = asyncio.create_task(self._tell_why(ended))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        self._ooms[ended.id] = asyncio.Event()

    def take_oom(self, id: WorkerId) -> None:
        """Note an ``oom`` event that came after the death of its worker."""
        if id in self._ooms:
            self._ooms[id].set()

    def expect_looks(self) -> None:
        """Connect to the engine before the first look, as this engine may send an ``oom`` event late or never."""
        self._looker.warm()

    async def _tell_why(self, ended: ContainerEnd) -> None:
        """Announce a death with its reason, or without once the time for that is over."""
        oom = asyncio.create_task(self._ooms[ended.id].wait())
        looking = asyncio.create_task(self._look(ended.container))
        try:
            is_oom = await self._either(oom, looking)
        finally:
            del self._ooms[ended.id]
            oom.cancel()
            looking.cancel()
        self._deaths.add(death(ended, is_oom))
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
    """Say how a worker died."""
    if out_of_memory:
        return Death(ended.id, CloseReason.OUT_OF_MEMORY, f"out of memory (exit status {ended.exit_status})")
    return Death(ended.id, CloseReason.WORKER_LOST, f"exit status {ended.exit_status}")


class DieEvents:
    """Reads the events of one gateway's workers, in a thread of its own, and reports each worker's death once.

    The stream blocks for as long as nothing dies, and is requested again after a long silence: a connection may be gone
    without notice. After a broken connection the thread requests the events since the last one, so that a restart of
    the gate loses none. An engine that was restarted itself has forgotten them, so the thread looks through its
    containers as well, and reports the dead ones that it has not reported yet.
    """

    def __init__(self, url: str, labels: Sequence[str], watcher: DeathWatcher, *, silence_s: float) -> None:
        """Begin to read, in a thread; *watcher* is called in the running loop."""
        self._url = url
        self._labels = [*labels]
        self._watcher = watcher
        self._loop = asyncio.get_running_loop()
        self._silence_s = silence_s
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Between the end and a stream that is just being opened: one of the two sees the other."""
        self._stream: Any = None
        self._since_ns = time.time_ns()
        self._was_followed = False
        self._tells_of_each_oom = False
        """Whether an ``oom`` event comes before each ``die`` of one: see `_cause`."""
        self._broken = False
        self._told: OrderedDict[WorkerId, None] = OrderedDict()
        self._out_of_memory: OrderedDict[WorkerId, int] = OrderedDict()
        """When a process of that worker was last killed for want of memory, by the engine's clock (ns)."""
        # A daemon: an engine that accepts a connection and then says nothing must not hold up the gateway's end.
        self._thread = threading.Thread(target=self._run, name="engine-events", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """End the stream and wait for the thread; blocks for at most *timeout_s*."""
        with self._lock:
            self._closing.set()
            stream = self._stream
        if stream is not None:
            # The SDK looks for the socket in a response that the reader may be closing at this moment.
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
            except Exception:  # this thread is the only one that hears of deaths: it must go on
                if not self._closing.is_set():  # else it was read from while it was closed
                    logger.exception("engine_events_failed url=%s", self._url)
                self._broken = True
            # One that was only silent is followed again at once: what dies meanwhile would be told late.
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
            # The SDK's own `events` keeps the response to itself, so that nobody could close it. Its stream ends also
            # where the connection does, or is silent for too long.
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
        """Tell of the dead that are there still; after the stream began, so that none falls between the two."""
        for entry in client.containers(all=True, filters={"label": self._labels, "status": DEAD}):
            id = entry["Labels"].get(LABEL_WORKER)
            if id and id not in self._told:
                status = int(calls.state(client, container=entry["Id"])["ExitCode"])
                self._tell(ContainerEnd(WorkerId(id), entry["Id"], status, None if status == KILLED else False))

    def _hear(self, event: dict[str, Any]) -> None:
        # Not compared with the last one's: the engine's clock may have been set back, or be behind this machine's. What
        # is told again, as the engine counts from the last one inclusive, changes nothing.
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
        """Whether it was out of memory: by the ``oom`` event, which comes before ``die`` (of both of a pair).

        Where memory is counted by cgroup v2 the shim may hear of it only when the container is gone: the event then
        follows the death, or there is none. To look at the state takes some 30 ms, and 100 to 240 ms where twenty die
        at once, as the engine holds a container while it tidies up: so it is asked only where it may know more.
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
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act, found)


def _remember(known: OrderedDict[WorkerId, Any], id: WorkerId, value: object) -> None:
    known[id] = value
    known.move_to_end(id)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
