"""Find the sources of containers' mounts, as paths that the engine sees.

They differ from the gateway's paths if the gateway itself runs in a container.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from docker import APIClient

from gateway.backends.docker import calls
from gateway.backends.docker.container import custom_tasks
from gateway.backends.docker.engine import Engine, EngineError
from gateway.backends.folders import Folders
from gateway.core.environment import Environment
from gateway.core.errors import StartFailed
from gateway.core.ids import WorkerId
from gateway.core.placement import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPaths:
    """Places of workers' files: folders as their machine sees them, and the volumes mounted there."""

    socket_dir: Path
    """Absolute path of the folder that holds the workers' socket folders."""
    node: NodeId | None = None
    """The node whose engine gate creates the socket folders; None if they are on this machine."""
    socket_volume: str | None = None
    """The volume that is mounted at *socket_dir*; None if the engine sees that path itself."""
    custom_tasks_dir: Path | None = None
    """The folder of operators' task modules; None if there are none to mount."""
    custom_tasks_volume: str | None = None
    """The volume with the task modules; None if the engine sees *custom_tasks_dir* itself."""


class Sources:
    """Finds the sources of mounts, and caches the mount points of the engine's volumes."""

    def __init__(self, engine: Engine, folders: Folders, paths: HostPaths) -> None:
        self._engine = engine
        self._folders = folders
        self._volume = paths.socket_volume
        self._custom_tasks_dir = paths.custom_tasks_dir.absolute() if paths.custom_tasks_dir is not None else None
        self._custom_tasks_volume = paths.custom_tasks_volume
        self._mountpoints: dict[str, str] = {}

    async def sockets(self, id: WorkerId) -> str:
        """Return the path of worker *id*'s socket folder, as the engine sees it."""
        if self._volume is None:
            return str(self._folders.folder(id))
        return f"{await self._mountpoint(self._volume)}/{id}"

    async def custom_tasks(self, environment: Environment) -> str:
        """Return the path of the environment's task modules; an empty string if there are none to mount.

        Raises:
            StartFailed: The environment has task modules, but the settings name no folder of task modules.
        """
        tasks = custom_tasks(environment)
        if tasks is None:
            return ""
        if self._custom_tasks_volume is not None:
            return f"{await self._mountpoint(self._custom_tasks_volume)}/{tasks.folder}"
        if self._custom_tasks_dir is None:
            raise StartFailed(f"environment {environment.name} has custom tasks, but custom_tasks_dir is not set")
        return str(self._custom_tasks_dir / tasks.folder)

    async def expect_volumes(self, environment: Environment) -> None:
        """Check that the engine has the volumes of the environment's ``environment.toml``.

        Raises:
            StartFailed: A volume is missing. The engine would create it, and the gateway would never remove it.
        """
        for volume in environment.volumes:
            if volume.source.startswith("/"):
                continue
            if not await self._engine.call(partial(calls.has_volume, name=volume.source)):
                raise StartFailed(
                    f"there is no volume {volume.source}, to be mounted at {volume.target}; make it with: "
                    f"docker volume create {volume.source}"
                )

    def explained(self, error: EngineError, id: WorkerId, environment: Environment) -> str:
        """Return the engine's message, with a remedy if the engine does not find a mount's source."""
        if "bind source path does not exist" not in str(error):
            return str(error)
        if any(str(error).endswith(f": {volume.source}") for volume in environment.volumes):
            return f"{error} (the volumes in an environment.toml are paths of the engine's machine)"
        if f"/{id}" not in str(error):  # so it is not the worker's socket folder
            return f"{error} (is the folder of custom tasks there, and does the engine see it under this path?)"
        root = self._folders.root
        if self._volume is not None:
            return f"{error} (is volume {self._volume} mounted at {root} here?)"
        return f"{error} (the engine must see {root} under the same path, or socket_volume must name its volume)"

    async def _mountpoint(self, volume: str) -> str:
        # Engines before 26 can't mount a volume's subpath, so its folders are bound from the volume's mount point.
        if volume not in self._mountpoints:
            found = await self._engine.call(partial(APIClient.inspect_volume, name=volume))
            self._mountpoints[volume] = found["Mountpoint"]
        return self._mountpoints[volume]
