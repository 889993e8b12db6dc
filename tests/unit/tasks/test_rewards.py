"""Named reward functions: a name and literals, and nothing that could run."""

from __future__ import annotations

from typing import Any

import pytest
from envserver.generic.calls import parse_call
from hypothesis import given
from hypothesis import strategies as st

from gateway.tasks.schema import MAX_CHARS, RewardCall, parse_reward


@pytest.mark.parametrize(
    ("text", "name", "args", "kwargs"),
    [
        ("exact_match", "exact_match", (), {}),
        (" exact_match() ", "exact_match", (), {}),
        ("check_url_contains('dashboard')", "check_url_contains", ("dashboard",), {}),
        ("contains('x', case=False)", "contains", ("x",), {"case": False}),
        ("f(-1, +2, 1.5, True, None)", "f", (-1, 2, 1.5, True, None), {}),
        ("f([1, ('a', {'k': [2]})])", "f", ([1, ["a", {"k": [2]}]],), {}),
        (r"regex_match('\d+')", "regex_match", (r"\d+",), {}),
        ("f('é 😀', a='x', b=\"y\")", "f", ("é 😀",), {"a": "x", "b": "y"}),
    ],
)
def test_a_name_with_literals_is_read(text: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert parse_reward(text) == RewardCall(name, args, kwargs)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "f(x)",
        "f(g())",
        "f(*[1])",
        "f(**{'a': 1})",
        "f(1 + 1)",
        "f(lambda: 0)",
        "f('a' if 1 else 'b')",
        "f(f'{1}')",
        "f(b'x')",
        "f(1j)",
        "f(...)",
        "f(-True)",
        "f(1e999)",
        "f({1: 2})",
        "f({**{}})",
        "f([x for x in 'a'])",
        "a.b('c')",
        "__import__('os').system('true')",
        "f()()",
        "f('a'); g('b')",
        "f('a'",
        "f(a=1, a=2)",
        "1",
        "'f'",
        "f\n(\n",
        "f('\0')",
        "f" + "(" * 3000,
        "f(" + "[" * 50 + "]" * 50 + ")",
        "f('" + "x" * MAX_CHARS + "')",
        "-" * 4000 + "1",
    ],
)
def test_everything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"wanted|taken|longer|nested|texts|large"):
        parse_reward(text)


@pytest.mark.parametrize("text", ["None", "import", "not"])
def test_a_word_of_python_s_is_no_name(text: str) -> None:
    with pytest.raises(ValueError, match="wanted"):
        parse_reward(text)


WORDS = st.lists(st.sampled_from(["f", "(", ")", "'a'", ",", "k=", "-", "1", "[", "]", "{", "}", ":", "1.5", "None"]))


@given(WORDS.map("".join))
def test_what_is_read_here_the_environments_read_alike(text: str) -> None:
    try:
        call = parse_reward(text)
    except ValueError:
        return
    theirs = parse_call(text)
    assert (call.name, call.args, call.kwargs) == theirs


@given(st.text(max_size=60))
def test_whatever_comes_it_is_a_call_or_a_refusal(text: str) -> None:
    try:
        call = parse_reward(text)
    except ValueError:
        return
    assert call.name.isidentifier()
