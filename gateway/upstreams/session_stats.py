"""What was seen of each session: its steps and rewards, where the server itself keeps no count.

Each replica counts what it runs, and tells the others in the record of calls; the one that ends the session adds all
up. A sum of which a part is missing gives no reward.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

from gateway.core.episode import TOOL_FAILED, StepResult, Summary
from gateway.core.faults import FaultKind
from gateway.core.ids import SessionId
from gateway.core.ports.calls import Tally
from gateway.core.session import Session
from gateway.upstreams.idempotency.recorder import Recorder

SESSIONS_MAX: Final = 50_000
"""Those that were closed in another replica are forgotten last."""
NO_STEPS: Final = frozenset(("not_found", "name_collision", "input_validation", "episode_finished"))
"""Reasons of results for which nothing ran."""


@dataclass(slots=True)
class _Count:
    began_at: float
    tally: Tally
    is_news: bool = False
    """Whether other replicas have to hear of it before an answer goes out: it changes how the episode ends."""


class SessionStats:
    """Counts of the sessions that this replica serves."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        """*recorder*: tells other replicas; None: no other one runs calls of these sessions."""
        self._recorder = recorder
        self._numbers = itertools.count(1)
        self._counts: OrderedDict[tuple[SessionId, str], _Count] = OrderedDict()

    def begin(self, session: Session) -> None:
        """Start to count in the replica that opened the session; others count from their first step on."""
        count = self._count(session)
        self._set(session, replace(count.tally, is_opener=True))
        if self._recorder is not None:
            self._recorder.telling(session)

    def add(self, session: Session, result: StepResult) -> None:
        """Count what came of a call; one that was refused is no step."""
        tally = replace(
            self._count(session).tally,
            fault=FaultKind.AUTHOR if result.reason == TOOL_FAILED else None,
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

    def failed(self, session: Session) -> None:
        """Note that a call ended with the author's fault."""
        self._set(session, replace(self._count(session).tally, fault=FaultKind.AUTHOR, ended_at=time.monotonic()))

    async def tell(self, session: Session) -> None:
        """Let other replicas know before the call's answer goes out, if what came of it changes how the episode ends.

        All else they hear within a second: that there was one more step without a reward.
        """
        count = self._counts.get((session.id, session.lease))
        if self._recorder is not None and count is not None and count.is_news:
            count.is_news = False
            await self._recorder.tell(session)

    def steps(self, session: Session) -> int:
        """The steps that were seen here."""
        count = self._counts.get((session.id, session.lease))
        return 0 if count is None else count.tally.steps

    async def summary(self, session: Session) -> Summary | None:
        """How the session went in all replicas; None if none of them saw anything of it."""
        count = self._counts.get((session.id, session.lease))
        others = {} if self._recorder is None else await self._recorder.tallies(session)
        seen = [*([count.tally] if count is not None else ()), *(others or {}).values()]
        if not seen:
            return None
        here_s = 0.0 if count is None else time.monotonic() - count.began_at
        last = max(seen, key=lambda tally: -1.0 if tally.ended_at is None else tally.ended_at)
        return Summary(
            reward=sum(tally.reward for tally in seen),
            finished=any(tally.finished for tally in seen),
            steps=sum(tally.steps for tally in seen),
            seconds=max(here_s, *(tally.seconds for tally in seen)),
            is_rewarded=any(tally.is_rewarded for tally in seen),
            is_whole=others is not None and any(tally.is_opener for tally in seen),
            fault=last.fault,
        )

    def forget(self, session: Session) -> None:
        """End the count."""
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
    """Whether more has changed than the number of steps, of which the first one counts."""
    if now.fault is not None or now.fault is not before.fault:
        return True
    return _course(now) != _course(before)


def _course(tally: Tally) -> tuple[bool, bool, float, bool, bool]:
    return tally.is_opener, tally.steps > 0, tally.reward, tally.is_rewarded, tally.finished
