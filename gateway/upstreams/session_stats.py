"""Counts the steps and rewards of sessions whose server does not keep a count.

Each replica counts the calls that it runs, and sends its count to the other replicas through the record of calls. The
replica that ends the session adds all counts. If a count is missing, the session has no reward.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.episode import StepResult, Summary
from gateway.core.faults import FaultKind
from gateway.core.ids import SessionId
from gateway.core.ports.calls import Tally
from gateway.core.session import Session
from gateway.upstreams.idempotency.recorder import Recorder

SESSIONS_MAX: Final = 50_000
"""Largest number of counts. The least recently used goes first: it may be of a session that another replica closed."""
NO_STEPS: Final = frozenset(("not_found", "name_collision", "input_validation", "episode_finished"))
"""Reasons of results for which no tool ran."""


@dataclass(slots=True)
class _Count:
    began_at: float
    tally: Tally
    is_news: bool = False
    """True if an unsent change affects the summary. Other replicas have to receive it before the response is sent."""


class SessionStats:
    """The counts of the sessions that this replica serves."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """Start without counts. *recorder* sends them to other replicas. None: no other replica runs these calls."""
        self._recorder = recorder
        self._numbers = itertools.count(1)
        self._counts: OrderedDict[tuple[SessionId, str], _Count] = OrderedDict()

    def begin(self, session: Session) -> None:
        """Start the count in the replica that opened the session. Other replicas start at their first call."""
        count = self._count(session)
        self._set(session, replace(count.tally, is_opener=True))
        if self._recorder is not None:
            self._recorder.telling(session)

    def add(self, session: Session, result: StepResult) -> None:
        """Count the result of a call. A refused call is not a step."""
        tally = replace(
            self._count(session).tally,
            fault=None,
            ended_at=time.monotonic(),
        )
        if result.error is None or result.reason not in NO_STEPS:
            tally = replace(
                tally,
                steps=tally.steps + 1,
                reward=tally.reward + (result.reward or 0.0),
                is_rewarded=tally.is_rewarded or result.reward is not None,
                finished=tally.finished or result.finished,
            )
        self._set(session, tally)

    def note(self, session: Session, note: str) -> None:
        """Add a note to the count. Other replicas have it before the response of the call is sent."""
        tally = self._count(session).tally
        self._set(session, replace(tally, notes=(*tally.notes, note)))

    def failed(self, session: Session) -> None:
        """Record that a call failed by the environment author's fault."""
        self._set(session, replace(self._count(session).tally, fault=FaultKind.AUTHOR, ended_at=time.monotonic()))

    async def tell(self, session: Session) -> None:
        """Send the count to other replicas before the call's response is sent, if the episode's summary changes.

        A further step without a reward is not such a change. Other replicas receive it within a second.
        """
        count = self._counts.get((session.id, session.lease))
        if self._recorder is not None and count is not None and count.is_news:
            count.is_news = False
            await self._recorder.tell(session)

    def steps(self, session: Session) -> int:
        """Return the number of steps that this replica counted."""
        count = self._counts.get((session.id, session.lease))
        return 0 if count is None else count.tally.steps

    async def summary(self, session: Session) -> Summary | None:
        """Return the session's summary over all replicas, or None if no replica has a count."""
        seen, is_complete = await self.of_all_replicas(session)
        if not seen:
            return None
        count = self._counts.get((session.id, session.lease))
        here_s = 0.0 if count is None else time.monotonic() - count.began_at
        last = max(seen, key=lambda tally: -1.0 if tally.ended_at is None else tally.ended_at)
        return Summary(
            reward=sum(tally.reward for tally in seen),
            finished=any(tally.finished for tally in seen),
            steps=sum(tally.steps for tally in seen),
            seconds=max(here_s, *(tally.seconds for tally in seen)),
            is_rewarded=any(tally.is_rewarded for tally in seen),
            is_whole=is_complete,
            fault=last.fault,
        )

    async def of_all_replicas(self, session: Session) -> tuple[list[Tally], bool]:
        """Return the counts of all replicas, and False if a part is missing."""
        count = self._counts.get((session.id, session.lease))
        others = {} if self._recorder is None else await self._recorder.tallies(session)
        seen = [*([count.tally] if count is not None else ()), *(others or {}).values()]
        return seen, others is not None and any(tally.is_opener for tally in seen)

    def forget(self, session: Session) -> None:
        """Drop the count of a session."""
        self._counts.pop((session.id, session.lease), None)

    def _set(self, session: Session, tally: Tally) -> None:
        count = self._count(session)
        tally = replace(tally, version=count.tally.version + 1, seconds=time.monotonic() - count.began_at)
        count.is_news = count.is_news or _is_news(count.tally, tally)
        count.tally = tally
        if self._recorder is not None:
            self._recorder.counted(session, tally)

    def _count(self, session: Session) -> _Count:
        place = session.id, session.lease
        count = self._counts.get(place)
        if count is None:
            count = self._counts[place] = _Count(time.monotonic(), Tally(number=next(self._numbers)))
            if len(self._counts) > SESSIONS_MAX:
                self._counts.popitem(last=False)
        else:
            self._counts.move_to_end(place)
        return count


def _is_news(before: Tally, now: Tally) -> bool:
    """Return True if more changed than the number of steps after the first step, or if there is a fault."""
    if now.fault is not None or now.fault is not before.fault:
        return True
    return _course(now) != _course(before)


def _course(tally: Tally) -> tuple[object, ...]:
    return tally.is_opener, tally.steps > 0, tally.reward, tally.is_rewarded, tally.finished, len(tally.notes)
