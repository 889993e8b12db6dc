"""The command ``gateway`` in the test process, because a separate process takes a second of CPU to import it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import pytest

from gateway.cli.main import main


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    returncode: int
    stdout: str
    stderr: str


class Command(Protocol):
    """Runs the command with *arguments*. Of all GATEWAY_… variables the command sees only *variables*."""

    def __call__(self, *arguments: str, **variables: str) -> Done: ...


@contextmanager
def in_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Yield a function that runs the command. At the end restore the loggers, which serving commands set up."""

    def run(*arguments: str, **variables: str) -> Done:
        with monkeypatch.context() as patched:
            for name in [name for name in os.environ if name.startswith("GATEWAY_")]:
                patched.delenv(name)
            for name, value in variables.items():
                patched.setenv(name, value)
            patched.setattr(sys, "argv", ["gateway", *arguments])
            with pytest.raises(SystemExit) as ended:
                main()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, *capfd.readouterr())

    root = logging.getLogger()
    handlers, loggers = root.handlers[:], [root, *map(logging.getLogger, root.manager.loggerDict)]
    levels = [(logger, logger.level) for logger in loggers]
    try:
        yield run
    finally:
        root.handlers[:] = handlers
        for logger, level in levels:
            logger.setLevel(level)
