"""Plans the number of workers of each environment from the store's load and the expected openings.

The decision itself is the pure function `gateway.core.scaling.plan`. This module gathers its input.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Protocol

from gateway.catalog.catalog import Catalog
from gateway.core.capacity import CapacityRequest, Expected, shared
from gateway.core.environment import Environment
from gateway.core.ids import EnvironmentName
from gateway.core.scaling import Demands, Plan, plan
from gateway.core.worker import EnvironmentLoad
from gateway.metrics import Metrics
from gateway.pool.starts import WorkerStarts


class Forecast(Protocol):
    """Predicts openings; implemented by `gateway.tasks.curricula.service.Curricula`."""

    def expected(self) -> Mapping[EnvironmentName, Expected]:
        """Return the expected openings, by the environment of their sessions."""


class Planner:
    """Plans for all environments together."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        forecast: Forecast,
        starts: WorkerStarts,
        demands: Demands,
        metrics: Metrics,
        max_workers: int = 0,
    ) -> None:
        """
        Args:
            forecast: Predicts openings in addition to the waiting ones.
            starts: Knows the environments whose last start failed.
            demands: Knows how fast openings arrive and how long starts take.
            max_workers: Maximum number of workers of all environments together; 0 leaves only their own limits.
        """
        self._catalog = catalog
        self._forecast = forecast
        self._starts = starts
        self._demands = demands
        self._metrics = metrics
        self._max_workers = max_workers
        self._looked_at: float | None = None
        self.workers = 0
        """Number of workers of all environments at the last `look`."""

    def rest(self) -> None:
        """Note that this replica makes no plans now: the time until the next `look` must not affect arrival rates."""
        self._looked_at = None

    def look(self, loads: Mapping[EnvironmentName, EnvironmentLoad]) -> None:
        """Update demands and metrics from *loads*, with the openings that arrived since the last call."""
        self._metrics.loaded(loads)
        now = time.monotonic()
        since_s = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        self.workers = sum(len(load.workers) for load in loads.values())
        for name, load in loads.items():
            demand = self._demands.looked(name, load, since_s)
            environment = self._catalog.known.get(name)
            warm = environment.pool.warm if environment is not None else 0
            self._metrics.sized(name, arrival_rate=demand.rate, start_s=demand.start_s, warm=max(warm, demand.ahead))

    def plans(
        self, loads: Mapping[EnvironmentName, EnvironmentLoad]
    ) -> list[tuple[Environment, EnvironmentLoad, Plan]]:
        """Return a plan for each environment, within the maximum number of workers of all environments."""
        expected = self._forecast.expected()
        wishes: dict[EnvironmentName, CapacityRequest] = {}
        environments = list(self._catalog.all())
        for environment in environments:
            name = environment.name
            load, demand = loads.get(name, EnvironmentLoad()), self._demands.of(name)
            wanted = plan(
                environment.pool,
                load,
                digest=environment.digest(),
                demand=demand,
                expected=expected.get(name, Expected()).slots(demand.start_s),
                is_trial=self._starts.is_trial(name),
            )
            wishes[name] = CapacityRequest(plan=wanted, policy=environment.pool, load=load)
        plans = shared(wishes, most=self._max_workers)
        return [(one, wishes[one.name].load, plans[one.name]) for one in environments]
