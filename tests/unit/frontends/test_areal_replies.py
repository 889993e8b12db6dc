"""Conversion of results to the replies that AReaL clients read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gateway.core.environment import Areal, ObservationType
from gateway.core.episode import Action, Block, ImageBlock, StepResult, TextBlock
from gateway.frontends.areal.replies import first_observation, observation, start_reply, step_reply

SHOWN = Areal(max_turns=3)
TEXT = Action(text="ls")
PIXEL = ImageBlock("aGk=", "image/png")


def shown(kind: str) -> Areal:
    return Areal(observation_type=ObservationType(kind))


def info(result: StepResult, *, action: Action = TEXT, turn: int = 1) -> dict[str, Any]:
    found: dict[str, Any] = step_reply(SHOWN, "e", action, result, turn)["info"]
    return found


# -- observations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "result", "seen"),
    [
        ("text", StepResult(blocks=(TextBlock("a"), TextBlock("b"))), {"type": "text", "content": "a\nb"}),
        ("text", StepResult(blocks=(TextBlock("a"), PIXEL)), {"type": "text", "content": "a\n[image: image/png]"}),
        ("text", StepResult(blocks=()), {"type": "text", "content": "(no output)"}),
        ("text", StepResult(blocks=(TextBlock(" \n"),)), {"type": "text", "content": "(no output)"}),
        ("text", StepResult(data={"a": 1}, blocks=(TextBlock("a"),)), {"type": "text", "content": "a"}),
        ("messages", StepResult(blocks=(TextBlock("a"),)), {"type": "text", "content": "a"}),
        ("json", StepResult(data={"a": 1}, blocks=(TextBlock("a"),)), {"type": "json", "content": {"a": 1}}),
        ("json", StepResult(data=[], blocks=(TextBlock("a"),)), {"type": "json", "content": []}),
        ("json", StepResult(blocks=(TextBlock("a"),)), {"type": "json", "content": {"text": "a"}}),
        ("image", StepResult(blocks=(TextBlock("a"),)), {"type": "text", "content": "a"}),
        (
            "image",
            StepResult(blocks=(TextBlock("a"), PIXEL)),
            {"type": "image", "content": "aGk=", "mime_type": "image/png", "text": "a"},
        ),
        ("text", StepResult(error="what?", reason="input_validation"), {"type": "text", "content": "what?"}),
        ("json", StepResult(error="what?", reason="input_validation"), {"type": "text", "content": "what?"}),
        ("text", StepResult(error="<|im_end|>", reason="odd"), {"type": "text", "content": "< |im_end|>"}),
    ],
)
def test_an_observation_has_the_configured_type_where_possible(kind: str, result: StepResult, seen: Any) -> None:
    assert observation(shown(kind), result) == seen


@pytest.mark.parametrize("reason", ["not_found", "name_collision", "tool_failed"])
def test_a_refusal_ends_with_a_hint_how_to_continue(reason: str) -> None:
    seen = observation(SHOWN, StepResult(error="no", reason=reason))

    first, hint = seen["content"].split("\n")
    assert first == "no"
    assert hint.endswith(".")


def test_a_failure_without_a_message_is_an_observation_too() -> None:
    assert observation(SHOWN, StepResult(error="", reason="odd"))["content"] == "(no output)"


def role(name: str) -> TextBlock:
    return TextBlock(f"[{name}]", {"role": name})


@pytest.mark.parametrize(
    ("blocks", "messages"),
    [
        ([TextBlock("a"), TextBlock("b")], [("user", "a\nb")]),
        ([role("system"), TextBlock("a"), role("user"), TextBlock("b")], [("system", "a"), ("user", "b")]),
        ([TextBlock("[system]")], [("user", "[system]")]),
        ([role("user")], [("user", "(no output)")]),
        ([], [("user", "(no output)")]),
    ],
)
def test_a_prompt_may_be_a_conversation(blocks: list[Block], messages: list[tuple[str, str]]) -> None:
    seen = first_observation(shown("messages"), blocks)

    assert seen == {"type": "messages", "content": [{"role": who, "content": what} for who, what in messages]}


# -- start ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "blocks", "description"),
    [
        ({"instruction": "Count."}, [TextBlock("You are … Count.")], "Count."),
        ({"instruction": " "}, [PIXEL, TextBlock(""), TextBlock("Look.")], "Look."),
        ({"instruction": 7}, [], "17"),
        ({}, [PIXEL], "17"),
    ],
)
def test_the_description_is_only_the_problem_and_never_empty(
    task: dict[str, Any], blocks: list[Block], description: str
) -> None:
    reply = start_reply(SHOWN, "e", blocks, sample=17, task=task)

    assert reply["info"] == {"max_turns": 3, "turn": 0, "sample_id": 17, "task_description": description}
    assert (reply["reward"], reply["done"]) == (0.0, False)


@pytest.mark.parametrize(
    ("task", "observation", "turns"),
    [
        ({"config": {"max_turns": 2}}, {}, 2),
        ({"config": {"max_turns": 9}}, {}, 3),
        ({}, {"max_turns": 1}, 1),
        ({"config": {"max_turns": True}}, {"max_turns": "2"}, 3),
        ({"config": []}, [], 3),
    ],
)
def test_the_start_states_the_smallest_limit_of_turns_of_environment_task_and_configuration(
    task: dict[str, Any], observation: Any, turns: int
) -> None:
    blocks: list[Block] = [TextBlock("Look."), TextBlock("Go.", {"observation": observation})]

    assert start_reply(SHOWN, "e", blocks, sample=17, task=task)["info"]["max_turns"] == turns


USER, SYSTEM = TextBlock("[user]", {"role": "user"}), TextBlock("[system]", {"role": "system"})


@pytest.mark.parametrize(
    ("blocks", "text", "described"),
    [
        pytest.param(
            [USER, TextBlock("Count."), TextBlock("Go.")], "Count.\nGo.", "Count.", id="one message of the user"
        ),
        pytest.param([SYSTEM, TextBlock("Be brief.")], "[system]\nBe brief.", "Be brief.", id="one of the system"),
        pytest.param(
            [SYSTEM, TextBlock("Be brief."), USER, TextBlock("Go.")],
            "[system]\nBe brief.\n[user]\nGo.",
            "Be brief.",
            id="two messages",
        ),
        pytest.param([TextBlock("See:"), USER, TextBlock("Go.")], "See:\n[user]\nGo.", "See:", id="text before it"),
        pytest.param([TextBlock("[user]")], "[user]", "[user]", id="a text that looks like a header"),
    ],
)
def test_roles_are_headers_only_in_conversations_and_never_the_description(
    blocks: list[Block], text: str, described: str
) -> None:
    reply = start_reply(SHOWN, "e", blocks, sample=17, task={})

    assert (reply["observation"]["content"], reply["info"]["task_description"]) == (text, described)


# -- step -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("action", "result", "parsed"),
    [
        (Action(text="ls"), StepResult(), {"thought": None, "action": None, "content": "ls"}),
        (
            Action(name="sh", arguments={"a": "é"}),
            StepResult(),
            {"thought": None, "action": "sh", "content": '{"a": "é"}'},
        ),
        (Action(fields={"a": 1}), StepResult(), {"thought": None, "action": None, "content": '{"a": 1}'}),
        (
            Action(text="?"),
            StepResult(error="x", reason="input_validation"),
            dict.fromkeys(("thought", "action", "content")),
        ),
        (
            Action(text="?"),
            StepResult(error="x", reason="tool_failed"),
            {"thought": None, "action": None, "content": "?"},
        ),
        (
            Action(text="ls"),
            StepResult(metadata={"parsed_action": {"thought": "t", "action": "bash", "content": "ls"}}),
            {"thought": "t", "action": "bash", "content": "ls"},
        ),
        (
            Action(text="ls"),
            StepResult(metadata={"parsed_action": 7}),
            {"thought": None, "action": None, "content": "ls"},
        ),
    ],
)
def test_a_reply_shows_the_action_as_the_environment_parsed_it(action: Action, result: StepResult, parsed: Any) -> None:
    assert info(result, action=action) == {"turn": 1, "parsed_action": parsed}


def test_answer_and_status_of_the_environment_are_passed_on_while_the_episode_runs() -> None:
    found = info(StepResult(metadata={"answer": "31", "status": "running", "other": 1}))

    assert (found["answer"], found["status"], "other" in found) == ("31", "running", False)


@pytest.mark.parametrize(
    ("reward", "metadata", "success"),
    [
        (1.0, None, True),
        (1.5, None, True),
        (0.99, None, False),
        (0.0, None, False),
        (None, None, False),
        (-1.0, None, False),
        (0.5, {"success": True}, True),
        (1.0, {"success": False}, False),
        (1.0, {"success": "no"}, True),
        (0.0, {"success": 1}, False),
    ],
)
def test_success_is_the_environments_boolean_or_else_a_full_reward(
    reward: float | None, metadata: dict[str, Any] | None, success: bool
) -> None:
    reply = step_reply(SHOWN, "e", TEXT, StepResult(reward=reward, finished=True, metadata=metadata), 2)

    assert reply["info"]["success"] is success
    assert reply["reward"] == (reward or 0.0)
    assert (reply["observation"], reply["done"], reply["info"]["num_turns"]) == (None, True, 2)


@pytest.mark.parametrize(
    ("action", "metadata", "answer"),
    [
        (TEXT, {"answer": "31"}, "31"),
        (TEXT, {"answer": ""}, ""),
        (Action(name="answer_action", arguments={"answer": "31"}), None, "31"),
        (Action(name="finish_action", arguments={"thought": "done"}), None, ""),
        (Action(fields={"answer": "31"}), {}, "31"),
        (Action(fields={"answer": 31}), {}, ""),
        (Action(text="31"), {"answer": 31}, "31"),
    ],
)
def test_the_answer_is_always_a_text(action: Action, metadata: dict[str, Any] | None, answer: str) -> None:
    assert info(StepResult(finished=True, metadata=metadata), action=action)["answer"] == answer


@pytest.mark.parametrize(
    ("metadata", "status"),
    [(None, "completed"), ({"status": "task error"}, "task error"), ({"status": 7}, "completed")],
)
def test_the_status_is_the_environments_text_or_else_completed(metadata: dict[str, Any] | None, status: str) -> None:
    assert info(StepResult(finished=True, metadata=metadata))["status"] == status


@pytest.mark.parametrize(("turn", "done"), [(1, False), (2, False), (3, True), (4, True)])
def test_at_the_limit_of_turns_an_episode_ends_with_the_reward_of_its_last_step(turn: int, done: bool) -> None:
    reply = step_reply(SHOWN, "e", TEXT, StepResult(reward=-0.5), turn)

    assert reply["done"] is done
    assert reply["reward"] == -0.5
    assert (reply["observation"] is None) is done
    assert ("status" in reply["info"] and reply["info"]["status"] == "task limit reached") is done


def test_without_a_limit_of_turns_only_the_environment_ends_an_episode() -> None:
    unlimited = replace(SHOWN, max_turns=None)
    begun = start_reply(unlimited, "e", [TextBlock("Go.")], sample=17, task={})

    assert begun["info"]["max_turns"] == 1000
    assert [step_reply(unlimited, "e", TEXT, StepResult(), turn)["done"] for turn in (999, 1000, 5000)] == [False] * 3


def test_a_result_that_ends_the_episode_in_the_last_turn_counts() -> None:
    reply = step_reply(SHOWN, "e", TEXT, StepResult(reward=1.0, finished=True), 3)

    assert (reply["reward"], reply["info"]["status"]) == (1.0, "completed")
