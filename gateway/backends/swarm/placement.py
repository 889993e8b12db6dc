"""Where the next worker goes: ``core/plan.place``, with what is begun on each node and in no report yet."""

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
from gateway.core.errors import BackendError
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.placement import Need, NodeId
from gateway.core.scaling import place, why_not

REPORTED_S: Final = 5.0
"""A worker that was started is in its node's reports after a second or two; until then it counts as one that starts."""


@dataclass(slots=True)
class _Begun:
    """A worker that is being started, or was just now."""

    node: NodeId
    need: Need
    ended_at: float | None = None


class Placement:
    """Chooses nodes, and remembers for a moment what it chose."""

    def __init__(self, nodes: Nodes, *, environments: Collection[Environment], forwarder_image: str) -> None:
        """*environments*: on offer, for what their workers take of a machine."""
        self._nodes = nodes
        self._forwarder_image = forwarder_image
        self._pinned: dict[str, str] = {}
        """The image that each reference stands for."""
        self._takes: dict[EnvironmentName, Need] = {}
        self._begun: dict[WorkerId, _Begun] = {}
        for environment in with_splits(environments):
            self.need(environment)

    def references(self, environment: Environment) -> list[str]:
        """The images that workers of *environment* need, its own first."""
        return images_of(environment, self._forwarder_image)

    def pin(self, environment: Environment, images: Mapping[str, str]) -> None:
        """Let each of *environment*'s references stand for an image: reference → id."""
        self._pinned |= images
        self.need(environment)

    def need(self, environment: Environment) -> Need:
        """What a worker of *environment* takes of a machine; counted for those that are there, too."""
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
        """Choose the node for worker *id*, and count it there from now on: of many starts each sees those before it.

        Raises:
            BackendError: no node has room; with what each lacks.
        """
        reports, starting = self._nodes.live(), self._starting()
        node = place(reports, need, starting=starting, takes=self._takes)
        if node is None:
            raise BackendError(why_not(reports, need, starting=starting, takes=self._takes))
        self._begun[id] = _Begun(node, need)
        return node

    def ended(self, id: WorkerId) -> None:
        """Worker *id* runs: its node will report it."""
        if id in self._begun:
            self._begun[id].ended_at = asyncio.get_running_loop().time()

    def forget(self, id: WorkerId) -> None:
        """Worker *id* takes no room."""
        self._begun.pop(id, None)

    def begun(self) -> dict[WorkerId, NodeId]:
        """Workers that are being started, or were just now, and where."""
        return {id: begun.node for id, begun in self._begun.items()}

    def _starting(self) -> dict[NodeId, Sequence[Need]]:
        """What is begun on each node and not in its report yet."""
        now = asyncio.get_running_loop().time()
        starting: dict[NodeId, list[Need]] = {}
        for id, begun in list(self._begun.items()):
            view = self._nodes.view(begun.node)
            is_reported = view is not None and view.report is not None and id in view.report.workers
            if begun.ended_at is not None and (is_reported or now - begun.ended_at > REPORTED_S):
                del self._begun[id]
            elif not is_reported:
                starting.setdefault(begun.node, []).append(begun.need)
        return dict(starting)
