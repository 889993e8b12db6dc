"""Finds the start and the end of a command's output in the bytes of a terminal.

A mark is a fresh random word that is typed in two halves, so neither an echo of the typed line nor the mark of an
earlier command can be mistaken for it.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from operator import itemgetter

KEPT_BYTES = 65_536
"""The kept bytes of one command's output; the rest is read and dropped, so that `yes` cannot grow the server."""

_TAIL_BYTES = 256
"""More bytes than a mark with its numbers has, because the last read may have split a mark."""


# One pattern for all marks: compiling a pattern takes longer than all other work here. The words of marks distinguish
# them. A command may have run `stty onlcr`. Only the one line end that the mark itself prints is cut from the output.
_PRINTED = re.compile(rb"\r?\n[0-9a-f]{24}:(\d+):(\d+):\r*\n")


TYPED = re.compile(
    r"(?:\++ )?\\?command printf '?\\?n%s%s:%d:%d:\\?n'? [0-9a-f]{12} [0-9a-f]{12} (?:\$\? \$\$|\d+ \d+)\n?"
)
"""A typed mark that a program read as input and displayed, or that the shell printed because of ``set -x``.

It has its backslashes, or, as by bash's ``read``, lacks them. Some shells print it without quotes.
"""


class Mark:
    """A line that makes the shell print the last status and its own process id."""

    def __init__(self) -> None:
        first, second = secrets.token_hex(6), secrets.token_hex(6)
        self.line = rf"\command printf '\n%s%s:%d:%d:\n' {first} {second} $? $$"
        """The typed line. It is short, so that a nested shell that edits its line shows it on one row."""
        self.word = (first + second).encode()
        """The word that the mark prints before the numbers."""


class Nesting:
    """The words that a shell prints when it starts a nested shell, which then waits for a mark of its own."""

    def __init__(self) -> None:
        first, second = secrets.token_hex(6), secrets.token_hex(6)
        self.word = (first + second).encode()
        self.printed = re.compile(rb"\r?\n" + self.word + rb"\r*\n")
        # `su - jack` and `bash` read the terminal if their input is only the empty one of every command. With a command
        # of their own they do not.
        enter = (
            rf"_enter() {{ if [ /dev/stdin -ef /dev/null ]; then \command printf '\n%s%s\n' {first} {second}; "
            r'\command "$@" < /dev/tty; else \command "$@"; fi; }; '
        )
        own = {"su": "-c*|--c*|--s*", **dict.fromkeys(("bash", "sh", "dash"), "-c*|-[!-]*c*|[!-]*")}
        self.functions = enter + "".join(
            rf'{name}() {{ for _own in "$@" ""; do case $_own in {pattern}) break;; esac; done; '
            rf'if [ "$_own" ]; then \command {name} "$@"; else _enter {name} "$@"; fi; }}; '
            for name, pattern in own.items()
        )
        """The shell's functions in place of these commands, which print the words."""


@dataclass(frozen=True, slots=True)
class Found:
    """A printed mark."""

    mark: Mark
    status: int
    shell_pid: int


class Capture:
    """Reads a terminal's bytes until one of its marks arrives; keeps the first `KEPT_BYTES` before it."""

    def __init__(self, *marks: Mark, nesting: Nesting | None = None) -> None:
        self.marks = list(marks)
        self.found: Found | None = None
        self.is_nested = False
        """True if a nested shell has started since this was last set to False."""
        self._nesting = nesting
        self.seen_bytes = 0
        self._kept = bytearray()
        self._tail = b""

    @property
    def output(self) -> bytes:
        """The bytes before the mark, or all bytes if no mark has arrived."""
        kept = bytes(self._kept)
        return (kept if self._nesting is None else self._nesting.printed.sub(b"", kept))[:KEPT_BYTES]

    def feed(self, data: bytes) -> Found | None:
        """Add *data* and return the mark, if found; bytes after a mark are dropped."""
        start = self.seen_bytes - len(self._tail)
        window = self._tail + data
        if self._nesting is not None:
            # Once: the words stay in the window for some reads.
            self.is_nested |= any(hit.end() > len(self._tail) for hit in self._nesting.printed.finditer(window))
        hits = [(hit.start(), hit, mark) for mark in self.marks if (hit := _first_hit(mark, window))]
        end = min((at for at, *_ in hits), default=len(window))
        if hits:
            _, first, mark = min(hits, key=itemgetter(0))
            self.found = Found(mark, int(first[1]), int(first[2]))
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
