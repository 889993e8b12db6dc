"""The environments on offer, read from the ``environment.toml`` files of a folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gateway.core.errors import ConfigError, UnknownEnvironment
from gateway.core.model import (
    Environment,
    EnvironmentName,
    Isolation,
)
from gateway.environment_files import read_environment


class Catalog:
    """The environments on offer; names are matched without regard to case."""

    def __init__(self, environments: Sequence[Environment], default: str = "") -> None:
        """*default* is the environment that is meant where none is named; empty: the first.

        Raises:
            ConfigError: no environment, two of one name, or *default* is not among them.
        """
        if not environments:
            raise ConfigError("no environment is on offer")
        self._environments = {environment.name: environment for environment in environments}
        if len(self._environments) != len(environments):
            raise ConfigError("two environments have the same name")
        name = EnvironmentName(default.lower() or environments[0].name)
        if name not in self._environments:
            raise ConfigError(
                f"default_environment {default!r} is not on offer; there are {', '.join(self._environments)}"
            )
        self._default = name

    @property
    def default(self) -> Environment:
        """The environment that is meant where none is named."""
        return self._environments[self._default]

    def __iter__(self) -> Iterator[Environment]:
        """Go through the environments, the default one first."""
        yield self.default
        yield from (entry for name, entry in self._environments.items() if name != self._default)

    def only_local(self, *, default: str = "") -> Catalog:
        """The environments that need no engine: local processes, and servers that somebody else runs.

        *default* as at the start.

        Raises:
            ConfigError: there are none, or *default* is none of them.
        """
        return Catalog([one for one in self._environments.values() if not one.needs_an_engine], default)

    def replace(self, environment: Environment) -> None:
        """Offer *environment* instead of the one of its name, from now on; sessions that are open are not touched.

        Raises:
            UnknownEnvironment: there is none of its name.
        """
        self.named(environment.name)
        self._environments[environment.name] = environment

    def __len__(self) -> int:
        return len(self._environments)

    def get(self, name: str) -> Environment | None:
        """Look *name* up without regard to case."""
        return self._environments.get(EnvironmentName(name.lower()))

    def named(self, name: str) -> Environment:
        """Look *name* up, which must be on offer.

        Raises:
            UnknownEnvironment: it is not.
        """
        environment = self.get(name)
        if environment is None:
            raise UnknownEnvironment(f"unknown environment {name!r}")
        return environment


def load_catalog(directory: Path, *, names: Sequence[str] = (), default: str = "") -> Catalog:
    """Read ``<directory>/<name>/environment.toml``, all of them or those of *names*, in that order.

    Raises:
        ConfigError: no such folder or environment, or a file is wrong (with file, line and reason).
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such folder (GATEWAY_CATALOG_DIR)")
    files = sorted(directory.glob("*/environment.toml"))
    if names:
        by_folder = {path.parent.name: path for path in files}
        missing = [name for name in names if name not in by_folder]
        if missing:
            raise ConfigError(f"{directory}: no environment {', '.join(missing)}; there are {', '.join(by_folder)}")
        files = [by_folder[name] for name in names]
    if not files:
        raise ConfigError(f"{directory}: no */environment.toml in it")
    return Catalog([read_environment(path) for path in files], default)


SANDBOX_WORDS: Mapping[Isolation, tuple[str, ...]] = {
    Isolation.SHARED: (),
    Isolation.SANDBOX: ("sandboxes: SETUID, SETGID, seccomp profile, /proc unmasked",),
    Isolation.EXCLUSIVE: (),
}
"""What an isolation needs beyond the hardened default."""


def describe(environment: Environment) -> Mapping[str, Any]:
    """What ``gateway check`` prints of one environment."""
    pool, timeouts = environment.pool, environment.timeouts
    return {
        "name": environment.name,
        "image": environment.server.url or environment.image,
        "protocol": environment.protocol.value,
        "isolation": environment.isolation.value,
        "workers": f"{pool.min_workers}-{pool.max_workers} x {'learned' if pool.learns_slots else pool.slots} slots",
        "idle_s": timeouts.idle_s,
        "loosened": [
            *SANDBOX_WORDS[environment.isolation],
            *environment.loosened.words(),
            *_modules(environment),
            *_volumes(environment),
        ],
    }


def _modules(environment: Environment) -> tuple[str, ...]:
    """Code of an operator's that decides rewards."""
    tasks = environment.custom_tasks
    return () if tasks is None else (f"task modules {tasks.module} of folder {tasks.folder}",)


def _volumes(environment: Environment) -> Iterator[str]:
    for volume in environment.volumes:
        yield f"volume {volume.source} at {volume.target}{'' if volume.read_only else ', writable'}"
