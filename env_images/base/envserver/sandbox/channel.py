"""The server's end of a connection to its spawner or a supervisor: concurrent requests, answers matched by number."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from envserver.sandbox import protocol as wire
from envserver.sandbox.values import SandboxError

Answer = tuple[dict[str, object], list[int]]
_PAUSE_S = 0.002
_PATIENCE_S = 10.0
"""Seconds that a send waits for a peer that reads nothing. A healthy peer always reads, so this one is stopped or
gone."""


class Expectation:
    """The answers to request *number*, in order. Its end closes files that no caller took."""

    def __init__(self, channel: "Channel", number: int) -> None:
        self.number = number
        self._channel = channel
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue()

    def __enter__(self) -> "Expectation":
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.forget(self.number)

    def put(self, answer: Answer | None) -> None:
        self._answers.put_nowait(answer)

    async def get(self) -> Answer:
        """Wait for the next answer.

        Raises:
            SandboxError: ``ended``: the peer is gone. Any other code is the peer's own.
        """
        return self._read(await self._answers.get())

    def _read(self, answer: Answer | None) -> Answer:
        if answer is None:
            self._answers.put_nowait(None)
            raise SandboxError("the sandbox has ended", code="ended")
        message, _ = answer
        if "error" in message:
            raise SandboxError(str(message["error"]), code=str(message.get("code", "refused")))
        return answer

    def now(self) -> Answer | None:
        """Return an available answer, else None. Raises as `get`."""
        return None if self._answers.empty() else self._read(self._answers.get_nowait())

    def discard(self) -> None:
        while not self._answers.empty():
            if (answer := self._answers.get_nowait()) is not None:
                _close_all(answer[1])


class Channel:
    """A connection to a peer. It owns the socket *sock*."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_event: Callable[[dict[str, object]], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._expected: dict[int, Expectation] = {}
        self._events: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.is_closed = False
        self._loop.add_reader(sock.fileno(), self._on_readable)

    def listen(self, on_event: Callable[[dict[str, object]], None], on_end: Callable[[], None]) -> None:
        """Send later messages that answer no request to *on_event*, and call *on_end* once at the end."""
        self._on_event, self._on_end = on_event, on_end

    def expect(self, number: int) -> Expectation:
        expectation = self._expected[number] = Expectation(self, number)
        if self.is_closed:
            expectation.put(None)
        return expectation

    def forget(self, number: int) -> None:
        """Stop waiting for *number*. Late answers to it are dropped, and their files are closed."""
        if (expectation := self._expected.pop(number, None)) is not None:
            expectation.discard()

    async def next_event(self) -> dict[str, object]:
        """Wait for an event, or ``{}`` at the end of the stream. Only for a channel without a listener."""
        return await self._events.get()

    async def send(self, message: wire.Message) -> None:
        """Send *message*.

        Raises:
            SandboxError: The peer is gone or reads nothing, or the message is too large.
        """
        deadline = self._loop.time() + _PATIENCE_S
        while not self.is_closed:
            try:
                wire.send(self._sock, message)
            except BlockingIOError:
                if self._loop.time() > deadline:
                    break
                await asyncio.sleep(_PAUSE_S)
            except ValueError as error:
                raise SandboxError(str(error)) from error
            except OSError:
                self._on_readable()  # the peer's last messages state the reason
                break
            else:
                return
        raise SandboxError("the sandbox has ended", code="ended")

    def post(self, message: wire.Message) -> None:
        """Send *message* if that is possible now. For cleanup during a cancellation."""
        if not self.is_closed:
            with suppress(OSError):
                wire.send(self._sock, message)

    def _on_readable(self) -> None:
        for _ in range(64):  # then the loop's other work gets a turn
            if self.is_closed:
                return
            try:
                received = wire.receive(self._sock)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # reported once if the peer left data unread. The peer's own last messages follow it
            except OSError:
                received = None
            if received is None:
                self.close()
                return
            self._dispatch(*received)

    def _dispatch(self, message: dict[str, object], files: list[int]) -> None:
        number = message.get("id")
        expectation = self._expected.get(number) if isinstance(number, int) else None
        if expectation is not None:
            expectation.put((message, files))
            return
        _close_all(files)
        if number is not None:
            return
        if self._on_event is not None:
            self._on_event(message)
        else:
            self._events.put_nowait(message)

    def close(self) -> None:
        """Hang up: the peer ends, and all waiting callers get an error. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        for expectation in self._expected.values():
            expectation.put(None)
        self._events.put_nowait({})
        if self._on_end is not None:
            self._on_end()


def _close_all(files: Sequence[int]) -> None:
    for fd in files:
        with suppress(OSError):
            os.close(fd)
