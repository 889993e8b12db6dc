"""The server's settings: a frozen value. This module is the only reader of the process environment."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from envserver.errors import ConfigError, Unexpected
from envserver.scorer import ScorerSettings

LogLevel = Literal["debug", "info", "warning", "error"]
_LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")
_MIB = 1024 * 1024
_PREFIX = "ENVSERVER_"
_Reader: TypeAlias = Callable[[str, str], Any]
"""Converts a variable's name and text to a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Source and limits of a server's sandboxes. A limit of None leaves the environment class's limit."""

    box: str = "/srv/box"
    """Folder of the box, the agents' root filesystem."""
    work: str = "/work"
    """Folder that contains the spawner's mounts."""
    host: bool = False
    """Whether to build a missing box from this machine's own programs, and a work folder below *work*."""
    memory_mib: int | None = None
    pids: int | None = None
    disk_mib: int | None = None
    cpu_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The server's addresses and limits. ``from_environ`` reads the variables."""

    socket: str | None = None
    """Path of the Unix socket. A client can claim such a server with a token. None: TCP."""
    host: str = "0.0.0.0"
    """TCP address."""
    port: int = 8080
    """TCP port. 0 lets the kernel choose, and the log line ``server_ready`` states the choice."""
    slots: int = 0
    """Maximum number of sessions open at the same time. 0 means no limit."""
    idle_s: float = 900.0
    """Seconds without a request or a running call after which a session ends. 0 means never."""
    exit_on_eof: bool = False
    """Whether the server stops at the end of standard input, which means that the parent process died."""
    tasks: str | None = None
    """Directory with ``<split>.jsonl`` files, or with one such directory per environment."""
    log: LogLevel = "info"
    """Lowest level that is logged."""
    body_max_bytes: int = 32 * _MIB
    """Maximum size of a request body in bytes. The server answers a larger body with 413."""
    kept_max_bytes: int = 32 * _MIB
    """Bytes of memory for the results of finished calls, kept for replay. Beyond it the oldest results are dropped
    first."""
    strict_paths: bool = False
    """Whether to answer 409 if the path names another environment than the session's."""
    task_modules: tuple[str, ...] = ()
    """Dotted names of the modules that register tasks. The server imports them at start. ``OPENENV_TASK_MODULE`` lists
    them, separated by commas, as RFC 005 of OpenEnv names it."""
    custom_tasks_dir: str = "/opt/openenv"
    """Folder that the server adds to the import path for these modules. It contains ``custom_tasks``."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """Sandbox settings for environment classes with ``sandbox_limits``."""
    scorer: ScorerSettings = field(default_factory=ScorerSettings)
    """The parts of the server that judge episodes: a JSON object with ``files`` and ``packages``, lists of texts."""

    unexpected: Unexpected = "mark"
    """What an exception in a tool means that is no ``ToolError``."""

    @property
    def threads(self) -> int:
        """Maximum number of threads for plain ``def`` code: one per slot, so that no session waits for another."""
        return self.slots or 256

    @property
    def lanes(self) -> int:
        """Maximum number of lanes for ``async def`` code."""
        return min(self.slots or 64, 256)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> "Settings":
        """Read the ``ENVSERVER_*`` variables. An empty variable counts as absent.

        Raises:
            ConfigError: A value is malformed or out of range.
        """
        values = {
            name.lower(): read(f"{_PREFIX}{name}", text)
            for name, read in _READERS.items()
            if (text := environ.get(f"{_PREFIX}{name}"))
        }
        sandbox = {name[8:]: values.pop(name) for name in list(values) if name.startswith("sandbox_")}
        # An invalid module name fails later, at its import, so that the server serves everything else.
        modules = tuple(name for part in environ.get("OPENENV_TASK_MODULE", "").split(",") if (name := part.strip()))
        return cls(**values, task_modules=modules, sandbox=SandboxSettings(**sandbox))


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the names that have this server's prefix but are not settings. They are probably typing errors."""
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


def _one_of(*choices: str) -> _Reader:
    def read(name: str, text: str) -> str:
        if text.lower() not in choices:
            raise ConfigError(f"{name}={text.lower()!r}: expected one of {', '.join(choices)}")
        return text.lower()

    return read


def _scorer(name: str, text: str) -> ScorerSettings:
    try:
        value = json.loads(text)
        parts = {part: tuple(value.pop(part, ())) for part in ("files", "packages")}
    except (ValueError, TypeError, AttributeError, RecursionError):
        value, parts = text, {}
    if value or not all(isinstance(one, str) and one for part in parts.values() for one in part):
        raise ConfigError(f'{name}={text!r:.200}: expected {{"files": [...], "packages": [...]}} with lists of texts')
    return ScorerSettings(**parts)


_READERS: Mapping[str, _Reader] = {
    "SOCKET": _text,
    "HOST": _text,
    "PORT": _whole(most=65_535),
    "SLOTS": _whole(most=1_000_000),
    "IDLE_S": _seconds,
    "EXIT_ON_EOF": _flag,
    "TASKS": _text,
    "LOG": _one_of(*_LOG_LEVELS),
    "BODY_MAX_BYTES": _whole(least=1024),
    "KEPT_MAX_BYTES": _whole(),
    "STRICT_PATHS": _flag,
    "CUSTOM_TASKS_DIR": _text,
    "SCORER": _scorer,
    "UNEXPECTED": _one_of(*get_args(Unexpected)),
    "SANDBOX_BOX": _text,
    "SANDBOX_WORK": _text,
    "SANDBOX_HOST": _flag,
    # Below these values a sandbox does not even open.
    "SANDBOX_MEMORY_MIB": _whole(least=16, most=2**24),
    "SANDBOX_PIDS": _whole(least=4, most=2**22),
    "SANDBOX_DISK_MIB": _whole(least=1, most=2**24),
    "SANDBOX_CPU_S": _whole(least=1, most=2**31),
}
"""The reader of each ``ENVSERVER_*`` variable, in the order in which the server reports errors."""
