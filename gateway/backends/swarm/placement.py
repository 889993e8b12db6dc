"""Choose a node for each worker by ``core/scaling.place``, counting starts that no node's report contains yet."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gateway.backends.docker.calls import with_splits
from gateway.backends.docker.container import FORWARDER_LIMITS
from gateway.backends.docker.images import images_of
from gateway.backends.swarm.nodes import Nodes
from gateway.core.environment import Environment
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.placement import Need, NodeId
from gateway.core.scaling import place

REPORTED_S: Final = 5.0
"""A started worker counts as starting until its node reports it, or until a report that arrived this many seconds after
the start does not list it. Reports list it after a second or two; those of a busy node may be late."""


@dataclass(slots=True)
class _Begun:
    """A worker that is starting or has just started."""

    node: NodeId
    need: Need
    ended_at: float | None = None


class Placement:
    """Chooses nodes for workers, and remembers recent choices until the nodes report them."""

    def __init__(self, nodes: Nodes, *, environments: Collection[Environment], forwarder_image: str) -> None:
        """Create the object; *environments* are all environments, with the resources that their workers need."""
        self._nodes = nodes
        self._forwarder_image = forwarder_image
        self._pinned: dict[str, str] = {}
        """The image id of each reference."""
        self._takes: dict[EnvironmentName, Need] = {}
        self._begun: dict[WorkerId, _Begun] = {}
        for environment in with_splits(environments):
            self.need(environment)

    def references(self, environment: Environment) -> list[str]:
        """Return the references of the images that workers of *environment* need, the environment's own first."""
        return images_of(environment, self._forwarder_image)

    def pin(self, environment: Environment, images: Mapping[str, str]) -> None:
        """Set the image id of each of *environment*'s references: reference → id."""
        self._pinned |= images
        self.need(environment)

    def need(self, environment: Environment) -> Need:
        """Return the resources that a worker of *environment* needs; existing workers count with them as well."""
        limits, is_pair = environment.limits, environment.server.is_foreign
        need = self._takes[environment.name] = Need(
            environment=environment.name,
            memory_bytes=limits.memory_bytes + (FORWARDER_LIMITS.memory_bytes if is_pair else 0),
            cpus=limits.cpus,
            containers=2 if is_pair else 1,
            images={reference: self._pinned.get(reference, "") for reference in self.references(environment)},
        )
        return need

    def begin(self, id: WorkerId, need: Need) -> NodeId:
        """Choose the node for worker *id*, and count the worker there, so that later choices include it.

        Raises:
            BackendError: No node has room; the error lists what each node lacks.
        """
        node = place(self._nodes.live(), need, starting=self._starting(), takes=self._takes)
        self._begun[id] = _Begun(node, need)
        return node

    def ended(self, id: WorkerId) -> None:
        """Mark worker *id* as started: its node will report it."""
        if id in self._begun:
            self._begun[id].ended_at = asyncio.get_running_loop().time()

    def forget(self, id: WorkerId) -> None:
        """Stop counting worker *id*: it takes no room."""
        self._begun.pop(id, None)

    def begun(self) -> dict[WorkerId, NodeId]:
        """Return the node of each worker that is starting or has just started."""
        return {id: begun.node for id, begun in self._begun.items()}

    def _starting(self) -> dict[NodeId, Sequence[Need]]:
        """Return the resources of the starts on each node that the node's report does not contain yet."""
        now = asyncio.get_running_loop().time()
        starting: dict[NodeId, list[Need]] = {}
        for id, begun in list(self._begun.items()):
            view = self._nodes.view(begun.node)
            is_reported = view is not None and view.report is not None and id in view.report.workers
            heard_at = now if view is None else now - view.silent_s
            if begun.ended_at is not None and (is_reported or heard_at - begun.ended_at > REPORTED_S):
                del self._begun[id]
            elif not is_reported:
                starting.setdefault(begun.node, []).append(begun.need)
        return dict(starting)
