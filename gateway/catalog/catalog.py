"""Holds the available environments, read from the ``environment.toml`` files of a folder."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from gateway import BUNDLED
from gateway.catalog.toml import MIB, read_environment, variant
from gateway.core.environment import ALL_GPUS, Environment, Isolation, Limits, PoolPolicy, tenant_tag
from gateway.core.errors import ConfigError, NotPermitted, UnknownEnvironment
from gateway.core.ids import Owner
from gateway.core.validation import did_you_mean

REQUIREMENTS: Final = "requirements.txt"
"""File in an environment's folder with the names (only) of its server's Python packages and all their dependencies."""


class Catalog:
    """The available environments. Names are case-insensitive.

    A split with its own resources is an environment too (`Environment.splits`), with the name ``environment.split``.
    If the pool is separate, each key's workers belong to an environment ``environment@key`` (`Environment.tenants`).
    Sessions and workers can have such names, so `known` and `named` include these variants. Trainers cannot use them,
    so frontends use `offered` and `wanted`. `known` also includes withdrawn environments, whose sessions may still run.
    """

    def __init__(self, environments: Sequence[Environment], default: str = "") -> None:
        """Create a catalog. *default* names the environment for requests that name none; empty: the first one.

        Raises:
            ConfigError: There is no environment, two have the same name, or *default* is not available.
        """
        if not environments:
            raise ConfigError("no environment is available")
        self._tenants: Mapping[Owner, Collection[str]] = {}
        self._parts: dict[tuple[str, ...], Catalog] = {}
        self.offered: dict[str, Environment] = {one.name: self._followed(one) for one in environments}
        """The environments that trainers can name, by lower-case name, without variants."""
        if len(self.offered) != len(environments):
            raise ConfigError("two environments have the same name")
        name = default.lower() or environments[0].name
        if name not in self.offered:
            raise ConfigError(
                f"default_environment {default!r} is not available; choose one of {', '.join(self.offered)}"
            )
        self.default = self.offered[name]
        """The environment for requests that name none."""
        self._withdrawn: dict[str, Environment] = {}
        self.known = self._by_name()
        """The environments of sessions and workers, by lower-case name: offered ones, variants, withdrawn ones."""
        self.left_out: dict[str, str] = {}
        """The reason, with its remedy, why an environment that has a file is not available, by name."""

    def __iter__(self) -> Iterator[Environment]:
        """Iterate over a copy of the offered environments, the default one first."""
        others = [entry for entry in self.offered.values() if entry is not self.default]
        return iter([self.default, *others])

    def all(self) -> Iterator[Environment]:
        """Iterate over all environments that workers may have: offered ones, their variants, and withdrawn ones.

        An environment with a variant for each key keeps no workers ready itself: only queries for tasks and tools use
        them.
        """
        offered = [_without_reserve(one) if one.tenants else one for entry in self for one in _with_variants(entry)]
        return iter([*offered, *self._withdrawn.values()])

    def set_tenants(self, tenants: Mapping[Owner, Collection[str]]) -> None:
        """Give each key its own variants of the environments with separate pools.

        *tenants*: the names of the environments that each key may use; empty: all. A key that is gone keeps its
        sessions until they end.
        """
        before = dict(self.known)
        self._tenants = tenants
        self.offered = {name: self._followed(one) for name, one in self.offered.items()}
        self.default = self.offered[self.default.name]
        self.known = self._by_name()
        gone = [one for name, one in before.items() if name not in self.known]
        self._withdrawn.update((one.name, _ending(one)) for one in gone)
        self.known = self._by_name()

    def part(self, names: tuple[str, ...]) -> Catalog:
        """Return a catalog of the environments *names* only, for a key that may use no others.

        Raises:
            NotPermitted: None of them is available.
        """
        if names not in self._parts:
            kept = [one for one in self if one.name in names]
            if not kept:
                raise NotPermitted(f"this key may use only {', '.join(names)}, and none of these is available")
            part = Catalog(kept)
            reason = f"this key may use only {', '.join(names)}"
            part.left_out = self.left_out | {name: reason for name in self.offered if name not in names}
            self._parts[names] = part
        return self._parts[names]

    def runnable(self, *, containers: bool, default: str = "") -> Catalog:
        """Return a catalog of the environments whose workers can run here; ``left_out`` has the others and the reasons.

        *default* is as in the constructor.

        Raises:
            ConfigError: No environment can run, or *default* cannot.
        """
        left_out = {
            str(one.name): reason
            for one in self.offered.values()
            if (reason := why_not_runnable(one, containers=containers))
        }
        kept = [one for one in self.offered.values() if one.name not in left_out]
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        if not kept:
            raise ConfigError(f"no environment is available: {reasons}")
        if default.lower() in left_out:
            raise ConfigError(f"default_environment {default!r} is not available: {left_out[default.lower()]}")
        catalog = Catalog(kept, default)
        catalog.left_out = left_out
        return catalog

    def replace(self, environment: Environment) -> None:
        """Replace the offered environment of the same name. Open sessions do not change.

        A split gets its pool and limits from ``environment.splits``, and all else from *environment*.

        Raises:
            UnknownEnvironment: No environment of this name is available.
        """
        before = self.wanted(environment.name)
        self.offered[before.name] = self._followed(environment)
        if before is self.default:
            self.default = self.offered[before.name]
        now = {one.name for one in _with_variants(self.offered[before.name])}
        self._withdrawn.update((one.name, _ending(one)) for one in _with_variants(before) if one.name not in now)
        self.known = self._by_name()

    def offer(self, environment: Environment) -> None:
        """Add an environment to the offer.

        Raises:
            ConfigError: An environment of this name is available.
        """
        if environment.name in self.offered:
            raise ConfigError(f"two environments have the name {environment.name!r}")
        self.offered[environment.name] = self._followed(environment)
        self.left_out.pop(environment.name, None)
        self.known = self._by_name()

    def withdraw(self, name: str) -> None:
        """Remove the environment *name* from the offer.

        Its open sessions continue, and its idle workers are stopped. It stays in `named` and `all`.

        Raises:
            UnknownEnvironment: No environment of this name is available.
            ConfigError: It is the default environment, which requests without a name need.
        """
        environment = self.wanted(name)
        if environment is self.default:
            raise ConfigError(f"{environment.name!r} is the default environment")
        del self.offered[environment.name]
        self._withdrawn.update((one.name, _ending(one)) for one in _with_variants(environment))
        self.known = self._by_name()

    def __len__(self) -> int:
        return len(self.offered)

    def named(self, name: str) -> Environment:
        """Return the environment *name* from `known`.

        Raises:
            UnknownEnvironment: The name is not in `known`.
        """
        environment = self.known.get(name.lower())
        if environment is None:
            raise self.unknown(name)
        return environment

    def wanted(self, name: str) -> Environment:
        """Return the environment *name* from `offered`.

        Raises:
            UnknownEnvironment: The name is not in `offered`.
        """
        environment = self.offered.get(name.lower())
        if environment is None:
            raise self.unknown(name)
        return environment

    def unknown(self, name: str) -> UnknownEnvironment:
        """Return the error for a *name* that is not available, with the reason or the list of offered names."""
        if reason := self.left_out.get(name.lower()):
            return UnknownEnvironment(f"environment {name!r} is not available: {reason}")
        names = [one.name for one in self]
        close = did_you_mean(name.lower(), names)
        return UnknownEnvironment(f"unknown environment {name[:64]!r}; there are {', '.join(names)}{close}")

    def _followed(self, environment: Environment) -> Environment:
        """Return *environment* with its variants derived from it again; splits keep their own pools and limits."""
        if not (environment.splits or environment.tenants or environment.pool.is_separate):
            return environment
        splits = {
            name: self._with_tenants(variant(environment, name, pool=one.pool, limits=one.limits))
            for name, one in environment.splits.items()
        }
        return self._with_tenants(replace(environment, splits=splits))

    def _with_tenants(self, one: Environment) -> Environment:
        users = [owner for owner, names in self._tenants.items() if not names or (one.base or one.name) in names]
        is_separate = one.pool.is_separate
        return replace(one, tenants={owner: one.for_tenant(tenant_tag(owner)) for owner in users if is_separate})

    def _by_name(self) -> dict[str, Environment]:
        self._parts.clear()
        known: dict[str, Environment] = {
            one.name: one for entry in self.offered.values() for one in _with_variants(entry)
        }
        self._withdrawn = {name: one for name, one in self._withdrawn.items() if name not in known}
        return known | self._withdrawn


def why_not_runnable(environment: Environment, *, containers: bool) -> str:
    """Return why workers of *environment* cannot run as containers or local processes, and the remedy; empty: they can.

    Sandboxes also need user namespaces, but only a worker's start shows if these are available.
    """
    if environment.server.url:
        return ""
    if containers:
        return (
            "" if environment.image else "its environment.toml names no image: add one, or use GATEWAY_BACKEND=process"
        )
    if environment.needs_an_engine:
        return "it runs in its image only: use GATEWAY_BACKEND=docker"
    if environment.isolation is Isolation.SANDBOX and shutil.which("bwrap") is None:
        return (
            "its sandboxes need bubblewrap, and there is no bwrap on PATH: install bubblewrap 0.8 or later and restart "
            "the gateway, or use GATEWAY_BACKEND=docker"
        )
    if environment.directory.is_relative_to(BUNDLED) and (missing := _missing_packages(environment)):
        # Without dependencies: each requirements list is complete.
        command = [sys.executable, "-m", "pip", "install", "--no-deps"]
        command += ["--constraint", f"{BUNDLED / 'constraints.txt'}"]
        command += ["--requirement", f"{environment.directory / REQUIREMENTS}"]
        return (
            f"it needs Python packages that are not installed ({', '.join(missing)}): run `{shlex.join(command)}` and "
            "restart the gateway"
        )
    return ""


def _missing_packages(environment: Environment) -> list[str]:
    """Return the required packages of a bundled environment that this Python lacks."""
    path = environment.directory / REQUIREMENTS
    if not path.is_file():
        return []
    names = [line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines()]
    return [name for name in names if name and not any(metadata.Distribution.discover(name=name))]


def _with_variants(environment: Environment) -> Iterator[Environment]:
    """Yield an offered environment, its splits with resources of their own, and the variants of both for each key."""
    for one in (environment, *environment.splits.values()):
        yield one
        yield from one.tenants.values()


def _without_reserve(environment: Environment) -> Environment:
    return replace(environment, pool=replace(environment.pool, min_workers=0, warm=0))


def _ending(environment: Environment) -> Environment:
    """Return *environment* with a pool that keeps no idle worker, because trainers can no longer request it."""
    pool = replace(environment.pool, min_workers=0, warm=0, idle_worker_s=0.0, pause_idle_s=0.0)
    return replace(environment, pool=pool, splits={}, tenants={})


def load_catalog(directory: Path, *, names: Sequence[str] = (), default: str = "", image_tag: str = "") -> Catalog:
    """Read the ``<directory>/<name>/environment.toml`` files: all of them, or only *names*, in that order.

    *image_tag* is as in `parse_environment`.

    Raises:
        ConfigError: The folder or an environment is missing, or a file is wrong (with file, line and reason).
    """
    if not directory.is_dir():
        raise ConfigError(
            f"{directory}: no such folder: set GATEWAY_CATALOG_DIR to a folder of environments "
            "(NAME/environment.toml), or run this in a checkout of env-gateway, which has some"
        )
    files = sorted(directory.glob("*/environment.toml"))
    if names:
        by_folder = {path.parent.name: path for path in files}
        missing = [name for name in names if name not in by_folder]
        if missing:
            raise ConfigError(f"{directory}: no environment {', '.join(missing)}; there are {', '.join(by_folder)}")
        files = [by_folder[name] for name in names]
    if not files:
        raise ConfigError(f"{directory}: no */environment.toml in it")
    return Catalog([read_environment(path, image_tag=image_tag) for path in files], default)


SANDBOX_WORDS: Mapping[Isolation, tuple[str, ...]] = {
    Isolation.SHARED: (),
    Isolation.SANDBOX: ("sandboxes: SETUID, SETGID, seccomp profile, /proc unmasked",),
    Isolation.EXCLUSIVE: (),
}
"""Privileges that each isolation needs beyond the hardened default, as shown by ``gateway check``."""


def describe(environment: Environment) -> Mapping[str, Any]:
    """Return the values that ``gateway check`` prints for an environment, or for a split with its own resources."""
    return {
        "name": environment.name,
        "image": environment.server.url or environment.image or "local processes only",
        "protocol": environment.protocol.value,
        "isolation": environment.isolation.value,
        "workers": _workers(environment.pool),
        "resources": "not ours" if environment.server.url else _resources(environment.limits),
        "idle_s": environment.timeouts.idle_s,
        "loosened": [
            *SANDBOX_WORDS[environment.isolation],
            *environment.loosened.words(),
            *_modules(environment),
            *_volumes(environment),
        ],
        "remarks": list(_remarks(environment)),
    }


def _workers(pool: PoolPolicy) -> str:
    words = [f"{pool.min_workers}-{pool.max_workers} x {'learned' if pool.learns_slots else pool.slots} slots"]
    if pool.warm:
        words.append(f"{pool.warm} warm")
    if pool.pause_idle_s:
        words.append(f"paused after {pool.pause_idle_s:g} s")
    return ", ".join(words)


def _resources(limits: Limits) -> str:
    words = [f"{limits.cpus:g} CPU{'s' * (limits.cpus != 1)}", f"{limits.memory_bytes // MIB} MiB"]
    if limits.gpus == ALL_GPUS:
        words.append("all GPUs")
    elif limits.gpus:
        words.append(f"{limits.gpus} GPU{'s' * (limits.gpus != 1)}")
    if limits.gpu_ids:
        words.append(f"GPU {', '.join(limits.gpu_ids)}")
    return ", ".join(words)


def _remarks(environment: Environment) -> Iterator[str]:
    """Yield warnings about possible mistakes: split tables without a task file, if there is a task folder.

    Third-party servers without a task folder have splits without a file.
    """
    if environment.tasks is None:
        return
    for split in environment.splits:
        path = environment.tasks / f"{split}.jsonl"
        if not path.is_file():
            yield f"splits.{split}: {path}: no such file"


def _modules(environment: Environment) -> tuple[str, ...]:
    """Return a description of the operator's task modules, which decide rewards."""
    tasks = environment.custom_tasks
    return () if tasks is None else (f"task modules {tasks.module} of folder {tasks.folder}",)


def _volumes(environment: Environment) -> Iterator[str]:
    for volume in environment.volumes:
        yield f"volume {volume.source} at {volume.target}{'' if volume.read_only else ', writable'}"
