"""Calls on the Docker engine: the SDK's blocking client, in a bounded number of threads.

The SDK's client is not safe to share, so each thread has one of its own. A call that was begun cannot be cancelled; it
ends within the client's timeout.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import requests
from docker import APIClient
from docker.errors import APIError, DockerException

from gateway.core.errors import BackendError

T = TypeVar("T")

TIMEOUT_S = 60.0
"""The longest silence of the engine within a call; it starts some six containers a second, so a burst queues there."""

MIN_API_VERSION = "1.24"
"""The oldest that the SDK speaks; only the question for the engine's own is asked with it."""
CLOSE_S = 10.0
"""How long calls under way may take to end when the backend closes."""


class EngineError(BackendError):
    """The engine refused, or did not answer at all (``status`` 0: what was asked may have happened)."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def connect(url: str) -> APIClient:
    """Make a client that speaks the engine's own API version; asks the engine for it, so this blocks."""
    with translated(url):
        _knock(url)
    with translated(url), closing(_client(url, MIN_API_VERSION)) as client:
        # Not the SDK's "auto": that asks in the constructor, and where it fails nobody can close the connection.
        version: str = client.version(api_version=False)["ApiVersion"]
    return _client(url, version)


def _knock(url: str) -> None:
    """Raise ``OSError`` if nobody listens on the engine's socket; the SDK would leave a socket open for each try."""
    if url.startswith("unix://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as visitor:
            visitor.settimeout(TIMEOUT_S)
            visitor.connect("/" + url.removeprefix("unix://").lstrip("/"))


def _client(url: str, version: str) -> APIClient:
    return APIClient(base_url=url, version=version, timeout=TIMEOUT_S)  # type: ignore[arg-type]  # any number will do


def open_stream(
    client: APIClient,
    method: str,
    path: str,
    query: Mapping[str, str],
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
    silence_s: float | None,
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


class Engine:
    """Threads with a client each."""

    def __init__(self, url: str, *, threads: int) -> None:
        self.url = url
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="engine")
        self._own = threading.local()
        self._lock = threading.Lock()
        self._clients: list[APIClient] = []
        self._closed = False

    async def call(self, work: Callable[[APIClient], T]) -> T:
        """Run *work* in a thread that has a client.

        Raises:
            EngineError: the engine refused, or does not answer.
        """
        if self._closed:
            raise EngineError("the backend is closed")
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, work)

    async def aclose(self) -> None:
        """Let go of threads and clients; a call that hangs for longer than ``CLOSE_S`` keeps its thread."""
        self._closed = True
        shutdown = partial(self._executor.shutdown, wait=True, cancel_futures=True)
        await asyncio.wait({asyncio.get_running_loop().run_in_executor(None, shutdown)}, timeout=CLOSE_S)
        with self._lock:
            clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def _run(self, work: Callable[[APIClient], T]) -> T:
        with translated(self.url):
            return work(self._client())

    def _client(self) -> APIClient:
        client: APIClient | None = getattr(self._own, "client", None)
        if client is None:
            client = connect(self.url)
            self._own.client = client
            with self._lock:
                self._clients.append(client)
        return client
