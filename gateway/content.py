"""Reads environments, tasks and curricula from the places that the settings name."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gateway.catalog.catalog import Catalog, load_catalog
from gateway.catalog.static_servers import StaticServers
from gateway.catalog.task_modules import CustomTaskFolders
from gateway.core.environment import Environment
from gateway.core.errors import ConfigError, UnknownEnvironment
from gateway.core.ids import EnvironmentName
from gateway.settings import Settings
from gateway.tasks.curricula import definitions as curriculum_files
from gateway.tasks.curricula.model import Curriculum
from gateway.tasks.curricula.tables import Rows, read_table
from gateway.tasks.registry import TaskRegistry, load_tasks, read_splits

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Content:
    """The environments, tasks and curricula of a gateway, as read at the start."""

    catalog: Catalog
    tasks: TaskRegistry
    curricula: Mapping[str, Curriculum] = field(default_factory=dict)
    """Curricula from files, by name."""
    static: StaticServers | None = None
    """The external servers, of which some may not be found yet."""


async def load_content(settings: Settings) -> Content:
    """Read all content with `load_files` and `read_curricula`, and inspect the servers of ``static``.

    Raises:
        ConfigError: A file is wrong, with line and reason; or no server of ``static`` can be used.
    """
    servers = StaticServers(settings.static_servers(), step_s=settings.static_step_s)
    static = await servers.find() if settings.static else []
    if (reason := servers.missing.get(settings.default_environment)) is not None:
        raise ConfigError(f"default_environment {settings.default_environment!r} is not available: {reason}")
    catalog, tasks = load_files(settings, static=static)
    catalog.left_out |= servers.missing
    return Content(catalog, tasks, read_curricula(settings, catalog, tasks), servers)


def load_files(
    settings: Settings, *, on_engine: bool | None = None, static: Sequence[Environment] = ()
) -> tuple[Catalog, TaskRegistry]:
    """Read the environments and their tasks.

    Args:
        settings: Settings of this process.
        on_engine: True if workers are containers; None: the backend decides. Local processes leave out environments
            that run only in their images.
        static: Additional environments. Unless the settings name environments, only these are offered.

    Raises:
        ConfigError: A file is wrong; the message has file, line and reason.
    """
    default = settings.default_environment
    if static and not settings.environments:
        catalog = Catalog(static, default)
        return catalog, load_tasks(catalog)
    containers = settings.uses_containers if on_engine is None else on_engine
    found = load_catalog(Path(settings.catalog_dir), names=settings.environments, image_tag=settings.image_tag)
    catalog = found.runnable(containers=containers, default="" if static else default)
    for name, reason in catalog.left_out.items():
        if name in settings.environments:
            raise ConfigError(f"GATEWAY_ENVIRONMENTS: {name}: {reason}")
        logger.info("environment_left_out environment=%s reason=%r", name, reason)
    if static:
        catalog = Catalog([*catalog, *static], default)
    return catalog, load_tasks(catalog)


def read_curricula(settings: Settings, catalog: Catalog, tasks: TaskRegistry) -> dict[str, Curriculum]:
    """Read the curriculum files, and check them against the environments and tasks.

    Raises:
        ConfigError: Lists every problem with its file, line and key.
    """
    tables: dict[tuple[EnvironmentName, str], Rows | None] = {}

    def look(name: EnvironmentName, split: str) -> Rows | None:
        environment = catalog.offered.get(name)
        if environment is None:
            raise UnknownEnvironment(f"no environment {name!r} is available")
        if (name, split) not in tables:
            tables[name, split] = read_table(environment, split, tasks)
        return tables[name, split]

    return curriculum_files.read_curricula(settings.curricula_dir, look)


class Completion:
    """Adds to an environment its tasks and the content of its task modules, which its file does not contain."""

    def __init__(self, catalog: Catalog, tasks: TaskRegistry, task_modules: CustomTaskFolders) -> None:
        self._catalog = catalog
        self._tasks = tasks
        self._task_modules = task_modules

    async def complete(self, environment: Environment) -> Environment:
        """Read the tasks of *environment* before it is offered; return it with the content of its task modules.

        Raises:
            ConfigError: Its tasks are wrong.
        """
        if environment.name not in self._catalog.offered:  # `TaskFileWatch` watches known environments
            found = await asyncio.to_thread(read_splits, environment.tasks)
            self._tasks.offer(environment.name, found, environment.env_types)
        return await self._task_modules.fill(environment)
