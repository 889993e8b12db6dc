"""A session whose socket this replica has, and what it has seen of it."""

from __future__ import annotations

import asyncio
import time

from gateway.core.environment import Environment
from gateway.core.episode import Summary
from gateway.core.errors import SessionNotFound
from gateway.core.faults import FaultKind
from gateway.core.session import Session
from gateway.upstreams.openenv.frames import acts, failure_of, kind_of, outcome_of
from gateway.upstreams.openenv.http import Place
from gateway.upstreams.openenv.websocket import Line


class Held:
    """A session whose socket this replica has."""

    def __init__(self, session: Session, environment: Environment, sid: str, line: Line, first: bytes) -> None:
        self.session = session
        self.environment = environment
        self.digest = environment.digest()
        self.sid = sid
        self.take(line)
        self.first = first
        """The reply to its reset; empty: not known here (any more)."""
        self.steps = 0
        self.is_whole = True
        """False: another replica held it before, and what its steps gave is not known here."""
        self.is_ended = False
        self.was_broken = False
        """Whether its socket was found broken at the last sweep."""
        self.attaching = asyncio.Lock()
        self._reward = 0.0
        self._is_rewarded = False
        self._finished = False
        self._fault: FaultKind | None = None
        """Who is at fault for how its last step ended, if not the agent."""
        self._began_at = time.monotonic()

    @property
    def at(self) -> Place:
        """Its worker."""
        return Place(self.session.worker, self.session.address)

    @property
    def summary(self) -> Summary:
        """How it went, as far as it was seen here."""
        seconds = time.monotonic() - self._began_at
        return Summary(
            reward=self._reward,
            finished=self._finished,
            steps=self.steps,
            seconds=seconds,
            is_rewarded=self._is_rewarded,
            is_whole=self.is_whole,
            fault=self._fault,
        )

    def take(self, line: Line) -> None:
        """Go on with *line*."""
        self.line = line
        line.heard = self.note

    def check(self) -> None:
        """Raise ``SessionNotFound`` once it is being ended."""
        if self.is_ended:
            raise SessionNotFound(self.session.name)

    def note(self, frame: bytes, reply: bytes) -> None:
        """Count what came of an action; a malformed one is none.

        A tool call by JSON-RPC is no step, as in the servers: its reply has no word for a reward.
        """
        if not acts(frame):
            return
        kind, failed = kind_of(reply), failure_of(reply)
        if kind == "observation":
            reward, finished = outcome_of(reply)
            self.steps += 1
            self._reward += reward or 0.0
            self._is_rewarded = self._is_rewarded or reward is not None
            self._finished = self._finished or finished
        elif kind == "error":
            self.steps += bool(failed)
        elif kind != "mcp":
            return
        self._fault = FaultKind.AUTHOR if failed else None
