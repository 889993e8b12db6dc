"""The environments on offer, read from the ``environment.toml`` files of a folder."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from gateway import BUNDLED
from gateway.catalog.toml import MIB, read_environment, variant
from gateway.core.environment import ALL_GPUS, Environment, Isolation, Limits, PoolPolicy
from gateway.core.errors import ConfigError, UnknownEnvironment

REQUIREMENTS: Final = "requirements.txt"
"""In an environment's folder: the Python packages that its server needs, names only, and all that these need."""


class Catalog:
    """The environments on offer; names are matched without regard to case.

    Splits with resources of their own are environments too (`Environment.splits`), named after the one that
    they belong to with a dot between. Sessions and workers bear such names, so that they are found in `known` and by
    `named`; trainers cannot say them, so that frontends look in `offered` and call `wanted`. What is no longer on offer
    is found as well while sessions of it may live.
    """

    def __init__(self, environments: Sequence[Environment], default: str = "") -> None:
        """*default* is the environment that is meant where none is named; empty: the first.

        Raises:
            ConfigError: no environment, two of one name, or *default* is not among them.
        """
        if not environments:
            raise ConfigError("no environment is on offer")
        self.offered: dict[str, Environment] = {one.name: _followed(one) for one in environments}
        """What trainers may name, by lower-case name: the environments on offer, and no split's."""
        if len(self.offered) != len(environments):
            raise ConfigError("two environments have the same name")
        name = default.lower() or environments[0].name
        if name not in self.offered:
            raise ConfigError(f"default_environment {default!r} is not on offer; there are {', '.join(self.offered)}")
        self.default = self.offered[name]
        """The environment that is meant where none is named."""
        self._withdrawn: dict[str, Environment] = {}
        self.known = self._by_name()
        """What sessions and workers are of, by lower-case name: environments, those of splits, withdrawn ones."""
        self.left_out: dict[str, str] = {}
        """By name: why an environment that has a file is not on offer, and what to do about it."""

    def __iter__(self) -> Iterator[Environment]:
        """Go through the environments, the default one first; as they are now, whatever changes meanwhile."""
        others = [entry for entry in self.offered.values() if entry is not self.default]
        return iter([self.default, *others])

    def all(self) -> Iterator[Environment]:
        """Go through all that workers may be of: the environments, their splits, and what was withdrawn."""
        return iter([*(one for entry in self for one in (entry, *entry.splits.values())), *self._withdrawn.values()])

    def runnable(self, *, containers: bool, default: str = "") -> Catalog:
        """The environments whose workers can run here, as `why_not_runnable` says; the others are ``left_out``.

        *default* as at the start.

        Raises:
            ConfigError: there are none, or *default* is none of them.
        """
        left_out = {
            str(one.name): reason
            for one in self.offered.values()
            if (reason := why_not_runnable(one, containers=containers))
        }
        kept = [one for one in self.offered.values() if one.name not in left_out]
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        if not kept:
            raise ConfigError(f"no environment is on offer: {reasons}")
        if default.lower() in left_out:
            raise ConfigError(f"default_environment {default!r} is not on offer: {left_out[default.lower()]}")
        catalog = Catalog(kept, default)
        catalog.left_out = left_out
        return catalog

    def replace(self, environment: Environment) -> None:
        """Offer *environment* instead of the one of its name, from now on; sessions that are open are not touched.

        What its splits have of their own is taken from its ``splits``, and all else of theirs from itself.

        Raises:
            UnknownEnvironment: none of its name is on offer.
        """
        before = self.wanted(environment.name)
        self.offered[before.name] = _followed(environment)
        if before is self.default:
            self.default = self.offered[before.name]
        for split, one in before.splits.items():
            if split not in environment.splits:
                self._withdrawn[one.name] = _ending(one)
        self.known = self._by_name()

    def offer(self, environment: Environment) -> None:
        """Offer one more environment from now on.

        Raises:
            ConfigError: one of its name is on offer.
        """
        if environment.name in self.offered:
            raise ConfigError(f"two environments have the name {environment.name!r}")
        self.offered[environment.name] = _followed(environment)
        self.left_out.pop(environment.name, None)
        self.known = self._by_name()

    def withdraw(self, name: str) -> None:
        """Offer the environment *name* no longer.

        Its open sessions go on, and its idle workers are stopped: it stays known to `get` and `all`.

        Raises:
            UnknownEnvironment: none of that name is on offer.
            ConfigError: it is the default one, which requests that name none would not find.
        """
        environment = self.wanted(name)
        if environment is self.default:
            raise ConfigError(f"{environment.name!r} is the default environment")
        del self.offered[environment.name]
        for one in (environment, *environment.splits.values()):
            self._withdrawn[one.name] = _ending(one)
        self.known = self._by_name()

    def __len__(self) -> int:
        return len(self.offered)

    def named(self, name: str) -> Environment:
        """Look up in `known` what must be there.

        Raises:
            UnknownEnvironment: it is not.
        """
        environment = self.known.get(name.lower())
        if environment is None:
            raise self.unknown(name)
        return environment

    def wanted(self, name: str) -> Environment:
        """Look up in `offered` what must be there.

        Raises:
            UnknownEnvironment: it is not.
        """
        environment = self.offered.get(name.lower())
        if environment is None:
            raise self.unknown(name)
        return environment

    def unknown(self, name: str) -> UnknownEnvironment:
        """The error for a *name* that is not on offer: why it is left out, or which names there are."""
        if reason := self.left_out.get(name.lower()):
            return UnknownEnvironment(f"environment {name!r} is not on offer: {reason}")
        return UnknownEnvironment(f"unknown environment {name[:64]!r}; there are {', '.join(one.name for one in self)}")

    def _by_name(self) -> dict[str, Environment]:
        known: dict[str, Environment] = {
            one.name: one for entry in self.offered.values() for one in (entry, *entry.splits.values())
        }
        self._withdrawn = {name: one for name, one in self._withdrawn.items() if name not in known}
        return known | self._withdrawn


def why_not_runnable(environment: Environment, *, containers: bool) -> str:
    """Why workers of *environment* cannot run as containers, or as local processes, and what to do; empty: they can.

    That user namespaces are there, which sandboxes need too, shows only as a worker starts.
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
        # Without what these packages require of others: each list is complete.
        command = [sys.executable, "-m", "pip", "install", "--no-deps"]
        command += ["--constraint", f"{BUNDLED / 'constraints.txt'}"]
        command += ["--requirement", f"{environment.directory / REQUIREMENTS}"]
        return (
            f"it needs Python packages that are not installed ({', '.join(missing)}): run `{shlex.join(command)}` and "
            "restart the gateway"
        )
    return ""


def _missing_packages(environment: Environment) -> list[str]:
    """List the packages of a bundled environment's requirements that this Python does not have."""
    path = environment.directory / REQUIREMENTS
    if not path.is_file():
        return []
    names = [line.partition("#")[0].strip() for line in path.read_text("utf-8").splitlines()]
    return [name for name in names if name and not any(metadata.Distribution.discover(name=name))]


def _followed(environment: Environment) -> Environment:
    """*environment* with splits that have all of it but their own pools and limits."""
    if not environment.splits:
        return environment
    splits = {
        name: variant(environment, name, pool=one.pool, limits=one.limits) for name, one in environment.splits.items()
    }
    return replace(environment, splits=splits)


def _ending(environment: Environment) -> Environment:
    """*environment* as one that nobody can ask for any more: no worker is kept for sessions to come."""
    pool = replace(environment.pool, min_workers=0, warm=0, idle_worker_s=0.0, pause_idle_s=0.0)
    return replace(environment, pool=pool, splits={})


def load_catalog(directory: Path, *, names: Sequence[str] = (), default: str = "", image_tag: str = "") -> Catalog:
    """Read ``<directory>/<name>/environment.toml``, all of them or those of *names*, in that order.

    *image_tag*: as for `read_environment`.

    Raises:
        ConfigError: no such folder or environment, or a file is wrong (with file, line and reason).
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
"""What an isolation needs beyond the hardened default."""


def describe(environment: Environment) -> Mapping[str, Any]:
    """What ``gateway check`` prints of one environment, or of a split of one with resources of its own."""
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
    """What may be a mistake. Servers of other people's without a task folder have splits that no file is of."""
    if environment.tasks is None:
        return
    for split in environment.splits:
        path = environment.tasks / f"{split}.jsonl"
        if not path.is_file():
            yield f"splits.{split}: {path}: no such file"


def _modules(environment: Environment) -> tuple[str, ...]:
    """Code of an operator's that decides rewards."""
    tasks = environment.custom_tasks
    return () if tasks is None else (f"task modules {tasks.module} of folder {tasks.folder}",)


def _volumes(environment: Environment) -> Iterator[str]:
    for volume in environment.volumes:
        yield f"volume {volume.source} at {volume.target}{'' if volume.read_only else ', writable'}"
