"""Parsing of AReaL request bodies: accepted values, and the message of each refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.episode import Action
from gateway.core.errors import InvalidRequest
from gateway.frontends.areal.requests import read_action, read_episode_id, read_object, read_start


@pytest.mark.parametrize("body", [b"{}", b' {"a": 1, "b": null}\n', '{"é": "😀"}'.encode()])
def test_an_object_is_read(body: bytes) -> None:
    assert read_object(body) == json.loads(body)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b'{"a": NaN}', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 10_000, "not JSON"),
        (b"[]", "array"),
        (b"null", "nothing"),
        (b"true", "boolean"),
        (b"7", "number"),
        (b'"x"', "string"),
    ],
)
def test_a_body_that_is_not_an_object_is_refused(body: bytes, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        read_object(body)


@pytest.mark.parametrize(("sent", "sample"), [(17, "17"), ("17", "17"), (0, "0"), (-1, "-1"), ("", ""), ("a b", "a b")])
def test_a_sample_is_compared_as_text_and_echoed_unchanged(sent: str | int, sample: str) -> None:
    start = read_start({"sample_id": sent})

    assert (start.sample, start.as_sent) == (sample, sent)


@pytest.mark.parametrize("body", [{}, {"config": None}, {"config": {}}, {"config": {"seed": None}}, {"more": 1}])
def test_a_missing_seed_is_left_to_the_task(body: dict[str, Any]) -> None:
    assert read_start({"sample_id": 17} | body).seed is None


def test_a_seed_and_further_configuration_are_passed_on() -> None:
    start = read_start({"sample_id": 1, "config": {"seed": 42, "level": "hard"}})

    assert (start.seed, start.config) == (42, {"seed": 42, "level": "hard"})


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "sample_id"),
        ({"sample_id": None}, "sample_id"),
        ({"sample_id": True}, "sample_id"),
        ({"sample_id": 1.0}, "sample_id"),
        ({"sample_id": ["1"]}, "sample_id"),
        ({"sample_id": 1, "config": 7}, "config"),
        ({"sample_id": 1, "config": False}, "config"),
        ({"sample_id": 1, "config": []}, "config"),
        ({"sample_id": 1, "config": {"seed": "7"}}, "config.seed"),
        ({"sample_id": 1, "config": {"seed": True}}, "config.seed"),
        ({"sample_id": 1, "config": {"seed": 7.5}}, "config.seed"),
    ],
)
def test_the_refusal_of_a_malformed_start_names_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        read_start(body)


@pytest.mark.parametrize("name", [None, 7, "", [], {}, True])
def test_an_episode_id_that_is_not_a_text_is_refused(name: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^episode_id: "):
        read_episode_id({"episode_id": name})


@pytest.mark.parametrize(
    ("content", "action"),
    [
        ("ls<|im_end|>", Action(text="ls")),
        ("", Action(text="")),
        ({"name": "bash", "arguments": {"script": "ls"}}, Action(name="bash", arguments={"script": "ls"})),
        ({"name": "finish"}, Action(name="finish")),
        ({"name": "bash", "arguments": "ls"}, Action(fields={"name": "bash", "arguments": "ls"})),
        ({"name": "Ann", "age": 7}, Action(fields={"name": "Ann", "age": 7})),
        ({"move": "left"}, Action(fields={"move": "left"})),
        ({}, Action(fields={})),
    ],
)
def test_an_action_has_one_of_three_forms(content: Any, action: Action) -> None:
    kind = "text" if isinstance(content, str) else "structured"

    assert read_action({"action": {"type": kind, "content": content}}) == action


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "action"),
        ({"action": "ls"}, "action"),
        ({"action": []}, "action"),
        ({"action": {}}, "action.type"),
        ({"action": {"type": "image", "content": "x"}}, "action.type"),
        ({"action": {"type": ["text"], "content": "x"}}, "action.type"),
        ({"action": {"type": "text"}}, "action.content"),
        ({"action": {"type": "text", "content": 7}}, "action.content"),
        ({"action": {"type": "text", "content": {}}}, "action.content"),
        ({"action": {"type": "structured", "content": "ls"}}, "action.content"),
        ({"action": {"type": "structured", "content": []}}, "action.content"),
    ],
)
def test_the_refusal_of_a_malformed_action_names_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        read_action(body)
