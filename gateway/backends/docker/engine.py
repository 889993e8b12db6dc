"""Calls on the Docker engine: the SDK's blocking client, in a bounded number of threads.

The SDK's client is not safe to share, so each thread has one of its own. A call that was begun cannot be cancelled; it
ends within the client's timeout. So every call has three bounds, for an engine that hangs accepts connections and says
nothing: the calls that may wait for a thread, the time that they may wait, and the silence that a thread bears. The
threads are daemons: one that still bears a silence does not hold up the end of the process.
"""

from __future__ import annotations

import asyncio
import math
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import requests
from docker import APIClient
from docker.errors import APIError, DockerException
from docker.transport import UnixHTTPAdapter
from docker.transport.unixconn import UnixHTTPConnection, UnixHTTPConnectionPool

from gateway.core.errors import BackendError

T = TypeVar("T")

TIMEOUT_S = 60.0
"""The longest silence of the engine within a call; it starts some six containers a second, so a burst queues there."""
LOOK_S = 15.0
"""The same within a call that only looks: 5 ms for a list of 60 containers, some more on an engine in a burst."""
QUEUED_S = 60.0
"""The longest that a call waits for a thread; then it is not made at all."""
MAX_QUEUED = 512
"""Calls that may wait for a thread, those that have one included. The pool bounds its starts; an audit may ask for the
end of some hundred containers at once."""

MIN_API_VERSION = "1.24"
"""The oldest that the SDK speaks; only the question for the engine's own is asked with it."""
CLOSE_S = 10.0
"""How long calls under way may take to end when the backend closes."""


class EngineError(BackendError):
    """The engine refused, or did not answer at all (``status`` 0: what was asked may have happened)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_silence(self) -> bool:
        """Whether the engine said nothing at all, or nobody asked it as it is busy."""
        return self.status in (0, 503)

    @property
    def is_image_missing(self) -> bool:
        """Whether it has no image of that name."""
        return self.status == 404 and "no such image" in str(self).lower()


def connect(url: str, *, timeout_s: float = TIMEOUT_S) -> APIClient:
    """Make a client that speaks the engine's own API version; asks the engine for it, so this blocks.

    *timeout_s* is the longest silence that the client bears, here and later.
    """
    with translated(url), closing(_client(url, MIN_API_VERSION, timeout_s)) as client:
        # Not the SDK's "auto": that asks in the constructor, and where it fails nobody can close the connection.
        version: str = client.version(api_version=False)["ApiVersion"]
    return _client(url, version, timeout_s)


def _client(url: str, version: str, timeout_s: float) -> APIClient:
    client = APIClient(base_url=url, version=version, timeout=timeout_s)  # type: ignore[arg-type]  # any number will do
    if url.startswith("unix://"):
        # The SDK keeps connections to the last 25 URLs, that is one for each of so many containers, whatever number of
        # pools it is asked for; a thread needs one.
        client.mount("http+docker://", _Adapter(f"http+{url}", math.ceil(timeout_s), pool_connections=1))
    return client


class _Connection(UnixHTTPConnection):
    """Closes its socket if the engine does not accept; the SDK leaves one open for each try."""

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            sock.connect(self.unix_socket)
        except BaseException:
            sock.close()
            raise
        self.sock = sock


class _ConnectionPool(UnixHTTPConnectionPool):
    def _new_conn(self) -> _Connection:  # type: ignore[override]  # the SDK's own has no types
        return _Connection(self.base_url, self.socket_path, self.timeout)  # type: ignore[arg-type]  # as the SDK does


class _Adapter(UnixHTTPAdapter):
    def get_connection(self, url: Any, proxies: Any = None) -> _ConnectionPool:
        with self.pools.lock:
            pool = self.pools.get(url)
            if pool is None:
                pool = self.pools[url] = _ConnectionPool(
                    url, self.socket_path, self.timeout, maxsize=self.max_pool_size
                )
        return pool


def open_stream(
    client: APIClient,
    method: str,
    path: str,
    query: Mapping[str, str],
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    silence_s: float,
) -> requests.Response:
    """Ask for what comes bit by bit; whoever gets it closes it. *silence_s* is the longest wait for the next bit.

    Raises:
        EngineError: the engine refused.
    """
    response: requests.Response = client.request(
        method,
        f"{client.base_url}/v{client.api_version}/{path}",
        params=query,
        headers=headers,
        stream=True,
        timeout=(TIMEOUT_S, silence_s),
    )
    if response.status_code != 200:
        with response:
            raise EngineError(_message(response), status=response.status_code)
    return response


def _message(response: requests.Response) -> str:
    try:
        return str(response.json()["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason}"


@contextmanager
def translated(url: str) -> Iterator[None]:
    """Turn whatever the SDK raises into ``EngineError``."""
    try:
        yield
    except APIError as error:
        raise EngineError(str(error.explanation or error), status=error.status_code or 0) from error
    except (requests.RequestException, DockerException, OSError) as error:
        raise EngineError(f"the Docker engine at {url} does not answer: {error}") from error


@dataclass(slots=True)
class _Call:
    """Something to be done in a thread."""

    work: Callable[[APIClient], Any]
    silence_s: float
    outcome: Future[Any] = field(default_factory=Future)


class Engine:
    """Threads with a client each; to be used from one event loop."""

    def __init__(
        self,
        url: str,
        *,
        threads: int,
        silence_s: float = TIMEOUT_S,
        max_queued: int = MAX_QUEUED,
        queued_s: float = QUEUED_S,
    ) -> None:
        """Start nothing yet: a thread begins when there is no idle one for a call.

        Args:
            url: The engine's socket.
            threads: Calls at once.
            silence_s: The engine's longest within a call.
            max_queued: Calls that are under way or wait for a thread.
            queued_s: The longest that a call waits for a thread.
        """
        self.url = url
        self._most_threads = threads
        self._silence_s = silence_s
        self._max_queued = max_queued
        self._queued_s = queued_s
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._pending = 0
        """Calls that no thread has ended with, those of callers that gave up included."""
        self._is_warm = False
        self._closed = False

    def warm(self) -> None:
        """Start all threads now, and let each have a client before its first call, which then need not connect.

        A client that was let go of after a silence is replaced at once, too, as far as the engine answers.
        """
        with self._lock:
            self._is_warm = not self._closed
            while self._is_warm and len(self._threads) < self._most_threads:
                self._begin_thread()

    async def call(self, work: Callable[[APIClient], T], *, silence_s: float = math.inf) -> T:
        """Run *work* in a thread that has a client; *silence_s* is the engine's longest within it, if that is shorter.

        A caller that is cancelled leaves a call behind that is under way, and takes back one that waits.

        Raises:
            EngineError: the engine refused, or does not answer; or too many calls wait for it already, or this one
                waited for too long (``status`` 503: it was not made).
        """
        if self._closed:
            raise EngineError("the backend is closed", status=503)
        call = _Call(work, min(silence_s, self._silence_s))
        self._enqueue(call)
        outcome = asyncio.wrap_future(call.outcome)
        try:
            await asyncio.wait({outcome}, timeout=self._queued_s)
            if not outcome.done() and call.outcome.cancel():
                raise EngineError(
                    f"the Docker engine at {self.url} is busy, or hangs: no call ended for {self._queued_s:g} s",
                    status=503,
                )
            result: T = await outcome  # it is under way, and ends by itself: its silence is bounded
            return result
        finally:
            outcome.cancel()

    async def aclose(self, *, timeout_s: float = CLOSE_S) -> None:
        """Let go of threads and clients; a call that hangs for longer than *timeout_s* keeps its thread."""
        self._closed = True
        with self._lock:
            threads = list(self._threads)
        self._drop_queued()
        for _ in threads:
            self._calls.put(None)
        await asyncio.to_thread(_join, threads, timeout_s)

    def _enqueue(self, call: _Call) -> None:
        with self._lock:
            if self._pending >= self._max_queued:
                raise EngineError(
                    f"the Docker engine at {self.url} is busy, or hangs: {self._pending} calls wait for it", status=503
                )
            self._pending += 1
            if len(self._threads) < min(self._pending, self._most_threads):
                self._begin_thread()
        self._calls.put(call)

    def _begin_thread(self) -> None:
        thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _drop_queued(self) -> None:
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None and call.outcome.set_running_or_notify_cancel():
                call.outcome.set_exception(EngineError("the backend is closed", status=503))

    def _serve(self) -> None:
        client = self._warmed(None)
        while (call := self._calls.get()) is not None:
            if call.outcome.set_running_or_notify_cancel():
                client = self._run(call, client)
            else:
                self._ended()
            # Else a caller's objects would live until the next call.
            del call
            client = self._warmed(client)
        if client is not None:
            client.close()

    def _warmed(self, client: APIClient | None) -> APIClient | None:
        if client is None and self._is_warm and not self._closed:
            with suppress(EngineError):  # the next call tries again, and says why
                return connect(self.url, timeout_s=self._silence_s)
        return client

    def _run(self, call: _Call, client: APIClient | None) -> APIClient | None:
        """Do it; returns the client for the next one, or None after a silence: whoever answers then may be another."""
        try:
            with translated(self.url):
                if client is None:
                    client = connect(self.url, timeout_s=call.silence_s)
                client.timeout = call.silence_s  # type: ignore[assignment]  # any number will do
                result = call.work(client)
        except BaseException as error:  # noqa: BLE001  # it is the caller's, who gets it
            if client is not None and isinstance(error, EngineError) and error.status == 0:
                client.close()
                client = None
            self._ended()
            call.outcome.set_exception(error)
        else:
            self._ended()
            call.outcome.set_result(result)
        return client

    def _ended(self) -> None:
        """Make room for another call; before a caller hears of its outcome, as it may have one at once."""
        with self._lock:
            self._pending -= 1


def _join(threads: list[threading.Thread], timeout_s: float) -> None:
    """Wait for *threads*, at most *timeout_s* together."""
    ended = threading.Event()

    def wait() -> None:
        for thread in threads:
            thread.join()
        ended.set()

    threading.Thread(target=wait, name="engine-end", daemon=True).start()
    ended.wait(timeout_s)
