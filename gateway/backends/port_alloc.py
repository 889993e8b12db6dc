"""Local servers of somebody else's: a port for each, and an end together with the gateway."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Final

PLACEHOLDER: Final = "{port}"

_TIED: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the gateway ended before its worker began")
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(f"cannot run {sys.argv[2]}: {error.strerror}")
"""
"""``PR_SET_PDEATHSIG``: the kernel kills this process, and what it becomes, when the one that started it ends."""


def free_port(*, but: Collection[int] = ()) -> int:
    """A port of loopback on which nobody listens now, and none of *but*, whose servers may not listen yet.

    Somebody else may be quicker to take it: then the worker does not get ready, and the next one gets another.
    """
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in but:
            return port


def with_port(words: tuple[str, ...], port: int) -> tuple[str, ...]:
    """Replace each ``{port}`` in *words*."""
    return tuple(word.replace(PLACEHOLDER, str(port)) for word in words)


def is_program(program: str, folder: Path, path: str) -> bool:
    """Whether *program* can be run in *folder* with that ``PATH``."""
    if os.sep in program:
        return os.access(folder / program, os.X_OK)
    return shutil.which(program, path=path) is not None


def tied(command: tuple[str, ...], *, python: str) -> tuple[str, ...]:
    """Let *command*, which knows nothing of us, end when this process does, however that ends.

    Where the kernel has no word for it (it is Linux'), it stays when this process is killed.
    """
    if not sys.platform.startswith("linux"):
        return command
    return (python, "-I", "-S", "-c", _TIED, str(os.getpid()), *command)
