"""Rewards by name: reading of calls, results of the built-in functions, and refusals before a session starts."""

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from envserver.generic import REWARDS, RewardCall, RewardError, parse_reward, read_reward, reward_function
from envserver.generic.rewards import MAX_CALL_CHARS
from hypothesis import given
from hypothesis import strategies as st

from tests.deadlines import HANG_S


@pytest.fixture
def rewards() -> Iterator[dict[str, Any]]:
    """Yield the reward functions, and restore them at the end."""
    before = dict(REWARDS)
    yield REWARDS
    REWARDS.clear()
    REWARDS.update(before)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("exact_match", RewardCall("exact_match")),
        (" exact_match('a') ", RewardCall("exact_match", ("a",))),
        ("contains('x', case=False)", RewardCall("contains", ("x",), {"case": False})),
        ("numeric_match(-1.5, tol=+2)", RewardCall("numeric_match", (-1.5,), {"tol": 2})),
        ("one_of(['a', 'b'], None)", RewardCall("one_of", (["a", "b"], None))),
        ("json_equals({'a': (1, {'b': True})})", RewardCall("json_equals", ({"a": [1, {"b": True}]},))),
        (r"regex_match('\d+')", RewardCall("regex_match", (r"\d+",))),
        ("check_url_contains('dashboard')", RewardCall("check_url_contains", ("dashboard",))),
        (" exact_match() ", RewardCall("exact_match")),
        ("f(-1, +2, 1.5, True, None)", RewardCall("f", (-1, 2, 1.5, True, None))),
        ("f([1, ('a', {'k': [2]})])", RewardCall("f", ([1, ["a", {"k": [2]}]],))),
        ("f('é 😀', a='x', b=\"y\")", RewardCall("f", ("é 😀",), {"a": "x", "b": "y"})),
    ],
)
def test_a_call_is_read(text: str, call: RewardCall) -> None:
    assert parse_reward(text) == call


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        5,
        "a b",
        "f(",
        "f(x)",
        "f(g())",
        "f(1)(2)",
        "os.system('true')",
        "f(*[1])",
        "f(**{'a': 1})",
        "f(a=x)",
        "f({1: 2})",
        "f({**{}})",
        "f(-True)",
        "f(+False)",
        "   ",
        "f('a' if 1 else 'b')",
        "f(lambda: 0)",
        "f()()",
        "f('a'); g('b')",
        "1",
        "'f'",
        "f\n(\n",
        "-" * 4000 + "1",
        "None",
        "import",
        "not",
        "f(--1)",
        "f(1 + 1)",
        "f(b'x')",
        "f(1j)",
        "f(...)",
        "f(1e999)",
        "f(f'{1}')",
        "f([x for x in ()])",
        "(lambda: 1)()",
        "f(1); g(2)",
        "f(x := 1)",
        "f(a=1, a=2)",
        "\0",
        "f('" + "x" * MAX_CALL_CHARS + "')",
        "f(" + "-" * 4000 + "1)",
        "f(" + "[" * 150 + "]" * 150 + ")",
        "f(" + "(" * 2000 + ")" * 2000 + ")",
        "f(" + "1+" * 2000 + "1)",
    ],
)
def test_a_text_that_is_not_a_call_with_literals_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_reward(text)


@given(st.text(max_size=60))
def test_any_text_is_a_call_or_is_refused(text: str) -> None:
    try:
        call = parse_reward(text)
    except ValueError:
        return
    assert call.name.isidentifier()


def test_reading_calls_does_not_change_the_filters_of_warnings() -> None:
    before = list(warnings.filters)
    threads = [threading.Thread(target=lambda: [parse_reward(r"f('\d')") for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)

    assert list(warnings.filters) == before


@pytest.mark.parametrize(
    ("call", "text", "reward"),
    [
        ("exact_match('Rome')", " Rome\n", 1),
        ("exact_match('Rome')", "rome", 0),
        ("exact_match('a\\nb')", "a\r\nb", 1),
        ("iexact_match('ROME')", "rome", 1),
        ("contains('b')", "abc", 1),
        ("contains('B')", "abc", 0),
        ("contains('B', case=False)", "abc", 1),
        ("not_contains('x')", "abc", 1),
        ("not_contains('b')", "abc", 0),
        ("not_contains('x')", "  ", 0),
        ("starts_with('ab')", "abc", 1),
        ("starts_with('b')", "abc", 0),
        ("ends_with('bc')", "abc\n", 1),
        ("ends_with('BC', case=False)", "abc", 1),
        ("regex_match('b+')", "abba", 1),
        ("regex_match('b+', whole=True)", "abba", 0),
        ("regex_match('A.*', case=False, whole=True)", "abba", 1),
        ("numeric_match(1000)", "1,000", 1),
        ("math_match('42')", "42" + " " * 5_000 + "43", 0),
        ("math_match('42')", "4%2", 0),
        ("math_match('42')", "4\u00b02", 0),
        ("math_match('1200')", "1 $200", 0),
        ("math_match('72')", r"\$72", 1),
        ("math_match('90')", r"90^\circ", 1),
        ("math_match('50')", r"50\%", 1),
        (r"math_match('3-\\frac{1}{2}')", r"3\frac{-1}{2}", 0),
        ("numeric_match(3.14, tol=0.01)", "3.145", 1),
        ("numeric_match(3.14, tol=0.001)", "3.145", 0),
        ("numeric_match(1)", "one", 0),
        ("numeric_match(1)", "nan", 0),
        ("numeric_match(1)", "1_0", 0),
        ("numeric_match(1)", "1" * 3_000, 0),
        ("numeric_match(12)", "1,2", 0),
        ("numeric_match(123)", "1,2,3", 0),
        ("numeric_match(42)", ",42", 0),
        ("numeric_match(-3.5)", "\u22123.5", 1),
        ("numeric_match(42)", r"$\boxed{42}$", 1),
        ("numeric_match(0.1)", "0.1000001", 1),
        ("numeric_match(0.1)", "0.10001", 0),
        ("exact_match('caf\u00e9')", "cafe\u0301", 1),
        ("contains('cafe\u0301')", "Un caf\u00e9.", 1),
        ("one_of('na\u00efve')", "nai\u0308ve", 1),
        ("json_equals({'x': 0.3})", '{"x": 0.30000000000000004}', 1),
        ("json_equals({'x': 0.3}, exact=True)", '{"x": 0.30000000000000004}', 0),
        ("json_equals([0.3])", "[0.30001]", 0),
        ("json_equals([0.0])", "[1e-9]", 0),
        ("json_equals([3])", "[3.0000001]", 0),
        ("numeric_match('2.50')", "2.5", 1),
        ("one_of('a', 'b')", "b", 1),
        ("one_of(['a', 'B'], case=False)", "b", 1),
        ("one_of('a')", "b", 0),
        ("json_equals({'a': [1, True]})", '{"a": [1.0, true]}', 1),
        ("json_equals({'a': 1})", '```json\n{"a": 1}\n```', 1),
        ("json_equals({'a': 1})", '{"a": true}', 0),
        ("json_equals([1])", "[1, 2]", 0),
        ("json_equals([])", "[" * 100_000, 0),
        ("json_equals({})", "no JSON", 0),
        ("word_count_between(2, 3)", "one two", 1),
        ("word_count_between(2, 3)", "one", 0),
        ("word_count_between(2, 3)", "one two three four", 0),
    ],
)
def test_a_built_in_function_judges_a_text(call: str, text: str, reward: float) -> None:
    assert parse_reward(call)(text) == reward


def test_further_keys_of_an_evaluation_are_arguments() -> None:
    expected = {"x": [1, None]}

    assert read_reward({"reward_function": "json_equals", "expected": expected})('{"x": [1, null]}') == 1.0
    assert read_reward({"reward_function": "contains('A')", "case": False})("a") == 1.0


@pytest.mark.parametrize(
    ("evaluation", "reason"),
    [
        (None, "must be an object with reward_function"),
        ({"script": "true"}, "must be an object with reward_function"),
        ({"reward_function": "no_such"}, "no reward function 'no_such'; there are .*exact_match"),
        ({"reward_function": "__import__('os')"}, "no reward function '__import__'"),
        ({"reward_function": "exact_match"}, "exact_match: missing a required argument: 'expected'"),
        ({"reward_function": "exact_match('a', 'b')"}, "too many positional"),
        ({"reward_function": "exact_match('a')", "case": True}, "unexpected keyword argument 'case'"),
        (
            {"reward_function": "exact_match(expected='a')", "expected": "b"},
            "the call already has the argument expected: remove evaluation.expected",
        ),
        ({"reward_function": "exact_match(5)"}, "expected must be str, not 5"),
        ({"reward_function": "contains('a', case=1)"}, "case must be bool, not 1"),
        ({"reward_function": "one_of('a', 5)"}, "choices must be .*, not 5"),
        ({"reward_function": "word_count_between(1.5, 2)"}, "least must be int"),
        ({"reward_function": "word_count_between(True, 2)"}, "least must be int"),
        ({"reward_function": "regex_match('(')"}, "'\\(' is not a pattern"),
        ({"reward_function": "regex_match", "pattern": "a" * 1_001}, "at most 1000"),
        ({"reward_function": "numeric_match('two')"}, "is not a number"),
        ({"reward_function": "numeric_match(2, tol=-1)"}, "is not a number and a distance"),
    ],
)
def test_a_call_that_cannot_work_is_refused_before_anything_is_judged(evaluation: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_reward(evaluation)


def test_a_custom_function_is_used_by_its_name(rewards: dict[str, Any]) -> None:
    def check(page: str) -> None:
        if not page.startswith("/"):
            raise ValueError("a page begins with /")

    @reward_function("visited", check=check)
    def visited(subject: dict[str, Any], page: str) -> float:
        return float(page in subject["pages"])

    assert parse_reward("visited('/a')")({"pages": ["/a"]}) == 1.0
    assert rewards["visited"]({"pages": []}, "/a") == 0.0
    assert visited({"pages": ["/b"]}, "/b") == 1.0
    with pytest.raises(ValueError, match="visited: a page begins with /"):
        parse_reward("visited('a')").check()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("exact_match", id="the name is a built-in's"),
        pytest.param("a.b", id="the name is not an identifier"),
    ],
)
def test_a_function_cannot_be_registered_under_a_taken_or_invalid_name(rewards: dict[str, Any], name: str) -> None:
    before = rewards.get(name)

    with pytest.raises(ValueError, match=name):
        reward_function(name)(lambda text: 1.0)

    assert rewards.get(name) is before


@pytest.mark.parametrize(
    ("value", "reason"),
    [(1.5, "gave 1.5"), (float("nan"), "gave nan"), (-1, "gave -1"), ("x", "ValueError"), (None, "TypeError")],
)
def test_an_invalid_reward_is_a_failure_and_never_0(rewards: dict[str, Any], value: Any, reason: str) -> None:
    reward_function("odd")(lambda text: value)

    with pytest.raises(RewardError, match=f"odd.*{reason}"):
        rewards["odd"]("text")
