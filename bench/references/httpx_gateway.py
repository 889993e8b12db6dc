"""The same gateway with httpx instead of its own transport, to measure the worth of that transport.

Run as ``httpx_gateway.py unlimited serve`` or ``httpx_gateway.py default serve``. The first word limits httpx'
connections to a worker: no limit, or httpx' own limits (100, of which 20 are kept). The words after it are the command
line of ``gateway``. Sessions, keys and fronts are the gateway's.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import httpx

import gateway.app
from gateway.cli.main import app
from gateway.core.addresses import Address, parse_address
from gateway.core.errors import UpstreamError, UpstreamGone, UpstreamTimeout
from gateway.core.faults import Fault
from gateway.core.ids import WorkerId
from gateway.core.ports.transport import Headers, Request

CONNECT_S = 5.0
HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"content-length"))
UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=None)
LIMITS = {"unlimited": UNLIMITED, "default": httpx.Limits(max_connections=100, max_keepalive_connections=20)}


class HttpxExchange:
    """An answer received over httpx."""

    is_whole = False

    def __init__(self, response: httpx.Response) -> None:
        self._response = response
        self.status = response.status_code
        raw = ((name.lower(), value) for name, value in response.headers.raw)
        self.headers: Headers = [(name, value) for name, value in raw if name not in HOP_BY_HOP]

    @property
    def faults(self) -> tuple[Fault, ...]:
        """An empty tuple: httpx shows no trailers."""
        return ()

    @property
    def result(self) -> bytes:
        """Nothing, for the same reason."""
        return b""

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body's chunks on arrival."""
        try:
            async for chunk in self._response.aiter_raw():
                yield chunk
        except httpx.TimeoutException as error:
            raise UpstreamTimeout(f"the worker was silent: {error!r}") from error
        except httpx.TransportError as error:
            raise UpstreamGone(f"the worker closed the connection: {error!r}", sent=True) from error

    async def read(self, limit_bytes: int) -> bytes:
        """Read the whole body."""
        parts, size = [], 0
        async for chunk in self.chunks():
            size += len(chunk)
            if size > limit_bytes:
                raise UpstreamError(f"the worker's answer exceeds {limit_bytes} bytes")
            parts.append(chunk)
        return b"".join(parts)

    async def aclose(self) -> None:
        """Release the connection, or drop it if the body was not read to its end."""
        await self._response.aclose()


class HttpxTransport:
    """Like `Relay`: an `httpx.AsyncClient` for each worker's life, with httpx' default transport."""

    def __init__(self, limits: httpx.Limits) -> None:
        self._limits = limits
        self._clients: dict[WorkerId, tuple[str, httpx.AsyncClient]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def send(self, worker: WorkerId, address: str, request: Request, *, silence_s: float) -> HttpxExchange:
        """Send *request* and return after the head of the answer; see `Transport.send`."""
        client = self._client(worker, address)
        asked = client.build_request(
            request.method.decode(),
            request.target.decode(),
            headers=list(request.headers),
            content=request.body,
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
        )
        try:
            return HttpxExchange(await client.send(asked, stream=True))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UpstreamGone(f"no connection to the worker: {error!r}", sent=False) from error
        except httpx.TimeoutException as error:
            raise UpstreamTimeout(f"the worker was silent: {error!r}") from error
        except httpx.TransportError as error:
            raise UpstreamGone(f"the worker closed the connection: {error!r}", sent=True) from error

    def forget(self, worker: WorkerId) -> None:
        """Drop a worker's connections."""
        _, client = self._clients.pop(worker, ("", None))
        if client is not None:
            task = asyncio.get_running_loop().create_task(client.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Drop all connections."""
        for worker in list(self._clients):
            self.forget(worker)
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _client(self, worker: WorkerId, address: str) -> httpx.AsyncClient:
        known, client = self._clients.get(worker, ("", None))
        if client is None or known != address:
            self.forget(worker)
            client = _connected(parse_address(address), self._limits)
            self._clients[worker] = address, client
        return client


def _connected(place: Address, limits: httpx.Limits) -> httpx.AsyncClient:
    scheme = "https" if place.tls else "http"
    transport = httpx.AsyncHTTPTransport(uds=place.path if place.is_unix else None, limits=limits)
    return httpx.AsyncClient(transport=transport, base_url=f"{scheme}://{place.authority}{place.prefix}")


if __name__ == "__main__":
    chosen = LIMITS[sys.argv.pop(1)]
    if not hasattr(gateway.app, "HttpTransport"):
        sys.exit("the gateway's transport has another name now: this would measure the gateway itself")
    vars(gateway.app)["HttpTransport"] = lambda dial: HttpxTransport(chosen)  # the only part that is replaced
    app()
