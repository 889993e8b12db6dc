"""The server's settings: one frozen value, and the only reader of the process environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from envserver.errors import ConfigError

LogLevel = Literal["debug", "info", "warning", "error"]
_LOG_LEVELS: tuple[LogLevel, ...] = ("debug", "info", "warning", "error")
_MIB = 1024 * 1024


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
        given = {name: value for name, value in environ.items() if name.startswith("ENVSERVER_") and value}
        standard = cls()
        return cls(
            socket=given.get("ENVSERVER_SOCKET"),
            host=given.get("ENVSERVER_HOST", standard.host),
            port=_whole(given, "ENVSERVER_PORT", standard.port, most=65_535),
            slots=_whole(given, "ENVSERVER_SLOTS", standard.slots, most=1_000_000),
            idle_s=_seconds(given, "ENVSERVER_IDLE_S", standard.idle_s),
            exit_on_eof=_flag(given, "ENVSERVER_EXIT_ON_EOF"),
            tasks=given.get("ENVSERVER_TASKS"),
            log=_level(given),
            body_max_bytes=_whole(given, "ENVSERVER_BODY_MAX_BYTES", standard.body_max_bytes, least=1024),
            kept_max_bytes=_whole(given, "ENVSERVER_KEPT_MAX_BYTES", standard.kept_max_bytes),
            strict_paths=_flag(given, "ENVSERVER_STRICT_PATHS"),
            task_modules=_names(environ.get("OPENENV_TASK_MODULE", "")),
            custom_tasks_dir=given.get("ENVSERVER_CUSTOM_TASKS_DIR", standard.custom_tasks_dir),
            sandbox=_sandbox(given, standard.sandbox),
        )


_VARIABLES = frozenset(
    f"ENVSERVER_{name}"
    for name in (
        *("SOCKET", "HOST", "PORT", "SLOTS", "IDLE_S", "EXIT_ON_EOF", "TASKS", "LOG"),
        *("BODY_MAX_BYTES", "KEPT_MAX_BYTES", "STRICT_PATHS", "CUSTOM_TASKS_DIR"),
        *("SANDBOX_BOX", "SANDBOX_WORK", "SANDBOX_HOST"),
        *("SANDBOX_MEMORY_MIB", "SANDBOX_PIDS", "SANDBOX_DISK_MIB", "SANDBOX_CPU_S"),
    )
)


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Name the variables that look like ours and are none: most likely a typing error."""
    return sorted(name for name in environ if name.startswith("ENVSERVER_") and name not in _VARIABLES)


def _sandbox(given: Mapping[str, str], standard: SandboxSettings) -> SandboxSettings:
    return SandboxSettings(
        box=given.get("ENVSERVER_SANDBOX_BOX", standard.box),
        work=given.get("ENVSERVER_SANDBOX_WORK", standard.work),
        host=_flag(given, "ENVSERVER_SANDBOX_HOST"),
        # Below these a sandbox does not even open.
        memory_mib=_limit(given, "ENVSERVER_SANDBOX_MEMORY_MIB", least=16, most=2**24),
        pids=_limit(given, "ENVSERVER_SANDBOX_PIDS", least=4, most=2**22),
        disk_mib=_limit(given, "ENVSERVER_SANDBOX_DISK_MIB", least=1, most=2**24),
        cpu_s=_limit(given, "ENVSERVER_SANDBOX_CPU_S", least=1, most=2**31),
    )


def _names(text: str) -> tuple[str, ...]:
    """Part at commas. What is no name of a module fails where it would be imported, so that all else is served."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def _limit(given: Mapping[str, str], name: str, *, least: int, most: int) -> int | None:
    return _whole(given, name, least, least=least, most=most) if name in given else None


def _whole(given: Mapping[str, str], name: str, default: int, *, least: int = 0, most: int = 2**40) -> int:
    text = given.get(name)
    if text is None:
        return default
    if not text.isascii() or not text.isdecimal() or not least <= int(text) <= most:
        raise ConfigError(f"{name}={text!r}: expected a whole number from {least} to {most}")
    return int(text)


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ConfigError(f"{name}={text!r}: expected seconds, 0 or more")
    return value


def _flag(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "0")
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r}: expected 0 or 1")
    return text == "1"


def _level(given: Mapping[str, str]) -> LogLevel:
    text = given.get("ENVSERVER_LOG", "info").lower()
    for level in _LOG_LEVELS:
        if text == level:
            return level
    raise ConfigError(f"ENVSERVER_LOG={text!r}: expected one of {', '.join(_LOG_LEVELS)}")
