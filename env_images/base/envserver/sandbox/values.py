"""What a sandbox is made of, what a command in it comes to, and what can go wrong: values, no behaviour."""

from dataclasses import dataclass
from pathlib import Path

from envserver.errors import EnvServerError

UIDS = 65_536
"""Users of a full Debian: ``nobody`` is 65534."""
FIRST_UID = 100_000
"""The first subordinate uid of a Linux machine (shadow's SUB_UID_MIN); the box's root belongs to it."""


@dataclass(frozen=True)
class Box:
    """The agent's root filesystem: a tree of its own, which no sandbox ever changes."""

    path: str | Path
    """A directory with ``/bin``, ``/etc`` and so on, in which every owner is shifted by *first_uid*."""
    first_uid: int = FIRST_UID
    """What root is outside. Where one uid is all there is (a plain user), the box belongs to that user instead."""


@dataclass(frozen=True)
class Limits:
    """Bounds of each sandbox. A worker with n slots needs n x (memory_bytes + disk_bytes) and its layers' bytes."""

    memory_bytes: int = 512 * 1024 * 1024
    """Of all processes together, held by a watchdog that kills the sandbox; one process alone gets ENOMEM at once."""
    pids: int = 128
    """Processes and threads at a time; the next one gets EAGAIN. At the limit for a second, the sandbox is killed."""
    disk_bytes: int = 256 * 1024 * 1024
    """What may be written; it is memory. Beyond it a write gets ENOSPC."""
    cpu_s: int = 600
    """CPU seconds of one process; then it gets SIGXCPU and, a second later, SIGKILL."""
    output_bytes: int = 65_536
    """Kept of each stream of a command; the rest is read and dropped."""


@dataclass
class Judged:
    """A judge's claim to CPU time in one sandbox, and what its last ``run`` there made of it.

    Set as ``sandbox.judged`` before ``run``: what runs then has the server's priority instead of an agent's. The claim
    is bounded, since what is judged is an agent's code too: from *cpu_s* on all of it has an agent's priority.
    """

    cpu_s: float
    """CPU seconds of all processes of a run together."""
    used_s: float = 0.0
    """CPU seconds that they used, ended children that their parents waited for among them."""
    waited_s: float = 0.0
    """Seconds for which a thread could have run and had no CPU: at most the real time, however many waited at once."""
    unseen_s: float = 0.0
    """What may be missing in *used_s*: nobody need wait for a process that ends between two looks of the watchdog. So
    of each interval in which a thread began or ended, this has what one CPU could have given besides."""


@dataclass(frozen=True)
class Completed:
    """A command that ran. Its background children may still live."""

    status: int
    """The exit status, or minus the signal's number."""
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    """It was killed at its deadline, with all of its session; *status* is then -9."""
    truncated: bool = False
    """Output beyond the bound was dropped."""


class SandboxError(EnvServerError):
    """A sandbox could not be opened, or cannot do what was asked; the message says why and what to do.

    A command that fails is no error: it is a ``Completed`` with its status.

    Attributes:
        code: ``unsupported`` (this machine can't), ``ended`` (the sandbox is gone: closed, killed by its watchdog or by
            its own agent), ``refused`` (this request can't be done: no such file, no such program, too large) or
            ``full`` (no room: disk, processes, sandboxes).
    """

    def __init__(self, message: str, *, code: str = "refused") -> None:
        super().__init__(message)
        self.code = code

    @property
    def is_infrastructure(self) -> bool:
        """Whether the sandbox is at fault, and not what was asked of it."""
        return self.code != "refused"
