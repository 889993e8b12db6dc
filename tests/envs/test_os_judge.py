"""Judging: matchers as tables, and checks in a real box with an expected value from before or after the episode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from envserver.sandbox import Completed

from tests.deadlines import HANG_S
from tests.envs.os_sandboxes import opening_sandboxes, os_module

pytestmark = pytest.mark.sandbox

episodes = os_module("os_episode")
judges = os_module("os_judge")
problems = os_module("os_problem")
scripts = os_module("os_scripts")

COUNT = "ls /srv | wc -l"
COUNTED = {"check": [None, {"matcher": "integer-match"}], "example": COUNT}


@pytest.fixture
async def sandbox() -> AsyncIterator[Any]:
    async with opening_sandboxes() as sandboxes:
        sandbox = await sandboxes.open()
        yield sandbox
        await sandbox.close()


async def judge(sandbox: Any, evaluation: dict[str, Any]) -> Any:
    judge = judges.Judge(judges.Evaluation.read(evaluation), sandbox)
    await judge.prepare()
    return judge


@pytest.mark.parametrize(
    ("matcher", "answer", "expected", "is_match"),
    [
        pytest.param("integer-match", " 31 ", "31\n", True, id="integers, ignoring white space"),
        pytest.param("integer-match", "031", "31", True, id="integers by value"),
        pytest.param("integer-match", "31 files", "31", False, id="a sentence is not an integer"),
        pytest.param("integer-match", "", "31", False, id="an empty text is not an integer"),
        pytest.param("integer-match", "9" * 5_000, "9", False, id="more digits than an integer may have"),
        pytest.param("string-match", "a b\r\nc ", "a b\nc\n", True, id="texts, ignoring line ends"),
        pytest.param("string-match", "A", "a", False, id="capitals count"),
        pytest.param("size-match", "5K", "5120", True, id="kibibytes"),
        pytest.param("size-match", "5kb", "5120B", True, id="with a B"),
        pytest.param("size-match", "5 MB", "5120 K", True, id="mebibytes"),
        pytest.param("size-match", "1P", str(2**50), True, id="pebibytes"),
        pytest.param("size-match", "5120 Bytes", "5K", True, id="bytes in words"),
        pytest.param("size-match", "5.0K", "5K", False, id="no fractions"),
        pytest.param("size-match", "large", "large", False, id="not a size"),
        pytest.param("containing", "it is 31 in all", "31\n", True, id="the expected value within the answer"),
        pytest.param("containing", "3", "31", False, id="not the other way round"),
        pytest.param("in", "3", "31", True, id="the answer within the expected value"),
        pytest.param("in", "310", "31", False, id="not a longer answer"),
    ],
)
def test_a_matcher_compares_an_answer_with_the_expected_value(
    matcher: str, answer: str, expected: str, is_match: bool
) -> None:
    assert judges.MATCHERS[matcher](answer, expected) is is_match


@pytest.mark.parametrize(
    ("match", "answer", "is_match"),
    [
        pytest.param("7", " 7\n", True, id="a text"),
        pytest.param({"answer": "7"}, " 7", True, id="stripped by default"),
        pytest.param({"answer": "7", "strip": False}, " 7", False, id="not stripped"),
        pytest.param({"regex": "^[67]$"}, "7", True, id="a pattern"),
        pytest.param({"regex": "an"}, "banana", True, id="a pattern is searched for"),
        pytest.param({"regex": "^a"}, "banana", False, id="a pattern that does not match"),
        pytest.param("None", None, False, id="no answer is never right"),
        pytest.param({"regex": ".*"}, None, False, id="also not for a pattern"),
    ],
)
async def test_a_match_compares_the_answer_with_a_text_or_a_pattern(
    match: object, answer: str | None, is_match: bool
) -> None:
    one = judges.Judge(judges.Evaluation.read({"match": match}), None)  # a match needs no box

    assert await one.judge(answer) is is_match


@pytest.mark.parametrize("answer", [None, "", " \n"], ids=["no answer", "empty", "blank"])
@pytest.mark.parametrize("matcher", judges.MATCHERS)
async def test_an_answer_that_is_missing_or_empty_solves_nothing_whatever_the_matcher(
    sandbox: Any, matcher: str, answer: str | None
) -> None:
    for expected in ("None", "3"):
        told = {"example": {"code": f"echo '{expected} '"}, "check": [None, {"matcher": matcher}]}

        assert await (await judge(sandbox, told)).judge(answer) is False


@pytest.mark.parametrize("answer", [None, ""], ids=["no answer", "empty"])
async def test_a_script_gets_no_argument_without_an_answer(sandbox: Any, answer: str | None) -> None:
    async def solved(*codes: str) -> bool:
        return bool(await (await judge(sandbox, {"check": [{"code": code} for code in codes]})).judge(answer))

    assert await solved("test $# = 0")
    assert not await solved('test "$1" = None')
    assert await solved("echo 7", 'test "$1" = "" && test $2 = 7')


async def test_a_pattern_that_tries_too_many_ways_ends_and_other_sessions_go_on() -> None:
    one = judges.Judge(judges.Evaluation.read({"match": {"regex": "^(a+)+$"}}), None)
    judging = asyncio.create_task(one.judge("a" * 28 + "!"))
    await asyncio.sleep(0)  # it has begun: with a match on this loop, it would never return here

    assert not judging.done()
    async with asyncio.timeout(HANG_S):
        assert await judging is False


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        pytest.param(None, "must be an object", id="nothing"),
        pytest.param({}, "match or check", id="neither match nor check"),
        pytest.param({"check": []}, "match or check", id="no check"),
        pytest.param({"check": [None]}, "example", id="null without an example"),
        pytest.param({"check": [{"matcher": "magic"}]}, "no matcher", id="an unknown matcher"),
        pytest.param({"check": [7]}, "a script is", id="an invalid check"),
        pytest.param({"check": [{"code": "x", "language": "perl"}]}, "no language", id="an unknown language"),
        pytest.param({"match": {"regex": "("}}, "regex", id="a broken pattern"),
        pytest.param({"match": {"regex": "x" * 1_001}}, "at most 1000", id="a pattern that is too long"),
        pytest.param({"match": 7}, "must be a text", id="an invalid match"),
        pytest.param({"match": "7", "judge": "now"}, "'before' or 'after'", id="an unknown order"),
    ],
)
def test_the_refusal_of_an_invalid_evaluation_states_the_reason(evaluation: object, says: str) -> None:
    with pytest.raises(judges.InvalidEvaluation, match=says):
        judges.Evaluation.read(evaluation)


async def test_the_expected_value_is_computed_before_the_episode_and_the_agent_cannot_change_it(sandbox: Any) -> None:
    await sandbox.run(["/bin/touch", "/srv/a", "/srv/b"])
    one = await judge(sandbox, COUNTED)

    await sandbox.run(["/bin/touch", "/srv/c"])
    await sandbox.run(["/bin/rm", "/bin", "/lib", "/lib64"])  # links in the box: no program can start any more

    assert await one.judge("2") is True
    assert await one.judge("3") is False


async def test_with_judge_after_the_agent_can_change_the_expected_value_as_in_agentbench(sandbox: Any) -> None:
    await sandbox.run(["/bin/touch", "/srv/a", "/srv/b"])
    one = await judge(sandbox, {**COUNTED, "judge": "after"})

    await sandbox.run(["/bin/touch", "/srv/c"])

    assert await one.judge("2") is False
    assert await one.judge("3") is True


async def test_a_failing_example_lets_no_session_start(sandbox: Any) -> None:
    with pytest.raises(judges.JudgeFailed, match=r"3.*no luck"):
        await judge(sandbox, {**COUNTED, "example": "echo no luck >&2; exit 3"})


@pytest.mark.parametrize(
    ("check", "is_right"),
    [
        pytest.param(['test "$1" = 7'], True, id="the answer is the first argument"),
        pytest.param(['test "$1" = 8'], False, id="a check that fails"),
        pytest.param(["printf five", 'test "$2" = five'], True, id="outputs are the further arguments"),
        pytest.param(
            ["printf 'a\\n'", {"language": "python", "code": "import sys; assert sys.argv[2] == 'a\\n'"}],
            True,
            id="with their newline",
        ),
        pytest.param(["false", "true"], False, id="the first failure ends the judgement"),
        pytest.param([{"language": "python", "code": "import os; assert os.getcwd() == '/root'"}], True, id="in /root"),
        pytest.param(["mkdir -p /srv; printf x > /srv/f", {"read": "/srv/f"}, {"equals": "x\n"}], True, id="a file"),
        pytest.param([{"read": "/srv/none"}, {"equals": ""}], False, id="a missing file"),
        pytest.param([{"read": "/srv"}, {"equals": ""}], False, id="a directory instead of a file"),
        pytest.param(["echo 7", {"matcher": "integer-match"}], True, id="a matcher on a check's output"),
        pytest.param([{"matcher": "integer-match"}], False, id="a matcher with nothing to compare"),
    ],
)
async def test_checks_run_in_order_and_decide_the_verdict(sandbox: Any, check: list[Any], is_right: bool) -> None:
    one = await judge(sandbox, {"check": check})

    assert await one.judge("7") is is_right


@pytest.mark.parametrize("limit", ["SCRIPT_TIMEOUT_S", "JUDGE_TIMEOUT_S"])
async def test_a_check_that_does_not_end_solves_nothing(
    sandbox: Any, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(judges, limit, 0.5)
    one = await judge(sandbox, {"check": ["exec sleep 1000"]})

    assert await one.judge("7") is False


async def test_a_check_that_other_sessions_keep_from_the_cpu_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judges, "SCRIPT_TIMEOUT_S", 8.0)
    one = judges.Judge(judges.Evaluation.read({"check": ["true"]}), Starved())

    with pytest.raises(judges.JudgeStarved, match="kept a check from the CPU for 5 s"):
        await one.judge("7")


class Starved:
    """A box whose programs wait for the CPU until they are stopped."""

    judged: Any = None

    async def freeze(self) -> None:
        """Do nothing: the agent has no process."""

    async def run(self, argv: list[str], **_: object) -> Any:
        self.judged.waited_s, self.judged.used_s = 5.0, 1.0
        return Completed(-9, b"", b"", timed_out=True)


COUNTED_AFTER = {"judge": "after", "check": [None, {"matcher": "integer-match"}]}


async def ended(evaluation: dict[str, Any], *, script: str, answer: str | None) -> Any:
    """Play an episode of one command and return its verdict."""
    task = {
        "instruction": "Make a command greet.",
        "config": {"init": "echo 3 > /srv/n", "start": "cd /srv"},
        "evaluation": evaluation,
    }
    async with opening_sandboxes() as sandboxes:
        episode = await episodes.Episodes(sandboxes).open(problems.Problem.read(task), seed=1)
        try:
            await episode.bash(script)
            return await episode.judge(answer)
        finally:
            await episode.close()


@pytest.mark.parametrize(
    ("evaluation", "says"),
    [
        pytest.param(
            {"check": ["test -f /srv/n && nosuchjudge --all"]}, "needs nosuchjudge", id="a program of a check"
        ),
        pytest.param(
            {"check": ['test "$(nosuchjudge 2> /dev/null)" = 1']},
            "needs nosuchjudge",
            id="whose error output is discarded",
        ),
        pytest.param({"check": ["/usr/bin/nosuchjudge"]}, "needs /usr/bin/nosuchjudge", id="by its path"),
        pytest.param(
            {"check": [{"language": "c++", "code": "int main() {}"}]}, r"needs /usr/bin/c\+\+", id="a compiler"
        ),
        pytest.param({**COUNTED_AFTER, "example": "cat /nothing"}, "example ended with 1", id="an example that fails"),
        pytest.param({**COUNTED_AFTER, "example": "nosuchjudge"}, "example ended with 127", id="an example's program"),
        pytest.param(
            {**COUNTED_AFTER, "example": "grep 4 /srv/n; :"}, "printed nothing", id="an example without output"
        ),
        pytest.param(
            {**COUNTED_AFTER, "judge": "before", "example": "echo"}, "printed nothing", id="found at the start"
        ),
    ],
)
async def test_a_mistake_of_the_task_author_is_a_failure_without_a_verdict(
    evaluation: dict[str, Any], says: str
) -> None:
    with pytest.raises(judges.JudgeFailed, match=says):
        await ended({"example": "cat /srv/n", **evaluation}, script="touch n", answer="3")


@pytest.mark.parametrize(
    ("evaluation", "script"),
    [
        pytest.param({"check": ["wc -l < /srv/n"]}, "rm /usr/bin/wc", id="it removed a program of a check"),
        pytest.param(
            {"check": [{"language": "python", "code": "1"}]}, "rm -f /usr/bin/python3*", id="it removed an interpreter"
        ),
        pytest.param({"check": ["greet"]}, "true", id="it did not make the required program"),
        pytest.param({"check": ["sh /srv/own.sh"]}, "echo nosuch > /srv/own.sh", id="its own script lacks a program"),
        pytest.param({**COUNTED_AFTER, "example": "cat /srv/n"}, "rm n", id="it removed the example's input"),
        pytest.param({**COUNTED_AFTER, "example": "cat /srv/n"}, ": > n", id="it emptied the example's input"),
    ],
)
async def test_an_agents_damage_to_its_judge_is_a_lost_episode_and_not_a_failure(
    evaluation: dict[str, Any], script: str
) -> None:
    assert await ended(evaluation, script=script, answer="") == 0.0


def test_random_numbers_are_seeded_in_scripts_that_use_them() -> None:
    script = scripts.Script("echo $RANDOM")

    assert script.seeded(70_000).code == "RANDOM=4464\necho $RANDOM"
    assert scripts.Script("echo 1").seeded(7).code == "echo 1"
    assert scripts.Script("RANDOM", "python").seeded(7).code == "RANDOM"
