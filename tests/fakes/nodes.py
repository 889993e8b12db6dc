"""A cluster machine without an engine: it answers over TLS as ``gateway node`` does, or as the test directs.

It reports itself, sends and loads images, and relays connections to Unix sockets. It echoes every other request in
place of an engine gate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from gateway.backends.swarm.nodes import Nodes
from gateway.core.placement import VOUCHER_HEADER
from gateway.node.tls import NODE_NAME, client_context, server_context
from tests.deadlines import HANG_S
from tests.fakes.certificates import Files
from tests.fakes.ports import reserved_port
from tests.fakes.raw_http import Connection, Request

HOST = "127.0.0.1"
EVERY_S = 0.05
"""Seconds between two queries of a test's directory."""


def image_id(content: bytes) -> str:
    return f"sha256:{sha256(content).hexdigest()}"


class FakeNode:
    """A node that serves while the context is open."""

    def __init__(self, files: Files, *, id: str = "n1", workers_dir: Path | None = None) -> None:
        """Make a node. *workers_dir* has the folders of its workers' sockets."""
        self.id = id
        self.port = reserved_port(count=2)
        self.report: dict[str, Any] = {
            "id": id,
            "name": f"machine-{id}",
            "cpus": 8.0,
            "memory_bytes": 16 * 2**30,
            "available_bytes": 12 * 2**30,
            "max_containers": 100,
            "containers": 0,
            "is_draining": False,
            "workers": {},
        }
        self.content: dict[str, bytes] = {}
        """Contents of the node's images, by reference."""
        self.built_at: dict[str, float] = {}
        self.registry: dict[str, bytes] = {}
        """Contents of the images that the node can pull, by reference."""
        self.hangs = False
        """True while the node accepts connections and does not answer."""
        self.refusal = ""
        """Reason why the node relays no connection to its workers. Empty: it relays."""
        self.requests: list[Request] = []
        self.lines: list[bytes] = []
        """First lines that the relay received."""
        self.may_load = asyncio.Event()
        """While this event is cleared, the node does not load an image that it receives."""
        self.may_load.set()
        self._workers_dir = workers_dir
        self._files = files
        self._servers: list[asyncio.Server] = []
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def images(self) -> dict[str, str]:
        """Image ids by reference."""
        return {reference: image_id(content) for reference, content in self.content.items()}

    async def start(self) -> None:
        """Listen at `port` and the next one, also after `aclose`."""
        tls = server_context(self._files.ca, self._files.cert, self._files.key)
        listeners = [socket.create_server((HOST, self.port + number), backlog=128) for number in range(2)]
        self._servers = [
            await self._serving(listener, script, tls)
            for listener, script in zip(listeners, (self._gate, self._relay), strict=True)
        ]

    async def aclose(self) -> None:
        """Stop as a killed process does."""
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            self._tasks[task].transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> FakeNode:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _serving(
        self,
        listener: socket.socket,
        script: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
        tls: ssl.SSLContext,
    ) -> asyncio.Server:
        async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks[task] = writer
            try:
                with contextlib.suppress(ConnectionError, EOFError, ssl.SSLError):
                    await script(reader, writer)
            except asyncio.CancelledError:
                pass  # from `aclose`: asyncio would log the cancelled task of a server
            finally:
                del self._tasks[task]
                writer.close()

        return await asyncio.start_server(run, sock=listener, ssl=tls)

    # -- the gate's port

    async def _gate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        while True:
            request = await self._request(connection)
            self.requests.append(request)
            if self.hangs:
                await connection.left()
                return
            status, body = await self._answer(request)
            more = f"{VOUCHER_HEADER}: voucher of {image_id(body)}\r\n" if request.method == "GET" else ""
            await connection.answer(body, status=status, more=more)

    async def _request(self, connection: Connection) -> Request:
        request = await connection.request()
        if request.headers.get("transfer-encoding") != "chunked":
            return request
        body = bytearray()
        while size := int(await connection.reader.readuntil(b"\r\n"), 16):
            body += await connection.reader.readexactly(size)
            await connection.reader.readexactly(2)
        await connection.reader.readexactly(2)
        return Request(request.method, request.target, request.headers, bytes(body))

    async def _answer(self, request: Request) -> tuple[int, bytes]:
        parts = urlsplit(request.target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        path = unquote(parts.path)
        if path == "/env-gateway/node":
            told = {**self.report, "images": self.images, "built_at": self.built_at}
            return 200, json.dumps(told).encode()
        if path == "/env-gateway/node/draining":
            self.report["is_draining"] = json.loads(request.body)
            return 200, b"{}"
        if path.startswith("/env-gateway/images/"):
            return await self._image(request, path.removeprefix("/env-gateway/images/"), query)
        return 200, f"{request.method} {request.target}".encode()

    async def _image(self, request: Request, reference: str, query: dict[str, str]) -> tuple[int, bytes]:
        if request.method != "POST" and "@" in reference:
            return 403, b"no tag"
        if request.method == "GET":
            return (200, self.content[reference]) if reference in self.content else (404, b"no such image")
        if request.method == "PUT":
            await self.may_load.wait()
            if query["id"] != image_id(request.body):
                return 400, b"another image"
            if request.headers.get(VOUCHER_HEADER) != f"voucher of {image_id(request.body)}":
                return 403, b"no node vouches for it"
            self.content[reference] = request.body
        else:
            reference = reference.removesuffix("/pull")
            if reference not in self.registry:
                return 502, b"the registry has none"
            self.content[reference] = self.registry[reference]
        self.built_at[reference] = 1.0
        return 200, json.dumps({"id": self.images[reference]}).encode()

    # -- the relay's port

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readuntil(b"\n")
        self.lines.append(line)
        if self.hangs:
            await reader.read()
            return
        if self.refusal:
            writer.write(f"-{self.refusal}\n".encode())
            await writer.drain()
            return
        worker, _, name = line.decode().strip().removeprefix("EG1 ").partition("/")
        assert self._workers_dir is not None
        try:
            far_reader, far_writer = await asyncio.open_unix_connection(self._workers_dir / worker / name)
        except OSError as error:
            writer.write(f"-worker {worker} has no {name} here: {error.strerror}\n".encode())
            await writer.drain()
            return
        writer.write(b"+\n")
        try:
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        finally:
            far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def knowing(
    files: Files, *nodes: FakeNode, lost_s: float = HANG_S, unheard_s: float = 0.0
) -> AsyncIterator[Nodes]:
    """Yield a directory of *nodes* with the gateway's *files*.

    A node that answers late on a busy machine must not be lost, so only tests of a loss have a short *lost_s*. By
    default it also holds for unheard nodes.
    """
    tls = client_context(files.ca, files.cert, files.key)
    hosts = [(HOST, node.port) for node in nodes]
    directory = Nodes(hosts, tls=tls, tls_name=NODE_NAME, lost_s=lost_s, unheard_s=unheard_s, every_s=EVERY_S)
    try:
        await directory.settled()
        yield directory
    finally:
        await directory.aclose()
