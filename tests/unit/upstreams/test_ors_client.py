"""Conversion of actions and results between the gateway's types and ORS bodies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.episode import Action, ImageBlock, StepResult, TextBlock
from gateway.core.errors import AuthorFault, SessionFailed, UpstreamError
from gateway.core.faults import Fault, FaultKind
from gateway.upstreams.ors.client import read_blocks, read_result, written

OUTPUT: dict[str, Any] = {
    "blocks": [
        {"text": "a", "detail": {"k": 1}, "type": "text"},
        {"data": "aGk=", "mimeType": "image/png", "type": "image"},
    ],
    "metadata": {"score": 1},
    "reward": 1,
    "finished": True,
    "data": [1],
}
RESULT = StepResult(
    blocks=(TextBlock("a", {"k": 1}), ImageBlock("aGk=", "image/png")),
    reward=1.0,
    finished=True,
    metadata={"score": 1},
    data=[1],
)


@pytest.mark.parametrize(
    ("action", "body"),
    [
        (Action(name="add", arguments={"n": 1}), {"name": "add", "input": {"n": 1}}),
        (Action(name="stop"), {"name": "stop", "input": {}}),
        (Action(text=""), {"text": ""}),
        (Action(text="é \ud800"), {"text": "é \ud800"}),
        (Action(fields={}), {"action": {}}),
    ],
)
def test_an_action_is_written_in_its_form(action: Action, body: dict[str, Any]) -> None:
    assert json.loads(written(action)) == body


def test_a_result_is_read_with_all_its_fields() -> None:
    assert read_result(json.dumps({"ok": True, "output": OUTPUT}).encode()) == RESULT


def test_a_refusal_keeps_its_reason() -> None:
    result = read_result(b'{"ok": false, "error": "no", "reason": "not_found"}')

    assert (result.error, result.reason, result.finished, result.reward) == ("no", "not_found", False, None)


@pytest.mark.parametrize("reward", ["NaN", "Infinity", "-Infinity", "1e999", '"1"', "true", "[]"])
def test_a_reward_that_is_not_a_finite_number_is_an_author_fault(reward: str) -> None:
    answer = json.dumps({"ok": True, "output": OUTPUT | {"reward": "REWARD"}}).replace('"REWARD"', reward)

    with pytest.raises(AuthorFault, match="can't be used"):
        read_result(answer.encode())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b"null",
        b"{}",
        b'{"ok": true}',
        b'{"ok": true, "output": {"blocks": [{"type": "sound"}]}}',
        b'{"ok": true, "output": {"blocks": [7]}}',
        b'{"ok": true, "output": {"blocks": 7}}',
    ],
)
def test_an_answer_that_can_t_be_read_is_an_error(answer: bytes) -> None:
    with pytest.raises(UpstreamError):
        read_result(answer)


@pytest.mark.parametrize("value", [None, 7, "text", {}, [{}], [None]])
def test_blocks_that_are_not_a_list_of_objects_are_an_error(value: Any) -> None:
    with pytest.raises(UpstreamError):
        read_blocks(value)


def test_a_broken_session_and_an_author_fault_are_errors_instead_of_results() -> None:
    with pytest.raises(SessionFailed, match="the judge ended"):
        read_result(b'{"ok": false, "error": "the judge ended", "reason": "session_failed"}')
    fault = Fault(FaultKind.AUTHOR, "reward", "nan")
    with pytest.raises(AuthorFault, match="no number") as failed:
        read_result(b'{"ok": false, "error": "no number", "reason": "author_fault"}', faults=(fault,))
    assert failed.value.faults == (fault,)
