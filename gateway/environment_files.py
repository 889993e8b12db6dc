"""Environment files: one ``environment.toml`` read and checked.

A file that is wrong stops the start with file, line and reason: an environment that silently lost a limit is worse
than none.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.core.errors import ConfigError
from gateway.core.model import (
    ActionMapping,
    ActionType,
    Areal,
    CustomTasks,
    Environment,
    EnvironmentName,
    Isolation,
    Limits,
    Loosened,
    ObservationType,
    OpenEnv,
    PoolPolicy,
    Protocol,
    ResetMapping,
    SandboxLimits,
    Server,
    Timeouts,
    Volume,
)

MIB = 2**20

ROOT_ROUTES = frozenset(
    [
        "health",
        "version",
        "ping",
        "list_environments",
        "create",
        "delete",
        "create_session",
        "delete_session",
        "docs",
        "redoc",
        "openapi.json",
    ]
)
"""First path segments that belong to ORS itself."""
OPERATIONS = frozenset(
    [
        "tools",
        "splits",
        "tasks",
        "num_tasks",
        "task",
        "task_range",
        "prompt",
        "task_tools",
        "call",
        "messages",
        "score_group",
    ]
)
"""ORS operations, which follow an environment's name in a path, or stand alone."""
OUR_ROUTES = frozenset(["areal", "api", "openenv", "k", "admin", "dashboard", "metrics", "healthz", "readyz", "peers"])
"""First path segments of the gateway's own."""
RESERVED = ROOT_ROUTES | OPERATIONS | OUR_ROUTES
"""No environment may bear one of these names."""
SLOTS = 16
"""Of a worker, where nothing is said and its protocol does not tell."""
OPENENV_SLOTS = 1
"""The same for OpenEnv images: their default, and most of them say nothing else."""
ORS_IDLE_MAX_S = 840.0
"""The official ORS servers end sessions that were not touched for 900 s, and their clients do not ping in between."""
STATIC_IMAGE = "(static)"
"""Instead of an image's name, where somebody else runs the server."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=False, allow_inf_nan=False)


class _Pool(_Table):
    slots: Annotated[int, Field(ge=1, le=100_000)] | Literal["learn"] | None = None
    min_workers: int = Field(default=0, ge=0)
    max_workers: int = Field(default=4, ge=1)
    idle_worker_s: float = Field(default=60.0, ge=0)
    max_uses: int = Field(default=0, ge=0)


class _Limits(_Table):
    memory_mib: int = Field(default=512, ge=16)
    cpus: float = Field(default=1.0, gt=0)
    pids: int = Field(default=256, ge=8)
    tmp_mib: int = Field(default=64, ge=1)


class _Timeouts(_Table):
    idle_s: float = Field(default=300.0, gt=0)
    start_s: float = Field(default=60.0, gt=0)
    open_s: float = Field(default=60.0, gt=0)
    setup_s: float = Field(default=60.0, gt=0)
    call_s: float = Field(default=3600.0, gt=0)
    close_s: float = Field(default=30.0, gt=0)


class _Loosened(_Table):
    user: str = Field(default="10001:10001", pattern=r"^\d+:\d+$")
    writable_root: bool = False
    network: str = Field(default="none", pattern=r"^[a-zA-Z0-9][a-zA-Z0-9_.-]*$")
    capabilities: tuple[str, ...] = ()


class _Sandbox(_Table):
    memory_mib: int | None = Field(default=None, ge=16)
    pids: int | None = Field(default=None, ge=8)
    disk_mib: int | None = Field(default=None, ge=1)
    cpu_s: int | None = Field(default=None, ge=1)


class _Areal(_Table):
    name: str = ""
    description: str = ""
    split: str = Field(default="train", min_length=1)
    max_turns: int = Field(default=20, ge=1)
    observation_type: ObservationType = ObservationType.TEXT
    action_type: ActionType = ActionType.TEXT
    start_s: float = Field(default=50.0, gt=0)
    step_s: float = Field(default=50.0, gt=0)


class _OpenEnv(_Table):
    split: str = Field(default="train", min_length=1)
    reset_s: float = Field(default=50.0, gt=0)
    step_s: float = Field(default=50.0, gt=0)


class _Server(_Table):
    port: int = Field(default=0, ge=0, le=65_535)
    url: str = Field(default="", pattern=r"^$|^https?://[^\s/?#]+(/[^\s?#]*)?$")
    ready: str = Field(default="", pattern=r"^$|^/[^\s]*$")


class _Actions(_Table):
    default_tool: str = ""
    text_field: str = ""


class _Resets(_Table):
    keys: tuple[str, ...] = ("seed", "episode_id")
    from_task: dict[str, str] = Field(default_factory=dict)
    seeds: int = Field(default=1000, ge=1, le=1_000_000)


class _Volume(_Table):
    source: str = Field(pattern=r"^(/[^:]+|[a-zA-Z0-9][a-zA-Z0-9_.-]*)$")
    target: str = Field(pattern=r"^/[^:]+$")
    read_only: bool = True


class _Tasks(_Table):
    directory: str | None = None
    env_types: tuple[str, ...] = ()
    module: str = Field(default="", pattern=r"^$|^[A-Za-z_][A-Za-z0-9_.]*(,[A-Za-z_][A-Za-z0-9_.]*)*$")
    folder: str = Field(default="", pattern=r"^$|^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")


class _File(_Table):
    name: str = Field(pattern=r"^[a-z][a-z0-9_-]{0,62}$")
    image: str = ""
    description: str = ""
    protocol: Protocol = Protocol.ORS
    isolation: Isolation = Isolation.SHARED
    command: tuple[str, ...] | None = None
    upstream_name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]*$")
    variables: dict[str, str] = Field(default_factory=dict)
    platform_keys: bool = False
    pool: _Pool = _Pool()
    limits: _Limits = _Limits()
    timeouts: _Timeouts = _Timeouts()
    loosened: _Loosened = _Loosened()
    sandbox: _Sandbox = _Sandbox()
    areal: _Areal = _Areal()
    openenv: _OpenEnv = _OpenEnv()
    server: _Server = _Server()
    actions: _Actions = _Actions()
    resets: _Resets = _Resets()
    volumes: tuple[_Volume, ...] = ()
    tasks: _Tasks = _Tasks()


def read_environment(path: Path) -> Environment:
    """Read one ``environment.toml``; paths in it are relative to the folder above the catalog's.

    Raises:
        ConfigError: with file, line and reason.
    """
    try:
        source = path.read_text(encoding="utf-8")
        table = tomllib.loads(source)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax_error(path, source, error)) from error
    try:
        parsed = _File.model_validate(table)
    except ValidationError as error:
        raise ConfigError("\n".join(_complaints(path, source, error))) from None
    environment = _environment(parsed, path)
    _refuse_contradictions(environment, path, source, tables=parsed.model_fields_set)
    return environment


def _environment(parsed: _File, path: Path) -> Environment:
    # What is absolute stays so: Path joins give the right-hand side then.
    root = path.parent.parent.parent
    return Environment(
        name=EnvironmentName(parsed.name),
        image=parsed.image or STATIC_IMAGE,
        directory=path.parent.resolve(),
        command=_command(parsed),
        description=parsed.description,
        protocol=parsed.protocol,
        isolation=parsed.isolation,
        upstream_name=parsed.upstream_name,
        variables=parsed.variables,
        platform_keys=parsed.platform_keys,
        pool=_pool(parsed),
        limits=Limits(
            memory_bytes=parsed.limits.memory_mib * MIB,
            cpus=parsed.limits.cpus,
            pids=parsed.limits.pids,
            tmp_bytes=parsed.limits.tmp_mib * MIB,
        ),
        timeouts=Timeouts(**parsed.timeouts.model_dump()),
        loosened=Loosened(**parsed.loosened.model_dump()),
        sandbox=SandboxLimits(
            memory_bytes=(parsed.sandbox.memory_mib or 0) * MIB,
            pids=parsed.sandbox.pids or 0,
            disk_bytes=(parsed.sandbox.disk_mib or 0) * MIB,
            cpu_s=parsed.sandbox.cpu_s or 0,
        ),
        areal=Areal(**parsed.areal.model_dump()),
        openenv=OpenEnv(**parsed.openenv.model_dump()),
        server=Server(**parsed.server.model_dump()),
        actions=ActionMapping(**parsed.actions.model_dump()),
        resets=ResetMapping(**parsed.resets.model_dump()),
        volumes=tuple(Volume(**one.model_dump()) for one in parsed.volumes),
        tasks=(root / parsed.tasks.directory).resolve() if parsed.tasks.directory else None,
        env_types=parsed.tasks.env_types,
        custom_tasks=_custom_tasks(parsed),
    )


def _command(parsed: _File) -> tuple[str, ...]:
    if parsed.command is not None:
        return parsed.command
    # How an image of somebody else's would run without its image, nobody can guess.
    return () if parsed.server.port or parsed.server.url else ("python3", "server.py")


def _pool(parsed: _File) -> PoolPolicy:
    given = parsed.pool.model_dump()
    slots = given.pop("slots")
    usual = OPENENV_SLOTS if parsed.protocol is Protocol.OPENENV else SLOTS
    if parsed.server.url and "max_workers" not in parsed.pool.model_fields_set:
        given["max_workers"] = 1
    return PoolPolicy(slots=slots if isinstance(slots, int) else usual, learns_slots=slots == "learn", **given)


def _custom_tasks(parsed: _File) -> CustomTasks | None:
    if not parsed.tasks.module:
        return None
    return CustomTasks(module=parsed.tasks.module, folder=parsed.tasks.folder or parsed.name)


def _refuse_contradictions(environment: Environment, path: Path, source: str, *, tables: set[str]) -> None:
    def complain(reason: str, *location: str) -> ConfigError:
        return ConfigError(f"{path}:{line_of(source, location)}: {'.'.join(location)}: {reason}")

    if environment.name in RESERVED:
        raise complain(f"{environment.name!r} is a reserved name", "name")
    if environment.pool.min_workers > environment.pool.max_workers:
        raise complain("more than max_workers", "pool", "min_workers")
    _refuse_foreign_contradictions(environment, complain, tables=tables)
    if environment.isolation is not Isolation.SANDBOX and environment.sandbox != SandboxLimits():
        raise complain('only for isolation = "sandbox"', "sandbox")
    if environment.isolation is Isolation.SANDBOX and replace(environment.loosened, network="none") != Loosened():
        raise complain("the container of sandboxes has its own user and capabilities; only network is free", "loosened")
    if environment.isolation is Isolation.EXCLUSIVE and (environment.pool.slots, environment.pool.max_uses) != (1, 1):
        raise complain("an exclusive environment needs slots = 1 and max_uses = 1", "isolation")
    if environment.tasks is not None and not environment.tasks.is_dir():
        raise complain(f"{environment.tasks}: no such folder", "tasks", "directory")
    for name in environment.variables:
        if name.startswith("ENVSERVER_") or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise complain("not a name for an environment's own variable", "variables", name)
    for front, name in (("areal", environment.areal.split), ("openenv", environment.openenv.split)):
        if environment.tasks is not None and front in tables:
            split = environment.tasks / f"{name}.jsonl"
            if not split.is_file():
                raise complain(f"{split}: no such file", front, "split")


def _refuse_foreign_contradictions(
    environment: Environment, complain: Callable[..., ConfigError], *, tables: set[str]
) -> None:
    """Refuse what does not fit together about servers of other people's."""
    server, protocol = environment.server, environment.protocol
    if not server.is_foreign:
        if protocol is not Protocol.ORS:
            raise complain(f"a server that speaks {protocol.value} needs [server] port, or url", "protocol")
        for table in sorted(tables & {"actions", "resets"}):
            raise complain("only for servers of other people's, which have [server] port, or url", table)
    if server.port and server.url:
        raise complain("either port, for an image, or url, for a server that runs already", "server", "url")
    if (environment.image == STATIC_IMAGE) != bool(server.url):
        raise complain("a server that runs already has no image" if server.url else "Field required", "image")
    if server.url and (environment.pool.max_workers, environment.isolation) != (1, Isolation.SHARED):
        raise complain('a server that runs already is one worker: max_workers = 1, isolation = "shared"', "pool")
    if server.url and urlsplit(server.url).hostname is None:
        raise complain("no host in it", "server", "url")
    if server.url and environment.volumes:
        raise complain("a server that runs already is given no volumes", "volumes")
    if environment.pool.learns_slots and protocol is not Protocol.OPENENV:
        raise complain('only OpenEnv servers tell their capacity: "learn" is for them', "pool", "slots")
    if environment.isolation is Isolation.SANDBOX and server.is_foreign:
        raise complain("sandboxes are made by our own environment server", "isolation")
    if environment.custom_tasks is not None and server.is_foreign:
        raise complain("task modules are loaded by our own environment server", "tasks", "module")
    if "resets" in tables and protocol is not Protocol.OPENENV:
        raise complain("only OpenEnv servers are reset", "resets")
    if protocol is Protocol.ORS and server.is_foreign and environment.timeouts.idle_s > ORS_IDLE_MAX_S:
        raise complain(
            f"more than {ORS_IDLE_MAX_S:g}: ORS servers end sessions themselves after 900 s", "timeouts", "idle_s"
        )
    targets = [volume.target for volume in environment.volumes]
    if len(set(targets)) != len(targets):
        raise complain("two have the same target", "volumes")


def _syntax_error(path: Path, source: str, error: tomllib.TOMLDecodeError) -> str:
    text = str(error)
    found = re.search(r"\(at line (\d+), column (\d+)\)", text)
    line = int(found[1]) if found else len(source.splitlines())  # else it says "at end of document"
    return f"{path}:{line}: {text}"


def _complaints(path: Path, source: str, error: ValidationError) -> Iterator[str]:
    for entry in error.errors(include_url=False, include_context=False):
        location = tuple(str(part) for part in entry["loc"])
        if entry["type"] == "literal_error" and location[:2] == ("pool", "slots"):
            continue  # the other of its two forms has its own entry
        if location[:2] == ("pool", "slots"):
            location = location[:2]
        yield f"{path}:{line_of(source, location)}: {'.'.join(location)}: {entry['msg']}"


def line_of(source: str, location: Sequence[str]) -> int:
    """Find the line, counted from 1, on which the key at *location* (tables, then key) stands.

    A missing key gives its table's line, or 1. ``tomllib`` keeps no positions, so this reads the few forms that our
    files have: ``[a.b]`` headers and ``key = value`` lines.
    """
    table: tuple[str, ...] = ()
    best, depth = 1, 0
    for number, line in enumerate(source.splitlines(), 1):
        if header := re.match(r"\s*\[+\s*([^\]]+?)\s*\]+\s*(?:#.*)?$", line):
            table = tuple(part.strip(" \"'") for part in header[1].split("."))
            key: tuple[str, ...] = table
        elif entry := re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line):
            key = (*table, *(part.strip(" \"'") for part in entry[1].split(".")))
        else:
            continue
        if len(key) > depth and key == tuple(location[: len(key)]):
            best, depth = number, len(key)
    return best
