"""Raw protocol requests that no client can send: exact bodies, streams line by line, dropped connections."""

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from tests.deadlines import HANG_S

MAX_LINE_BYTES = 65_536
"""The most bytes in a line of a stream. Clients with older HTTP library releases fail above twice that size."""


@dataclass(frozen=True)
class Event:
    """One event of a stream."""

    name: str
    data: str


@dataclass(frozen=True)
class Outcome:
    """A call's stream, read to its end."""

    events: tuple[Event, ...]
    lines: tuple[str, ...]
    """The raw ``data:`` values, without the one leading space that the format allows."""

    @property
    def task_id(self) -> str:
        assert self.events[0].name == "task_id", self.events
        return self.events[0].data

    @property
    def error(self) -> str:
        """The text of the ``error`` event that ended the stream."""
        assert self.events[-1].name == "error", self.events
        return self.events[-1].data

    @property
    def result(self) -> Any:
        """The JSON value that the chunks form together."""
        names = [event.name for event in self.events]
        assert names == ["task_id", *["chunk"] * (len(names) - 2), "end"], names
        return json.loads("".join(event.data for event in self.events[1:]))

    @property
    def text(self) -> str:
        """The text of a result of one text block."""
        result = self.result
        assert result["ok"] is True, result
        (block,) = result["output"]["blocks"]
        return str(block["text"])


def parse(body: str) -> Outcome:
    """Read a whole stream strictly: every event ends with an empty line, every line has a colon."""
    events: list[Event] = []
    lines: list[str] = []
    name = ""
    data: list[str] = []
    *complete, rest = body.replace("\r\n", "\n").split("\n")
    assert rest == "", f"the stream ends within a line: {rest[-100:]!r}"
    for line in complete:
        if line == "":
            if name:
                events.append(Event(name, "\n".join(data)))
            name, data = "", []
            continue
        field, colon, value = line.partition(":")
        assert colon, f"a line without a colon: {line[:100]!r}"
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
            lines.append(value)
    assert not name, "the stream ends within an event"
    return Outcome(tuple(events), tuple(lines))


class Stream:
    """A stream that is still being received."""

    def __init__(self, pieces: AsyncIterator[str]) -> None:
        self._pieces = pieces
        self.text = ""

    async def read_until(self, mark: str) -> None:
        """Read until *mark*, an end of lines or events, has arrived."""
        while mark not in self.text:
            self.text += (await anext(self._pieces)).replace("\r\n", "\n")

    async def outcome(self) -> Outcome:
        """Read to the end."""
        async for piece in self._pieces:
            self.text += piece
        return parse(self.text)


@dataclass(frozen=True)
class RawEpisode:
    """An open session for raw requests."""

    http: httpx.AsyncClient
    sid: str
    environment: str

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Session-ID": self.sid}

    async def post(self, path: str, body: Any = None) -> httpx.Response:
        return await self.http.post(path, headers=self.headers, json=body)

    async def get(self, operation: str) -> httpx.Response:
        return await self.http.get(f"/{self.environment}/{operation}", headers=self.headers)

    async def ask(self, tool: str, input: Mapping[str, Any] | None = None, **more: Any) -> httpx.Response:
        """Call *tool* and return the whole response, whatever its status is."""
        body = {"name": tool, "input": dict(input or {})} | more
        headers = self.headers | {"Accept": "text/event-stream"}
        return await self.http.post(f"/{self.environment}/call", headers=headers, json=body)

    async def call(self, tool: str, input: Mapping[str, Any] | None = None, **more: Any) -> Outcome:
        """Call *tool* and return the outcome of its stream."""
        response = await self.ask(tool, input, **more)
        assert response.status_code == 200, response.text
        return parse(response.text)

    @asynccontextmanager
    async def streaming(self, tool: str, input: Mapping[str, Any]) -> AsyncIterator["Stream"]:
        """Call *tool* and yield its stream once its ``task_id`` has arrived. An early exit disconnects."""
        body = {"name": tool, "input": dict(input)}
        headers = self.headers | {"Accept": "text/event-stream"}
        async with self.http.stream("POST", f"/{self.environment}/call", headers=headers, json=body) as response:
            assert response.status_code == 200
            stream = Stream(response.aiter_text())
            await stream.read_until("\n\n")
            yield stream

    async def drop_after_task_id(self, tool: str, input: Mapping[str, Any]) -> str:
        """Call *tool*, read its ``task_id`` and disconnect."""
        async with self.streaming(tool, input) as stream:
            return parse(stream.text).task_id

    async def delete(self) -> httpx.Response:
        return await self.post("/delete")


def new_sid() -> str:
    """Return an unused session id."""
    return str(uuid.uuid4())


async def create(
    http: httpx.AsyncClient, sid: str, *, headers: Mapping[str, str] | None = None, **body: Any
) -> httpx.Response:
    """POST ``/create``."""
    return await http.post("/create", headers={"X-Session-ID": sid, **(headers or {})}, json=body)


@asynccontextmanager
async def episode(
    http: httpx.AsyncClient,
    task: Mapping[str, Any] | None = None,
    *,
    environment: str = "probe",
    sid: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[RawEpisode]:
    """Open a session by a raw request, and delete it at the end in any case."""
    sid = sid or new_sid()
    opened = RawEpisode(http, sid, environment)
    try:
        response = await create(http, sid, headers=headers, env_name=environment, task_spec=dict(task or {}))
        assert response.status_code == 200, response.text
        assert response.json() == {"sid": sid}
        yield opened
    finally:
        await opened.delete()


async def send_bytes(host: str, port: int, request: bytes) -> bytes:
    """Send *request* unchanged on its own connection, and read until the server closes it or 10 s are over."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        answer = b""
        # A server that refuses a request early may close the connection before it has read the whole request.
        with contextlib.suppress(ConnectionError):
            writer.write(request)
            async with asyncio.timeout(HANG_S):
                await writer.drain()
                while piece := await reader.read(65_536):
                    answer += piece
        return answer
    finally:
        writer.close()
