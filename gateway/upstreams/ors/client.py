"""Requests to an ORS server, and its answers; no token of ours ever goes to a standard one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gateway.core.errors import InvalidRequest, SessionNotFound, UpstreamError
from gateway.core.ids import WorkerId
from gateway.core.ports.transport import Exchange, Headers, Request, Transport
from gateway.core.session import Session
from gateway.upstreams.faults import author_fault

MAX_ANSWER_BYTES: Final = 128 * 2**20
"""OpenEnv's clients take observations of 100 MiB."""
ANSWER_S: Final = 60.0
"""For questions: a server may load its data for the first one, on the loop that should answer it."""
STARTING_PAUSE_S: Final = 0.5
"""Before a server is asked again that said that a session's setup still runs; it holds a request 25 s itself."""
UNKNOWN_SESSION: Final = b"Active environment not found"
"""How a server says that it does not know a session."""
JSON: Final = ((b"content-type", b"application/json"),)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def parsed(self, what: str) -> Any:
        """The body as JSON. Raises ``UpstreamError``."""
        try:
            return json.loads(self.body) if self.body else None
        except (ValueError, RecursionError) as error:
            raise UpstreamError(f"the worker's answer to {what} is not JSON") from error

    @property
    def detail(self) -> str:
        """Why the request failed, in the server's words."""
        try:
            answer = json.loads(self.body)
        except (ValueError, RecursionError):
            return f"the worker answered {self.status} and gave no reason"
        detail = answer.get("detail") if isinstance(answer, Mapping) else None
        if isinstance(detail, list):  # what is wrong with a body: entries of pydantic's form
            return "; ".join(_fault(entry) for entry in detail if isinstance(entry, Mapping))
        return detail if isinstance(detail, str) else f"the worker answered {self.status} and gave no reason"

    @property
    def is_starting(self) -> bool:
        """Whether it says that the session's setup runs: then nothing else did."""
        return self.status == 503 and self.headers.get(b"x-backend-state") == b"starting"

    @property
    def is_unknown_session(self) -> bool:
        """Whether it says that it does not know the session."""
        return self.status == 410 or (self.status == 404 and UNKNOWN_SESSION in self.body)


class Refused(UpstreamError):
    """A server answered something else than 200; nothing ran."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.detail)
        self.answer = answer


class OrsClient:
    """Sends requests to servers."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def send(
        self,
        worker: WorkerId,
        address: str,
        method: bytes,
        target: bytes,
        headers: Headers = (),
        body: bytes = b"",
        *,
        silence_s: float,
    ) -> Exchange:
        """Send a request and return when its head is there. Raises as ``Transport.send``."""
        return await self._transport.send(worker, address, Request(method, target, headers, body), silence_s=silence_s)

    async def ask(
        self,
        worker: WorkerId,
        address: str,
        target: bytes,
        *,
        body: Any = None,
        headers: Headers = (),
        silence_s: float = ANSWER_S,
        method: bytes = b"",
    ) -> Answer:
        """Send a request and read its answer; a GET, or with a *body*, which is JSON or bytes of it, a POST."""
        content = b""
        if isinstance(body, bytes):
            content, headers = body, (*headers, *JSON)
        elif body is not None:
            # Escaped: a trainer's text may hold what UTF-8 can't (a lone surrogate), and JSON can.
            content, headers = json.dumps(body, separators=(",", ":")).encode(), (*headers, *JSON)
        method = method or (b"GET" if body is None else b"POST")
        exchange = await self.send(worker, address, method, target, headers, content, silence_s=silence_s)
        return await read(exchange)

    async def settled(
        self,
        session: Session,
        target: bytes,
        *,
        body: Any = None,
        headers: Headers = (),
        silence_s: float,
    ) -> Answer:
        """Ask until the server no longer says that the session's setup runs; until the caller's deadline.

        Raises:
            SessionNotFound: the server does not know the session.
        """
        while True:
            answer = await self.ask(
                session.worker,
                session.address,
                target,
                body=body,
                headers=(*of(session), *headers),
                silence_s=silence_s,
            )
            if answer.is_unknown_session:
                raise SessionNotFound(session.name)
            if not answer.is_starting:
                return answer
            await asyncio.sleep(STARTING_PAUSE_S)


async def read(exchange: Exchange) -> Answer:
    """Read an answer whole, and close it."""
    try:
        return Answer(exchange.status, dict(exchange.headers), await exchange.read(MAX_ANSWER_BYTES))
    finally:
        await exchange.aclose()


def of(session: Session) -> Headers:
    """The header that names a session: its id here, which no two trainers share."""
    return ((b"x-session-id", session.id.encode()),)


def refusal(answer: Answer) -> Exception:
    """What an answer to a request means that the server did not take; 500 is what an author's exception becomes."""
    if answer.status == 500:
        return author_fault(answer.detail, "session")
    if 400 <= answer.status < 500 and answer.status not in (401, 403, 408, 429):
        return InvalidRequest(answer.detail)
    return UpstreamError(answer.detail)


def _fault(entry: Mapping[str, Any]) -> str:
    place = ".".join(map(str, entry.get("loc") or ()))
    return f"{place}: {entry.get('msg')}" if place else str(entry.get("msg"))
