"""A command's input and output in bounded memory: what is beyond the bound is read and dropped."""

import asyncio
import os

_CHUNK_BYTES = 64 * 1024
_LAST_BYTES = 1024 * 1024
"""Read after the command has ended: the largest pipe that fs.pipe-max-size allows; later bytes are its children's."""


class Output:
    """Reads the pipe *fd*, which it owns, and keeps its first *most_bytes*."""

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
        """Read once; the number of bytes, 0 when there are none now."""
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
        """Take what is in the pipe now and close it: a background child may hold the other end for ever."""
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
    """Writes *data* into the pipe *fd*, which it owns, as fast as it is read, and closes it."""

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
        except OSError:  # nobody reads it
            self.close()
            return
        if not self._rest:
            self.close()

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
