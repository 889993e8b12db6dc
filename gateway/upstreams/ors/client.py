"""Sends requests to an ORS server and reads its responses. A standard server never receives a token of the gateway."""

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

MAX_ANSWER_BYTES: Final = 128 * 2**20
"""Largest response, in bytes. OpenEnv's clients accept observations of 100 MiB."""
ANSWER_S: Final = 60.0
"""Seconds that a server has to answer a query. It may load its data at the first query and block its event loop."""
STARTING_PAUSE_S: Final = 0.5
"""Seconds before a request is sent again to a server that is still setting up the session.

The server itself holds a request for 25 s.
"""
UNKNOWN_SESSION: Final = b"Active environment not found"
"""Text in the response of a server that does not know the session."""
JSON: Final = ((b"content-type", b"application/json"),)
FAILURES: Final = {kind.code: kind for kind in (AuthorFault, SessionFailed)}
"""Errors by the ``reason`` of a result that reports a failed session. The gateway's own images send these reasons."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete response."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def parsed(self, what: str) -> Any:
        """Return the body as JSON. Raises ``UpstreamError`` if it is not JSON. *what* names the request."""
        try:
            return json.loads(self.body) if self.body else None
        except (ValueError, RecursionError) as error:
            raise UpstreamError(f"the worker's answer to {what} is not JSON") from error

    @property
    def detail(self) -> str:
        """The reason for the failure, in the server's words."""
        try:
            answer = json.loads(self.body)
        except (ValueError, RecursionError):
            return f"the worker answered {self.status} and gave no reason"
        detail = explained(answer.get("detail")) if isinstance(answer, Mapping) else None
        return f"the worker answered {self.status} and gave no reason" if detail is None else detail

    @property
    def is_starting(self) -> bool:
        """Return True if the session's setup still runs. The request itself did not run."""
        return self.status == 503 and self.headers.get(b"x-backend-state") == b"starting"

    @property
    def is_unknown_session(self) -> bool:
        """Return True if the server does not know the session."""
        return self.status == 410 or (self.status == 404 and UNKNOWN_SESSION in self.body)


class Refused(UpstreamError):
    """A server answered with another status than 200. Nothing ran."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.detail)
        self.answer = answer


class OrsClient:
    """Sends requests to ORS servers."""

    answer_s: ClassVar[float] = ANSWER_S

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def of(self, session: Session) -> Headers:
        """Return the header that names a session to a standard server by its lease.

        Gateways that share such a server do not know each other, and their trainers may choose the same names. A lease
        is random, and no other opening has it.
        """
        return ((b"x-session-id", session.lease.encode()),)

    async def send(self, worker: WorkerId, address: str, request: Request, *, silence_s: float) -> Exchange:
        """Send a request and return when the head of the response has arrived. Raises as ``Transport.send``."""
        return await self._transport.send(worker, address, request, silence_s=silence_s)

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
        """Send a request and read its response.

        Args:
            body: A JSON value or encoded JSON. With a body, the default method is POST, else GET.
        """
        content = b""
        if isinstance(body, bytes):
            content, headers = body, (*headers, *JSON)
        elif body is not None:
            content, headers = encode(body).encode(), (*headers, *JSON)
        method = method or (b"GET" if body is None else b"POST")
        silence_s = self.answer_s if silence_s is None else silence_s
        exchange = await self.send(worker, address, Request(method, target, headers, content), silence_s=silence_s)
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
        """Request tools or tasks of the environment *name*, and return the response's JSON.

        Raises:
            UnknownSplit: The server does not know the split that *body* names.
            UpstreamError: The request failed.
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
        """Repeat a request until the session's setup is done. The caller has to set a deadline.

        Raises:
            SessionNotFound: The server does not know the session.
        """
        while True:
            answer = await self.ask(
                session.worker,
                session.address,
                target,
                body=body,
                headers=(*self.of(session), *headers),
                silence_s=silence_s,
            )
            if answer.is_unknown_session:
                raise SessionNotFound(session.name)
            if not answer.is_starting:
                return answer
            await asyncio.sleep(STARTING_PAUSE_S)


def path(name: str, operation: str) -> bytes:
    """Return the path of an operation of the environment *name*."""
    return f"/{quote(name, safe='')}/{operation}".encode()


async def read(exchange: Exchange) -> Answer:
    """Read the whole response, and close the exchange."""
    try:
        return Answer(exchange.status, dict(exchange.headers), await exchange.read(MAX_ANSWER_BYTES))
    finally:
        await exchange.aclose()


def refusal(answer: Answer) -> Exception:
    """Return the error for a refused request. A 500 is an exception of the environment author's code."""
    if answer.status == 500:
        return author_fault(answer.detail, "session")
    if 400 <= answer.status < 500 and answer.status not in (401, 403, 408, 429):
        return InvalidRequest(answer.detail)
    return UpstreamError(answer.detail)


def explained(detail: object) -> str | None:
    """Return the ``detail`` of a refusal as text, or None if it is neither text nor a list of pydantic's entries."""
    if isinstance(detail, list):
        return "; ".join(_fault(entry) for entry in detail if isinstance(entry, Mapping))
    return detail if isinstance(detail, str) else None


def _fault(entry: Mapping[str, Any]) -> str:
    loc = entry.get("loc")
    place = ".".join(map(str, loc)) if isinstance(loc, list) else ""
    return f"{place}: {entry.get('msg')}" if place else str(entry.get("msg"))


# -- calls ----------------------------------------------------------------------------------------------------------


def written(action: Action) -> bytes:
    """Return *action* as a body of ``/call``."""
    body: dict[str, Any]
    if action.name is not None:
        body = {"name": action.name, "input": dict(action.arguments)}
    elif action.text is not None:
        body = {"text": action.text}
    else:
        body = {"action": dict(action.fields or {})}
    return encode(body).encode()


def read_result(answer: bytes, counted: bytes | None = None, faults: tuple[Fault, ...] = ()) -> StepResult:
    """Read a response to ``/call`` with status 200, a JSON object.

    Args:
        counted: The number of the turn, if a header contains it.
        faults: Failures of the author's code, as headers report them.

    Raises:
        AuthorFault: The author's code failed, or the reward is not a finite number. No other number replaces it.
        SessionFailed: The session broke in its worker.
        UpstreamError: The response is not valid ORS.
    """
    try:
        turn = None if counted is None else _turn(counted)
        return _result(parse(answer), turn, faults)
    except NotFinite as error:
        raise AuthorFault(f"the tool's result can't be used: {error}", faults=faults) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UpstreamError(f"the worker's answer to the call can't be read: {error}") from error


def read_blocks(value: Any) -> list[Block]:
    """Read a list of blocks from a prompt or a result.

    Raises:
        UpstreamError: The value is not a list of blocks.
    """
    if not isinstance(value, list):
        raise UpstreamError("the worker's blocks are not a list")
    try:
        return list(map(_block, value))
    except (TypeError, KeyError, ValueError) as error:
        raise UpstreamError(f"the worker's blocks can't be read: {error}") from error


def _turn(counted: bytes) -> int:
    if not counted.isdigit() or (turn := int(counted)) < 1:
        raise ValueError(f"{counted[:64]!r} is not a number of a turn")
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
        raise NotFinite(f"{value!r} is not a reward")
    if not math.isfinite(value):
        raise NotFinite(f"the reward {value} is not a finite number")
    return float(value)


def _block(value: Mapping[str, Any]) -> Block:
    if value["type"] == "text":
        return TextBlock(str(value["text"]), value.get("detail"))
    if value["type"] == "image":
        return ImageBlock(str(value["data"]), str(value["mimeType"]), value.get("detail"))
    raise ValueError(f"{value['type']!r} is not a type of block")
