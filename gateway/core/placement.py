"""Reports of a cluster's machines, and the resources that workers need.

`gateway.backends.swarm.placement` places workers by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NewType

from gateway.core.ids import EnvironmentName, WorkerId

NodeId = NewType("NodeId", str)
"""Id of a machine, stable over restarts of the node's process. Workers' addresses contain it
(``node:<id>/<worker>/<socket>``)."""
VOUCHER_HEADER: Final = "x-env-gateway-voucher"
"""The header in which a node proves that it has the image that it sends. A gateway passes it on with the image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """The report of one machine about itself."""

    id: NodeId
    name: str
    """The machine's own name, for people."""
    cpus: float
    memory_bytes: int
    """Total memory."""
    available_bytes: int
    """Memory that programs can still take, by the kernel's estimate; 0: not known."""
    max_containers: int
    """Maximum number of concurrent containers of this instance that the machine's engine gate allows."""
    containers: int = 0
    """Number of existing containers of this instance."""
    is_draining: bool = False
    """True if the machine takes no more workers; its existing workers continue."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Images of the catalog that the machine has: reference → id (``sha256:…``)."""
    built_at: Mapping[str, float] = field(default_factory=dict)
    """Build time of each of these images: reference → Unix time."""
    workers: Mapping[WorkerId, EnvironmentName] = field(default_factory=dict)
    """Running workers of this instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The resources of a machine that a new worker takes."""

    environment: EnvironmentName
    memory_bytes: int
    """The worker's memory limit."""
    cpus: float
    containers: int = 1
    """Number of containers; a worker of a third-party image needs two."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Required images: reference → id. An empty id accepts any image of that name."""
