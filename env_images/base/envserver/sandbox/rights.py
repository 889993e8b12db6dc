"""Gives up the server's capabilities, and keeps a launcher that starts spawners in its place.

A server that may change its user could become root of the machine: in a container without a user namespace, the files
in /proc/sys belong to that user, and a write to them needs no capability.
"""

import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from envserver.errors import ConfigError
from envserver.sandbox import boot, kernel
from envserver.sandbox import protocol as wire
from envserver.sandbox.values import FIRST_UID, UIDS, SandboxError

_ANSWER_S = 10.0
"""Seconds for an answer of the launcher, which takes milliseconds."""
_CAP_SETGID, _CAP_SETUID = 6, 7


def may_map_range() -> bool:
    """Return True if this process may map a range of uids: it has CAP_SETUID and CAP_SETGID here."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            held = int(line.split()[1], 16)
            return bool(held >> _CAP_SETGID & 1 and held >> _CAP_SETUID & 1)
    return False


class Spawned:
    """A spawner that the launcher has started, which also reaps it."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd

    def kill(self) -> None:
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until it has ended. Call it once."""
        select.select([self._pidfd], [], [])
        os.close(self._pidfd)


class Launcher:
    """The connection to the launcher. Several threads may use it."""

    def __init__(self) -> None:
        ours, theirs = wire.pair()
        with theirs:
            argv = boot.command("launcher", theirs.fileno(), FIRST_UID, UIDS)
            self._process = subprocess.Popen(
                argv, pass_fds=[theirs.fileno()], env={}, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True
            )
        ours.settimeout(_ANSWER_S)
        self._socket = ours
        self._lock = threading.Lock()

    def start(self, theirs: socket.socket) -> Spawned:
        """Start a spawner at the other end of *theirs*.

        Raises:
            SandboxError: The launcher is gone, or the machine has no room for a process.
        """
        answer, files = self._ask({"op": "start"}, (theirs.fileno(),))
        return Spawned(int(str(answer["pid"])), files[0])

    def map_users(self, pid: int) -> None:
        """Map the users of the spawner *pid*.

        Raises:
            SandboxError: The launcher is gone, or the kernel refuses the map.
        """
        self._ask({"op": "map", "pid": pid})

    def _ask(self, message: wire.Message, files: Sequence[int] = ()) -> tuple[dict[str, object], list[int]]:
        with self._lock:
            try:
                wire.send(self._socket, message, files)
                received = wire.receive(self._socket)
            except OSError:
                received = None
                self._socket.close()  # a late answer must not answer the next request
        if received is None:
            raise SandboxError("the launcher of sandboxes has ended: start the server again", code="unsupported")
        if "error" in received[0]:
            raise SandboxError(f"the launcher of sandboxes failed: {received[0]['error']}", code="unsupported")
        return received


_launcher: Launcher | None = None


def launcher() -> Launcher | None:
    """Return the launcher; None if this process has kept its rights or had none."""
    return _launcher


def give_up() -> None:
    """Give up all capabilities of this process for good. Call it before the first thread starts.

    Root keeps its rights, because the files of the machine belong to it anyway. A user without the right to map users
    has nothing to give up.

    Raises:
        ConfigError: Another thread runs, which would keep its capabilities, or the kernel refuses.
    """
    global _launcher
    if os.geteuid() == 0 or not may_map_range():
        return
    if len(os.listdir("/proc/self/task")) > 1:
        raise ConfigError("a thread runs before `serve` and would keep the right to become root: start it later")
    try:
        _launcher = Launcher()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        kernel.drop_capabilities()
    except OSError as error:
        raise ConfigError(f"the right to become root could not be given up: {error}") from error
    with suppress(OSError):  # dropping these needs another capability; without new privileges they give none
        for capability in (_CAP_SETGID, _CAP_SETUID):
            kernel.prctl(kernel.PR_CAPBSET_DROP, capability)
