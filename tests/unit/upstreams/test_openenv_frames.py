"""Replies of OpenEnv servers: fast reading without parsing, their meaning, and their transfer between replicas."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.episode import Action, ImageBlock, StepResult, Summary, TextBlock
from gateway.core.errors import SessionNotFound, UpstreamError
from gateway.upstreams.openenv import ownership as codec
from gateway.upstreams.openenv.frames import PARSED_MAX_BYTES, Fault, acts, fault_of, kind_of, outcome_of
from gateway.upstreams.openenv.ownership import Handle, read_handle


def observed(observation: Any, **more: Any) -> bytes:
    data = {"observation": observation, "reward": None, "done": False} | more
    return json.dumps({"type": "observation", "data": data}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("frame", "kind"),
    [
        (b'{"type":"step","data":{}}', "step"),
        (b' { "type" : "state" }', "state"),
        (b'{"data":{"type":"close"},"type":"mcp"}', "mcp"),
        (b"[1]", ""),
        (b'{"type":7}', ""),
        (b"nonsense", ""),
        (b'{"data":"' + b"x" * PARSED_MAX_BYTES + b'","type":"step"}', ""),
    ],
)
def test_the_type_of_a_frame(frame: bytes, kind: str) -> None:
    assert kind_of(frame) == kind


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        pytest.param(observed({"text": "x"}, reward=1.5, done=True), (1.5, True), id="at the end of an episode"),
        pytest.param(observed({}, reward=True), (1.0, False), id="a bool is a number"),
        pytest.param(observed({}, reward=-2e-3), (-0.002, False), id="negative, with an exponent"),
        pytest.param(observed({}), (None, False), id="no reward"),
        pytest.param(observed({}, reward=2, done=True, metadata={"a": 1}), (2.0, True), id="metadata after the reward"),
        pytest.param(
            observed({}, metadata={"reward": 9, "done": True}), (None, False), id="not the reward in the metadata"
        ),
        pytest.param(
            b'{"type":"observation","data":{"reward":0.5,"done":false,"observation":{"reward":9,"done":true}}}',
            (0.5, False),
            id="not the reward in the observation",
        ),
        pytest.param(
            b'{"data":{"observation":{},"reward":3,"done":true},"type":"observation"}',
            (3.0, True),
            id="another order of keys",
        ),
        pytest.param(observed({"t": '"reward":9,"done":true}}'}), (None, False), id="not the reward in a text"),
        pytest.param(observed({"x": "y" * PARSED_MAX_BYTES}, reward=4), (4.0, False), id="a large reply"),
        pytest.param(observed({}, reward=10**400), (None, False), id="an infinite number"),
        pytest.param(observed({}, reward="1"), (None, False), id="a text as reward"),
        pytest.param(
            b'{"type":"observation","data":{"observation":{},"reward":007,"done":true}}',
            (None, False),
            id="invalid JSON",
        ),
        pytest.param(b"nonsense", (None, False), id="not a frame"),
    ],
)
def test_reward_and_end_are_read_from_the_reply(reply: bytes, outcome: tuple[float | None, bool]) -> None:
    assert outcome_of(reply) == outcome


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (
            {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": 3},
            Fault("CAPACITY_REACHED", "full", 3),
        ),
        (
            {
                "message": "Invalid message",
                "code": "VALIDATION_ERROR",
                "errors": [{"loc": ["data", "op"], "msg": "wanted"}],
            },
            Fault("VALIDATION_ERROR", "Invalid message: data.op: wanted"),
        ),
        ({"code": "X", "max_sessions": True}, Fault("X", "the server gave no reason")),
        ("broken", Fault("", "the server's error can't be read")),
    ],
)
def test_an_error_frame_is_read(data: Any, fault: Fault) -> None:
    assert fault_of(json.dumps({"type": "error", "data": data}).encode()) == fault
    assert fault_of(observed({})) is None


@pytest.mark.parametrize(
    ("frame", "does"),
    [
        ({"type": "step", "data": {"op": "inc"}}, True),
        ({"type": "step", "data": {"type": "list_tools"}}, False),
        ({"type": "state"}, False),
        ({"type": "mcp", "data": {"method": "tools/call", "params": {"name": "t"}}}, True),
        ({"type": "mcp", "data": {"params": {"arguments": {"method": "tools/call"}}, "method": "tools/list"}}, False),
        ({"type": "mcp", "data": {"method": "tools/call", "params": {"text": "x" * PARSED_MAX_BYTES}}}, True),
        ({"type": "mcp", "data": 7}, False),
    ],
)
def test_steps_and_tool_calls_act(frame: Any, does: bool) -> None:
    assert acts(json.dumps(frame).encode()) is does


# -- between replicas -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "action", [Action(text="\ud800"), Action(name="t", arguments={"a": [1]}), Action(fields={}), Action(text="")]
)
def test_actions_survive_the_transfer_unchanged(action: Action) -> None:
    assert codec.read_action(codec.write_action(action, "k")) == (action, "k")


def test_results_and_summaries_survive_the_transfer_unchanged() -> None:
    result = StepResult(
        blocks=(TextBlock("a", {"x": 1}), ImageBlock("aGk=", "image/png")),
        reward=0.5,
        metadata={"m": 1},
        data={"d": [1]},
    )
    summary = Summary(reward=0.0, finished=True, steps=3, seconds=0.5, is_rewarded=False)

    assert codec.read_result(codec.write_result(result)) == result
    assert codec.read_summary(codec.write_summary(summary)) == summary
    assert codec.read_summary(codec.write_summary(None)) is None
    with pytest.raises(UpstreamError):
        codec.read_result(b"{}")


def test_a_handle_carries_the_first_observation_unless_it_is_large() -> None:
    small = Handle(sid="s", holder="http://a:1", first=observed({"text": "é"}))

    assert read_handle(small.written()) == small
    assert read_handle(Handle(sid="s", first=b"x" * 40_000).written()) == Handle(sid="s")
    with pytest.raises(SessionNotFound):
        read_handle("")
