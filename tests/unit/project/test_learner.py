"""The policy of the learner example: its probabilities, its gradient, and its learning from a group."""

from __future__ import annotations

import math
import random

import pytest

from examples.learner.policy import Attempt, Decision, Policy, advantages, largest

OPTIONS = (("a", "b"), ("b",), ("c", "d"), ("a", "d"))
DECISIONS = (Decision(OPTIONS, 0), Decision(OPTIONS[:3], 2), Decision((("b", "c"), ("d",)), 1))


def policy() -> Policy:
    return Policy({"a": 0.3, "b": -0.7, "c": 1.1, "d": 0.2})


def test_a_new_policy_gives_all_options_the_same_probability() -> None:
    assert Policy().probabilities(OPTIONS) == [0.25] * 4


def test_the_probability_of_an_option_follows_from_the_sum_of_its_weights() -> None:
    found = policy().probabilities(OPTIONS)

    assert sum(found) == pytest.approx(1)
    assert found[2] / found[1] == pytest.approx(math.exp(1.1 + 0.2 + 0.7))


def test_large_weights_cause_no_overflow() -> None:
    assert Policy({"a": 1e4}).probabilities([("a",), ("b",)]) == [1.0, 0.0]


def test_options_are_chosen_as_often_as_their_probabilities() -> None:
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


def test_advantages_are_centred_and_normalized() -> None:
    found = advantages([0.0, 0.0, 1.0, 1.0])

    assert sum(found) == pytest.approx(0)
    assert found[0] == -found[3] == pytest.approx(-0.5 / 0.6)


@pytest.mark.parametrize("reward", [0.0, 0.3, 1.0])
def test_a_group_with_equal_rewards_changes_no_weights(reward: float) -> None:
    before = policy()

    learnt = before.learn([Attempt(DECISIONS, reward), Attempt(DECISIONS[:1], reward)], rate=1.0)

    assert not learnt
    assert before.weights == policy().weights


def test_a_rewarded_decision_becomes_more_likely() -> None:
    learner = Policy()
    good, bad = Decision(OPTIONS, 2), Decision(OPTIONS, 1)

    learnt = learner.learn([Attempt((good,), 1.0), Attempt((bad,), 0.0)], rate=0.5)

    assert learnt
    found = learner.probabilities(OPTIONS)
    assert found[2] > 0.25 > found[1]


def test_a_step_is_the_mean_of_the_gradients_weighted_by_advantages() -> None:
    learner, group = policy(), [Attempt(DECISIONS[:1], 1.0), Attempt(DECISIONS[1:2], 0.0)]
    first, second = advantages([1.0, 0.0])
    slopes = [policy().gradient(attempt.decisions) for attempt in group]

    learner.learn(group, rate=0.1)

    for name, weight in policy().weights.items():
        step = 0.1 * (first * slopes[0].get(name, 0) + second * slopes[1].get(name, 0)) / 2
        assert learner.weights[name] == pytest.approx(weight + step)


def test_the_largest_weights_are_chosen_by_absolute_value() -> None:
    assert largest({"a": 0.1, "b": -3.0, "c": 2.0}, 2) == [("b", -3.0), ("c", 2.0)]
