"""Mapping of texts and objects to tool calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import ActionMapping, Environment
from gateway.core.episode import Action
from gateway.core.errors import InvalidRequest
from gateway.core.ids import EnvironmentName
from gateway.upstreams.action_mapping import Tool, Unreadable, instructions, text_argument, tool_call

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
    ("field", "text", "value"),
    [
        pytest.param({"type": "integer"}, " 3\n", 3, id="an integer"),
        pytest.param({"type": "number"}, "-0.5", -0.5, id="a number"),
        pytest.param({"type": "boolean"}, "true", True, id="a boolean"),
        pytest.param({"enum": [1, "up", None]}, "1", 1, id="an enumeration"),
        pytest.param({"enum": ["up", "down"], "type": "string"}, "up ", "up", id="an enumeration of texts"),
        pytest.param(
            {"enum": ["up", "down"], "type": "string"}, "left", "left", id="another text: the server refuses it"
        ),
        pytest.param({"const": 7}, "7", 7, id="a constant"),
        pytest.param({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "3", 3, id="an integer or null"),
        pytest.param({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "3", 3, id="an integer or a text: 3"),
        pytest.param({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "c", "c", id="an integer or a text: c"),
        pytest.param({"$ref": "#/$defs/Column"}, "2", 2, id="a reference"),
    ],
)
def test_a_text_names_the_value_of_the_only_required_field(field: dict[str, Any], text: str, value: Any) -> None:
    form = schema({"a": field, "other": STRING}, "a", **{"$defs": {"Column": {"type": "integer"}}})

    filled = text_argument(text, form, "")

    assert filled == {"a": value}
    assert type(filled["a"]) is type(value)
    assert text_argument(text, form, "a") == filled


@pytest.mark.parametrize(
    ("form", "example"),
    [
        pytest.param(schema({"a": NUMBER, "b": NUMBER}, "a", "b"), {"a": 0, "b": 0}, id="two numbers"),
        pytest.param(schema({"a": STRING, "b": STRING}, "a", "b"), {"a": "…", "b": "…"}, id="two texts"),
        pytest.param(schema({"a": {"type": "integer", "minimum": 1}}, "a"), {"a": 1}, id="a number"),
        pytest.param(schema({"a": {"$ref": "#/properties/a"}}, "a"), {"a": "…"}, id="a reference to itself"),
        pytest.param(schema({"a": {"enum": ["x", "y"]}, "b": {}}, "a"), {"a": "x"}, id="an enumeration"),
        pytest.param(
            schema({"a": {"type": "array"}, "b": {"type": "object"}, "c": {"type": "boolean"}}),
            {"a": [], "b": {}, "c": True},
            id="nothing is required",
        ),
        pytest.param({}, {}, id="an empty schema"),
        pytest.param(None, {}, id="no schema"),
    ],
)
def test_a_text_that_is_no_action_is_answered_with_one_that_is(form: Any, example: dict[str, Any]) -> None:
    assert text_argument(' {"a": 1, "b": 2}\n', form, "") == {"a": 1, "b": 2}
    for text in ("", "five", "[1]", "{a: 1}", '{"a": ' * 5000, "[" * 50_000, "1.5.2"):
        with pytest.raises(Unreadable) as caught:
            text_argument(text, form, "")
        assert json.loads(caught.value.detail.partition("such as ")[2]) == example


CALL = {"name": "add", "arguments": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(json.dumps(CALL), id="bare"),
        pytest.param(f"\n {json.dumps(CALL, indent=2)} \n", id="bare, on several lines"),
        pytest.param(f"I add.\n```json\n{json.dumps(CALL)}\n```\nDone.", id="fenced"),
        pytest.param(f"```\n{json.dumps(CALL)}\n```", id="fenced without a language"),
        pytest.param(f"<think>Add.</think><tool_call>\n{json.dumps(CALL)}\n</tool_call>", id="tagged"),
        pytest.param(json.dumps({"id": "c1", "name": "add", "arguments": json.dumps(CALL["arguments"])}), id="as text"),
    ],
)
@pytest.mark.parametrize(
    ("tools", "actions"), [([GUESS, ADD, STOP], {}), ([ADD], {}), ([GUESS, ADD], {"default_tool": "guess"})]
)
def test_a_text_may_contain_a_call(text: str, tools: list[Tool], actions: dict[str, str]) -> None:
    assert tool_call(Action(text=text), environment(**actions), tools) == ("add", {"a": 1, "b": 2})


def test_a_call_may_have_no_arguments_and_an_unknown_name_is_left_to_the_server() -> None:
    assert tool_call(Action(text='{"name": "stop"}'), environment(), [GUESS, STOP]) == ("stop", {})
    assert tool_call(Action(text='{"name": "fly", "arguments": {}}'), environment(), [GUESS, STOP]) == ("fly", {})


def test_an_input_that_looks_like_a_call_is_an_input_of_the_only_tool() -> None:
    named = Tool("greet", schema({"name": STRING, "arguments": STRING}, "name", "arguments"))
    text = '{"name": "Ann", "arguments": {}}'

    assert tool_call(Action(text=text), environment(), [named]) == ("greet", {"name": "Ann", "arguments": {}})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("hi", "This is no call of a tool. Reply with JSON such as "),
        ('{"a": 1}', "This is no call of a tool. "),
        ('{"name": "add", "arguments": 7}', "This is no call of a tool. "),
        ('{"name": "add", "arguments": {}, "more": 1}', "This is no call of a tool. "),
        (f"<tool_call>{json.dumps(CALL)}</tool_call><tool_call>{json.dumps(CALL)}</tool_call>", "Only one tool"),
    ],
)
def test_a_text_without_a_call_is_answered_with_the_form_of_calls_and_the_names_of_tools(text: str, told: str) -> None:
    with pytest.raises(Unreadable) as caught:
        tool_call(Action(text=text), environment(), [ADD, GUESS])

    assert caught.value.detail.startswith(told)
    if told.startswith("This"):
        shown, _, names = caught.value.detail.partition("such as ")[2].partition(". The tools are ")
        assert json.loads(shown) == {"name": "add", "arguments": {"a": 0, "b": 0}}
        assert names == "'add', 'guess'."


def test_an_object_is_the_input_of_the_only_tool_or_of_the_default_tool() -> None:
    fields = Action(fields={"a": 1, "b": 2})

    assert tool_call(fields, environment(), [ADD]) == ("add", {"a": 1, "b": 2})
    assert tool_call(fields, environment(default_tool="add"), [GUESS, ADD, STOP]) == ("add", {"a": 1, "b": 2})
    assert tool_call(fields, environment(default_tool="hidden"), [GUESS]) == ("hidden", {"a": 1, "b": 2})


def test_a_text_is_the_input_of_the_default_tool() -> None:
    assert tool_call(Action(text="hi"), environment(), [GUESS]) == ("guess", {"word": "hi"})
    assert tool_call(Action(text="hi"), environment(default_tool="guess"), [ADD, GUESS]) == ("guess", {"word": "hi"})


@pytest.mark.parametrize(
    ("tools", "actions", "terminal", "lines"),
    [
        pytest.param([], {}, "", [""], id="no tools"),
        pytest.param(
            [GUESS],
            {},
            "",
            [
                '{"name": "guess", "arguments": {"word": "…"}}',
                "Any other reply is the input 'word' of 'guess'.",
                "guess",
            ],
            id="one tool",
        ),
        pytest.param(
            [ADD], {}, "", ['{"name": "add", "arguments": {"a": 0, "b": 0}}', "add"], id="one tool with two fields"
        ),
        pytest.param([ADD, GUESS], {}, "", ['"add"', "add", "guess"], id="several tools"),
        pytest.param([ADD, GUESS], {}, "guess", ["'word' of 'guess'", "add", "guess"], id="a terminal tool"),
        pytest.param([ADD, GUESS], {"default_tool": "guess"}, "", ["'word' of 'guess'", "guess"], id="a default tool"),
    ],
)
def test_an_agent_that_acts_by_texts_is_told_how(
    tools: list[Tool], actions: dict[str, str], terminal: str, lines: list[str]
) -> None:
    told = instructions(tools, environment(**actions), terminal=terminal)

    assert all(line in told for line in lines)
    assert [line for line in told.splitlines() if line.startswith("input: ")] == [
        f"input: {json.dumps(tool.input_schema or {})}" for tool in tools
    ]
    assert ("Any other reply" in told) == any("word" in line and " of " in line for line in lines)


def test_an_object_without_a_name_is_refused_if_there_are_several_tools() -> None:
    with pytest.raises(InvalidRequest, match=r"'guess', 'add'.*default_tool in \[actions\]"):
        tool_call(Action(fields={"a": 1}), environment(), [GUESS, ADD])


def test_a_text_is_refused_if_no_tools_are_known() -> None:
    with pytest.raises(Unreadable, match="offers no tools"):
        tool_call(Action(text="hi"), environment(), [])
