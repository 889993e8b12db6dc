"""Reading and writing of the bodies of an AReaL task server, without a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import ActionMapping, Areal, Environment, ObservationType
from gateway.core.episode import Action, Block, ImageBlock, StepResult, TextBlock
from gateway.core.errors import UpstreamError
from gateway.core.ids import EnvironmentName
from gateway.frontends.areal.replies import first_observation
from gateway.upstreams.areal.codec import Begun, ServerInfo, read_step, written
from gateway.upstreams.areal.observations import read_messages, read_observation, read_prompt

GUESS = Environment(name=EnvironmentName("guess"), image="one", directory=Path("/"), command=())
TEXT = ServerInfo(b"/api", {"name": "guess", "action_type": "text"})
STRUCTURED = ServerInfo(b"/api", {"name": "guess", "action_type": "structured"})
SYSTEM, USER, ASSISTANT = (TextBlock(f"[{role}]", {"role": role}) for role in ("system", "user", "assistant"))
PNG = "iVBORw0KGgo="


@pytest.mark.parametrize(
    ("action", "actions", "told", "sent"),
    [
        (Action(text="go"), {}, TEXT, ("text", "go")),
        (Action(name="act", arguments={"content": "go"}), {}, TEXT, ("text", "go")),
        (Action(name="say", arguments={"content": "go"}), {"default_tool": "say"}, TEXT, ("text", "go")),
        (Action(fields={"content": "go"}), {}, TEXT, ("text", "go")),
        (Action(fields={"content": 3}), {}, TEXT, ("text", '{"content": 3}')),
        (Action(fields={"guess": 3}), {}, TEXT, ("text", '{"guess": 3}')),
        (Action(fields={"guess": 3}), {}, STRUCTURED, ("structured", {"guess": 3})),
        (Action(name="act", arguments={"guess": 3}), {}, STRUCTURED, ("structured", {"guess": 3})),
        (
            Action(name="bash", arguments={"x": 1}),
            {},
            STRUCTURED,
            ("structured", {"name": "bash", "arguments": {"x": 1}}),
        ),
        (Action(text=' {"guess": 3} '), {}, STRUCTURED, ("structured", {"guess": 3})),
        (Action(text="{three"), {}, STRUCTURED, ("text", "{three")),
        (Action(text="three"), {}, STRUCTURED, ("text", "three")),
        (Action(text="three"), {"text_field": "word"}, STRUCTURED, ("structured", {"word": "three"})),
    ],
)
def test_each_form_of_an_action_is_written_in_a_form_of_the_server(
    action: Action, actions: Mapping[str, str], told: ServerInfo, sent: tuple[str, Any]
) -> None:
    environment = replace(GUESS, actions=ActionMapping(**actions))

    assert written(action, environment, told) == {"type": sent[0], "content": sent[1]}


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (Action(name="bash"), "not_found"),
        (Action(name="act"), "input_validation"),
        (Action(name="act", arguments={"content": 3}), "input_validation"),
        (Action(name="act", arguments={"content": "x", "more": 3}), "input_validation"),
    ],
)
def test_an_invalid_call_is_answered_with_an_error_for_the_agent(action: Action, reason: str) -> None:
    result = written(action, GUESS, TEXT)

    assert isinstance(result, StepResult)
    assert result.error
    assert result.reason == reason


@pytest.mark.parametrize(
    ("observation", "blocks"),
    [
        ({"type": "text", "content": "hello"}, [TextBlock("hello")]),
        (
            {
                "type": "messages",
                "content": [{"role": "system", "content": "be brief"}, {"role": "agent", "content": "yes"}],
            },
            [SYSTEM, TextBlock("be brief"), ASSISTANT, TextBlock("yes")],
        ),
        (
            {
                "type": "messages",
                "content": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "text", "text": "look"},
                            {"type": "image_url", "image_url": {"url": f"data:image/gif;base64,{PNG}"}},
                        ],
                    }
                ],
            },
            [USER, TextBlock("look"), ImageBlock(PNG, "image/gif")],
        ),
        (
            {"type": "json", "content": {"board": "äx"}},
            [TextBlock('{"board":"äx"}', {"observation": {"board": "äx"}})],
        ),
        ({"type": "image", "content": PNG}, [ImageBlock(PNG, "image/png")]),
        (
            {"type": "image", "content": "/9j/", "mime_type": "image/x", "text": "t"},
            [TextBlock("t"), ImageBlock("/9j/", "image/x")],
        ),
    ],
)
def test_a_first_observation_becomes_blocks(observation: Any, blocks: list[Block]) -> None:
    assert read_prompt(observation) == blocks


@pytest.mark.parametrize(
    "observation",
    [
        None,
        "hello",
        {"type": "text"},
        {"type": "smell", "content": "x"},
        {"type": "image", "content": 3},
        {"type": "messages", "content": "hello"},
        {"type": "messages", "content": [{"content": "who says so?"}]},
    ],
)
def test_an_observation_of_an_unknown_form_is_an_error(observation: Any) -> None:
    with pytest.raises(UpstreamError):
        read_prompt(observation)


def test_messages_stay_unchanged_through_the_areal_frontend() -> None:
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]

    blocks = read_prompt({"type": "messages", "content": said})
    shown = first_observation(Areal(observation_type=ObservationType.MESSAGES), blocks)

    assert shown == {"type": "messages", "content": said}


def test_a_conversation_is_read_as_pairs_of_role_and_blocks() -> None:
    said = [{"role": "system", "content": "a"}, {"role": "tool", "content": "b"}]

    conversation = read_messages({"type": "messages", "content": said})

    assert conversation == [("system", [TextBlock("a")]), ("user", [TextBlock("b")])]
    assert read_messages({"type": "text", "content": "c"}) == [("user", [TextBlock("c")])]


def test_a_structured_observation_of_a_step_becomes_data() -> None:
    result = read_step(b'{"observation": {"type": "json", "content": [1]}, "reward": 0, "done": false, "info": null}')

    assert (result.data, result.blocks, result.metadata) == ([1], (TextBlock("[1]"),), None)


def test_a_missing_observation_becomes_no_blocks() -> None:
    assert read_observation(None) == ([], None)


def test_a_handle_survives_writing_and_reading() -> None:
    begun = Begun("e", {"type": "text", "content": "\ud800"}, {"max_turns": 8})

    assert Begun.of(begun.handle()) == begun
    assert begun.handle().isascii()
