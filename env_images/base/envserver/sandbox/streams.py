"""The input and output of a sandbox's programs: pipes with bounded memory, and pseudo terminals."""

import asyncio
import fcntl
import os
import signal
import struct
import termios
from collections.abc import Awaitable, Callable
from contextlib import suppress

_CHUNK_BYTES = 64 * 1024
_LAST_BYTES = 1024 * 1024
"""Bytes read after the command has ended: the largest pipe that fs.pipe-max-size allows. Later bytes come from
children."""
_TIOCSIG = 0x40045436
_WRITE_S = 10.0
"""Seconds that a write waits for a program that reads nothing while its terminal's buffer of 4 KiB is full."""

Send = Callable[[dict[str, object]], Awaitable[None]]


class Output:
    """Reads the pipe *fd*, which it owns, and keeps its first *most_bytes*. It reads and drops the rest."""

    def __init__(self, fd: int, most_bytes: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._most_bytes = most_bytes
        self._kept = bytearray()
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self.truncated = False
        self._loop.add_reader(fd, self._read)

    @property
    def kept(self) -> bytes:
        return bytes(self._kept)

    def _read(self) -> int:
        """Read once. Return the number of bytes, or 0 if none are available now."""
        try:
            data = os.read(self._fd, _CHUNK_BYTES)
        except BlockingIOError:
            return 0
        except OSError:
            data = b""
        if not data:
            self.close()
            return 0
        room = self._most_bytes - len(self._kept)
        self._kept += data[:room]
        self.truncated = self.truncated or len(data) > room
        return len(data)

    def finish(self) -> None:
        """Read the remaining bytes and close the pipe. A background child may hold the other end forever."""
        taken = 0
        while self._is_open and taken < _LAST_BYTES:
            count = self._read()
            if not count:
                break
            taken += count
        self.close()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._fd)
            os.close(self._fd)


class Input:
    """Writes *data* to the pipe *fd*, which it owns, at the reader's speed, then closes the pipe."""

    def __init__(self, fd: int, data: bytes) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = memoryview(data)
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        if data:
            self._loop.add_writer(fd, self._write)
        else:
            self.close()

    def _write(self) -> None:
        try:
            self._rest = self._rest[os.write(self._fd, self._rest[:_CHUNK_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # no process reads it
            self.close()
            return
        if not self._rest:
            self.close()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_writer(self._fd)
            os.close(self._fd)


class Terminal:
    """A program on a pseudo terminal of the sandbox. This object owns the master side *fd*.

    Closing it kills the program and all of its session. Nothing is buffered here: unread output stays in the kernel,
    and the program that writes it waits.
    """

    def __init__(self, fd: int, *, number: int, send: Send, forget: Callable[[], None]) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._number = number
        self._send = send
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._is_at_end = False
        self._closing = False

    @property
    def is_closed(self) -> bool:
        """Whether the stream has ended (no process has the terminal open) or ``close`` was called."""
        return self._is_at_end or self._closing

    async def write(self, data: bytes) -> None:
        """Type *data*. A closed terminal drops it.

        Raises:
            TimeoutError: The program read nothing for ten seconds.
        """
        rest = memoryview(data)
        while rest and not self.is_closed:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                await self._wait(self._loop.add_writer, self._loop.remove_writer, _WRITE_S)
            except OSError:
                self._is_at_end = True

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        """Return the available bytes, at most *max_bytes*, or ``b""`` at the end of the stream.

        Raises:
            TimeoutError: Nothing arrived within *timeout_s*.
        """
        deadline = self._loop.time() + timeout_s
        while not self.is_closed:
            try:
                data = os.read(self._fd, max_bytes)
            except BlockingIOError:
                await self._wait(self._loop.add_reader, self._loop.remove_reader, deadline - self._loop.time())
                continue
            except OSError:  # EIO: the last process that had it open is gone
                data = b""
            if data:
                return data
            self._is_at_end = True
        return b""

    async def _wait(self, add: Callable[..., object], remove: Callable[[int], object], timeout_s: float) -> None:
        ready = asyncio.Event()
        add(self._fd, ready.set)
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                await ready.wait()
        finally:
            if not self._closing:
                remove(self._fd)

    def silence(self) -> None:
        """Turn off echo and the CR before each newline (ECHO and ONLCR), without a process inside.

        Any process that has the terminal open may turn both on again.
        """
        if not self.is_closed:
            with suppress(termios.error):
                # Through the master, whose settings are the terminal's own.
                settings = termios.tcgetattr(self._fd)
                settings[1] &= ~termios.ONLCR
                settings[3] &= ~termios.ECHO
                termios.tcsetattr(self._fd, termios.TCSANOW, settings)

    async def interrupt(self) -> None:
        """Send SIGINT to the foreground group, if any, as Ctrl-C does, whatever the terminal's settings."""
        if not self.is_closed:
            with suppress(OSError):
                # The kernel signals the group, not a pid: this needs no permission over the group's users.
                fcntl.ioctl(self._fd, _TIOCSIG, signal.SIGINT)

    async def kill_foreground(self) -> None:
        """Kill the foreground group, if any. If it is the program itself, the terminal ends."""
        if (group := self._foreground()) is not None:
            await self._send({"op": "kill_group", "group": group})

    def _foreground(self) -> int | None:
        """Return the foreground group, or None.

        After the session leader's end the kernel returns 0, even if other processes hold the terminal open. A signal to
        group 0 would reach the caller's own group.
        """
        if self.is_closed:
            return None
        try:
            group = int(struct.unpack("i", fcntl.ioctl(self._fd, termios.TIOCGPGRP, b"\0" * 4))[0])
        except OSError:
            return None
        return group if group > 1 else None

    async def close(self) -> None:
        """Hang up and kill the program's session. Idempotent."""
        if self._closing:
            return
        try:
            # Before the hang-up: a shell that ends by the hang-up would leave processes that ignore it.
            await self._send({"op": "kill", "target": self._number})
        finally:
            self.abandon()
            self._forget()

    def abandon(self) -> None:
        """Close only this side, because the sandbox has ended."""
        if not self._closing:
            self._closing = True
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
