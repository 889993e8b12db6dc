"""Draws: their inputs, their distribution, and their equality in all processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.curriculum import Outcome, TaskRecord
from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind, Stage
from gateway.tasks.curricula.sampling import TaskPlace, prepare, turn
from gateway.tasks.curricula.tables import Records, Rows, Tables, TaskRow, count_rows, parts_of
from tests.deadlines import COMMAND_S
from tests.unit.tasks.curricula.curriculum_parts import weight_of

MATH, GAME, NONE = EnvironmentName("math"), EnvironmentName("game"), EnvironmentName("none")
UNIFORM, SEQUENTIAL = SamplerKind.UNIFORM, SamplerKind.SEQUENTIAL
STAGES = (Stage(name="easy", max_difficulty=1), Stage(name="hard", min_difficulty=2))

Table = tuple[tuple[EnvironmentName, str], Rows]


def table(environment: EnvironmentName = MATH, split: str = "train", count: int = 10) -> Table:
    """Return tasks with the difficulties 0, 1, 2, 3, 0, … and the tags ``even`` and ``odd`` in turn."""
    rows = (TaskRow(at, f"{environment}-{at}", ("odd" if at % 2 else "even",), float(at % 4)) for at in range(count))
    return (environment, split), tuple(rows)


def tables(*some: Table) -> Tables:
    return dict(some)


def records(rewards: Mapping[str, list[float]], environment: EnvironmentName = MATH) -> Records:
    made: dict[str, TaskRecord] = {}
    for task, all_of_it in rewards.items():
        record = TaskRecord(environment=environment, task=task)
        for reward in all_of_it:
            outcome = Outcome(environment=environment, task=task, reward=reward, finished=True, steps=1, seconds=1)
            record = record.after(outcome, 1.0)
        made[task] = record
    return {environment: made}


def curriculum(sampler: Sampler | SamplerKind = UNIFORM, *components: Component, seed: int = 0) -> Curriculum:
    return Curriculum(
        name="study",
        components=components or (Component(environment=MATH),),
        sampler=Sampler(kind=sampler, stages=STAGES) if isinstance(sampler, SamplerKind) else sampler,
        seed=seed,
    )


MIXTURE = (Component(environment=MATH, weight=3), Component(environment=GAME, tags=("odd",)))
KNOWN = records({"math-0": [1.0] * 8, "math-1": [0.0] * 8, "math-2": [0.0, 1.0] * 4, "math-3": [0.0] * 4 + [1.0] * 4})


# -- mixtures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quotas", "falls"),
    [
        pytest.param([1], "aaaaaaaa", id="one component gets all draws"),
        pytest.param([1, 1], "abababab", id="two equal components take turns"),
        pytest.param([1, 1, 1], "abcabcabc", id="three equal components take turns"),
        pytest.param([3, 1], "aaabaaab", id="three of four"),
        pytest.param([1, 3], "abbbabbb", id="one of four"),
        pytest.param([2, 1, 1], "abacabac", id="a half and two quarters"),
    ],
)
def test_components_take_turns_by_their_weights(quotas: list[int], falls: str) -> None:
    found = "".join("abc"[turn(number, quotas)[0]] for number in range(len(falls)))

    assert found == falls


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(1, 200))
def test_every_component_knows_its_draws_before_and_is_near_its_share(quotas: list[int], stretch: int) -> None:
    seen: Counter[int] = Counter()

    for number in range(stretch):
        position, before = turn(number, quotas)
        assert before == seen[position]
        seen[position] += 1

    for position, quota in enumerate(quotas):
        assert abs(seen[position] - stretch * quota / sum(quotas)) < len(quotas)


def test_a_mixture_draws_from_each_component_by_its_weight_and_only_what_its_tags_allow() -> None:
    prepared = prepare(curriculum(UNIFORM, *MIXTURE), tables(table(), table(GAME)), {})

    places = [prepared.draw(number) for number in range(400)]

    assert Counter(place.environment for place in places) == {MATH: 300, GAME: 100}
    assert {place.index for place in places if place.environment == MATH} == set(range(10))
    assert {place.index for place in places if place.environment == GAME} == {1, 3, 5, 7, 9}
    assert prepared.shares() == {MATH: 0.75, GAME: 0.25}


def test_two_splits_of_an_environment_have_one_share_by_environment_and_two_by_split() -> None:
    both = (Component(environment=MATH, weight=0.1), Component(environment=MATH, split="more", weight=0.3))
    prepared = prepare(curriculum(UNIFORM, *both), tables(table(), table(split="more")), {})

    assert prepared.shares() == pytest.approx({MATH: 1.0})
    assert prepared.split_shares() == pytest.approx({(MATH, "train"): 0.25, (MATH, "more"): 0.75})


def test_weights_by_tag_are_components_of_one_split() -> None:
    by_tag = (Component(environment=MATH, tags=("odd",), weight=3), Component(environment=MATH))
    prepared = prepare(curriculum(UNIFORM, *by_tag), tables(table()), {})

    seen = Counter(prepared.draw(number).index % 2 for number in range(4000))

    assert seen[1] / 4000 == pytest.approx(0.75 + 0.25 / 2, abs=0.02)
    assert weight_of(prepared, MATH, "train", 1) == pytest.approx(0.75 / 5 + 0.25 / 10)
    assert prepared.tasks == 10, "each task counts once"


@pytest.mark.parametrize(
    ("components", "complaint"),
    [
        pytest.param(
            (Component(environment=MATH), Component(environment=NONE)),
            r"curriculum study: components\[1\]: none has no task in split 'train'",
            id="an environment without tasks",
        ),
        pytest.param(
            (Component(environment=MATH, split="test"),),
            r"components\[0\]: math has no task in split 'test'",
            id="a split that does not exist",
        ),
        pytest.param(
            (Component(environment=MATH, tags=("prime", "square")),),
            r"components\[0\]: math has no task tagged prime or square in split 'train'",
            id="tags that no task has",
        ),
    ],
)
def test_a_component_without_tasks_is_refused_by_name(components: tuple[Component, ...], complaint: str) -> None:
    some = tables(table(), table(NONE, count=0))

    with pytest.raises(InvalidRequest, match=complaint):
        prepare(curriculum(UNIFORM, *components), some, {})
    with pytest.raises(InvalidRequest, match=complaint):
        parts_of(curriculum(UNIFORM, *components), some)


def test_tasks_are_counted_over_components_and_not_over_stages() -> None:
    some = tables(table(), table(GAME))

    assert count_rows(parts_of(curriculum(UNIFORM, *MIXTURE), some)) == 15
    assert prepare(curriculum(SamplerKind.STAGED, *MIXTURE), some, {}).tasks == 15


# -- within a component ---------------------------------------------------------------------------------------------


def test_uniform_draws_are_equally_likely_for_every_task() -> None:
    prepared = prepare(curriculum(), tables(table()), {})

    seen = Counter(prepared.draw(number).index for number in range(10_000))

    assert sorted(seen) == list(range(10))
    # The bound is three standard deviations. The draws are deterministic.
    assert all(abs(times - 1000) < 100 for times in seen.values())
    assert weight_of(prepared, MATH, "train", 3) == pytest.approx(0.1)


def test_sequential_takes_each_task_once_in_order_before_any_comes_again() -> None:
    prepared = prepare(curriculum(SEQUENTIAL, *MIXTURE), tables(table(), table(GAME)), {})

    places = [prepared.draw(number) for number in range(80)]

    assert [place.index for place in places if place.environment == MATH] == [*range(10)] * 6
    assert [place.index for place in places if place.environment == GAME] == [1, 3, 5, 7, 9] * 4


def test_indices_whose_task_was_removed_are_never_drawn() -> None:
    left = (MATH, "train"), (TaskRow(2, "math-2"), TaskRow(7, "math-7"))

    in_turn = prepare(curriculum(SEQUENTIAL), tables(left), {})
    by_chance = prepare(curriculum(), tables(left), {})

    assert [in_turn.draw(number).index for number in range(4)] == [2, 7, 2, 7]
    assert {by_chance.draw(number).index for number in range(50)} == {2, 7}
    assert (weight_of(by_chance, MATH, "train", 7), weight_of(by_chance, MATH, "train", 5)) == (0.5, 0)


def test_draws_follow_the_weights() -> None:
    prepared = prepare(curriculum(SamplerKind.TARGET_SUCCESS), tables(table()), KNOWN)

    seen = Counter(prepared.draw(number).index for number in range(20_000))

    for index in range(10):
        assert abs(seen[index] / 20_000 - weight_of(prepared, MATH, "train", index)) < 0.01
    assert min(seen.values()) > 0  # `explore` draws even hopeless tasks.


@pytest.mark.parametrize("kind", list(SamplerKind))
def test_weights_are_shares_of_draws_in_descending_order(kind: SamplerKind) -> None:
    prepared = prepare(curriculum(kind, *MIXTURE), tables(table(), table(GAME)), KNOWN)

    told = prepared.heaviest(100)

    assert [weight for _, weight in told] == sorted((weight for _, weight in told), reverse=True)
    assert sum(weight for _, weight in told) == pytest.approx(1.0)
    for place, weight in told:
        assert weight_of(prepared, place.environment, place.split, place.index) == pytest.approx(weight)
    assert prepared.heaviest(2) == told[:2]
    assert sum(prepared.shares().values()) == pytest.approx(1.0)
    assert weight_of(prepared, NONE, "train", 0) == 0


# -- the same everywhere --------------------------------------------------------------------------------------------

GOLDEN = {
    "uniform": "math-2 math-6 math-9 game-1 math-4 math-7 math-3 game-9 math-8 math-1 math-5 game-9",
    "sequential": "math-0 math-1 math-2 game-1 math-3 math-4 math-5 game-3 math-6 math-7 math-8 game-5",
    "target_success": "math-2 math-6 math-7 game-1 math-3 math-7 math-3 game-9 math-7 math-2 math-6 game-9",
    "learning_progress": "math-3 math-7 math-8 game-1 math-3 math-7 math-3 game-9 math-7 math-3 math-7 game-9",
    "staged": "math-1 math-5 math-9 game-1 math-4 math-8 math-4 game-9 math-9 math-0 math-5 game-9",
}
"""The first draws. They change only if the choice of tasks changes, and CHANGELOG.md then says so."""


def drawn(kind: SamplerKind, count: int = 12) -> list[str]:
    prepared = prepare(curriculum(kind, *MIXTURE, seed=7), tables(table(), table(GAME)), KNOWN)
    return [prepared.draw(number).task for number in range(count)]


@pytest.mark.parametrize("kind", list(SamplerKind))
def test_the_first_draws_of_each_sampler_do_not_change(kind: SamplerKind) -> None:
    assert " ".join(drawn(kind)) == GOLDEN[kind.value]


IN_ANOTHER_PROCESS = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("draws", sys.argv[1])
draws = importlib.util.module_from_spec(spec)
sys.modules["draws"] = draws
spec.loader.exec_module(draws)
print(json.dumps({kind.value: draws.drawn(kind, 200) for kind in draws.SamplerKind}))
"""


def test_another_process_with_another_hash_seed_draws_the_same() -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", IN_ANOTHER_PROCESS, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            check=True,
            timeout=COMMAND_S,
        ).stdout
        for seed in ("1", "4242")
    ]

    here = {kind.value: drawn(kind, 200) for kind in SamplerKind}

    assert [json.loads(one) for one in told] == [here, here]


@pytest.mark.parametrize("kind", list(SamplerKind))
def test_a_draw_does_not_depend_on_earlier_draws_or_on_the_order_of_records(kind: SamplerKind) -> None:
    some = tables(table(), table(GAME))
    turned = {MATH: dict(reversed(list(KNOWN[MATH].items())))}
    study = curriculum(kind, *MIXTURE, seed=7)
    prepared = prepare(study, some, KNOWN)

    forward = [prepared.draw(number) for number in range(40)]
    backward = [prepare(study, some, turned, b"").draw(number) for number in reversed(range(40))]

    assert backward == forward[::-1]


def test_seed_and_name_of_a_curriculum_change_the_draws() -> None:
    some = tables(table(count=1000))
    study = curriculum(seed=1)

    found = {
        tuple(prepare(one, some, {}).draw(number).index for number in range(5))
        for one in (study, replace(study, seed=2), replace(study, name="other"))
    }

    assert len(found) == 3


def test_a_draw_returns_the_place_of_its_task() -> None:
    assert prepare(curriculum(SEQUENTIAL), tables(table()), {}, b"").draw(13) == TaskPlace(MATH, "train", 3, "math-3")


# -- arbitrary records ----------------------------------------------------------------------------------------------

rewards = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=40)
samplers = st.builds(
    Sampler,
    kind=st.sampled_from(SamplerKind),
    target=st.floats(0.01, 0.99),
    width=st.floats(0, 10),
    explore=st.floats(0, 1),
    prior=st.floats(0, 100),
    window=st.integers(1, 32),
    stages=st.just(STAGES),
    review=st.floats(0, 0.99),
)


def of_rewards(task: str, newest: list[float]) -> TaskRecord:
    """Return a record with these rewards, without their mean, which can overflow a float."""
    return TaskRecord(environment=MATH, task=task, attempts=len(newest), recent=tuple(newest[-32:]))


@given(samplers, st.lists(rewards, min_size=1, max_size=8), st.floats(-1e9, 1e9), st.integers(0, 10**12))
def test_any_finite_rewards_give_weights_that_are_shares(
    sampler: Sampler, known: list[list[float]], success_at: float, number: int
) -> None:
    study = replace(curriculum(sampler), success_at=success_at)
    told = {MATH: {f"math-{at}": of_rewards(f"math-{at}", newest) for at, newest in enumerate(known)}}

    prepared = prepare(study, tables(table()), told)

    weights = [weight for _, weight in prepared.heaviest(100)]
    assert all(0 <= weight <= 1 for weight in weights)
    assert sum(weights) == pytest.approx(1.0)
    place = prepared.draw(number)
    assert weight_of(prepared, place.environment, place.split, place.index) > 0
