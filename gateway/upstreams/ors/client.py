"""Requests to an ORS server, and its answers; no token of ours ever goes to a standard one.

Differences from a plain client: the answer to a call may be one JSON object (our own images) or an event stream
(standard servers, which do not look at ``Accept``); both say the same.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final
from urllib.parse import quote

from gateway.core.episode import TOOL_FAILED, Action, Block, ImageBlock, StepResult, TextBlock
from gateway.core.errors import (
    AuthorFault,
    InvalidRequest,
    SessionFailed,
    SessionNotFound,
    UnknownSplit,
    UpstreamError,
    author_fault,
)
from gateway.core.faults import Fault
from gateway.core.ids import WorkerId
from gateway.core.json_text import NotFinite, encode, parse
from gateway.core.ports.transport import Exchange, Headers, Request, Transport
from gateway.core.session import Session
from gateway.core.worker import Worker
from gateway.upstreams import sse

MAX_ANSWER_BYTES: Final = 128 * 2**20
"""OpenEnv's clients take observations of 100 MiB."""
ANSWER_S: Final = 60.0
"""For questions: a server may load its data for the first one, on the loop that should answer it."""
STARTING_PAUSE_S: Final = 0.5
"""Before a server is asked again that said that a session's setup still runs; it holds a request 25 s itself."""
UNKNOWN_SESSION: Final = b"Active environment not found"
"""How a server says that it does not know a session."""
JSON: Final = ((b"content-type", b"application/json"),)
FAILURES: Final = {kind.code: kind for kind in (AuthorFault, SessionFailed)}
"""By the reasons of results that are none, as the session has failed. Our own images give them."""


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
        detail = explained(answer.get("detail")) if isinstance(answer, Mapping) else None
        return f"the worker answered {self.status} and gave no reason" if detail is None else detail

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

    answer_s: ClassVar[float] = ANSWER_S

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
        silence_s: float | None = None,
        method: bytes = b"",
    ) -> Answer:
        """Send a request and read its answer; a GET, or with a *body*, which is JSON or bytes of it, a POST."""
        content = b""
        if isinstance(body, bytes):
            content, headers = body, (*headers, *JSON)
        elif body is not None:
            content, headers = encode(body).encode(), (*headers, *JSON)
        method = method or (b"GET" if body is None else b"POST")
        silence_s = self.answer_s if silence_s is None else silence_s
        exchange = await self.send(worker, address, method, target, headers, content, silence_s=silence_s)
        return await read(exchange)

    async def listed(
        self,
        worker: Worker,
        name: str,
        operation: str,
        body: Mapping[str, Any] | None = None,
        *,
        headers: Headers = (),
        silence_s: float | None = None,
    ) -> Any:
        """Ask for tools or tasks of the environment *name*, and return the answer's JSON.

        Raises:
            UnknownSplit: the server does not know the split that *body* names.
            UpstreamError: it fails.
        """
        place = worker.id, worker.address, path(name, operation)
        answer = await self.ask(*place, body=body, headers=headers, silence_s=silence_s)
        if answer.status == 400 and body is not None:
            raise UnknownSplit(answer.detail)
        if answer.status != 200:
            raise UpstreamError(f"the worker answered {answer.status} to /{operation}: {answer.detail}")
        return answer.parsed(f"/{operation}")

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


def path(name: str, operation: str) -> bytes:
    """Return where an operation of the environment *name* is."""
    return f"/{quote(name, safe='')}/{operation}".encode()


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


def explained(detail: object) -> str | None:
    """Return the ``detail`` of a refusal as text; None if it is neither text nor entries of pydantic's form."""
    if isinstance(detail, list):
        return "; ".join(_fault(entry) for entry in detail if isinstance(entry, Mapping))
    return detail if isinstance(detail, str) else None


def _fault(entry: Mapping[str, Any]) -> str:
    loc = entry.get("loc")
    place = ".".join(map(str, loc)) if isinstance(loc, list) else ""
    return f"{place}: {entry.get('msg')}" if place else str(entry.get("msg"))


# -- calls ----------------------------------------------------------------------------------------------------------


def written(action: Action) -> bytes:
    """The body of ``/call`` that means *action*."""
    body: dict[str, Any]
    if action.name is not None:
        body = {"name": action.name, "input": dict(action.arguments)}
    elif action.text is not None:
        body = {"text": action.text}
    else:
        body = {"action": dict(action.fields or {})}
    return encode(body).encode()


def read_result(
    answer: bytes, content_type: bytes, counted: bytes | None = None, faults: tuple[Fault, ...] = ()
) -> StepResult:
    """Read what ``/call`` answered with status 200.

    Args:
        counted: the number of the turn, where a header has it.
        faults: what headers tell of the author's code.

    Raises:
        AuthorFault: the author's code failed; a reward that is no finite number is never made into one.
        SessionFailed: the session broke in its worker.
        UpstreamError: it is not what ORS allows.
    """
    try:
        turn = None if counted is None else _turn(counted)
        if content_type.startswith(b"text/event-stream"):
            event = _last_event(answer)
            if event.name == "error":
                return StepResult(error=event.data, reason=TOOL_FAILED, turn=turn, faults=faults)
            if event.name != "end":
                raise UpstreamError("the worker's answer to the call broke off")
            answer = event.data.encode()
        return _result(parse(answer), turn, faults)
    except NotFinite as error:
        raise AuthorFault(f"the tool's result can't be used: {error}", faults=faults) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UpstreamError(f"the worker's answer to the call can't be read: {error}") from error


def read_blocks(value: Any) -> list[Block]:
    """Read a list of blocks, as prompts and results have them.

    Raises:
        UpstreamError: it is none.
    """
    if not isinstance(value, list):
        raise UpstreamError("the worker's blocks are no list")
    try:
        return list(map(_block, value))
    except (TypeError, KeyError, ValueError) as error:
        raise UpstreamError(f"the worker's blocks can't be read: {error}") from error


def _turn(counted: bytes) -> int:
    if not counted.isdigit() or (turn := int(counted)) < 1:
        raise ValueError(f"{counted[:64]!r} is no number of a turn")
    return turn


def _result(value: Mapping[str, Any], turn: int | None, faults: tuple[Fault, ...]) -> StepResult:
    if value["ok"] is not True:
        error, reason = str(value["error"]), str(value.get("reason") or TOOL_FAILED)
        if (failure := FAILURES.get(reason)) is not None:
            raise failure(error, faults=faults)
        return StepResult(error=error, reason=reason, turn=turn, faults=faults)
    output = value["output"]
    return StepResult(
        blocks=tuple(read_blocks(output["blocks"])),
        reward=_reward(output.get("reward")),
        finished=output.get("finished") is True,
        metadata=output.get("metadata"),
        data=output.get("data"),
        turn=turn,
        faults=faults,
    )


def _reward(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise NotFinite(f"{value!r} is no reward")
    if not math.isfinite(value):
        raise NotFinite(f"the reward {value} is no finite number")
    return float(value)


def _block(value: Mapping[str, Any]) -> Block:
    if value["type"] == "text":
        return TextBlock(str(value["text"]), value.get("detail"))
    if value["type"] == "image":
        return ImageBlock(str(value["data"]), str(value["mimeType"]), value.get("detail"))
    raise ValueError(f"{value['type']!r} is no type of block")


def _last_event(stream: bytes) -> sse.Event:
    """Return the last event; what a standard server cuts into ``chunk`` events is joined to its end."""
    chunks: list[str] = []
    last = sse.Event("", "")
    for event in sse.Reader(max_bytes=len(stream)).feed(stream + b"\n\n"):
        if event.name == "chunk":
            chunks.append(event.data)
        else:
            last = event
    return sse.Event("end", "".join(chunks) + last.data) if last.name == "end" else last
