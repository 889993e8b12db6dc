"""Sends the requests of plans with httpx, blocking and with asyncio.

TCP keepalives detect a dead connection within a minute, also during a call of an hour, which sends no bytes.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

import httpx

from env_gateway_client.errors import InvalidRequest, ProtocolError
from env_gateway_client.plans import Answer, Lost, Pause, Plan, Send, Timeouts

T = TypeVar("T")

MAX_ANSWER_BYTES = 256 * 2**20
"""Largest answer. A larger one is a `ProtocolError`."""
_KEPT_S = 15.0
"""Seconds that an idle connection is kept: less than the 75 s of the gateway, so that it rarely closes first."""
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=200, keepalive_expiry=_KEPT_S)
_KEEPALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, option, value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if (option := getattr(socket, name, None)) is not None  # not on every system
]


def base_url(url: str) -> str:
    """Return the server's URL without its last slash. Raises ``InvalidRequest``: it is not a usable URL."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query or parts.fragment:
        raise InvalidRequest("url: must look like http://HOST:8080, without user, query and fragment")
    if parts.path.startswith("/k/"):
        raise InvalidRequest("url: pass the key as key=, and not in the path")
    return url.rstrip("/")


def _verify(url: str, verify: ssl.SSLContext | bool) -> ssl.SSLContext | bool:
    return verify if url.startswith("https:") else False  # reading the certificates takes 20 ms


def _timeout(send: Send, timeouts: Timeouts) -> httpx.Timeout:
    return httpx.Timeout(send.timeout_s, connect=min(timeouts.connect_s, send.timeout_s))


@contextmanager
def _losses(parts: list[bytes], deadline: float) -> Iterator[None]:
    """Turn httpx's errors into `Lost`. *parts* is the body so far."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise Lost(str(error) or type(error).__name__, sent=False) from error
    except (httpx.LocalProtocolError, httpx.UnsupportedProtocol) as error:
        raise InvalidRequest(f"the request can't be sent: {error}") from error
    except (httpx.TransportError, httpx.DecodingError, TimeoutError) as error:
        is_late = isinstance(error, TimeoutError | httpx.TimeoutException) and time.monotonic() >= deadline - 0.01
        text = str(error) or type(error).__name__
        raise Lost(text, sent=True, timed_out=is_late, partial=b"".join(parts)) from error


def _add(parts: list[bytes], chunk: bytes, size: int) -> int:
    if size + len(chunk) > MAX_ANSWER_BYTES:
        raise ProtocolError(f"an answer has more than {MAX_ANSWER_BYTES} bytes", may_have_run=True)
    parts.append(chunk)
    return size + len(chunk)


def _answer(response: httpx.Response, parts: list[bytes]) -> Answer:
    return Answer(
        response.status_code, {name.lower(): value for name, value in response.headers.items()}, b"".join(parts)
    )


class SyncHttp:
    """Runs plans, blocking the thread. Threads may share it."""

    def __init__(self, url: str, timeouts: Timeouts, verify: ssl.SSLContext | bool, proxy: str | None) -> None:
        self._timeouts = timeouts
        self._url = base_url(url)
        self._verify = _verify(url, verify)
        self._proxy = proxy
        self._pid = 0
        self._client = self._connected()

    def run(self, plan: Plan[T]) -> T:
        """Run *plan*, and return its result."""
        try:
            effect = next(plan)
            while True:
                if isinstance(effect, Pause):
                    time.sleep(effect.seconds)
                    effect = plan.send(None)
                    continue
                try:
                    answer = self._send(effect)
                except (Lost, ProtocolError) as error:
                    effect = plan.throw(error)
                else:
                    effect = plan.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            plan.close()

    def close(self) -> None:
        """Close all connections."""
        if self._pid == os.getpid():
            self._client.close()

    def _connected(self) -> httpx.Client:
        """Return the client of this process. A process must not use the connections that it inherited by a fork."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            transport = httpx.HTTPTransport(
                verify=self._verify, limits=_LIMITS, proxy=self._proxy, socket_options=_KEEPALIVE
            )
            self._client = httpx.Client(base_url=self._url, transport=transport)
        return self._client

    def _send(self, send: Send) -> Answer:
        parts: list[bytes] = []
        size, deadline = 0, time.monotonic() + send.timeout_s
        client = self._connected()
        request = client.build_request(
            send.method, send.path, headers=send.headers, content=send.body, timeout=_timeout(send, self._timeouts)
        )
        with _losses(parts, deadline):
            response = client.send(request, stream=True)
            try:
                for chunk in response.iter_bytes():
                    size = _add(parts, chunk, size)
                    if time.monotonic() > deadline:
                        raise TimeoutError
            finally:
                response.close()
        return _answer(response, parts)


class AsyncHttp:
    """Runs plans with asyncio, in one event loop."""

    def __init__(self, url: str, timeouts: Timeouts, verify: ssl.SSLContext | bool, proxy: str | None) -> None:
        self._timeouts = timeouts
        transport = httpx.AsyncHTTPTransport(
            verify=_verify(url, verify), limits=_LIMITS, proxy=proxy, socket_options=_KEEPALIVE
        )
        self._client = httpx.AsyncClient(base_url=base_url(url), transport=transport)

    async def run(self, plan: Plan[T]) -> T:
        """Run *plan*, and return its result."""
        try:
            effect = next(plan)
            while True:
                if isinstance(effect, Pause):
                    await asyncio.sleep(effect.seconds)
                    effect = plan.send(None)
                    continue
                try:
                    answer = await self._send(effect)
                except (Lost, ProtocolError) as error:
                    effect = plan.throw(error)
                else:
                    effect = plan.send(answer)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            plan.close()

    async def aclose(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _send(self, send: Send) -> Answer:
        parts: list[bytes] = []
        size, deadline = 0, time.monotonic() + send.timeout_s
        request = self._client.build_request(
            send.method, send.path, headers=send.headers, content=send.body, timeout=_timeout(send, self._timeouts)
        )
        with _losses(parts, deadline):
            async with asyncio.timeout(send.timeout_s):
                response = await self._client.send(request, stream=True)
                try:
                    async for chunk in response.aiter_bytes():
                        size = _add(parts, chunk, size)
                finally:
                    await response.aclose()
        return _answer(response, parts)
