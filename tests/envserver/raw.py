"""A raw HTTP client over sockets: it shows the bytes that were sent and received."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tests.deadlines import HANG_S


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[tuple[str, str]]:
        """The events of a stream without comments. Strict: at most one space is removed from a data line."""
        return list(events(self.body))

    @property
    def result(self) -> Any:
        """The call's result, joined from the ``chunk`` and ``end`` events."""
        found = self.events
        assert found[-1][0] == "end", found[-1]
        return json.loads("".join(data for name, data in found if name in ("chunk", "end")))


def events(body: bytes) -> list[tuple[str, str]]:
    found = []
    for block in body.decode().split("\r\n\r\n"):
        lines = [line for line in block.split("\r\n") if line and not line.startswith(":")]
        if not lines:
            continue
        name = next(line[len("event: ") :] for line in lines if line.startswith("event: "))
        data = [line[len("data:") :].removeprefix(" ") for line in lines if line.startswith("data:")]
        found.append((name, "\n".join(data)))
    return found


class Wire:
    """One keep-alive connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, address: str) -> "Wire":
        """Connect to ``host:port`` or to the path of a Unix socket."""
        if address.startswith("/"):
            return cls(*await asyncio.open_unix_connection(address, limit=2**24))
        host, port = address.rsplit(":", 1)
        return cls(*await asyncio.open_connection(host, int(port), limit=2**24))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def ask(
        self,
        method: str,
        path: str,
        *,
        sid: str | None = None,
        body: object = None,
        raw: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request and read its whole answer."""
        self.send(request(method, path, sid=sid, body=body, raw=raw, headers=headers))
        return await self.read(has_body=method != "HEAD")

    async def read(self, *, has_body: bool = True) -> Answer:
        async with asyncio.timeout(HANG_S):
            status, headers = await self.head()
            return await self.rest(status, headers) if has_body else Answer(status, headers, b"")

    async def rest(self, status: int, headers: dict[str, str]) -> Answer:
        """Read the body of an answer whose head was read, and the trailers after the body."""
        async with asyncio.timeout(HANG_S):
            if "content-length" in headers:
                return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            if headers.get("transfer-encoding") != "chunked":
                return Answer(status, headers, await self.reader.read())
            chunks = []
            while chunk := await self._piece():
                chunks.append(chunk)
            while line := (await self.reader.readline()).decode("latin-1").rstrip("\r\n"):  # trailers, then the end
                name, value = line.split(": ", 1)
                headers[name.lower()] = value
            return Answer(status, headers, b"".join(chunks), chunks)

    async def head(self) -> tuple[int, dict[str, str]]:
        async with asyncio.timeout(HANG_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        pairs = [line.split(": ", 1) for line in lines]
        assert len({name.lower() for name, _ in pairs}) == len(pairs), "a header came twice"
        return int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}

    async def chunk(self) -> bytes | None:
        """Read one chunk of a chunked body; return None at its end, which has no trailers."""
        if data := await self._piece():
            return data
        async with asyncio.timeout(HANG_S):
            assert await self.reader.readexactly(2) == b"\r\n"
        return None

    async def _piece(self) -> bytes:
        async with asyncio.timeout(HANG_S):
            size = int(await self.reader.readline(), 16)
            if not size:
                return b""
            data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def is_closed(self) -> bool:
        """Wait until the server closes the connection; return False if bytes arrive instead."""
        async with asyncio.timeout(HANG_S):
            return await self.reader.read(1) == b""

    async def close(self) -> None:
        """Close the connection."""
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


def request(
    method: str,
    path: str,
    *,
    sid: str | None = None,
    body: object = None,
    raw: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """Return the bytes of a request; *body* is sent as JSON, *raw* unchanged."""
    content = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    lines = {"Host": "localhost"}
    if sid is not None:
        lines["X-Session-ID"] = sid
    if body is not None or raw is not None:
        lines["Content-Type"] = "application/json"
    if method == "POST":
        lines["Content-Length"] = str(len(content))
    lines |= headers or {}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + content
