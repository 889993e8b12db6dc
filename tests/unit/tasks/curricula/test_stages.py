"""Staged samplers: the tasks that each stage draws, and the moves between stages."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.curriculum import RECENT, TaskRecord
from gateway.core.errors import InvalidRequest
from gateway.core.ports.curricula import MAX_STATE_BYTES
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind, Stage
from gateway.tasks.curricula.sampling import prepare
from gateway.tasks.curricula.stages import MARKED, Standing, advance, standings
from gateway.tasks.curricula.tables import Tables, TaskRow
from tests.unit.tasks.curricula.curriculum_parts import weight_of
from tests.unit.tasks.curricula.staged_world import EASY, GAME, HARD, MATH, MIN, WINDOW, World, staged


def at_stage(name: str) -> World:
    """Return a world whose curriculum reached the stage *name* by successes."""
    world = World()
    for index, stage in enumerate(("easy", "middle", "hard")):
        if world.moved() == name:
            return world
        assert world.standing.stage == stage
        world.told(4 * index, *[1.0] * MIN)
    raise AssertionError(name)


# -- tasks of a stage -----------------------------------------------------------------------------------------------


def test_at_first_only_the_first_stage_is_drawn_from() -> None:
    world = World()

    drawn = world.drawn()

    assert sorted(drawn) == [0, 1, 2, 3]
    assert all(abs(times - 100) < 30 for times in drawn.values())


def test_a_share_of_draws_reviews_all_passed_stages() -> None:
    world = at_stage("hard")

    drawn = world.drawn(4000)

    assert sorted(drawn) == list(range(12))
    assert abs(sum(drawn[index] for index in range(8)) / 4000 - world.curriculum.sampler.review) < 0.015
    prepared = prepare(world.curriculum, world.tables, world.records, world.state)
    assert weight_of(prepared, MATH, "train", 0) == pytest.approx(0.1 / 8)
    assert weight_of(prepared, MATH, "train", 9) == pytest.approx(0.9 / 4)
    assert [place.index for place, _ in prepared.heaviest(4)] == [8, 9, 10, 11]


def test_without_review_only_the_present_stage_is_drawn_from() -> None:
    world = at_stage("middle")
    world.curriculum = replace(world.curriculum, sampler=replace(world.curriculum.sampler, review=0.0))

    assert sorted(world.drawn()) == [4, 5, 6, 7]


def test_a_task_that_is_in_two_stages_is_drawn_by_both_shares() -> None:
    world = at_stage("middle")
    world.curriculum = staged(EASY, Stage(name="middle", max_difficulty=2))

    prepared = prepare(world.curriculum, world.tables, world.records, world.state)

    assert weight_of(prepared, MATH, "train", 0) == pytest.approx(0.9 / 8 + 0.1 / 4)
    assert weight_of(prepared, MATH, "train", 5) == pytest.approx(0.9 / 8)


def test_bounds_leave_out_tasks_without_a_difficulty_and_are_inclusive() -> None:
    world = World()
    rows = [TaskRow(0, "a", (), None), TaskRow(1, "b", (), 1.0), TaskRow(2, "c", (), 2.0), TaskRow(3, "d", (), 2.5)]
    world.tables = {(MATH, "train"): tuple(rows)}
    world.curriculum = staged(Stage(name="some", min_difficulty=1, max_difficulty=2), Stage(name="all"))

    assert sorted(world.drawn()) == [1, 2]


# -- moves between stages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "rewards", "stage"),
    [
        pytest.param("easy", [1.0] * MIN, "middle", id="promoted"),
        pytest.param("easy", [1.0] * (MIN - 1), "easy", id="not promoted before there are enough outcomes"),
        pytest.param("easy", [0.0] * 30, "easy", id="no stage before the first"),
        pytest.param("middle", [0.0] * MIN, "easy", id="demoted"),
        pytest.param("middle", [0.0] * (MIN - 1), "middle", id="not demoted before there are enough outcomes"),
        pytest.param("middle", [0.0, 1.0] * 10, "middle", id="no move between the two rates"),
        pytest.param("middle", [0.0] * 20 + [1.0, 0.0, 1.0, 1.0], "hard", id="only the newest outcomes count"),
        pytest.param(
            "middle", [1.0] * 20 + [0.0, 0.0, 1.0, 0.0], "middle", id="the demotion rate itself does not demote"
        ),
        pytest.param("hard", [1.0] * 30, "hard", id="no stage after the last"),
        pytest.param("middle", [0.999] * MIN, "easy", id="a success is a reward of 1 or more"),
    ],
)
def test_a_stage_is_left_by_the_success_rate_of_its_newest_outcomes(
    start: str, rewards: list[float], stage: str
) -> None:
    world = at_stage(start)
    index = {"easy": 0, "middle": 4, "hard": 8}[start]

    world.told(index, *rewards)

    assert world.moved() == stage


def test_one_call_moves_by_one_stage_and_the_next_call_does_not_move() -> None:
    world = at_stage("easy").told(0, *[1.0] * 30).told(4, *[1.0] * 30)

    assert world.moved() == "middle"
    entered = world.state
    assert world.moved() == "middle"
    assert world.state is entered


def test_outcomes_before_the_first_call_do_not_count() -> None:
    world = World().told(0, *[1.0] * 30)

    assert world.standing == Standing(stage="easy", position=0, outcomes=0, counted=0, rate=None)
    assert world.moved() == "easy"
    assert world.told(0, *[1.0] * (MIN - 1)).moved() == "easy"
    assert world.told(1, 1.0).moved() == "middle"


def test_outcomes_count_anew_each_time_that_a_stage_is_entered() -> None:
    world = at_stage("middle").told(4, *[0.0] * MIN)
    assert world.moved() == "easy"

    assert world.standing == Standing(stage="easy", position=0, outcomes=0, counted=0, rate=None)
    assert world.told(0, *[1.0] * (MIN - 1)).moved() == "easy"  # The successes before the demotion do not count.
    assert world.told(1, 1.0).moved() == "middle"


def test_rewards_from_before_the_entry_do_not_count_as_new() -> None:
    """A task with few attempts since the entry still has older rewards in its record."""
    world = at_stage("middle").told(4, *[0.0] * MIN)
    world.moved()
    world.told(0, 0.0).told(1, *[1.0] * 20)

    # One outcome of task 0, which had eight successes before, and three of task 1.
    assert world.standing == Standing(stage="easy", position=0, outcomes=21, counted=4, rate=0.75)


def test_the_rate_covers_all_tried_tasks_and_not_only_the_last_group() -> None:
    world = at_stage("easy").told(0, *[0.0] * 8).told(1, *[0.0] * 8).told(2, *[0.0] * 8).told(3, *[1.0] * 8)

    assert world.standing.rate == 0.25


def test_outcomes_of_other_stages_do_not_count() -> None:
    world = at_stage("easy").told(5, *[1.0] * 30).told(9, *[1.0] * 30)

    assert world.standing.outcomes == 0
    assert world.moved() == "easy"


def test_outcomes_beyond_the_kept_rewards_count() -> None:
    world = at_stage("easy").told(0, *[0.0, 1.0] * RECENT)

    assert (world.standing.outcomes, world.standing.counted) == (2 * RECENT, WINDOW)


def test_a_forgotten_record_that_starts_anew_counts_from_its_start() -> None:
    world = at_stage("middle").told(4, *[0.0] * MIN)
    world.moved()
    del world.records[MATH]["math-0"]

    world.told(0, 1.0, 1.0, 1.0)

    assert world.standing.outcomes == 3


def test_a_replica_that_is_behind_does_not_count_old_attempts_as_new_ones() -> None:
    world = at_stage("easy").told(0, *[1.0] * (MIN - 1))
    behind = {MATH: dict(world.records[MATH])}
    world.told(0, 1.0)
    assert world.moved() == "middle"
    world.told(4, *[0.0] * MIN)
    assert world.moved() == "easy"

    assert advance(world.curriculum, world.tables, behind, world.state) is world.state
    assert standings(world.curriculum, world.tables, behind, world.state)[0].outcomes == 0


def test_a_task_in_two_splits_counts_once() -> None:
    world = World()
    world.tables = {**world.tables, (MATH, "more"): world.tables[MATH, "train"]}
    both = (Component(environment=MATH), Component(environment=MATH, split="more"))
    world.curriculum = staged(EASY, components=both)
    world.moved()

    world.told(0, 1.0, 0.0)

    assert (world.standing.outcomes, world.standing.counted) == (2, 2)


@given(st.lists(st.tuples(st.integers(0, 11), st.sampled_from([0.0, 1.0])), max_size=150))
def test_the_counts_match_a_complete_log_of_all_outcomes(outcomes: list[tuple[int, float]]) -> None:
    world = World()
    stage, book = world.moved(), list[tuple[int, float]]()

    for index, reward in outcomes:
        world.told(index, reward)
        book += [(index, reward)] if index // 4 == world.standing.position else []

        now = world.standing
        newest: dict[int, list[float]] = {}
        for tried, told in reversed(book):
            newest.setdefault(tried, []).append(told)
        told_by_depth = [told[depth] for depth in range(150) for told in newest.values() if depth < len(told)][:WINDOW]
        assert (now.outcomes, now.counted) == (len(book), len(told_by_depth))
        assert now.rate == (sum(told_by_depth) / len(told_by_depth) if book else None)
        if world.moved() != stage:
            stage, book = world.standing.stage, []


# -- stages and components without tasks ----------------------------------------------------------------------------


def mixture(*stages: Stage) -> tuple[Curriculum, Tables]:
    """Return a curriculum and its tasks: math has easy and hard tasks, game only hard ones."""
    maths = [TaskRow(at, f"math-{at}", (), float(3 * (at % 2))) for at in range(8)]
    games = [TaskRow(at, f"game-{at}", (), 3.0) for at in range(4)]
    some = {(MATH, "train"): tuple(maths), (GAME, "train"): tuple(games)}
    return staged(*stages, components=(Component(environment=MATH), Component(environment=GAME, weight=3))), some


def test_a_stage_without_tasks_in_one_component_draws_from_the_others() -> None:
    curriculum, some = mixture(EASY, HARD)
    late = json.dumps({"stage": "hard", "at": 0, "is_whole": True, "marks": {}}).encode()

    assert prepare(curriculum, some, {}).shares() == {MATH: 1.0, GAME: 0.0}
    # All of the review share (a tenth) is math, and a quarter of the rest.
    assert prepare(curriculum, some, {}, late).shares() == pytest.approx({MATH: 0.1 + 0.9 / 4, GAME: 0.9 * 3 / 4})


def test_a_stage_without_tasks_is_skipped_in_both_directions() -> None:
    nothing = Stage(name="nothing", tags=("misspelt",))
    world = World()
    world.curriculum = staged(nothing, EASY, nothing, HARD, nothing)

    assert world.moved() == "easy"
    assert sorted(world.drawn()) == [0, 1, 2, 3]
    assert world.told(0, *[1.0] * MIN).moved() == "hard"
    assert world.told(8, *[1.0] * MIN).moved() == "hard"
    assert world.told(8, *[0.0] * MIN).moved() == "easy"
    assert world.told(0, *[0.0] * MIN).moved() == "easy"


def test_a_component_without_tasks_in_any_stage_is_refused_by_name() -> None:
    curriculum, some = mixture(EASY)

    for refused in (
        lambda: prepare(curriculum, some, {}),
        lambda: advance(curriculum, some, {}, b""),
        lambda: standings(curriculum, some, {}, b""),
    ):
        with pytest.raises(InvalidRequest, match=r"components\[1\]: no task of game/train is in any stage"):
            refused()


def test_a_staged_sampler_without_stages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"sampler.stages: a staged sampler needs at least one"):
        prepare(staged(), World().tables, {})


# -- the state ------------------------------------------------------------------------------------------------------


def test_other_samplers_have_no_state() -> None:
    world = World()

    for kind in set(SamplerKind) - {SamplerKind.STAGED}:
        other = replace(world.curriculum, sampler=Sampler(kind=kind))
        assert advance(other, world.tables, world.records, b"") == b""


@pytest.mark.parametrize(
    "state",
    [
        b"",
        b"\xff",
        b"[]",
        b'{"stage":"middle"}',
        b'{"stage":"middle","at":0,"is_whole":true,"marks":[]}',
        b'{"stage":"gone","at":0,"is_whole":true,"marks":{}}',
    ],
)
def test_an_unusable_state_starts_from_the_first_stage(state: bytes) -> None:
    world = World()
    world.state = state

    assert sorted(world.drawn()) == [0, 1, 2, 3]
    assert world.moved() == "easy"
    assert world.state != state


def test_a_stage_that_lost_its_tasks_is_replaced_by_the_next_stage() -> None:
    world = at_stage("middle")
    rows = world.tables[MATH, "train"]
    world.tables = {(MATH, "train"): tuple([row for row in rows if not row.tags])}

    assert sorted(index for index in world.drawn() if index > 3) == [8, 9, 10, 11]
    assert world.standing.outcomes == 0
    assert world.moved() == "hard"


def test_the_state_of_a_stage_with_many_tasks_fits_and_counts_only_certainly_new_outcomes() -> None:
    count = 3 * MARKED
    world = World()
    rows = [TaskRow(at, f"math-{at}", (), float(at // count)) for at in range(2 * count)]
    world.tables = {(MATH, "train"): tuple(rows)}
    world.curriculum = staged(Stage(name="easy", max_difficulty=0), Stage(name="hard", min_difficulty=1))
    for index in range(count):
        made = TaskRecord(
            environment=MATH, task=f"math-{index}", attempts=10**6, seen_at=1.0 + index, recent=(1.0,) * 9
        )
        world.records[MATH][made.task] = made
    world.now = 1.0 + count
    world.moved()
    # The state is a string in another JSON document, where each quote takes two bytes.
    assert len(json.dumps({"sampler": world.state.decode()})) < MAX_STATE_BYTES

    world.told(0, 0.0, 0.0, 0.0).told(count - 1, 0.0, 0.0, 0.0)

    # All three outcomes of the last tried task count. Only the newest counts of the other, which has no mark.
    assert world.standing == Standing(stage="easy", position=0, outcomes=4, counted=4, rate=0.0)
