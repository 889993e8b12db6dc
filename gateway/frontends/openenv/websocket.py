"""Serves OpenEnv's WebSocket: an attachment on which episodes follow each other.

The socket outlives its episodes, also after a loss. A stock client whose socket closes opens another one by itself, and
would act in an environment that was not reset. So the reply to its next request reports a loss. The gateway never
sends a frame without a request.

`ClientSocket` reads a client's frames one by one, and cancels the work for a client that disconnects.

It reads a frame only when the server needs one, so the connection itself holds back a client that sends ahead. A
reader task runs only during long work, to notice that the client disconnects. An idle socket has one task.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from starlette.types import Message, Receive, Send

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, UpstreamKind
from gateway.core.ids import Owner
from gateway.core.json_text import parse
from gateway.frontends.openenv.episodes import Episodes, empty_state
from gateway.frontends.openenv.frames import (
    Code,
    FrameError,
    Json,
    ResetRequest,
    validated,
)
from gateway.frontends.openenv.mcp import RPC_BROKEN, Mcp
from gateway.frontends.openenv.passthrough import Passthrough
from gateway.frontends.openenv.replies import NO_EPISODE, error_frame, frame, framed
from gateway.frontends.openenv.session_ids import Attachment, Attachments
from gateway.frontends.session_ids import SessionIds
from gateway.server.websocket import PARTS

logger = logging.getLogger(__name__)
T = TypeVar("T")
_BROKEN: Final = FrameError(Code.EXECUTION_ERROR, "a fault of the gateway", status=500)


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Reset(_Closed):
    type: Literal["reset"]
    data: dict[str, Any] = Field(default_factory=dict)


class _Step(_Closed):
    type: Literal["step"]
    data: dict[str, Any]


class _State(_Closed):
    type: Literal["state"]


class _Close(_Closed):
    type: Literal["close"]


class _Mcp(_Closed):
    type: Literal["mcp"]
    data: dict[str, Any]


_MODELS: Final[dict[str, type[_Closed]]] = {
    "reset": _Reset,
    "step": _Step,
    "state": _State,
    "close": _Close,
    "mcp": _Mcp,
}
_WITH_DATA: Final = frozenset(("reset", "step", "mcp"))


def read_frame(text: str | None) -> tuple[str, Json]:
    """Return type and data of one request. The data is ``{}`` if the request has none.

    Args:
        text: Text of the frame. None: the frame is binary.

    Raises:
        FrameError: The frame is invalid. The message is a stock server's.
    """
    if text is None:
        raise FrameError(Code.SESSION_ERROR, "'text'", status=400, closes=True)
    try:
        frame = parse(text)
    except ValueError as error:
        raise FrameError(Code.INVALID_JSON, f"Invalid JSON: {error}", status=400) from None
    if not isinstance(frame, dict):
        kind = type(frame).__name__
        raise FrameError(Code.SESSION_ERROR, f"{kind!r} object has no attribute 'get'", status=400, closes=True)
    kind = frame.get("type", "")
    if not isinstance(kind, str) or kind not in _MODELS:
        raise FrameError(Code.UNKNOWN_TYPE, f"Unknown message type: {str(kind)[:200]}", status=400)
    if kind in _WITH_DATA and len(frame) == 2:  # the fast path of valid requests: pydantic explains invalid frames
        data = frame.get("data")
        if isinstance(data, dict):
            return kind, data
    read = validated(_MODELS[kind], frame, explains=False)
    return kind, getattr(read, "data", {})


class SocketServer:
    """Serves ``/ws`` and the WebSocket form of ``/mcp``."""

    def __init__(
        self,
        *,
        episodes: Episodes,
        relayed: Passthrough,
        mcp: Mcp,
        ids: SessionIds,
        attachments: Attachments,
        catalog: Catalog,
    ) -> None:
        """*catalog* supplies the current configuration of an environment, because sockets outlive its changes."""
        self._episodes = episodes
        self._relayed = relayed
        self._mcp = mcp
        self._ids = ids
        self._attachments = attachments
        self._catalog = catalog

    async def gym(self, peer: ClientSocket, owner: Owner, environment: Environment, wanted: str | None) -> None:
        """Serve ``/ws`` until one side closes. *wanted* is the session to attach to. None: a new one."""
        id = wanted if wanted is not None else self._ids.new(owner, environment.name)
        is_old = wanted is not None
        at = Attachment(owner=owner, environment=environment, id=id, outlives=is_old, has_begun=is_old)
        try:
            self._attach(at)
        except FrameError as refused:
            await self._end_with(peer, refused)
            return
        try:
            await self._serve(peer, at, self._answer, error_frame(_BROKEN))
        finally:
            await self._detach(at)

    async def rpc(self, peer: ClientSocket, owner: Owner, environment: Environment) -> None:
        """Serve ``/mcp``: JSON-RPC in every frame. The first tool call starts the socket's own episode."""
        id = self._ids.new(owner, environment.name)
        at = Attachment(owner=owner, environment=environment, id=id, begins=True)
        self._attach(at)
        try:
            await self._serve(peer, at, self._answer_rpc, RPC_BROKEN)
        finally:
            await self._detach(at)

    def _attach(self, at: Attachment) -> None:
        if not self._ids.holds(at.id, at.owner, at.environment.name):
            raise FrameError(Code.SESSION_ERROR, f"Unknown session_id: {at.id[:200]}", status=404, closes=True)
        if not self._attachments.add(at.owner, at.id):
            message = f"Session {at.id} already has an attached WebSocket"
            raise FrameError(Code.SESSION_ERROR, message, status=409, closes=True)

    async def _detach(self, at: Attachment) -> None:
        is_over = self._attachments.remove(at.owner, at.id)
        if is_over or (at.has_begun and not at.outlives):
            await self._episodes.end(at.owner, at.id)

    async def _serve(
        self,
        peer: ClientSocket,
        at: Attachment,
        answer: Callable[[Attachment, str | None], Awaitable[str | list[str] | None]],
        broken: str,
    ) -> None:
        try:
            while True:
                text = await peer.next()
                at.environment = self._catalog.known.get(at.environment.name, at.environment)
                try:
                    reply = await peer.attended(answer(at, text))
                except FrameError as refused:
                    if refused.closes:
                        await self._end_with(peer, refused)
                        return
                    reply = error_frame(refused)
                except Left:
                    return
                except Exception:  # the client waits for exactly one reply to each request
                    logger.exception("openenv_broken environment=%s", at.environment.name)
                    reply = broken
                if reply is None:
                    await peer.close()
                    return
                await peer.say(reply)
        except Left:
            return

    async def _end_with(self, peer: ClientSocket, refused: FrameError) -> None:
        try:
            await peer.say(error_frame(refused))
            await peer.close()
        except Left:
            return

    async def _answer(self, at: Attachment, text: str | None) -> str | list[str] | None:
        """Return the reply to one frame. None: the client requests a close."""
        kind, data = read_frame(text)
        if at.environment.wire is UpstreamKind.OPENENV:
            return await self._answer_relayed(at, kind, data, (text or "").encode())
        if kind == "step":
            return await framed("observation", await self._step(at, data))
        if kind == "reset":
            reset = validated(ResetRequest, data, "data")
            at.has_begun = True  # set before the reset: a partial episode then ends with the socket
            return frame("observation", await self._episodes.reset(at.owner, at.id, at.environment, reset))
        if kind == "state":
            state = await self._episodes.state(at.owner, at.id, at.environment) if at.has_begun else empty_state()
            return frame("state", state)
        if kind == "mcp":
            return frame("mcp", await self._mcp.answer_object(at.owner, at.environment, data, own=at))
        return None

    async def _answer_relayed(self, at: Attachment, kind: str, data: Json, message: bytes) -> str | list[str] | None:
        """Return the reply to one frame if the image speaks OpenEnv. None: the client requests a close."""
        if kind == "close":
            return None
        if kind == "reset":
            reset = validated(ResetRequest, data, "data")
            at.has_begun = True  # set before the reset: a partial episode then ends with the socket
            return (await self._relayed.reset(at.owner, at.id, at.environment, reset)).decode()
        if kind == "mcp" and not await self._is_for_image(at, data):
            return frame("mcp", await self._mcp.answer_object(at.owner, at.environment, data, own=at))
        if kind == "state":
            if not at.has_begun:
                return frame("state", empty_state())
            return (await self._relayed.state(at.owner, at.id, at.environment, message)).decode()
        if not at.has_begun:
            if kind == "step" and data.get("type") == "list_tools":
                return await framed("observation", await self._step(at, data))
            raise FrameError(Code.SESSION_ERROR, NO_EPISODE, status=409)
        return (await self._relayed.pass_on(at.owner, at.id, at.environment, message)).decode()

    async def _is_for_image(self, at: Attachment, data: Json) -> bool:
        """Return True if a JSON-RPC request is for the image. The gateway itself manages sessions and their ids."""
        if data.get("method") not in ("tools/list", "tools/call") or not at.has_begun:
            return False
        params = data.get("params")
        if isinstance(params, dict) and "session_id" in params:
            return False
        return await self._episodes.has(at.owner, at.id, at.environment)

    async def _step(self, at: Attachment, data: Json) -> Json:
        if not at.has_begun and data.get("type") != "list_tools":
            raise FrameError(Code.SESSION_ERROR, NO_EPISODE, status=409)
        return await self._episodes.step(at.owner, at.id, at.environment, data)

    async def _answer_rpc(self, at: Attachment, text: str | None) -> str:
        return await self._mcp.answer_text(at.owner, at.environment, text, own=at)


WATCHED_AFTER_S: Final = 0.2
"""Seconds after which a reader task watches the socket during work. Most steps end sooner and need no reader."""
AHEAD_MAX: Final = 8
AHEAD_CHARS: Final = 2**20
"""Limits for frames read ahead during work: `AHEAD_MAX` frames and `AHEAD_CHARS` characters. Beyond them the reader
stops, so a disconnect is noticed only after the work ends."""


class Left(Exception):
    """The client has disconnected, so it gets no reply."""


class ClientSocket:
    """The WebSocket of one client."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._ahead: deque[str | None] = deque()
        self._ahead_chars = 0
        self._watcher: asyncio.Task[None] | None = None
        self._has_left = False

    async def next(self) -> str | None:
        """Return the text of the next frame. None: the frame is binary.

        Raises:
            Left: The client has disconnected.
        """
        if self._ahead:
            text = self._ahead.popleft()
            self._ahead_chars -= len(text or "")
            return text
        if self._has_left:
            raise Left
        return self._read(await self._receive())

    async def accept(self) -> None:
        """Complete the handshake. Raises ``Left``."""
        await self._put({"type": "websocket.accept"})

    async def say(self, text: str | list[str]) -> None:
        """Send a message, given whole or in parts. Raises ``Left``."""
        parts = [text] if isinstance(text, str) else text
        if len(parts) > 1:
            await self._put({"type": "websocket.send", PARTS: parts})
        else:
            await self._put({"type": "websocket.send", "text": parts[0]})

    async def close(self, code: int = 1000) -> None:
        """Close the socket. Raises ``Left``."""
        await self._put({"type": "websocket.close", "code": code})

    async def attended(self, work: Awaitable[T]) -> T:
        """Return the result of *work*, which is cancelled if the client disconnects.

        Raises:
            Left: The client disconnected, and *work* has ended.
        """
        task = asyncio.current_task()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(WATCHED_AFTER_S, self._watch, task)
        try:
            done = await work
        except asyncio.CancelledError:
            if self._has_left and task.uncancel() <= 0:
                raise Left from None
            raise
        finally:
            timer.cancel()
            if self._watcher is not None:
                await self._stop_watching(self._watcher)
        if self._has_left:  # the work completed: a client library may have swallowed the cancellation
            task.uncancel()
            raise Left
        return done

    def _watch(self, task: asyncio.Task[object]) -> None:
        self._watcher = asyncio.ensure_future(self._read_ahead(task))

    async def _read_ahead(self, task: asyncio.Task[object]) -> None:
        while len(self._ahead) < AHEAD_MAX and self._ahead_chars < AHEAD_CHARS:
            try:
                text = self._read(await self._receive())
            except Left:
                task.cancel()
                return
            self._ahead.append(text)
            self._ahead_chars += len(text or "")

    async def _stop_watching(self, watcher: asyncio.Task[None]) -> None:
        # A cancelled read loses no message: the server's queue removes one in the same loop iteration that delivers it.
        self._watcher = None
        watcher.cancel()
        await asyncio.wait({watcher})

    def _read(self, message: Message) -> str | None:
        if message["type"] == "websocket.disconnect":
            self._has_left = True
            raise Left
        text: str | None = message.get("text")
        return text

    async def _put(self, message: Message) -> None:
        try:
            await self._send(message)
        except OSError:  # ASGI servers report a disconnected client this way
            self._has_left = True
            raise Left from None
