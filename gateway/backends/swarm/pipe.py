"""Bytes both ways between two connections; who reads slowly slows the writer down, and nothing piles up here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final, cast

FLUSH_S: Final = 10.0
"""How long what was written may still take to leave once the other end is gone."""


class Pipe(asyncio.Protocol):
    """One end. What comes before it is joined with another is held: one piece, then it is not read any more."""

    def __init__(self, *, began: Callable[[], None] | None = None, ended: Callable[[Pipe], None] | None = None) -> None:
        """*began* is called when the first bytes came, *ended* when the connection is gone."""
        self._began = began
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self._other: Pipe | None = None
        self._held = bytearray()
        self.is_lost = False

    def join(self, other: Pipe) -> None:
        """Pass all that comes to *other*, and all that comes there to this end."""
        for one, peer in ((self, other), (other, self)):
            one._other = peer
        for one, peer in ((self, other), (other, self)):
            peer._write(one._held)
            one._held.clear()
            if one.is_lost:
                peer.close()
            else:
                one._read(True)

    def close(self) -> None:
        """Close when what was written has left, or after `FLUSH_S`."""
        if self._transport is not None and not self.is_lost:
            self._transport.close()
            asyncio.get_running_loop().call_later(FLUSH_S, self.abort)

    def abort(self) -> None:
        """Drop the connection."""
        if self._transport is not None and not self.is_lost:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        if self._other is not None:
            self._other._write(data)
            return
        self._held += data
        self._read(False)
        began, self._began = self._began, None
        if began is not None:
            began()

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other._read(False)

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other._read(True)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._other is not None:
            self._other.close()
        if self._ended is not None:
            self._ended(self)

    def _write(self, data: bytes | bytearray) -> None:
        if data and self._transport is not None and not self.is_lost:
            self._transport.write(bytes(data))

    def _read(self, wanted: bool) -> None:
        if self._transport is None or self.is_lost or self._transport.is_closing():
            return
        with suppress(RuntimeError):  # it is as wanted, or closes just now
            if wanted:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
