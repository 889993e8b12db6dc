"""Totals of a session whose calls ran at several replicas: the replica that ends it adds the recorded shares."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.core.environment import Environment
from gateway.core.episode import Action, Block, StepResult, Summary, TextBlock
from gateway.core.errors import AuthorFault
from gateway.core.ids import EnvironmentName
from gateway.core.outcomes import EpisodeOutcome, outcome_of, reward_of
from gateway.core.session import CloseReason, Session
from gateway.core.worker import Worker
from gateway.upstreams import session_stats as module
from gateway.upstreams.idempotency.recorder import Recorder
from gateway.upstreams.ors_facade import OrsFacade
from tests.fakes.eventually import until
from tests.fakes.replicas import SESSION, Shared, View

ENVIRONMENT = Environment(name=EnvironmentName("puzzle"), image="i", directory=Path("/"), command=())
PLAIN = StepResult()
RAISED = StepResult(error="boom", reason="tool_error")
WON = StepResult(reward=1.0, finished=True)
NEVER_S = 3600.0
"""Seconds between two background writes. No background write happens within a test."""


class Puzzle(OrsFacade):
    """A server in memory that returns its results in turn."""

    def __init__(self, *results: StepResult | Exception, recorder: Recorder | None = None) -> None:
        super().__init__(recorder=recorder)
        self.results = list(results)

    async def step(self, session: Session, environment: Environment, action: Action, *, key: str | None) -> StepResult:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    async def prompt(self, session: Session, environment: Environment) -> list[Block]:
        return [TextBlock("Play.")]

    async def tools(self, worker: Worker, environment: Environment) -> bytes:
        return b'{"tools":[]}'


class Gateway:
    """One replica with its upstream and its recorder."""

    def __init__(self, shared: Shared, name: str, *, tick_s: float = NEVER_S) -> None:
        self.view = View(shared, name)
        self.recorder = Recorder(self.view, tick_s=tick_s, write_s=0.2)
        self.upstream = Puzzle(recorder=self.recorder)
        self._number = 0

    async def open(self) -> None:
        self.upstream.tallies.begin(SESSION)
        await until(lambda: self.recorder.is_idle)

    async def play(self, result: StepResult | Exception, *, key: str | None = None) -> None:
        self._number += 1
        self.upstream.results.append(result)
        await self.upstream.act(SESSION, ENVIRONMENT, Action(name="x", arguments={"n": self._number}), key=key)

    async def ended(self) -> tuple[EpisodeOutcome, float | None]:
        """Return the outcome and the reward of the episode if this replica ends it."""
        summary = await self.upstream.tallies.summary(SESSION)
        outcome = outcome_of(CloseReason.DELETED, summary)
        return outcome, reward_of(outcome, summary)

    async def aclose(self) -> None:
        self.view.gate.set()
        await self.upstream.calls.aclose()
        await self.recorder.aclose()


@pytest.fixture
def shared() -> Shared:
    return Shared()


@pytest.fixture
async def a(shared: Shared) -> AsyncIterator[Gateway]:
    """Yield the replica that opened the session."""
    gateway = Gateway(shared, "a")
    await gateway.open()
    yield gateway
    await gateway.aclose()


@pytest.fixture
async def b(shared: Shared) -> AsyncIterator[Gateway]:
    gateway = Gateway(shared, "b")
    yield gateway
    await gateway.aclose()


@pytest.mark.parametrize("key", [None, "k"])
@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (PLAIN, WON, (EpisodeOutcome.FINISHED, 1.0)),
        (PLAIN, RAISED, (EpisodeOutcome.STOPPED, 0.0)),
        (PLAIN, AuthorFault("a reward of NaN"), (EpisodeOutcome.AUTHOR_FAULT, None)),
        (RAISED, PLAIN, (EpisodeOutcome.STOPPED, 0.0)),
        (RAISED, WON, (EpisodeOutcome.FINISHED, 1.0)),
        (StepResult(reward=0.25), StepResult(reward=0.5), (EpisodeOutcome.STOPPED, 0.75)),
        (StepResult(reward=0.25), PLAIN, (EpisodeOutcome.STOPPED, 0.25)),
        (StepResult(reward=0.0), StepResult(finished=True), (EpisodeOutcome.FINISHED, 0.0)),
    ],
)
async def test_every_replica_computes_the_same_outcome_and_reward(
    a: Gateway,
    b: Gateway,
    first: StepResult,
    last: StepResult | AuthorFault,
    expected: tuple[EpisodeOutcome, float | None],
    key: str | None,
    shared: Shared,
) -> None:
    await a.play(first)
    try:
        await b.play(last, key=key)
    except AuthorFault:
        assert isinstance(last, AuthorFault)

    third = Gateway(shared, "c")
    assert [await one.ended() for one in (a, b, third)] == [expected] * 3
    await third.aclose()


async def test_an_unrewarded_step_needs_no_request_to_the_store_and_a_step_with_a_key_no_additional_one(
    a: Gateway,
) -> None:
    await a.play(PLAIN)
    before = list(a.view.trips)

    await a.play(PLAIN)
    assert a.view.trips == before

    await a.play(StepResult(reward=0.5))
    assert a.view.trips == [*before, "write"]

    await a.play(StepResult(reward=0.5), key="k")
    assert a.view.trips == [*before, "write", "begin", "write"]


async def test_the_number_of_steps_is_written_in_the_background(shared: Shared) -> None:
    a, b = Gateway(shared, "a", tick_s=0.01), Gateway(shared, "b")
    await a.open()
    for _ in range(3):
        await a.play(PLAIN)

    await until(lambda: a.recorder.is_idle)

    summary = await b.upstream.tallies.summary(SESSION)
    assert summary is not None
    assert replace(summary, seconds=0) == Summary(reward=0, finished=False, steps=3, seconds=0, is_rewarded=False)
    await a.aclose()
    await b.aclose()


async def test_without_the_store_there_is_no_reward(a: Gateway, b: Gateway) -> None:
    await a.play(StepResult(reward=0.25))
    await b.play(WON)

    a.view.is_away = True

    outcome, reward = await a.ended()
    assert (outcome, reward) == (EpisodeOutcome.STOPPED, None)


async def test_the_wait_for_the_sum_ends_if_the_store_hangs(a: Gateway) -> None:
    await a.play(StepResult(reward=0.25))

    a.view.gate.clear()

    assert await a.ended() == (EpisodeOutcome.STOPPED, None)


async def test_after_a_store_that_did_not_answer_steps_do_not_wait_for_it_again(a: Gateway) -> None:
    await a.play(PLAIN)
    a.view.is_away = True
    await a.play(StepResult(reward=0.25))
    before = len(a.view.trips)

    await a.play(StepResult(reward=0.25))

    assert len(a.view.trips) == before


@pytest.mark.parametrize("goes_on", [False, True])
async def test_there_is_no_reward_after_the_store_lost_its_data(
    a: Gateway, b: Gateway, shared: Shared, goes_on: bool
) -> None:
    await a.play(StepResult(reward=0.25))
    await b.play(StepResult(reward=0.25))
    shared.lose()

    if goes_on:  # the rewards recorded after the loss are incomplete
        await b.play(WON)
        await a.play(StepResult(reward=0.5))

    for one in (a, b):
        assert (await one.ended())[1] is None


async def test_a_session_whose_opening_was_not_recorded_has_no_reward(b: Gateway) -> None:
    """A gateway of an older version opened the session and may have run steps in it."""
    await b.play(WON)

    assert await b.ended() == (EpisodeOutcome.FINISHED, None)


async def test_a_count_that_was_dropped_and_restarted_is_incomplete(
    a: Gateway, b: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await b.play(StepResult(reward=0.25))
    monkeypatch.setattr(module, "SESSIONS_MAX", 0)
    b.upstream.tallies.begin(replace(SESSION, lease="another"))

    await b.play(WON)

    assert (await a.ended())[1] is None


async def test_an_ended_session_leaves_no_count_in_the_store(a: Gateway, b: Gateway, shared: Shared) -> None:
    await b.play(StepResult(reward=0.25))
    await b.play(PLAIN)  # not written yet

    a.upstream.forget(SESSION)
    await a.recorder.aclose()
    await b.recorder.aclose()

    assert shared.tallies(SESSION.id, SESSION.lease) == {}


async def test_a_single_gateway_counts_without_a_store() -> None:
    puzzle = Puzzle(StepResult(reward=0.25), WON)
    puzzle.tallies.begin(SESSION)
    for number in range(2):
        await puzzle.act(SESSION, ENVIRONMENT, Action(name="x", arguments={"n": number}))

    summary = await puzzle.tallies.summary(SESSION)

    assert summary is not None
    assert math.isclose(summary.reward, 1.25)
    assert summary.is_whole
