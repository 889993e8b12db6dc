"""The engine's ``oom`` and ``die`` events, read in a thread of its own: the stream blocks for as long as nothing dies.

After a broken connection the events since the last one are asked for, so that a restart of the gate, or a hiccup,
loses none. An engine that was restarted itself has forgotten them: so its containers are looked through as well, and
those that are dead and were not told of are told of now.

A stream that is silent for long is asked for anew, as a connection may be gone without a word.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from docker import APIClient
from docker.types import CancellableStream

from gateway.backends.docker import calls
from gateway.backends.docker.container import LABEL_WORKER
from gateway.backends.docker.engine import LOOK_S, EngineError, connect, open_stream, translated
from gateway.core.ids import WorkerId

logger = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Between two attempts to follow an engine that does not answer."""
SILENCE_S = 30.0
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


class DieEvents:
    """Follows the deaths of one gateway's workers until it is closed; tells each worker's once."""

    def __init__(
        self,
        url: str,
        labels: Sequence[str],
        *,
        announce: Callable[[ContainerEnd], None],
        announce_oom: Callable[[WorkerId], None] = lambda id: None,
        followed: Callable[[bool], None] = lambda tells_of_each_oom: None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """
        Args:
            labels: Of the workers, ``name=value``.
            announce: Hears of each death; like the others called in the thread that reads.
            announce_oom: Hears of an ``oom`` event that came after the death of its worker.
            followed: Called as often as a stream begins: whether its engine tells of each ``oom`` before the death.
            silence_s: How long the stream may be silent until it is asked for anew.
        """
        self._url = url
        self._labels = [*labels]
        self._announce = announce
        self._announce_oom = announce_oom
        self._followed = followed
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
            self._followed(self._tells_of_each_oom)
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
                self._announce_oom(WorkerId(id))
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
            self._announce(ended)


def _remember(known: OrderedDict[WorkerId, Any], id: WorkerId, value: object) -> None:
    known[id] = value
    known.move_to_end(id)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
