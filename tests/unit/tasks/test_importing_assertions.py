"""Assertions of benchmarks as cases: what becomes a case, and what stays a script."""

from __future__ import annotations

import ast

import pytest

from gateway.tasks.importing.coding import humaneval_cases, humaneval_task, mbpp_case, mbpp_task
from tests.unit.tasks.test_importing_coding import HUMANEVAL, MBPP


@pytest.mark.parametrize(
    ("test", "call", "check"),
    [
        ("assert f(1, [2]) == (3,)", "f(1, [2])", "answer == (3,)"),
        ("assert f(1) == {'b', 'a'}, 'a message'", "f(1)", "answer == {'a', 'b'}"),
        ("assert {1: [2]} == f(1)", "f(1)", "answer == {1: [2]}"),
        ("assert f(1) != None", "f(1)", "answer != None"),
        ("assert f(1) is None", "f(1)", "answer is None"),
        ("assert True is f(1)", "f(1)", "answer is True"),
        ("assert f(1) is not False", "f(1)", "answer is not False"),
        ("assert f(1)", "f(1)", "answer"),
        ("assert not f(1)", "f(1)", "not answer"),
        ("assert f(1) == True", "f(1)", "answer == True"),
        ("assert abs(f(1) - 0.5) < 1e-6", "f(1)", "abs(answer - 0.5) < 1e-06"),
        ("assert 1e-6 >= abs(-2 - f(1))", "f(1)", "abs(answer - (-2)) <= 1e-06"),
        ("import math\nassert math.fabs(f(1) - 2) < 10**-3", "f(1)", "abs(answer - 2) < 0.001"),
        (
            "assert math.isclose(f(1), 2.5, rel_tol=0.001)",
            "f(1)",
            "math.isclose(answer, 2.5, rel_tol=0.001)",
        ),
        ("assert set(f(1)) == set([2, 1])", "set(f(1))", "answer == {1, 2}"),
        ("assert round(f(1), 2) == 1.25", "round(f(1), 2)", "answer == 1.25"),
        ("assert sorted(f(1), key=lambda x: -x) == [2]", "sorted(f(1), key=lambda x: -x)", "answer == [2]"),
        ("assert f(1)[0] == 'x'", "f(1)[0]", "answer == 'x'"),
        ("assert f(1) == -2**10 + 1", "f(1)", "answer == -1023"),
        ("assert f(1) == float('inf')", "f(1)", "answer == 1e999"),
        ("assert f(1) == set()", "f(1)", "answer == set()"),
        ("assert f(g(2), LIMIT) == 3", "f(g(2), LIMIT)", "answer == 3"),
        ("assert f('é\\n') == '\\x00'", "f('é\\n')", "answer == '\\x00'"),
    ],
)
def test_an_assertion_about_one_call_is_a_case(test: str, call: str, check: str) -> None:
    assert mbpp_case(test, "LIMIT = 4") == {"call": call, "test": check}


@pytest.mark.parametrize(
    "test",
    [
        pytest.param("assert f(1) == f(2)", id="no constant"),
        pytest.param("assert f(1) == LIMIT", id="a name"),
        pytest.param("assert f(1) == float('nan')", id="nothing equals NaN"),
        pytest.param("assert f(1) == [float('nan')]", id="a list of NaN"),
        pytest.param("assert f(1) == list({'a', 'b'})", id="the order of a set"),
        pytest.param("assert f(1) == 2**10**9", id="a constant too large"),
        pytest.param("assert f(1) == 10**5000", id="a constant too long"),
        pytest.param("assert f(1) is 1", id="the identity of a number"),
        pytest.param("assert f(1) > 2", id="an order"),
        pytest.param("assert f(1) in [1, 2]", id="one of several"),
        pytest.param("assert 0 < f(1) < 2", id="a chain"),
        pytest.param("assert not f(1) == 2", id="a negated comparison"),
        pytest.param("assert f(1) == 2 and f(2) == 3", id="two in one"),
        pytest.param("assert (f(1) == 2) == True", id="a comparison of a comparison"),
        pytest.param("assert same(f(1), 2)", id="a function of the test"),
        pytest.param("assert isinstance(f(1), int)", id="a built-in function that could be answered without f"),
        pytest.param("assert all(f(n) == n for n in (1, 2))", id="a comprehension"),
        pytest.param("assert np.allclose(f(1), 2)", id="a method"),
        pytest.param("assert abs(f(1) - f(2)) < 1", id="the distance of two calls"),
        pytest.param("assert abs(f(1) - 2) > 1", id="a distance that is large"),
        pytest.param("assert abs(f(1) - 2) < True", id="a truth for a distance"),
        pytest.param("def f(n): return n\nassert f(1) == 1", id="a function that the test defines"),
        pytest.param("set = f\nassert set(f(1)) == 1", id="a built-in name that the test binds"),
        pytest.param("x = f(1)\nassert x == 1", id="a variable"),
        pytest.param("assert f(1) == 1\nassert f(2) == 2", id="two, which are worth one"),
        pytest.param("assert True", id="nothing"),
        pytest.param("assert f(1) == {**{}}", id="an unpacked dict"),
        pytest.param("assert f(1) ==", id="no Python"),
        pytest.param(f"assert f(1) == {'x' * 100_001!r}", id="a constant longer than the environment reads"),
        pytest.param("assert f(1) == " + "-" * 3_000 + "1", id="nested deeply"),
    ],
)
def test_any_other_assertion_stays_a_script(test: str) -> None:
    assert mbpp_case(test, "LIMIT = 4\ndef same(a, b): return a == b") is None


CHECK = "METADATA = {'author': 'x'}\n\n\ndef check(candidate):\n"


@pytest.mark.parametrize(
    ("body", "calls", "is_complete"),
    [
        (
            "    # text\n    assert candidate(1) == 2\n    assert candidate(2), 'x'\n    assert True",
            ["f(1)", "f(2)"],
            True,
        ),
        (
            "    for a, (b, c) in [(1, (2, 3)), (4, (5, 6))]:\n        assert candidate(a, b) == a + c",
            ["f(1, 2)", "f(4, 5)"],
            True,
        ),
        ("    for n in range(2, 4):\n        assert candidate(n) == n * n", ["f(2)", "f(3)"], True),
        ("    for n in range(300):\n        assert candidate(n) == n", [], False),
        ("    for n in range(2):\n        print(n)\n        assert candidate(n) == n", [], False),
        ("    for n in range(2):\n        assert candidate([n for n in 'ab']) == n", [], False),
        ("    x = [1]\n    assert candidate(x) == 2\n    assert candidate(3) == 4", ["f(3)"], False),
        (
            "    import random\n    assert candidate(1) == 2\n    assert candidate(random.random()) == 2",
            ["f(1)"],
            False,
        ),
        (
            "    assert candidate(1) == 2\n    if candidate(2):\n        return\n    assert candidate(3) == 4",
            ["f(1)"],
            False,
        ),
        ("    candidate = memo(candidate)\n    assert candidate(1) == 2", [], False),
        ("    assert (lambda candidate: candidate(1))(candidate) == 2", [], False),
        ("    assert True", [], True),
    ],
)
def test_a_humaneval_check_is_cases_and_the_rest(body: str, calls: list[str], is_complete: bool) -> None:
    cases, found_complete = humaneval_cases(CHECK + body, "f")

    assert ([case["call"] for case in cases], found_complete) == (calls, is_complete)


@pytest.mark.parametrize(
    "test",
    [
        "def check(candidate):\n    assert candidate(1) == 2\n\nassert f(1) == 2",
        "def check(candidate):\n    assert candidate(1) == 2\n\ndef other(): pass",
        "@twice\ndef check(candidate):\n    assert candidate(1) == 2",
        "f = 3\ndef check(candidate):\n    assert candidate(1) == 2",
        "check = print",
        "def check(candidate:",
    ],
)
def test_a_module_that_does_more_than_define_check_stays_a_script(test: str) -> None:
    assert humaneval_cases(test, "f")[1] is False


def test_a_task_with_only_cases_has_no_script_and_no_tag() -> None:
    task = humaneval_task(HUMANEVAL | {"test": CHECK + "    assert candidate(1) == 2\n    assert candidate(2) == 3"})

    assert task["tags"] == ["humaneval"]
    assert task["evaluation"] == {
        "reward_function": "test_cases",
        "time_limit_seconds": 10,
        "test_cases": [{"call": "f(1)", "test": "answer == 2"}, {"call": "f(2)", "test": "answer == 3"}],
        "prelude": HUMANEVAL["prompt"],
        "credit": "all",
    }


def test_a_task_with_a_rest_keeps_its_whole_check_and_has_the_tag() -> None:
    test = CHECK + "    assert candidate(1) == 2\n    assert candidate(2) > 3"
    task = humaneval_task(HUMANEVAL | {"test": test})

    assert task["tags"] == ["humaneval", "in-process"]
    assert task["evaluation"]["test_cases"] == [{"call": "f(1)", "test": "answer == 2"}]
    assert task["evaluation"]["test_scripts"] == [{"code": f"{test}\n\ncheck(f)\n"}]


def test_a_check_without_any_case_stays_a_script() -> None:
    task = humaneval_task(HUMANEVAL | {"test": CHECK + "    assert True"})

    assert task["tags"] == ["humaneval", "in-process"]
    assert "test_cases" not in task["evaluation"]


def test_the_tests_of_an_mbpp_task_keep_their_weight() -> None:
    task = mbpp_task(MBPP | {"test_list": ["assert f() == 1", "assert f() != 2", "assert f() > 0"]})

    assert task is not None
    assert task["tags"] == ["mbpp", "in-process"]
    assert task["evaluation"]["test_cases"] == [
        {"public": True, "call": "f()", "test": "answer == 1"},
        {"call": "f()", "test": "answer != 2"},
    ]
    assert task["evaluation"]["test_scripts"] == [{"code": "assert f() > 0"}]


def test_expected_values_are_written_alike_in_every_process() -> None:
    case = mbpp_case(f"assert f() == {set('abcdefghij')!r}", "")

    assert case == {"call": "f()", "test": f"answer == {{{', '.join(map(repr, 'abcdefghij'))}}}"}
    assert ast.literal_eval(case["test"].partition(" == ")[2]) == set("abcdefghij")
