"""The logs of the servers that tests start. A failed test shows what they wrote since it began.

Servers outlive tests, and their folders may be removed before a failure is reported. So each log file stays open, and a
test's part begins where the file ended when the test began.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHOWN_BYTES = 8_000
"""Length of the part of one log that a failed test shows: its end, because a failure is reported soon after it."""


ANSWER_S = 5.0
"""Seconds that a server has to answer for the report of a failed test. It may be what failed."""


@dataclass
class _Log:
    name: str
    fd: int
    """Descriptor of the open file. It stays readable after the file is deleted."""
    began_at: int = 0
    """Position in the file at which the current test began."""


_logs: dict[Path, _Log] = {}
_readers: dict[str, Callable[[], str]] = {}


def follow(path: Path) -> None:
    """Show what is written to the existing file *path* with each test that fails from now on."""
    if path in _logs and not _is_deleted(_logs[path]):
        return
    if path in _logs:
        os.close(_logs[path].fd)
    _logs[path] = _Log("/".join(path.parts[-2:]), os.open(path, os.O_RDONLY))


def ask(name: str, reader: Callable[[], str]) -> None:
    """Show what *reader* returns with each test that fails until `forget`, such as the logs of a gateway's workers."""
    _readers[name] = reader


def forget(name: str) -> None:
    """Do not ask the reader *name* any more."""
    _readers.pop(name, None)


def begin_test() -> None:
    """Exclude what was written before, and close the files that were deleted."""
    for path, log in list(_logs.items()):
        if _is_deleted(log):
            os.close(log.fd)
            del _logs[path]
        else:
            log.began_at = os.fstat(log.fd).st_size


def of_test() -> list[tuple[str, str]]:
    """Return the name and the text of each log to which something was written since the current test began."""
    found = [(log.name, _read(log)) for log in _logs.values()]
    return [(name, text) for name, text in [*found, *((name, _asked(name)) for name in _readers)] if text]


def _read(log: _Log) -> str:
    size = os.fstat(log.fd).st_size
    begin = max(log.began_at, size - SHOWN_BYTES)
    return os.pread(log.fd, size - begin, begin).decode(errors="replace")


def _asked(name: str) -> str:
    try:
        return _readers[name]()[-SHOWN_BYTES:]
    except Exception as error:  # noqa: BLE001  # the server may be what failed, and its failure must not hide the test's
        return f"no log: {error!r}"


def _is_deleted(log: _Log) -> bool:
    return os.fstat(log.fd).st_nlink == 0
