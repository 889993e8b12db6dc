"""What was seen here of each session: its steps and rewards, where the server itself keeps no count."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from gateway.core.faults import FaultKind
from gateway.core.model import Session, SessionId, StepResult, Summary

SESSIONS_MAX: Final = 50_000
"""Those that were closed in another replica are forgotten last."""
NO_STEPS: Final = frozenset(("not_found", "name_collision", "input_validation", "episode_finished"))
"""Reasons of results for which nothing ran."""


@dataclass(slots=True)
class _Tally:
    began_at: float
    reward: float = 0.0
    is_rewarded: bool = False
    finished: bool = False
    steps: int = 0
    fault: FaultKind | None = None
    """Who is at fault for how its last call ended, if not the agent."""


class Tallies:
    """Counts of the sessions that this replica serves."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tallies: OrderedDict[tuple[SessionId, str], _Tally] = OrderedDict()

    def begin(self, session: Session) -> None:
        """Start to count; a session that another replica opened is counted from its first step here."""
        self._tally(session)

    def add(self, session: Session, result: StepResult) -> None:
        """Count what came of a call; one that was refused is no step."""
        tally = self._tally(session)
        tally.fault = FaultKind.AUTHOR if result.is_fault else None
        if result.error is not None and result.reason in NO_STEPS:
            return
        tally.steps += 1
        tally.reward += result.reward or 0.0
        tally.is_rewarded = tally.is_rewarded or result.reward is not None
        tally.finished = tally.finished or result.finished

    def failed(self, session: Session) -> None:
        """Note that a call ended with the author's fault."""
        self._tally(session).fault = FaultKind.AUTHOR

    def steps(self, session: Session) -> int:
        """The steps that were seen here."""
        tally = self._tallies.get((session.id, session.lease))
        return 0 if tally is None else tally.steps

    def pop(self, session: Session) -> Summary | None:
        """End the count, and return it; None if nothing was seen here."""
        tally = self._tallies.pop((session.id, session.lease), None)
        if tally is None:
            return None
        seconds = self._clock() - tally.began_at
        return Summary(
            reward=tally.reward,
            finished=tally.finished,
            steps=tally.steps,
            seconds=seconds,
            is_rewarded=tally.is_rewarded,
            fault=tally.fault,
        )

    def _tally(self, session: Session) -> _Tally:
        place = session.id, session.lease
        tally = self._tallies.get(place)
        if tally is None:
            tally = self._tallies[place] = _Tally(self._clock())
            if len(self._tallies) > SESSIONS_MAX:
                self._tallies.popitem(last=False)
        else:
            self._tallies.move_to_end(place)
        return tally
