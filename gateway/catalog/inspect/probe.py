"""Sends HTTP requests and opens WebSockets to a server of unknown protocol, at any address."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from gateway.catalog.inspect.findings import one_line
from gateway.core.addresses import parse_address
from gateway.core.errors import ConfigError

logger = logging.getLogger(__name__)

ASK_S = 30.0
"""Maximum seconds of wait for one answer. A server may build an environment to list its tools."""
TRIAL_S = 300.0
"""Maximum seconds of wait for a reset or a step. AReaL's examples wait as long; a browser's first reset took 44 s."""
PAUSE_S = 0.2
"""Seconds between two requests to a server that is not up yet."""
ANSWER_MAX_BYTES = 8 * 2**20
"""Maximum size in bytes of an answer."""
FRAME_MAX_BYTES = 128 * 2**20
"""Maximum size in bytes of a frame. OpenEnv's clients accept 100 MiB."""


class Unanswered(Exception):
    """The server did not answer, or its answer is not usable."""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """A server's answer to an HTTP request."""

    status: int
    body: bytes

    def json(self) -> Any:
        """Return the body as JSON; None if it is not JSON (or is ``null``)."""
        try:
            return json.loads(self.body)
        except ValueError:
            return None

    def object(self) -> Mapping[str, Any]:
        """Return the JSON object in the body of a 200; an empty object for any other answer."""
        value = self.json() if self.status == 200 else None
        return value if isinstance(value, dict) else {}

    def text(self) -> str:
        """Return the server's own message, as one short readable line."""
        value = self.json()
        said = value.get("detail") or value.get("error") if isinstance(value, dict) else None
        return one_line(said if isinstance(said, str) else self.body.decode("utf-8", "replace"))


class Probe:
    """A server at an address: ``unix:PATH``, ``tcp:HOST:PORT`` or a URL."""

    def __init__(self, address: str, *, client: httpx.AsyncClient) -> None:
        self._address = parse_address(address)
        self._client = client

    @property
    def url(self) -> str:
        """The server's URL."""
        return self._address.url("")

    async def get(self, path: str, *, headers: Mapping[str, str] | None = None) -> ProbeAnswer:
        """Send a GET request for *path*, without following redirects. Raises ``Unanswered``."""
        return await self._send("GET", path, headers=headers)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        headers: Mapping[str, str] | None = None,
        within_s: float = ASK_S,
    ) -> ProbeAnswer:
        """Send a POST request with *body* as JSON; the server must not be silent for *within_s*. Raises as `get`."""
        return await self._send("POST", path, json=body, headers=headers, timeout=within_s)

    async def socket(self, path: str) -> ProbeSocket:
        """Open a WebSocket, which the caller closes. Raises ``Unanswered``."""
        options: dict[str, Any] = {
            "compression": None,
            "max_size": FRAME_MAX_BYTES,
            "open_timeout": ASK_S,
            "close_timeout": 2.0,
        }
        url = self._address.url(path, scheme="ws")
        try:
            if self._address.is_unix:
                return ProbeSocket(await unix_connect(self._address.path, url, **options))
            return ProbeSocket(await connect(url, proxy=None, **options))
        except (OSError, TimeoutError, WebSocketException, EOFError) as error:
            raise Unanswered(f"no WebSocket at {path}: {_reason(error)}") from error

    async def _send(self, method: str, path: str, **content: Any) -> ProbeAnswer:
        body = b""
        try:
            async with self._client.stream(method, self._address.url(path), **content) as response:
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > ANSWER_MAX_BYTES:
                        raise Unanswered(f"{path} answers more than {ANSWER_MAX_BYTES // 2**20} MiB")
        except httpx.HTTPError as error:
            raise Unanswered(f"{method} {path}: {_reason(error)}") from error
        return ProbeAnswer(response.status_code, body)


class ProbeSocket:
    """A WebSocket with one JSON object per text frame, and one reply per message."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection

    async def ask(self, message: Mapping[str, Any], *, within_s: float = ASK_S) -> Mapping[str, Any]:
        """Send *message* and return its reply, which must come *within_s* seconds. Raises ``Unanswered``."""
        try:
            async with asyncio.timeout(within_s):
                # A server that refuses sends its reason without a request and closes. The reason is still readable.
                with suppress(ConnectionClosed):
                    await self._connection.send(json.dumps(message))
                reply = json.loads(await self._connection.recv())
        except TimeoutError:
            raise Unanswered(f"no reply to {message.get('type')!r} within {within_s:g} s") from None
        except (OSError, ValueError, WebSocketException) as error:
            raise Unanswered(f"no reply to {message.get('type')!r}: {_reason(error)}") from error
        if not isinstance(reply, dict):
            raise Unanswered(f"the reply to {message.get('type')!r} is not an object")
        return reply

    async def close(self) -> None:
        """Send the closing message, and close the connection."""
        with suppress(TimeoutError, OSError, WebSocketException):  # the server closed first
            async with asyncio.timeout(2.0):
                await self._connection.send('{"type":"close"}')
        await self._connection.close()


@asynccontextmanager
async def probing(address: str) -> AsyncIterator[Probe]:
    """Open a probe of the server at *address*, and close its connections at the end.

    Raises:
        ConfigError: *address* is not a valid address.
    """
    try:
        parsed = parse_address(address)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    # A Unix socket has no TLS, and reading the machine's certificates takes 28 ms.
    transport = httpx.AsyncHTTPTransport(uds=parsed.path or None, verify=not parsed.is_unix)
    # No keep-alive, because an image may close idle connections at any time, and speed does not matter here.
    headers = {"Connection": "close"}
    async with httpx.AsyncClient(transport=transport, headers=headers, timeout=ASK_S, trust_env=False) as client:
        yield Probe(address, client=client)


async def no_check() -> None:
    """Do nothing: there is no sign that a server will never be up."""


async def until_up(server: Probe, *, timeout_s: float, check: Callable[[], Awaitable[None]] = no_check) -> None:
    """Wait until *server* answers with any status except 502 to 504.

    The function calls *check* between attempts. An exception of *check* ends the wait.

    Raises:
        Unanswered: The server did not answer within *timeout_s*; the message has the last failure.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    last, is_told = "it was not asked", False
    while loop.time() < deadline:
        try:
            async with asyncio.timeout_at(deadline):
                answer = await server.get("/health")
        except TimeoutError:
            last = "GET /health: no answer"
        except Unanswered as error:
            last = str(error)
        else:
            # A proxy in front of the server answers 502 to 504 while the server starts.
            if answer.status not in (502, 503, 504):
                return
            last = f"GET /health: {answer.status} {answer.text()}"
        if not is_told:
            is_told = True
            logger.warning("server_awaited url=%s limit_s=%g error=%s", server.url, timeout_s, last)
        await check()
        await asyncio.sleep(PAUSE_S)
    raise Unanswered(f"no answer within {timeout_s:g} s ({last})")


def _reason(error: BaseException) -> str:
    return one_line(str(error)) or type(error).__name__
