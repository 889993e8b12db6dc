"""Call the Docker engine with the SDK's blocking client, in a bounded number of threads.

The SDK's client is not thread-safe, so each thread has its own. A started call cannot be cancelled: it ends within the
client's timeout. An engine that hangs accepts connections and sends nothing. So three limits apply: the number of
queued calls, their time in the queue, and the engine's silence within a call. The threads are daemons, so a thread that
waits for a silent engine does not delay the end of the process.
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
"""Seconds of silence after which a call times out. The engine starts about six containers per second, others wait."""
LOOK_S = 15.0
"""Seconds of silence after which a read-only call times out. A list of 60 containers takes 5 ms, in a burst longer."""
QUEUED_S = 60.0
"""Seconds that a call may wait for a thread; after them the call is not sent."""
MAX_QUEUED = 512
"""Maximum number of calls that wait for a thread or run. The pool limits its starts, but an audit may stop some hundred
containers at the same time."""

MIN_API_VERSION = "1.24"
"""Oldest API version of the SDK; used only to query the engine's own version."""
CLOSE_S = 10.0
"""Seconds that running calls may take when the backend closes."""


class EngineError(BackendError):
    """The engine refused, or did not answer (``status`` 0: the engine may have executed the request)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_silence(self) -> bool:
        """Whether the engine did not answer, or the call was not sent because the engine is busy."""
        return self.status in (0, 503)

    @property
    def is_image_missing(self) -> bool:
        """Whether the engine has no image of the requested name."""
        return self.status == 404 and "no such image" in str(self).lower()


def connect(url: str, *, timeout_s: float = TIMEOUT_S) -> APIClient:
    """Return a client with the engine's own API version; block while the engine is queried for it.

    *timeout_s* is the number of seconds of silence after which this query and later requests time out.
    """
    with translated(url), closing(_client(url, MIN_API_VERSION, timeout_s)) as client:
        # The SDK's "auto" queries in the constructor, and after a failure its connection can't be closed.
        version: str = client.version(api_version=False)["ApiVersion"]
    return _client(url, version, timeout_s)


def _client(url: str, version: str, timeout_s: float) -> APIClient:
    client = APIClient(base_url=url, version=version, timeout=timeout_s)  # type: ignore[arg-type]  # any number will do
    if url.startswith("unix://"):
        # The SDK keeps connections to the last 25 URLs, so one for each of 25 containers, whatever number of pools is
        # requested. A thread needs one.
        client.mount("http+docker://", _Adapter(f"http+{url}", math.ceil(timeout_s), pool_connections=1))
    return client


class _Connection(UnixHTTPConnection):
    """A connection that closes its socket after a failed connect; the SDK leaves one open per attempt."""

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
    body: object = None,
    silence_s: float,
) -> requests.Response:
    """Send a request and return its streamed response, which the caller must close.

    *body* is sent as JSON unless it is None. *silence_s* is the longest wait for the next part, in seconds.

    Raises:
        EngineError: The engine refuses.
    """
    response: requests.Response = client.request(
        method,
        f"{client.base_url}/v{client.api_version}/{path}",
        params=query,
        headers=headers,
        json=body,
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
    """Translate the SDK's exceptions into ``EngineError``."""
    try:
        yield
    except APIError as error:
        raise EngineError(str(error.explanation or error), status=error.status_code or 0) from error
    except (requests.RequestException, DockerException, OSError) as error:
        raise EngineError(f"the Docker engine at {url} does not answer: {error}") from error


@dataclass(slots=True)
class _Call:
    """A call that waits for a thread or runs."""

    work: Callable[[APIClient], Any]
    silence_s: float
    outcome: Future[Any] = field(default_factory=Future)


class Engine:
    """A pool of threads with a client each, for one event loop."""

    def __init__(
        self,
        url: str,
        *,
        threads: int,
        silence_s: float = TIMEOUT_S,
        max_queued: int = MAX_QUEUED,
        queued_s: float = QUEUED_S,
    ) -> None:
        """Create the pool without threads: calls start them.

        Args:
            url: The engine's socket.
            threads: Maximum number of concurrent calls.
            silence_s: Seconds of silence after which a call times out.
            max_queued: Maximum number of calls that run or wait for a thread.
            queued_s: Seconds that a call may wait for a thread.
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
        """Number of calls that no thread has finished, including cancelled callers' calls."""
        self._is_warm = False
        self._closed = False

    def warm(self) -> None:
        """Start all threads now, each with a client, so that its first call need not connect.

        A client that is closed after a silence is also replaced immediately, if the engine answers.
        """
        with self._lock:
            self._is_warm = not self._closed
            while self._is_warm and len(self._threads) < self._most_threads:
                self._begin_thread()

    async def call(self, work: Callable[[APIClient], T], *, silence_s: float = math.inf) -> T:
        """Run *work* in a thread with a client, and return its result.

        *silence_s* replaces the engine's timeout if it is shorter. If the caller is cancelled, a waiting call is
        cancelled too, and a running call continues.

        Raises:
            EngineError: The engine refuses or does not answer. Status 503 means that the call was not sent: too many
                calls are queued, it waited too long, or the backend is closed.
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
            result: T = await outcome  # the call runs, and its own timeout ends it
            return result
        finally:
            outcome.cancel()

    async def aclose(self, *, timeout_s: float = CLOSE_S) -> None:
        """Release threads and clients; a call that runs longer than *timeout_s* seconds keeps its thread."""
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
            # Otherwise the caller's objects would live until the next call.
            del call
            client = self._warmed(client)
        if client is not None:
            client.close()

    def _warmed(self, client: APIClient | None) -> APIClient | None:
        if client is None and self._is_warm and not self._closed:
            with suppress(EngineError):  # the next call retries and reports the error
                return connect(self.url, timeout_s=self._silence_s)
        return client

    def _run(self, call: _Call, client: APIClient | None) -> APIClient | None:
        """Run *call* and return the client for the next call; None after a silence: another engine may answer then."""
        try:
            with translated(self.url):
                if client is None:
                    client = connect(self.url, timeout_s=call.silence_s)
                client.timeout = call.silence_s  # type: ignore[assignment]  # any number will do
                result = call.work(client)
        except BaseException as error:  # noqa: BLE001  # the caller receives it
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
        """Make room for another call, before the caller receives the result and may send the next call."""
        with self._lock:
            self._pending -= 1


def _join(threads: list[threading.Thread], timeout_s: float) -> None:
    """Wait for all *threads* together, at most *timeout_s* seconds."""
    ended = threading.Event()

    def wait() -> None:
        for thread in threads:
            thread.join()
        ended.set()

    threading.Thread(target=wait, name="engine-end", daemon=True).start()
    ended.wait(timeout_s)
