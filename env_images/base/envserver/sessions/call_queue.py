"""Whose turn it is: the order of one session's calls. Plain decisions, no I/O.

A serial call runs while no other serial one does, a concurrent call beside them, an exclusive call quite alone; and
nothing overtakes a waiting exclusive call.
"""

from typing import Generic, Protocol, TypeVar

from envserver.tools import Mode


class HasMode(Protocol):
    """What is put in order."""

    mode: Mode


_Call = TypeVar("_Call", bound=HasMode)


class Turns(Generic[_Call]):
    """The waiting and the running calls of a session."""

    __slots__ = ("_running", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []

    def __repr__(self) -> str:
        return f"<Turns {len(self._running)} running, {len(self._waiting)} waiting>"

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def free(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return not self._running and not self._waiting

    def join(self, call: _Call) -> None:
        """Put *call* at the end of the queue."""
        self._waiting.append(call)

    def leave(self, call: _Call) -> None:
        """Take *call* out, whether it waits or runs."""
        (self._running if call in self._running else self._waiting).remove(call)

    def drain(self) -> list[_Call]:
        """Take out all that wait."""
        drained, self._waiting = self._waiting, []
        return drained

    def next(self) -> _Call | None:
        """Move the first call whose turn has come from the waiting to the running, and return it."""
        modes = {call.mode for call in self._running}
        if "exclusive" in modes:
            return None
        serial_ahead = "serial" in modes
        for i, call in enumerate(self._waiting):
            if call.mode == "exclusive":
                if i or self._running:
                    return None
            elif call.mode == "serial" and serial_ahead:
                continue
            self._running.append(self._waiting.pop(i))
            return call
        return None
