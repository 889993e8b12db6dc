"""The values of the sandbox package: boxes, limits, results of commands, and errors. They have no behaviour."""

from dataclasses import dataclass
from pathlib import Path

from envserver.errors import EnvServerError

UIDS = 65_536
"""Number of uids of a full Debian, where ``nobody`` is 65534."""
FIRST_UID = 100_000
"""First subordinate uid of a Linux machine (shadow's SUB_UID_MIN). The box's root has this uid outside."""


@dataclass(frozen=True)
class Box:
    """The agent's root filesystem: a separate tree that no sandbox ever changes."""

    path: str | Path
    """A directory with ``/bin``, ``/etc`` and so on, in which every owner is shifted by *first_uid*."""
    first_uid: int = FIRST_UID
    """Uid of the sandbox's root outside. If only one uid is available (a plain user), the box belongs to that user
    instead."""


@dataclass(frozen=True)
class Limits:
    """Limits of each sandbox. A worker with n slots needs (n x memory_bytes) + (n + 4) x disk_bytes: its layers take
    four times disk_bytes."""

    memory_bytes: int = 512 * 1024 * 1024
    """Bytes of memory of all processes together. A watchdog kills the sandbox above the limit. A single process above
    it gets ENOMEM immediately."""
    pids: int = 128
    """Processes and threads at a time. The next one gets EAGAIN. After a second at the limit, the sandbox is killed."""
    disk_bytes: int = 256 * 1024 * 1024
    """Bytes that the sandbox may write, held in memory. A write beyond them gets ENOSPC."""
    cpu_s: int = 600
    """CPU seconds of one process. Beyond them it gets SIGXCPU, and SIGKILL a second later."""
    output_bytes: int = 65_536
    """Bytes kept of each output stream of a command. The rest is read and dropped."""


@dataclass
class Judged:
    """A judge's claim to CPU time in one sandbox, and the CPU times of its last ``run``.

    Set it as ``sandbox.judged`` before ``run``. The program then has the server's priority instead of an agent's. The
    claim is limited, because the judged program includes the agent's code. After *cpu_s* all of it has an agent's
    priority.
    """

    cpu_s: float
    """CPU seconds of all processes of a run together."""
    used_s: float = 0.0
    """CPU seconds used, including ended children that their parents waited for."""
    waited_s: float = 0.0
    """Seconds in which a thread was ready but had no CPU. Concurrent waits count once, so this is at most the real
    time."""
    unseen_s: float = 0.0
    """CPU seconds that *used_s* may lack, from processes that end between two checks of the watchdog. For each interval
    in which a thread started or ended, it adds the remaining time of one CPU."""


@dataclass(frozen=True)
class Completed:
    """A command that has ended. Its background children may still run."""

    status: int
    """The exit status, or the negative signal number."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    """Whether it was killed at its deadline, with all of its session. *status* is then -9."""
    truncated: bool = False
    """Whether output beyond the limit was dropped."""


class SandboxError(EnvServerError):
    """A sandbox could not open or cannot serve a request. The message states the reason and the remedy.

    A failed command is not an error. It is a ``Completed`` with its status.

    Attributes:
        code: ``unsupported`` (this machine has no support), ``ended`` (the sandbox is gone: closed, or killed by its
            watchdog or its own agent), ``refused`` (the request is impossible: no such file, no such program, too
            large) or ``full`` (no room: disk, processes, sandboxes).
    """

    def __init__(self, message: str, *, code: str = "refused") -> None:
        super().__init__(message)
        self.code = code
        self.is_infrastructure = code != "refused"
        """Whether the sandbox is at fault, and not the request."""
