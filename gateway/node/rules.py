"""What the gate allows: one frozen value, made from the catalog."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gateway.backends.docker.calls import with_splits
from gateway.backends.docker.third_party import FORWARDER_IMAGE
from gateway.core.environment import Environment

TOLERABLE_CAPABILITIES = frozenset(
    ["CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID"]
)
"""What an ``environment.toml`` may ask for: Docker's own default set (moby ``oci/caps/defaults.go``) without those that
reach past the container's files and processes: AUDIT_WRITE, MKNOD, NET_RAW and SYS_CHROOT."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What may be created."""

    instance: str
    """The label without which nothing exists."""
    environments: Mapping[str, Environment]
    """By name. A container is of one of them: its image, its user, at most its limits, and only what it loosens."""
    socket_root: str
    """The folder of the workers' socket folders, as the engine sees it (the volume's Mountpoint, or a directory)."""
    custom_tasks_root: str = ""
    """The folder of operators' task modules, as the engine sees it; empty: none may be mounted."""
    mounts: frozenset[str] = frozenset()
    """Further binds, each verbatim as ``source:target:options``."""
    capabilities: frozenset[str] = TOLERABLE_CAPABILITIES
    """The most that an environment can be given, whatever its ``environment.toml`` says."""
    max_containers: int = 500
    """Containers of the instance at once; a worker of somebody else's image is two."""
    forwarder_image: str = FORWARDER_IMAGE
    """What runs beside somebody else's images."""

    def custom_tasks_source(self, environment: Environment) -> str | None:
        """The one folder with task modules that containers of *environment* may see, as the engine does; or None."""
        tasks = environment.custom_tasks
        return f"{self.custom_tasks_root}/{tasks.folder}" if tasks is not None and self.custom_tasks_root else None

    @property
    def images(self) -> frozenset[str]:
        """The images that may be looked at."""
        own = {environment.image for environment in self.environments.values() if not environment.server.url}
        has_foreign = any(environment.server.port for environment in self.environments.values())
        return frozenset(own | ({self.forwarder_image} if has_foreign else set()))

    @property
    def volumes(self) -> frozenset[str]:
        """The volumes that the catalog's environments are given."""
        listed = [volume.source for environment in self.environments.values() for volume in environment.volumes]
        return frozenset(source for source in listed if not source.startswith("/"))

    @classmethod
    def of(
        cls,
        environments: Iterable[Environment],
        *,
        instance: str,
        socket_root: str,
        custom_tasks_root: str = "",
        mounts: Iterable[str] = (),
        capabilities: Iterable[str] = TOLERABLE_CAPABILITIES,
        max_containers: int = 500,
        forwarder_image: str = FORWARDER_IMAGE,
    ) -> Rules:
        """Make the rules for a catalog; those that splits ask other resources for are environments like the others."""
        return cls(
            instance=instance,
            environments={environment.name: environment for environment in with_splits(environments)},
            socket_root=socket_root.rstrip("/"),
            custom_tasks_root=custom_tasks_root.rstrip("/"),
            mounts=frozenset(mounts),
            capabilities=frozenset(name.upper().removeprefix("CAP_") for name in capabilities),
            max_containers=max_containers,
            forwarder_image=forwarder_image,
        )
