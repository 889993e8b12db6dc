"""The parts of a replica that calls in sessions use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from gateway.catalog.catalog import Catalog
from gateway.core.environment import UpstreamKind
from gateway.core.episode import StepResult
from gateway.core.ports.step_log import StepLog
from gateway.core.ports.store import SessionStore
from gateway.core.ports.upstream import EpisodeResults, FrameUpstream, SessionUpstream
from gateway.metrics import Metrics
from gateway.sessions.cache import SessionCache
from gateway.sessions.call_rates import CallRates
from gateway.sessions.closing import SessionCloser
from gateway.sessions.failure_reasons import FailureReasons
from gateway.sessions.turns import TurnCounter
from gateway.settings.keys import Keyring

LOGGED: Final = frozenset(("call", "prompt", "score_group"))
"""Operations that the step log records."""
NOT_RUN: Final = object()
"""Stands for the reply of a call that did not run, which the step log does not record."""


class CallParts:
    """The collaborators that calls need, shared by all sessions of this replica."""

    def __init__(
        self,
        *,
        store: SessionStore,
        upstreams: Mapping[UpstreamKind, SessionUpstream],
        frames: FrameUpstream,
        catalog: Catalog,
        cache: SessionCache,
        closer: SessionCloser,
        results: EpisodeResults,
        keys: Keyring,
        metrics: Metrics,
        log: StepLog,
    ) -> None:
        """*frames*: the upstream for sessions whose workers speak OpenEnv."""
        self.store = store
        self.closer = closer
        self.results = results
        self.upstreams = upstreams
        self.frames = frames
        self.catalog = catalog
        self.cache = cache
        self.keys = keys
        self.rates = CallRates()
        self.metrics = metrics
        self.log = log
        self.reasons = FailureReasons(store=store, cache=cache, closer=closer)
        self.turns = TurnCounter(store)
        self.playing: set[asyncio.Task[tuple[StepResult, int]]] = set()
        """Running steps, each of which continues if its trainer disconnects."""
