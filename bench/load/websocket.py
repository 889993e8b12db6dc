"""The parts of WebSocket that a load generator needs: one text frame out, one in.

Frames are masked with zeros. This is allowed and leaves the bytes unchanged. The client offers no compression.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from typing import IO, Any, cast

from bench.load.episodes import WrongAnswer
from bench.load.http1 import CONNECT_S, Address, OneAtATime, ProtocolError

_TEXT, _CLOSE, _PING = 0x81, 0x88, 0x89
_FIN = 0x80
_PONG_HEAD = b"\x8a\x80\0\0\0\0"
_MASKED = 0x80
STEP = b'{"type":"step","data":{"op":"inc"}}'


def frame(payload: bytes) -> bytes:
    """Return one text frame of a client."""
    size = len(payload)
    if size < 126:
        head = bytes((_TEXT, _MASKED | size))
    elif size < 1 << 16:
        head = bytes((_TEXT, _MASKED | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((_TEXT, _MASKED | 127)) + size.to_bytes(8, "big")
    return head + b"\0\0\0\0" + payload


class Socket(OneAtATime[bytes]):
    """One open socket. `connect_socket` makes it. A request is a frame or the upgrade, and its answer a payload."""

    def __init__(self) -> None:
        super().__init__()
        self._buffer = bytearray()
        self._is_open = False

    def data_received(self, data: bytes) -> None:
        """Complete the waiting request with a whole frame or the head of the upgrade."""
        self._buffer += data
        if not self._is_open:
            self._read_head()
        while self._is_open and self._read_frame():
            pass

    def _read_head(self) -> None:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        del self._buffer[: end + 4]
        if not head.startswith(b"HTTP/1.1 101"):
            self._fail(ProtocolError(f"no upgrade: {head[:200]!r}"))
            return
        self._is_open = True
        self._answer(head)

    def _read_frame(self) -> bool:
        """Take one frame from the buffer. Return False if the frame is incomplete."""
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        size, start = buffer[1], 2
        if size >= 126:
            start = 4 if size == 126 else 10
            if len(buffer) < start:
                return False
            size = int.from_bytes(buffer[2:start], "big")
        if len(buffer) < start + size:
            return False
        kind, payload = buffer[0], bytes(buffer[start : start + size])
        del buffer[: start + size]
        if kind == _TEXT:
            self._answer(payload)
        elif kind == _PING and not payload:
            self._transport.write(_PONG_HEAD)
        elif kind == _PING:
            self._transport.write(bytes((0x8A, _MASKED | size)) + b"\0\0\0\0" + payload)
        else:
            said = f"the server closed the socket: {payload!r}" if kind == _CLOSE else f"a frame of kind {kind:#x}"
            self._fail(ProtocolError(said))
        return True


class Player:
    """An episode of the counting environment on one socket."""

    def __init__(self, socket: Socket) -> None:
        self.socket = socket
        self._value = 0
        self._step = frame(STEP)

    async def reset(self, **data: Any) -> dict[str, Any]:
        """Begin an episode, and return its first observation.

        Raises:
            WrongAnswer, OSError, ProtocolError: The reset failed, as in `step`.
        """
        request = json.dumps({"type": "reset", "data": data}).encode()
        reply = json.loads(await self.socket.request(frame(request)))
        if reply["type"] != "observation" or reply["data"]["done"]:
            raise WrongAnswer(f"reset: {reply!r}"[:200])
        self._value = 0
        observation: dict[str, Any] = reply["data"]["observation"]
        return observation

    async def step(self, _: int = 0) -> None:
        """Increment the counter, and check the new value."""
        answer = await self.socket.request(self._step)
        self._value += 1
        match json.loads(answer):
            case {"type": "observation", "data": {"observation": {"value": value}, "reward": 0.0, "done": False}} if (
                value == self._value
            ):
                return
        raise WrongAnswer(f"step: {answer!r}"[:200])


def fetch_large(address: Address, path: str, characters: int, within_s: float) -> int:
    """Return the bytes of the reply to a step that returns a text of *characters*, without keeping them.

    It blocks, for a thread: a large reply on the event loop would delay the other callers that the loop serves.

    Raises:
        OSError: No server listens, it closed the connection, or it sent nothing for *within_s*.
    """
    call = {"type": "call_tool", "tool_name": "give", "arguments": {"characters": characters}}
    with (
        socket.create_connection(("127.0.0.1", address.port), timeout=within_s) as line,
        cast("IO[bytes]", line.makefile("rb", buffering=1 << 16)) as file,
    ):
        line.sendall(_upgrade(address, path))
        while file.readline() not in (b"\r\n", b""):
            pass
        size = 0
        for request in ({"type": "reset", "data": {}}, {"type": "step", "data": call}):
            line.sendall(frame(json.dumps(request).encode()))
            size = _skip_message(file)
        return size


def _skip_message(file: IO[bytes]) -> int:
    """Read a text message, which may have several frames, and return its size. Raises ``ConnectionError``."""
    size, is_last = 0, False
    while not is_last:
        head = file.read(2)
        if len(head) < 2 or head[0] & ~_FIN != (0 if size else _TEXT & ~_FIN):
            raise ConnectionError(f"no text frame, but {head!r}")
        is_last = bool(head[0] & _FIN)
        more = {126: 2, 127: 8}.get(head[1], 0)
        left = int.from_bytes(file.read(more), "big") if more else head[1]
        size += left
        while left and (data := file.read(min(left, 1 << 16))):
            left -= len(data)
    return size


async def connect_socket(address: Address, path: str) -> Socket:
    """Open a socket at *path*.

    Raises:
        OSError: No server listens, or it times out after ``CONNECT_S`` (a TimeoutError).
        ProtocolError: The server refuses the upgrade.
    """
    async with asyncio.timeout(CONNECT_S):
        loop = asyncio.get_running_loop()
        _, opened = await loop.create_connection(Socket, "127.0.0.1", address.port)
        try:
            await opened.request(_upgrade(address, path))
        except BaseException:
            opened.close()
            raise
    return opened


def _upgrade(address: Address, path: str) -> bytes:
    lines = (
        f"GET {path} HTTP/1.1",
        f"Host: 127.0.0.1:{address.port}",
        "Upgrade: websocket",
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}",
        "Sec-WebSocket-Version: 13",
    )
    return "\r\n".join([*lines, "", ""]).encode("ascii")
