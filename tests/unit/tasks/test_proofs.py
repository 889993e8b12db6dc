"""What `gateway tasks prove` makes of tasks, tools and rewards, without a gateway."""

from __future__ import annotations

from typing import Any

import pytest
from env_gateway_client.content import Tool

from gateway.cli.proofs import (
    NotPlayable,
    Played,
    Proof,
    Subject,
    constants_of,
    reference_calls,
    summed,
    text_call_of,
)

TEXT = {"type": "string"}
SUBMIT = Tool("submit", "", {"type": "object", "properties": {"answer": TEXT}, "required": ["answer"]})
WRITE = Tool("write", "", {"type": "object", "properties": {"path": TEXT, "text": TEXT}, "required": ["path", "text"]})
COUNT = Tool("count", "", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
LOOK = Tool("look", "", None)


def subject(id: str = "a", **task: Any) -> Subject:
    return Subject(environment="e", id=id, task=task, opening=task)


def proof(*plays: Played, **task: Any) -> Proof:
    return Proof(subject(**task), list(plays))


def reference(reward: float | None, *, finished: bool = True, error: str = "") -> Played:
    return Played("reference", reward, finished, error)


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"reference": "own", "evaluation": {"reference": "other"}}, "own", id="of the task"),
        pytest.param({"reference": None, "evaluation": {"reference": ["a", "b"]}}, ["a", "b"], id="of the evaluation"),
        pytest.param({"evaluation": {"entry": {"answer": "7"}}}, "7", id="of math"),
        pytest.param({"reference": ""}, "", id="an empty text"),
        pytest.param({"evaluation": {"entry": "x"}}, None, id="another entry"),
        pytest.param({"evaluation": "x", "tags": "y", "reward_full": "z"}, None, id="a task of an image"),
    ],
)
def test_the_reference_is_that_of_the_task_or_of_its_evaluation(task: dict[str, Any], expected: object) -> None:
    assert subject(**task).reference == expected


def test_a_text_goes_to_the_one_tool_that_requires_one_text_alone() -> None:
    assert text_call_of([LOOK, WRITE, COUNT, SUBMIT]) == ("submit", "answer")


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        pytest.param([LOOK, WRITE, COUNT], "no tool requires one text", id="none"),
        pytest.param(
            [SUBMIT, Tool("say", "", SUBMIT.input_schema)], "the tools submit, say require one text", id="several"
        ),
        pytest.param([Tool("odd", "", {"required": ["x"]})], "no tool requires one text", id="no properties"),
    ],
)
def test_without_one_such_tool_a_text_cannot_be_played(tools: list[Tool], says: str) -> None:
    with pytest.raises(NotPlayable, match=f"{says}.*--text-tool"):
        text_call_of(tools)


ACTION = {"name": "write", "input": {"path": "p", "text": "t"}}


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        pytest.param("7", [("submit", {"answer": "7"})], id="a text"),
        pytest.param(ACTION, [("write", ACTION["input"])], id="an action"),
        pytest.param([ACTION, "7"], [("write", ACTION["input"]), ("submit", {"answer": "7"})], id="a list"),
        pytest.param(
            {"commands": ["ls"], "answer": "9", "wrong": {}},
            [("bash_action", {"script": "ls"}), ("answer_action", {"answer": "9"})],
            id="commands with an answer",
        ),
        pytest.param({"commands": [], "answer": None}, [("finish_action", {"thought": ""})], id="commands alone"),
    ],
)
def test_a_reference_becomes_calls(written: object, expected: object) -> None:
    assert reference_calls(written, [SUBMIT, WRITE], None) == expected


def test_a_reference_of_another_form_is_refused_with_its_value() -> None:
    with pytest.raises(ValueError, match=r"has \"\{'tool': 'x'\}\".*fix: write a text, an action"):
        reference_calls([{"tool": "x"}], [SUBMIT], None)
    with pytest.raises(NotPlayable):
        reference_calls("7", [LOOK], None)
    assert reference_calls("7", [LOOK], ("look", "at")) == [("look", {"at": "7"})]


def test_the_constant_of_a_group_is_its_most_frequent_text() -> None:
    subjects = [
        *(subject(tags=["sum", "x"], reference=text) for text in ("1", "2", "2")),
        subject(reference="1"),
        subject(tags=["list"], reference=["2", "2"]),
    ]

    assert constants_of(subjects) == {("e", "sum"): "2", ("e", ""): "1"}


@pytest.mark.parametrize(
    ("one", "is_won", "problem"),
    [
        pytest.param(proof(reference(1.0), reference(1.0)), True, "", id="won twice"),
        pytest.param(
            proof(reference(1.0), reference(0.5)), False, "earns 1 in the first play and 0.5 in the", id="once"
        ),
        pytest.param(
            proof(reference(0.5), reference(0.5)), False, "earns 0.5 and does not win, which takes 1", id="less"
        ),
        pytest.param(proof(reference(0.5), reference(0.5), reward_full=0.5), True, "", id="a full reward of 0.5"),
        pytest.param(
            proof(reference(1.0, finished=False), reference(1.0, finished=False)), False, "does not end", id="goes on"
        ),
        pytest.param(proof(reference(1.0), reference(None, error="lost")), False, "failed: lost", id="failed once"),
        pytest.param(proof(reference(None, error="bad form")), False, "failed: bad form", id="not played"),
        pytest.param(proof(), False, "", id="no reference"),
    ],
)
def test_a_reference_wins_twice_with_the_same_reward_or_has_one_problem(one: Proof, is_won: bool, problem: str) -> None:
    found = one.problems()

    assert one.is_won == is_won
    assert len(found) == bool(problem)
    assert not problem or found[0][1].startswith(problem)


@pytest.mark.parametrize(
    ("played", "task", "problems", "remarks"),
    [
        pytest.param(Played("no-op", 0.0), {}, 0, 0, id="nothing earns nothing"),
        pytest.param(Played("no-op wait", 0.1), {}, 1, 0, id="nothing is paid"),
        pytest.param(Played("no-op wait", 0.1), {"reward_floor": 0.1}, 0, 0, id="as stated"),
        pytest.param(Played("no-op wait", -0.1), {"reward_floor": -0.5}, 1, 0, id="more than a negative floor"),
        pytest.param(Played("empty", 1.0), {}, 0, 1, id="an empty text"),
        pytest.param(Played("echo", 1.0), {}, 0, 1, id="the prompt"),
        pytest.param(Played("constant", 1.0), {}, 0, 0, id="a constant"),
        pytest.param(Played("echo", None, error="lost"), {}, 1, 0, id="a failed play"),
    ],
)
def test_rewards_without_effort_are_compared_with_the_floor(
    played: Played, task: dict[str, Any], problems: int, remarks: int
) -> None:
    one = proof(played, **task)

    assert (len(one.problems()), len(one.remarks())) == (problems, remarks)


def test_one_failure_of_several_plays_is_one_problem() -> None:
    plays = [Played(play, None, error="the judge failed") for play in ("reference", "reference", "echo")]

    assert proof(*plays).problems() == [("reference, echo", "failed: the judge failed")]


def test_the_rows_have_maxima_and_means_without_failed_plays() -> None:
    first = proof(Played("no-op", 0.0), Played("no-op wait", 0.5), Played("echo", None, error="lost"), tags=["t"])
    second = proof(reference(1.0), reference(1.0), Played("no-op", 0.0), tags=["t"])
    first.skipped["reference"] = "the task has none"

    found = summed([first, second])

    assert found["groups"] == [
        {
            "environment": "e",
            "tag": "t",
            "tasks": 2,
            "won": 1,
            "references": 1,
            "empty": None,
            "echo": None,
            "constant": None,
            "no-op": {"max": 0.5, "mean": pytest.approx(0.5 / 3)},
            "failed": 1,
        }
    ]
    assert [one["play"] for one in found["problems"]] == ["echo", "no-op wait"]
    assert found["skipped"] == [
        {"environment": "e", "task": "a", "place": "", "play": "reference", "reason": "the task has none"}
    ]
