"""The server's settings: one frozen value, and the only reader of the process environment."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from envserver.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
_LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")
_MIB = 1024 * 1024
_PREFIX = "ENVSERVER_"
_Reader: TypeAlias = Callable[[str, str], Any]
"""Makes a setting of a variable's name and text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Where a server's sandboxes come from and what bounds each; a limit of None is the environment class's own."""

    box: str = "/srv/box"
    """Folder of the box, the agents' root filesystem."""
    work: str = "/work"
    """Folder that the spawner mounts on."""
    host: bool = False
    """Make the box of this machine's own programs where it is not there yet, and a work folder below *work*."""
    memory_mib: int | None = None
    pids: int | None = None
    disk_mib: int | None = None
    cpu_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the server listens and what it bounds; see ``from_environ`` for the variables."""

    socket: str | None = None
    """Path of a Unix socket to listen on; a server on one can be claimed with a token. None: TCP."""
    host: str = "0.0.0.0"
    """TCP address."""
    port: int = 8080
    """TCP port; 0 lets the kernel choose, the log line ``server_ready`` names it."""
    slots: int = 0
    """Most sessions open at a time; 0 is no limit."""
    idle_s: float = 900.0
    """A session without a request or a running call for this long is ended; 0 is never."""
    exit_on_eof: bool = False
    """Stop when standard input ends, that is when the parent process died."""
    tasks: str | None = None
    """Directory with ``<split>.jsonl`` files, or with one such directory per environment."""
    log: LogLevel = "info"
    """Least level that is logged."""
    body_max_bytes: int = 32 * _MIB
    """Largest request body; a larger one is answered with 413."""
    kept_max_bytes: int = 32 * _MIB
    """Memory for the results of finished calls, kept for replay; beyond it the oldest go first."""
    strict_paths: bool = False
    """Answer 409 when the path names another environment than the session's."""
    task_modules: tuple[str, ...] = ()
    """Dotted names of modules that register tasks, imported as the server starts: ``OPENENV_TASK_MODULE``, by the name
    that RFC 005 of OpenEnv gives it, separated by commas."""
    custom_tasks_dir: str = "/opt/openenv"
    """Folder that is put on the import path for them; ``custom_tasks`` is in it."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """For environment classes with ``sandbox_limits``."""

    @property
    def threads(self) -> int:
        """Most threads for plain ``def`` code: one per slot, so that no session waits for another's."""
        return self.slots or 256

    @property
    def lanes(self) -> int:
        """Most lanes for ``async def`` code."""
        return min(self.slots or 64, 256)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Settings":
        """Read ``ENVSERVER_*`` variables; an empty one counts as absent.

        Raises:
            ConfigError: a value is malformed or out of range.
        """
        values = {
            name.lower(): read(f"{_PREFIX}{name}", text)
            for name, read in _READERS.items()
            if (text := environ.get(f"{_PREFIX}{name}"))
        }
        sandbox = {name[8:]: values.pop(name) for name in list(values) if name.startswith("sandbox_")}
        # What is no name of a module fails where it would be imported, so that all else is served.
        modules = tuple(name for part in environ.get("OPENENV_TASK_MODULE", "").split(",") if (name := part.strip()))
        return cls(**values, task_modules=modules, sandbox=SandboxSettings(**sandbox))


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Name the variables that look like ours and are none: most likely a typing error."""
    return sorted(name for name in environ if name.startswith(_PREFIX) and name[len(_PREFIX) :] not in _READERS)


def _text(name: str, text: str) -> str:
    return text


def _whole(*, least: int = 0, most: int = 2**40) -> _Reader:
    def read(name: str, text: str) -> int:
        if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
            raise ConfigError(f"{name}={text!r}: expected a whole number from {least} to {most}")
        return int(text)

    return read


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}={text!r}: expected seconds, 0 or more")
    return value


def _flag(name: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r}: expected 0 or 1")
    return text == "1"


def _level(name: str, text: str) -> str:
    if text.lower() not in _LOG_LEVELS:
        raise ConfigError(f"{name}={text.lower()!r}: expected one of {', '.join(_LOG_LEVELS)}")
    return text.lower()


_READERS: Mapping[str, _Reader] = {
    "SOCKET": _text,
    "HOST": _text,
    "PORT": _whole(most=65_535),
    "SLOTS": _whole(most=1_000_000),
    "IDLE_S": _seconds,
    "EXIT_ON_EOF": _flag,
    "TASKS": _text,
    "LOG": _level,
    "BODY_MAX_BYTES": _whole(least=1024),
    "KEPT_MAX_BYTES": _whole(),
    "STRICT_PATHS": _flag,
    "CUSTOM_TASKS_DIR": _text,
    "SANDBOX_BOX": _text,
    "SANDBOX_WORK": _text,
    "SANDBOX_HOST": _flag,
    # Below these a sandbox does not even open.
    "SANDBOX_MEMORY_MIB": _whole(least=16, most=2**24),
    "SANDBOX_PIDS": _whole(least=4, most=2**22),
    "SANDBOX_DISK_MIB": _whole(least=1, most=2**24),
    "SANDBOX_CPU_S": _whole(least=1, most=2**31),
}
"""How each ``ENVSERVER_*`` variable is read, in the order in which faults are reported."""
