"""Servers that many tests share: they start at the first use, and end with the last test of their scope.

A scope is a file, or a folder of tests with the same shared servers. One process runs a scope as a whole, so nothing
uses its servers afterwards. An idle gateway, its workers and its Redis would still wake up several times a second.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import pytest

T = TypeVar("T")
_known: list[SharedServers[Any]] = []


class SharedServers(ABC, Generic[T]):
    """The servers of one test process, by name. They may start again after `close`."""

    def __init__(self) -> None:
        self._running: dict[str, T] = {}
        self._failed: dict[str, str] = {}
        self._undo = contextlib.ExitStack()
        _known.append(self)

    def named(self, name: str) -> T:
        """Return the server *name*, and start it at the first use."""
        if name in self._failed:
            # One failed start is enough: each attempt may take a minute.
            pytest.fail(f"{name} did not start before: {self._failed[name]}")
        if name not in self._running:
            try:
                self._running[name] = self.started(name)
            except Exception as error:
                self._failed[name] = str(error)
                raise
        return self._running[name]

    @abstractmethod
    def started(self, name: str) -> T:
        """Start the server *name*. Its cleanup goes into ``_undo``."""

    def close(self) -> None:
        """End all servers."""
        self._running.clear()
        self._undo.close()


def end_of_scope() -> None:
    """End the servers of all kinds."""
    for one in _known:
        one.close()
