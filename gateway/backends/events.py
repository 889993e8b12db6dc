"""The engine's ``die`` events, read in a thread of its own: the stream blocks for as long as nothing dies.

After a broken connection the events since the last one are asked for, so that a restart of the gate, or a hiccup,
loses none; an engine that was restarted itself has forgotten them.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from docker import APIClient
from docker.types import CancellableStream

from gateway.backends.container import LABEL_INSTANCE, LABEL_WORKER
from gateway.backends.engine import EngineError, connect, open_stream, translated
from gateway.core.model import WorkerId

logger = logging.getLogger(__name__)

PAUSE_S = 0.5
"""Between two attempts to follow an engine that does not answer."""


class DieEvents:
    """Follows the deaths of one instance's workers until it is closed."""

    def __init__(self, url: str, instance: str, *, announce: Callable[[WorkerId], None]) -> None:
        """*announce* is called in the thread that reads."""
        self._url = url
        self._instance = instance
        self._announce = announce
        self._closing = threading.Event()
        self._lock = threading.Lock()
        """Between the end and a stream that is just being opened: one of the two sees the other."""
        self._stream: Any = None
        self._since_ns = time.time_ns()
        self._broken = False
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
            try:
                self._follow()
            except EngineError as error:
                if not self._broken and not self._closing.is_set():
                    logger.warning("engine_events_broken url=%s error=%s", self._url, error)
                self._broken = True
            except Exception:  # this thread is the only one that hears of deaths: it must go on
                logger.exception("engine_events_failed url=%s", self._url)
            self._closing.wait(PAUSE_S)

    def _follow(self) -> None:
        client = connect(self._url)
        try:
            with translated(self._url):
                self._read(client)
        finally:
            self._stream = None
            client.close()

    def _read(self, client: APIClient) -> None:
        filters = {"type": ["container"], "event": ["die"], "label": [f"{LABEL_INSTANCE}={self._instance}"]}
        seconds, nanoseconds = divmod(self._since_ns, 10**9)
        query = {"since": f"{seconds}.{nanoseconds:09}", "filters": json.dumps(filters)}
        with open_stream(client, "GET", "events", query, silence_s=None) as response:
            # The SDK's own `events` keeps the response to itself, so that nobody could close it.
            stream = CancellableStream(response.iter_lines(), response)
            with self._lock:
                self._stream = stream
                if self._closing.is_set():
                    return
            if self._broken:
                logger.info("engine_events_followed url=%s", self._url)
                self._broken = False
            for line in stream:
                self._hear(json.loads(line))

    def _hear(self, event: dict[str, Any]) -> None:
        at_ns = int(event["timeNano"])
        if at_ns <= self._since_ns:
            return  # asked for again, as the engine counts from the last one inclusive
        self._since_ns = at_ns
        id = event["Actor"]["Attributes"].get(LABEL_WORKER)
        if id:
            self._announce(WorkerId(id))
