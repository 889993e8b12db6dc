"""Finds the start and the end of a command's output in the bytes of a terminal.

A mark is a fresh random word that is typed in two halves, so neither an echo of the typed line nor the mark of an
earlier command can be mistaken for it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

KEPT_BYTES = 65_536
"""The kept bytes of one command's output; the rest is read and dropped, so that `yes` cannot grow the server."""

_TAIL_BYTES = 256
"""More bytes than a mark with its numbers has, because the last read may have split a mark."""


# One pattern for all marks: compiling a pattern takes longer than all other work here. The words of marks distinguish
# them. A command may have run `stty onlcr`. Only the one line end that the mark itself prints is cut from the output.
_PRINTED = re.compile(rb"\r?\n[0-9a-f]{24}:(\d+):(\d+):\r*\n")


TYPED = re.compile(r"\\?command printf '\\?n%s%s:%d:%d:\\?n' [0-9a-f]{12} [0-9a-f]{12} \$\? \$\$\n?")
"""A typed mark that a program read as input and displayed, with backslashes or, as by bash's `read`, without them."""


class Mark:
    """A line that makes the shell print the last status and its own process id."""

    def __init__(self) -> None:
        first, second = secrets.token_hex(6), secrets.token_hex(6)
        self.line = rf"\command printf '\n%s%s:%d:%d:\n' {first} {second} $? $$"
        """The typed line. It is short, so that a nested shell that edits its line shows it on one row."""
        self.word = (first + second).encode()
        """The word that the mark prints before the numbers."""


@dataclass(frozen=True, slots=True)
class Found:
    """A printed mark."""

    status: int
    shell_pid: int


class Capture:
    """Reads a terminal's bytes until one of its marks arrives; keeps the first `KEPT_BYTES` before it."""

    def __init__(self, *marks: Mark) -> None:
        self.marks = list(marks)
        self.found: Found | None = None
        self.seen_bytes = 0
        self._kept = bytearray()
        self._tail = b""

    @property
    def output(self) -> bytes:
        """The bytes before the mark, or all bytes if no mark has arrived."""
        return bytes(self._kept[:KEPT_BYTES])

    def feed(self, data: bytes) -> Found | None:
        """Add *data* and return the mark, if found; bytes after a mark are dropped."""
        start = self.seen_bytes - len(self._tail)
        window = self._tail + data
        hits = [hit for mark in self.marks if (hit := _first_hit(mark, window))]
        end = min((hit.start() for hit in hits), default=len(window))
        if hits:
            last = max(hits, key=lambda hit: hit.start())
            self.found = Found(int(last[1]), int(last[2]))
            del self._kept[start + end :]
        self._kept += window[max(0, len(self._kept) - start) : end][: KEPT_BYTES + _TAIL_BYTES - len(self._kept)]
        self.seen_bytes += len(data)
        self._tail = window[-_TAIL_BYTES:]
        return self.found


def _first_hit(mark: Mark, window: bytes) -> re.Match[bytes] | None:
    """Return the first place in *window* where *mark* was printed."""
    at = window.find(mark.word)
    while at >= 0:
        hit = _PRINTED.match(window, at - 2 if window[at - 2 : at] == b"\r\n" else at - 1)
        if hit is not None:
            return hit
        at = window.find(mark.word, at + 1)
    return None
