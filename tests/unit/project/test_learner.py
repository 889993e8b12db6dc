"""The example's policy: what it prefers, how its gradient is told, and what a group teaches."""

from __future__ import annotations

import math
import random

import pytest

from examples.learner.policy import Attempt, Decision, Policy, advantages, largest

OPTIONS = (("a", "b"), ("b",), ("c", "d"), ("a", "d"))
DECISIONS = (Decision(OPTIONS, 0), Decision(OPTIONS[:3], 2), Decision((("b", "c"), ("d",)), 1))


def policy() -> Policy:
    return Policy({"a": 0.3, "b": -0.7, "c": 1.1, "d": 0.2})


def test_at_the_beginning_all_options_are_alike() -> None:
    assert Policy().probabilities(OPTIONS) == [0.25] * 4


def test_an_option_is_as_likely_as_the_sum_of_its_weights_says() -> None:
    found = policy().probabilities(OPTIONS)

    assert sum(found) == pytest.approx(1)
    assert found[2] / found[1] == pytest.approx(math.exp(1.1 + 0.2 + 0.7))


def test_large_weights_overflow_nothing() -> None:
    assert Policy({"a": 1e4}).probabilities([("a",), ("b",)]) == [1.0, 0.0]


def test_decisions_fall_as_often_as_their_probabilities() -> None:
    chance, wanted = random.Random(1), policy().probabilities(OPTIONS)

    taken = [policy().decide(OPTIONS, chance).taken for _ in range(4000)]

    assert [taken.count(at) / 4000 for at in range(4)] == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_the_gradient_is_the_slope_of_the_log_probability(name: str) -> None:
    step = 1e-5
    above, below = policy(), policy()
    above.weights[name] += step
    below.weights[name] -= step
    slope = (above.log_probability(DECISIONS) - below.log_probability(DECISIONS)) / (2 * step)

    assert policy().gradient(DECISIONS)[name] == pytest.approx(slope, abs=1e-8)


def test_advantages_are_centred_and_of_one_scale() -> None:
    found = advantages([0.0, 0.0, 1.0, 1.0])

    assert sum(found) == pytest.approx(0)
    assert found[0] == -found[3] == pytest.approx(-0.5 / 0.6)


@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0])
def test_a_group_that_fares_alike_teaches_nothing(reward: float) -> None:
    before = policy()

    learnt = before.learn([Attempt(DECISIONS, reward), Attempt(DECISIONS[:1], reward)], rate=1.0)

    assert not learnt
    assert before.weights == policy().weights


def test_what_was_rewarded_becomes_likelier() -> None:
    learner = Policy()
    good, bad = Decision(OPTIONS, 2), Decision(OPTIONS, 1)

    learnt = learner.learn([Attempt((good,), 1.0), Attempt((bad,), 0.0)], rate=0.5)

    assert learnt
    found = learner.probabilities(OPTIONS)
    assert found[2] > 0.25 > found[1]


def test_a_step_is_the_mean_of_the_members_gradients_by_their_advantages() -> None:
    learner, group = policy(), [Attempt(DECISIONS[:1], 1.0), Attempt(DECISIONS[1:2], 0.0)]
    first, second = advantages([1.0, 0.0])
    slopes = [policy().gradient(attempt.decisions) for attempt in group]

    learner.learn(group, rate=0.1)

    for name, weight in policy().weights.items():
        step = 0.1 * (first * slopes[0].get(name, 0) + second * slopes[1].get(name, 0)) / 2
        assert learner.weights[name] == pytest.approx(weight + step)


def test_the_largest_weights_are_those_farthest_from_nothing() -> None:
    assert largest({"a": 0.1, "b": -3.0, "c": 2.0}, 2) == [("b", -3.0), ("c", 2.0)]
