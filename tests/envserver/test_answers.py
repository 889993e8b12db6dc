# ruff: noqa: RUF001 - models write the multiplication sign
"""Answers as models write them: their extraction from a text, and the value of a number in any usual notation."""

from __future__ import annotations

from fractions import Fraction

import pytest
from envserver.answers import MAX_NUMBER_CHARS, final_answer, read_number, unmarked
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzzing import fuzzed

NOTATIONS = {
    "42": [
        *("42", "+42", "42.0", "42.", " 42\n", "$42$", r"\(42\)", r"\[42\]", r"\boxed{42}", "**42**"),
        *(r"$\boxed{\text{42}}$", "x = 42", "The final answer is: 42.", "4.2e1", "4.2 × 10^{1}", r"4.2 \cdot 10^1"),
        *("`42`", '"42"', "= 42", "４２", "٤٢"),
    ],
    "-7": ["-7", "- 7", "\u22127", "\u20137", "\uff0d7", "-7.00", "-.7e1"],
    "8000": ["8000", "8,000", "8 000", "8\u202f000", "8\u00a0000", r"8{,}000", r"8\,000", "8e3", "8 × 10³"],
    "1/2": ["1/2", "0.5", ".5", r"\frac{1}{2}", r"\tfrac{1}{2}", "5e-1"],
}
NO_NUMBERS = (
    *("", " ", "-", "+", ".", "--7", "42 or 1", "40 + 2", "84/2", "1/1", "1/0", "0/5", "1,2", "1,2,3", "12,34"),
    *(",42", "42,", "1 2", "42%", "42 apples", "4_2", "0x2a", "nan", "inf", "Infinity", "1e", "e5", "1e1001"),
    *("$42", "42$", "\ud800", "4\x002", "1" * (MAX_NUMBER_CHARS + 1)),
)


@pytest.mark.parametrize(("value", "text"), [(value, text) for value, texts in NOTATIONS.items() for text in texts])
def test_a_number_has_the_same_value_in_any_usual_notation(value: str, text: str) -> None:
    assert read_number(text) == Fraction(value)


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_another_text_is_no_number(text: str) -> None:
    assert read_number(text) is None


@pytest.mark.parametrize("text", ["3 days", "3 Days", r"3 \text{ days}", "**3 days**", "3"])
def test_a_unit_may_follow_only_where_it_is_expected(text: str) -> None:
    assert read_number(text, units=("days", "day")) == 3
    assert read_number("3 hours", units=("days", "day")) is None
    assert read_number("3 days") is None


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        pytest.param(" 42\n", "42", id="the whole text"),
        pytest.param("<answer>1</answer> no: <answer> 2 </answer>", "2", id="the last of two tags"),
        pytest.param("<ANSWER>4</Answer>", "4", id="tags of any case"),
        pytest.param("So <answer>42", "42", id="an end tag that a stop string cut off"),
        pytest.param("<answer>42<|im_end|>", "42", id="an end token in place of the tag"),
        pytest.param("42</s>", "42", id="an end token"),
        pytest.param("<think>so <answer>7</answer></think>\n42", "42", id="a draft in the reasoning"),
        pytest.param("<think>a</think> b </think>42", "42", id="the last end of reasoning"),
        pytest.param(r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}", id="a box with braces in it"),
        pytest.param(r"\boxed{1} then \boxed{2}", "2", id="the last of two boxes"),
        pytest.param(r"\boxed{7", "7", id="a box that is never closed"),
        pytest.param(r"<answer>\boxed{42}</answer>", r"\boxed{42}", id="a box in a tag"),
    ],
)
def test_an_answer_is_found_after_the_reasoning_in_tags_and_in_boxes(text: str, answer: str) -> None:
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    "part", ["<answer>", "</answer>", "\\boxed{", "</think>", "{", "\\text{", "= ", "**", "answer is "]
)
def test_a_text_of_many_marks_is_read_to_its_end(part: str) -> None:
    assert isinstance(final_answer(part * 200_000), str)
    assert isinstance(unmarked((part * 2_000)[:MAX_NUMBER_CHARS]), str)


@given(st.text(max_size=300) | st.from_regex(r"[-+0-9eE./, $\\{}*×^a-z]{1,60}", fullmatch=True))
@fuzzed(500)
def test_any_text_is_a_number_or_not(text: str) -> None:
    value = read_number(text)

    assert value is None or read_number(str(value)) == value
    assert isinstance(final_answer(text), str)


@given(st.integers(-(10**30), 10**30))
@fuzzed(200)
def test_an_integer_with_commas_or_a_plain_one_has_its_value(number: int) -> None:
    assert read_number(f"{number:,}") == read_number(str(number)) == number
