"""Machines of a cluster, as they report themselves; `gateway.backends.swarm.placement` places workers by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from gateway.core.ids import EnvironmentName, WorkerId

NodeId = NewType("NodeId", str)
"""Stable over restarts of the node's own process: workers' addresses name it (``node:<id>/<worker>/<socket>``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """What one machine says of itself."""

    id: NodeId
    name: str
    """The machine's own, for people."""
    cpus: float
    memory_bytes: int
    """What it has."""
    available_bytes: int
    """Memory that programs could still take, by the kernel's own estimate; 0: not known."""
    max_containers: int
    """Containers of this instance that its gate allows at once."""
    containers: int = 0
    """Those that are there."""
    is_draining: bool = False
    """It takes no more workers; those that it has go on."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Of the catalog's images those that are there: reference → id (``sha256:…``)."""
    built_at: Mapping[str, float] = field(default_factory=dict)
    """When each of these images was built: reference → Unix time."""
    workers: Mapping[WorkerId, EnvironmentName] = field(default_factory=dict)
    """Of this instance, that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a worker that is to be placed takes of a machine."""

    environment: EnvironmentName
    memory_bytes: int
    """At most: its limit."""
    cpus: float
    containers: int = 1
    """A worker of somebody else's image is two."""
    images: Mapping[str, str] = field(default_factory=dict)
    """That it needs: reference → id; an id that is empty is satisfied by any image of that name."""
