"""Reads and checks one ``environment.toml``.

A wrong file stops the gateway's start with file, line and reason. An environment that silently lost a limit would be
worse than a missing environment.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError

from gateway.catalog.schema import EnvironmentFile, LimitsTable, SplitTable
from gateway.core.curriculum import PREFIX
from gateway.core.environment import (
    ALL_GPUS,
    ActionMapping,
    Areal,
    CustomTasks,
    Environment,
    Isolation,
    Limits,
    Nemo,
    ObservationMapping,
    OpenEnv,
    PoolPolicy,
    Relaxations,
    ResetMapping,
    SandboxLimits,
    Scorer,
    Server,
    ServerProtocol,
    StepLogPolicy,
    Timeouts,
    Volume,
)
from gateway.core.errors import ConfigError
from gateway.core.ids import EnvironmentName
from gateway.core.routes import RESERVED
from gateway.core.validation import reason_of

MIB = 2**20

SLOTS = 16
"""Default number of slots per worker."""
OPENENV_SLOTS = 1
"""Default number of slots per worker of an OpenEnv image: the default of OpenEnv servers, which most images keep."""
ORS_IDLE_MAX_S = 840.0
"""Maximum idle time, in seconds, of sessions on third-party ORS servers. The official servers end sessions after 900 s
without a call, and their clients do not ping in between."""
OWN_IMAGES = "env-gateway/"
"""Prefix of the names of images that this project builds."""
STATIC_IMAGE = "(static)"
"""Placeholder for the image's name where a third party runs the server."""
RESET_KEYS = ("task", "split", "index", "seed", "episode_id")
"""Keys of an OpenEnv reset that have the same meaning in every environment."""
SPLIT_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")
"""Pattern of the name of a split with its own resources. The name becomes part of labels and keys, so it has no dot."""


def read_environment(path: Path, *, image_tag: str = "") -> Environment:
    """Read and check one ``environment.toml``; see `parse_environment`.

    Raises:
        ConfigError: The file is wrong; the message has file, line and reason.
    """
    return parse_environment(read_source(path), path, image_tag=image_tag)


def parse_environment(source: str, path: Path, *, image_tag: str = "") -> Environment:
    """Parse and check the content of an ``environment.toml``. Its paths are relative to the catalog folder's parent.

    Args:
        source: The content of the file.
        path: The path that the file has or will have.
        image_tag: Tag for the project's own images (`OWN_IMAGES`) without a tag; empty: the engine's default tag.

    Raises:
        ConfigError: The file is wrong; the message has file, line and reason.
    """
    try:
        parsed = EnvironmentFile.model_validate(parse_toml(source, path))
    except ValidationError as error:
        raise ConfigError("\n".join(_complaints(path, source, error))) from None
    environment = _environment(parsed, path, image_tag)
    _refuse_contradictions(environment, path, source, parsed)
    return environment


def variant(environment: Environment, split: str, *, pool: PoolPolicy, limits: Limits) -> Environment:
    """Return the environment for sessions of *split*: *environment* with the split's limits and numbers of workers.

    Slots, uses and idle times of a worker stay those of *environment*.
    """
    return replace(
        environment,
        name=EnvironmentName(f"{environment.name}.{split}"),
        base=environment.name,
        pool=replace(environment.pool, min_workers=pool.min_workers, max_workers=pool.max_workers, warm=pool.warm),
        limits=limits,
        splits={},
    )


def _tagged(image: str, tag: str) -> str:
    is_own = image.startswith(OWN_IMAGES) and not set(image) & {":", "@"}
    return f"{image}:{tag}" if tag and is_own else image


def _environment(parsed: EnvironmentFile, path: Path, image_tag: str) -> Environment:
    # Absolute paths stay absolute: a Path join then returns its right-hand side.
    root = path.parent.parent.parent
    environment = Environment(
        name=EnvironmentName(parsed.name),
        image=_tagged(parsed.image, image_tag) if parsed.image else STATIC_IMAGE if parsed.server.url else "",
        directory=path.parent.resolve(),
        command=_command(parsed),
        description=parsed.description,
        protocol=parsed.protocol,
        isolation=parsed.isolation,
        upstream_name=parsed.upstream_name,
        variables=parsed.variables,
        secrets=parsed.secrets,
        platform_keys=parsed.platform_keys,
        pool=_pool(parsed),
        limits=_limits(parsed.limits),
        timeouts=Timeouts(**parsed.timeouts.model_dump()),
        loosened=Relaxations(**parsed.loosened.model_dump()),
        sandbox=SandboxLimits(
            memory_bytes=(parsed.sandbox.memory_mib or 0) * MIB,
            pids=parsed.sandbox.pids or 0,
            disk_bytes=(parsed.sandbox.disk_mib or 0) * MIB,
            cpu_s=parsed.sandbox.cpu_s or 0,
        ),
        areal=_areal(parsed),
        openenv=OpenEnv(**parsed.openenv.model_dump()),
        nemo=Nemo(**parsed.nemo.model_dump()),
        server=Server(**parsed.server.model_dump()),
        actions=ActionMapping(**parsed.actions.model_dump()),
        resets=ResetMapping(**parsed.resets.model_dump()),
        observations=ObservationMapping(**parsed.observations.model_dump()),
        volumes=tuple(Volume(**one.model_dump()) for one in parsed.volumes),
        tasks=(root / parsed.tasks.directory).resolve() if parsed.tasks.directory else None,
        env_types=parsed.tasks.env_types,
        task_view=parsed.tasks.view,
        seed_rule=parsed.tasks.seed,
        public_fields=parsed.tasks.public,
        custom_tasks=_custom_tasks(parsed),
        scorer=Scorer(**parsed.scorer.model_dump()),
        unexpected=parsed.errors.unexpected,
        step_log=StepLogPolicy(**parsed.step_log.model_dump()),
    )
    splits = {name: _split(environment, name, parsed.limits, table) for name, table in parsed.splits.items()}
    return replace(environment, splits=splits)


def _limits(table: LimitsTable) -> Limits:
    return Limits(
        memory_bytes=table.memory_mib * MIB,
        cpus=table.cpus,
        pids=table.pids,
        tmp_bytes=table.tmp_mib * MIB,
        gpus=ALL_GPUS if table.gpus == "all" else table.gpus,
        gpu_ids=table.gpu_ids,
    )


def _split(environment: Environment, split: str, base: LimitsTable, table: SplitTable) -> Environment:
    given = {
        key: value
        for key in LimitsTable.model_fields
        if key in SplitTable.model_fields and (value := getattr(table, key)) is not None
    }
    if "gpus" in given or "gpu_ids" in given:  # each of the two keys alone sets all GPUs
        given = {"gpus": 0, "gpu_ids": (), **given}
    pool = replace(
        environment.pool,
        min_workers=table.min_workers,
        max_workers=table.max_workers or environment.pool.max_workers,
        warm=table.warm,
    )
    return variant(environment, split, pool=pool, limits=_limits(base.model_copy(update=given)))


def _command(parsed: EnvironmentFile) -> tuple[str, ...]:
    if parsed.command is not None:
        return parsed.command
    # The start command of a third-party image outside of this image is unknown.
    return () if parsed.server.port or parsed.server.url else ("python3", "server.py")


def _pool(parsed: EnvironmentFile) -> PoolPolicy:
    given = parsed.pool.model_dump()
    slots = given.pop("slots")
    given["is_separate"] = given.pop("tenants") == "separate"
    usual = OPENENV_SLOTS if parsed.protocol is ServerProtocol.OPENENV else SLOTS
    if parsed.server.url and "max_workers" not in parsed.pool.model_fields_set:
        given["max_workers"] = 1
    return PoolPolicy(slots=slots if isinstance(slots, int) else usual, learns_slots=slots == "learn", **given)


def _areal(parsed: EnvironmentFile) -> Areal:
    given = parsed.areal.model_dump()
    is_own = not (parsed.server.port or parsed.server.url)
    if given["max_turns"] is None and is_own:  # a third-party server ends its episodes itself
        del given["max_turns"]
    return Areal(**given)


def _custom_tasks(parsed: EnvironmentFile) -> CustomTasks | None:
    if not parsed.tasks.module:
        return None
    return CustomTasks(module=parsed.tasks.module, folder=parsed.tasks.folder or parsed.name)


_JUDGE = ("timeouts", "judge_s")


def _refuse_contradictions(environment: Environment, path: Path, source: str, parsed: EnvironmentFile) -> None:
    def complain(reason: str, *location: str) -> ConfigError:
        return ConfigError(f"{path}:{line_of(source, location)}: {'.'.join(location)}: {reason}")

    if environment.name in RESERVED:
        raise complain(f"{environment.name!r} is a reserved name: choose another one", "name")
    _refuse_pool_contradictions(environment, complain)
    _refuse_foreign_contradictions(environment, complain, tables=parsed.model_fields_set)
    if environment.isolation is not Isolation.SANDBOX and environment.sandbox != SandboxLimits():
        raise complain('this table needs isolation = "sandbox"', "sandbox")
    if environment.isolation is Isolation.SANDBOX and replace(environment.loosened, network="none") != Relaxations():
        raise complain('with isolation = "sandbox", only network can be loosened', "loosened")
    if environment.isolation is Isolation.EXCLUSIVE and (environment.pool.slots, environment.pool.max_uses) != (1, 1):
        raise complain('"exclusive" needs [pool] slots = 1 and max_uses = 1', "isolation")
    if environment.tasks is not None and not environment.tasks.is_dir():
        raise complain(f"{environment.tasks}: no such folder", "tasks", "directory")
    judge_s = environment.timeouts.judge_s
    steps_s = {
        ("timeouts", "call_s"): environment.timeouts.call_s,
        ("areal", "step_s"): environment.areal.step_s,
        ("openenv", "step_s"): environment.openenv.step_s,
    }
    for place, step_s in steps_s.items():
        if judge_s and step_s <= judge_s:
            limit = "[{}] {}".format(*place)
            raise complain(f"the judge may take {judge_s:g} s, and {limit} is {step_s:g}: give steps more", *_JUDGE)
    for name in environment.openenv.task_keys:
        if name in RESET_KEYS:
            raise complain(
                f"{name!r} has a fixed meaning in every reset: choose another key", "openenv", "task_keys", name
            )
    for name in environment.variables:
        if name.startswith("ENVSERVER_") or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise complain(
                "a name has letters, digits and underscores, and does not begin with a digit or ENVSERVER_",
                "variables",
                name,
            )
    for front, table in (("areal", parsed.areal), ("openenv", parsed.openenv)):
        is_named = "split" in table.model_fields_set and not table.split.startswith(PREFIX)
        if environment.tasks is not None and is_named:
            split = environment.tasks / f"{table.split}.jsonl"
            if not split.is_file():
                raise complain(f"{split}: no such file", front, "split")


def _refuse_pool_contradictions(environment: Environment, complain: Callable[..., ConfigError]) -> None:
    """Refuse contradictory numbers of workers and GPUs in the environment and its splits."""
    pool, is_static = environment.pool, bool(environment.server.url)
    if pool.pause_idle_s and is_static:
        raise complain("the gateway cannot pause a server at [server] url: remove this key", "pool", "pause_idle_s")
    if pool.is_separate and is_static:
        raise complain("all keys share a server at [server] url: remove this key", "pool", "tenants")
    if 0 < pool.pause_idle_s >= pool.idle_worker_s and not pool.min_workers and not pool.warm:
        raise complain(
            f"must be less than idle_worker_s = {pool.idle_worker_s:g}, after which an idle worker is stopped",
            "pool",
            "pause_idle_s",
        )
    if environment.splits and is_static:
        raise complain("a server at [server] url has its own resources: remove these tables", "splits")
    for name in environment.splits:
        if not SPLIT_NAME.fullmatch(name):
            raise complain(
                "the name of a split with its own resources must match [a-z0-9][a-z0-9_-]*, at most 63 characters",
                "splits",
                name,
            )
    tables: list[tuple[Environment, tuple[str, ...], tuple[str, ...]]] = [(environment, ("pool",), ("limits",))]
    tables += [(one, ("splits", name), ("splits", name)) for name, one in environment.splits.items()]
    for one, pool_table, limits_table in tables:
        if one.pool.min_workers > one.pool.max_workers:
            raise complain(
                f"must be at most max_workers = {one.pool.max_workers}, not {one.pool.min_workers}",
                *pool_table,
                "min_workers",
            )
        _refuse_too_warm(one.pool, complain, pool_table)
        for key, value in (("gpus", one.limits.gpus), ("gpu_ids", one.limits.gpu_ids)):
            if value and is_static:
                raise complain(
                    "the gateway cannot give GPUs to a server at [server] url: remove this key", *limits_table, key
                )
        if one.limits.gpus and one.limits.gpu_ids:
            raise complain("set either gpus (a number) or gpu_ids (particular GPUs)", *limits_table, "gpu_ids")
        if len(set(one.limits.gpu_ids)) != len(one.limits.gpu_ids):
            raise complain("a GPU is listed twice", *limits_table, "gpu_ids")


def _refuse_too_warm(pool: PoolPolicy, complain: Callable[..., ConfigError], table: Sequence[str]) -> None:
    if pool.learns_slots:
        return  # the first worker reports how many sessions a worker holds
    each = min(pool.slots, pool.max_uses) if pool.max_uses else pool.slots
    if pool.warm > each * pool.max_workers:
        most = (
            f"{each * pool.max_workers}: max_workers = {pool.max_workers} with {each} session{'s' * (each != 1)} each"
        )
        raise complain(f"must be at most {most}", *table, "warm")


def _refuse_foreign_contradictions(
    environment: Environment, complain: Callable[..., ConfigError], *, tables: set[str]
) -> None:
    """Refuse contradictory keys about third-party servers."""
    server, protocol = environment.server, environment.protocol
    if not server.is_foreign:
        if protocol is not ServerProtocol.ORS:
            raise complain(
                f"{protocol.value!r} needs [server] port (for an image) or url (for a running server)", "protocol"
            )
        for table in sorted(tables & {"actions", "observations", "resets"}):
            raise complain("this table is for third-party servers, which have [server] port or url", table)
    if server.port and server.url:
        raise complain("set either port (for an image) or url (for a running server)", "server", "url")
    if server.url and environment.image != STATIC_IMAGE:
        raise complain("a server at [server] url has no image: remove this key", "image")
    if not environment.image and environment.needs_an_engine:
        raise complain("name an image, or set command to start the server as a local process", "image")
    if server.url and (environment.pool.max_workers, environment.isolation) != (1, Isolation.SHARED):
        raise complain('a server at [server] url is one worker: set max_workers = 1 and isolation = "shared"', "pool")
    if server.url and urlsplit(server.url).hostname is None:
        raise complain(f"{server.url!r} has no host; write http://HOST:PORT", "server", "url")
    if server.url and environment.volumes:
        raise complain("the gateway cannot mount volumes for a server at [server] url: remove them", "volumes")
    if environment.pool.learns_slots and protocol is not ServerProtocol.OPENENV:
        raise complain(
            '"learn" is for OpenEnv servers, because only they report their capacity; write a number', "pool", "slots"
        )
    if environment.isolation is Isolation.SANDBOX and server.is_foreign:
        raise complain('"sandbox" is not available for third-party servers ([server] port or url)', "isolation")
    if "scorer" in tables and server.is_foreign:
        raise complain("the scorer of a third-party server is its image: remove this table", "scorer")
    if "errors" in tables and server.is_foreign:
        raise complain("an error of a third-party server is the agent's: remove this table", "errors")
    if environment.custom_tasks is not None and server.is_foreign:
        raise complain(
            "task modules are not available for third-party servers ([server] port or url)", "tasks", "module"
        )
    for table in sorted(tables & {"observations", "resets"}):
        if protocol is not ServerProtocol.OPENENV:
            raise complain('this table is for OpenEnv servers (protocol = "openenv")', table)
    if protocol is ServerProtocol.ORS and server.is_foreign and environment.timeouts.idle_s > ORS_IDLE_MAX_S:
        raise complain(
            f"must be at most {ORS_IDLE_MAX_S:g}: ORS servers end idle sessions after 900 s", "timeouts", "idle_s"
        )
    if "secrets" in tables and protocol is not ServerProtocol.ORS:
        raise complain(
            f"the protocol {protocol.value!r} cannot carry secrets to a server: set [variables], which its container "
            "gets, and remove this table",
            "secrets",
        )
    targets = [volume.target for volume in environment.volumes]
    if len(set(targets)) != len(targets):
        raise complain("two volumes have the same target", "volumes")


def read_source(path: Path) -> str:
    """Return the content of a TOML file. Raises ``ConfigError`` if the file is not readable or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error.reason}") from error


def parse_toml(source: str, path: Path) -> dict[str, Any]:
    """Parse the content of the file at *path*. Raises ``ConfigError``, with the line, if it is not TOML."""
    try:
        return tomllib.loads(source)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line = int(found[1]) if found else len(source.splitlines())  # else the message is "at end of document"
        raise ConfigError(f"{path}:{line}: {error}") from error


def _complaints(path: Path, source: str, error: ValidationError) -> Iterator[str]:
    for entry in error.errors(include_url=False):
        location = tuple(str(part) for part in entry["loc"])
        if (own := _two_forms(location)) is not None:
            if entry["type"] == "literal_error":
                continue  # the other form of the key has its own entry
            location = own
        yield f"{path}:{line_of(source, location)}: {'.'.join(location)}: {reason_of(entry, EnvironmentFile)}"


def _two_forms(location: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the key at *location* if it accepts a number or a word, which gives two errors; else return None."""
    if location[:2] in (("pool", "slots"), ("limits", "gpus")):
        return location[:2]
    return location[:3] if location[:1] == ("splits",) and location[2:3] == ("gpus",) else None


def line_of(source: str, location: Sequence[int | str]) -> int:
    """Return the line, counted from 1, of the key at *location* (tables, list indices, then key).

    For a missing key, return its table's line, or 1. ``tomllib`` keeps no positions, so the function reads the forms
    that environment files use: ``[a.b]`` and ``[[a.b]]`` headers and ``key = value`` lines.
    """
    wanted = tuple(str(step) for step in location)
    table: tuple[str, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    best, depth = 1, 0
    for number, line in enumerate(source.splitlines(), 1):
        if header := re.match(r"\s*(\[+)\s*([^\]]+?)\s*\]+\s*(?:#.*)?$", line):
            table = tuple(part.strip(" \"'") for part in header[2].split("."))
            keys = [table]
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, str(counts[table]))
                keys.append(table)
        elif entry := re.match(r"\s*([A-Za-z0-9_.\"'-]+)\s*=", line):
            keys = [(*table, *(part.strip(" \"'") for part in entry[1].split(".")))]
        else:
            continue
        for key in keys:
            if len(key) > depth and key == wanted[: len(key)]:
                best, depth = number, len(key)
    return best
