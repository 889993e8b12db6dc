"""Generic tasks in the os environment: a script judges the end state, or a named reward function the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.envs.os_sandboxes import os_module, require_sandboxes
from tests.envs.workers import Worker

pytestmark = pytest.mark.sandbox

judges = os_module("os_judge")

NOTE: dict[str, Any] = {
    "id": "custom/note",
    "env_type": "os",
    "instruction": "Write hello into /srv/note, or say it.",
    "config": {"init": "mkdir -p /srv"},
    "evaluation": {"script": 'test "$1" = hello || grep -qx hello /srv/note'},
}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    asyncio.run(require_sandboxes())
    worker = Worker("os")
    try:
        yield worker
    finally:
        worker.stop()


def played(worker: Worker, evaluation: dict[str, Any], script: str, answer: str | None) -> dict[str, Any]:
    session = worker.open({**NOTE, "evaluation": evaluation})
    session.tool("bash_action", script=script)
    if answer is None:
        ended = session.tool("finish_action", thought="done")
    else:
        ended = session.tool("answer_action", answer=answer)
    session.close()
    return ended


@pytest.mark.parametrize(
    ("evaluation", "script", "answer", "reward"),
    [
        pytest.param(NOTE["evaluation"], "echo hello > /srv/note", None, 1.0, id="a script sees the state"),
        pytest.param(NOTE["evaluation"], "true", "hello", 1.0, id="a script receives the answer"),
        pytest.param(NOTE["evaluation"], "true", "bye", 0.0, id="a script that fails"),
        pytest.param(
            {"script": "import os, sys; sys.exit(not os.path.isdir('/srv/d'))", "language": "python"},
            "mkdir /srv/d",
            None,
            1.0,
            id="a script in another language",
        ),
        pytest.param({"reward_function": "iexact_match('Rome')"}, "true", "rome", 1.0, id="the right answer"),
        pytest.param({"reward_function": "iexact_match('Rome')"}, "true", "paris", 0.0, id="a wrong answer"),
        pytest.param({"reward_function": "not_contains('x')"}, "true", None, 0.0, id="no answer"),
        pytest.param(
            {"reward_function": "regex_match", "pattern": "(a+)+$"}, "true", "a" * 60 + "b", 0.0, id="a slow pattern"
        ),
    ],
)
def test_an_episode_is_judged_by_the_evaluation_of_the_task(
    worker: Worker, evaluation: dict[str, Any], script: str, answer: str | None, reward: float
) -> None:
    ended = played(worker, evaluation, script, answer)

    assert (ended["reward"], ended["finished"]) == (reward, True)
    assert ended["metadata"]["success"] is (reward == 1.0)
    assert ended["blocks"][0]["text"] == ("Solved." if reward else "Not solved.")


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        ({"script": ["true"]}, "evaluation.script must be a text"),
        ({"script": ""}, "evaluation.script must be a text"),
        ({"script": "true", "language": "perl"}, "no language 'perl'"),
        ({"script": "true", "match": "x"}, "not both"),
        ({"script": "true", "check": ["true"]}, "not both"),
        ({"reward_function": "guess('x')"}, "evaluation.reward_function: no reward function 'guess'"),
        ({"reward_function": "exact_match"}, "evaluation.reward_function: .*missing"),
        ({}, "evaluation needs match or check, or script or reward_function"),
    ],
)
def test_the_refusal_of_an_invalid_evaluation_states_the_reason(evaluation: dict[str, Any], says: str) -> None:
    with pytest.raises(judges.InvalidEvaluation, match=says):
        judges.Evaluation.read(evaluation)
