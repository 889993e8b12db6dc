"""Mapping of texts and objects to tool calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import ActionMapping, Environment
from gateway.core.episode import Action
from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.upstreams.action_mapping import Tool, Unreadable, text_argument, tool_call

STRING = {"type": "string"}
NUMBER = {"type": "integer"}
GUESS = Tool("guess", {"type": "object", "properties": {"word": STRING}, "required": ["word"]})
ADD = Tool("add", {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]})
STOP = Tool("stop")


def environment(**actions: str) -> Environment:
    return Environment(
        name=EnvironmentName("words"),
        image="i",
        directory=Path("/"),
        command=(),
        actions=ActionMapping(**actions),
    )


def schema(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), **more}


def test_a_call_by_name_stays_unchanged() -> None:
    action = Action(name="nope", arguments={"x": 1})

    assert tool_call(action, environment(default_tool="add"), [ADD]) == ("nope", {"x": 1})


@pytest.mark.parametrize(
    ("properties", "required"),
    [
        pytest.param({"word": STRING}, ["word"], id="the only field"),
        pytest.param({"word": STRING, "times": NUMBER}, ["word"], id="the only required field"),
        pytest.param({"word": STRING}, [], id="the only field, optional"),
        pytest.param({"word": {"anyOf": [{"type": "null"}, STRING]}}, [], id="a text or null"),
        pytest.param({"word": {"type": ["null", "string"]}}, ["word"], id="a list of types"),
        pytest.param({"word": {"$ref": "#/$defs/Word"}}, ["word"], id="a reference"),
    ],
)
def test_a_text_fills_the_only_suitable_field(properties: dict[str, Any], required: list[str]) -> None:
    form = schema(properties, *required, **{"$defs": {"Word": {"enum": ["a", "b"], "type": "string"}}})

    assert text_argument('{"word": "x"}', form, "") == {"word": '{"word": "x"}'}


def test_the_configured_field_has_priority() -> None:
    form = schema({"word": STRING, "reason": STRING}, "word")

    assert text_argument("because", form, "reason") == {"reason": "because"}
    assert text_argument("because", None, "reason") == {"reason": "because"}


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(schema({"a": NUMBER, "b": NUMBER}, "a", "b"), id="two numbers"),
        pytest.param(schema({"a": STRING, "b": STRING}, "a", "b"), id="two texts"),
        pytest.param(schema({"a": NUMBER}, "a"), id="a number"),
        pytest.param(schema({"a": {"$ref": "#/properties/a"}}, "a"), id="a reference to itself"),
        pytest.param({}, id="an empty schema"),
        pytest.param(None, id="no schema"),
    ],
)
def test_without_a_suitable_field_the_text_must_be_a_json_object_of_all_fields(form: dict[str, Any] | None) -> None:
    assert text_argument(' {"a": 1, "b": 2}\n', form, "") == {"a": 1, "b": 2}
    for text in ("", "five", "[1]", "{a: 1}", '{"a": ' * 5000):
        with pytest.raises(InvalidRequest, match=r"text_field in \[actions\]") as caught:
            text_argument(text, form, "")
        assert isinstance(caught.value, Unreadable) == bool(
            form
        )  # with known fields, the agent itself can correct its text


def test_an_object_is_the_input_of_the_only_tool_or_of_the_default_tool() -> None:
    fields = Action(fields={"a": 1, "b": 2})

    assert tool_call(fields, environment(), [ADD]) == ("add", {"a": 1, "b": 2})
    assert tool_call(fields, environment(default_tool="add"), [GUESS, ADD, STOP]) == ("add", {"a": 1, "b": 2})
    assert tool_call(fields, environment(default_tool="hidden"), [GUESS]) == ("hidden", {"a": 1, "b": 2})


def test_a_text_is_the_input_of_the_default_tool() -> None:
    assert tool_call(Action(text="hi"), environment(), [GUESS]) == ("guess", {"word": "hi"})
    assert tool_call(Action(text="hi"), environment(default_tool="guess"), [ADD, GUESS]) == ("guess", {"word": "hi"})


@pytest.mark.parametrize("action", [Action(text="hi"), Action(fields={"a": 1})])
def test_an_action_without_a_name_is_refused_if_there_are_several_tools(action: Action) -> None:
    with pytest.raises(InvalidRequest, match=r"'guess', 'add'.*default_tool in \[actions\]"):
        tool_call(action, environment(), [GUESS, ADD])


def test_a_text_is_refused_if_no_tools_are_known() -> None:
    with pytest.raises(InvalidRequest, match="none are known"):
        tool_call(Action(text="hi"), environment(), [])
