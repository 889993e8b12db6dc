"""A step log in memory."""

from __future__ import annotations

from collections.abc import Callable

from gateway.core.environment import Environment, StepLogging
from gateway.core.ports.step_log import EpisodeEnd, LoggedCall, Rollout
from gateway.core.session import EpisodeRequest, Session


class FakeStepLog:
    """Keeps all records in lists."""

    def __init__(self) -> None:
        self.begun: list[Session] = []
        self.calls: list[LoggedCall] = []
        self.ended: list[tuple[Session, EpisodeEnd]] = []
        self.rollouts: list[Rollout] = []
        self.gateway = ""
        self.called: Callable[[LoggedCall], object] = self.calls.append

    async def flush(self) -> None:
        pass

    def keeps(self, lease: str, environment: Environment) -> bool:
        return environment.step_log.mode is StepLogging.FULL

    def opened(self, session: Session, environment: Environment, request: EpisodeRequest, *, open_s: float) -> None:
        self.begun.append(session)

    def rollout(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)

    def closed(self, session: Session, environment: Environment, end: EpisodeEnd) -> None:
        self.ended.append((session, end))
