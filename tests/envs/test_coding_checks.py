"""Cases judged outside the solution's process mean exactly what their assertions meant inside it."""

from __future__ import annotations

import collections
import contextlib
import enum
import fractions
import importlib
import json
import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.tasks.importing import assertions
from gateway.tasks.importing.coding import mbpp_case
from tests.envs.coding_world import comparing

checks: Any = importlib.import_module("coding_checks")
driver: Any = importlib.import_module("coding_driver")

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.integers()
    | st.sampled_from([0.0, -0.0, 1.0, 2.5, -1.0, math.inf, -math.inf, 1e300, 2.0**70, 1j, 1 + 0j, 2 + 3j, 2**70])
    | st.sampled_from(["", "a", "1", "é", "\ud800", "\n", b"", b"a"])
)
CONSTANTS = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(SCALARS, max_size=3)
        | st.dictionaries(SCALARS, inner, max_size=3)
    ),
    max_leaves=6,
)


class Level(enum.IntEnum):
    ONE = 1


class Word(str):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")
ODD = (
    *(
        math.nan,
        [math.nan],
        {"a": math.nan},
        {math.nan},
        complex(math.nan, 1),
        complex(1, math.nan),
        object(),
        [object()],
    ),
    *(fractions.Fraction(5, 2), fractions.Fraction(1), Decimal("2.5"), Decimal("NaN"), Decimal("1"), [Decimal("2.5")]),
    *(collections.Counter("aa"), collections.OrderedDict(a=2), collections.defaultdict(int, {"a": 2}), {"a": 2}.keys()),
    *(
        Pair(1, 2),
        Level.ONE,
        Word("a"),
        frozenset({1, 2}),
        bytearray(b"a"),
        range(3),
        map(str, [1]),
        10**5_000,
        {1: 2}.items(),
    ),
)
"""Answers that are not plain constants."""
FORMS = (
    *(
        "answer == VALUE",
        "VALUE == answer",
        "answer != VALUE",
        "answer",
        "not answer",
        "answer is None",
        "answer is not True",
    ),
    *(
        "False is answer",
        "abs(answer - VALUE) < 0.5",
        "0.5 >= abs(VALUE - answer)",
        "math.isclose(answer, VALUE, rel_tol=0.1)",
    ),
)


def holds_inside(statement: str, answer: object) -> bool:
    """Return True if the assertion holds in the process of the solution that gives *answer*."""
    try:
        exec(f"import math\nassert {statement}", {"f": lambda: answer})
    except Exception:  # noqa: BLE001 - a wrong type makes an assertion fail too
        return False
    return True


def holds_outside(case: dict[str, str], answer: object) -> bool:
    """Return True if the judge accepts *answer*, which passes through the driver and through JSON."""
    check = checks.read_check(case["test"], call=case["call"])
    tree = bool(answer) if check.is_truth else driver.encoded(answer)
    try:
        return bool(check.holds(comparing.parse(json.dumps(tree, allow_nan=False))))
    except comparing.NotAnAnswer:
        return False


@given(form=st.sampled_from(FORMS), value=CONSTANTS, answer=CONSTANTS | st.sampled_from(ODD))
@example(form="answer == VALUE", value=[(1, 2.0)], answer=[(True, 2)])
@example(form="answer == VALUE", value=[(1, 2)], answer=[[1, 2]])
@example(form="answer == VALUE", value={1, 2}, answer=frozenset({2, 1.0}))
@example(form="answer == VALUE", value={"a": 2}, answer=collections.Counter("aa"))
@example(form="answer == VALUE", value=0.1, answer=fractions.Fraction(1, 10))
@example(form="answer == VALUE", value=2.5, answer=Decimal("2.5"))
@example(form="answer == VALUE", value=0.3, answer=0.1 + 0.2)
@example(form="answer == VALUE", value=-0.0, answer=0)
@example(form="answer != VALUE", value=1, answer=object())
@example(form="abs(answer - VALUE) < 0.5", value=1, answer=1.5)
@example(form="abs(answer - VALUE) < 0.5", value=1, answer=10**400)
@example(form="abs(answer - VALUE) < 0.5", value=1, answer=1 + 0.1j)
@example(form="abs(answer - VALUE) < 0.5", value=2.5, answer=Decimal("2.5"))
def test_a_case_holds_exactly_where_its_assertion_holds(form: str, value: object, answer: object) -> None:
    try:
        text = assertions.written(value)
    except ValueError:
        return  # no literal, so no case
    statement = form.replace("VALUE", text)
    case = mbpp_case(f"assert {statement.replace('answer', 'f()')}", "import math")
    if case is None:
        assert form in FORMS[8:], text  # a distance from something that is no number
        return

    assert holds_outside(case, answer) is holds_inside(statement.replace("answer", "f()"), answer)


@given(CONSTANTS)
def test_every_constant_equals_itself_and_no_list_of_it(value: Any) -> None:
    case = {"call": "f()", "test": f"answer == {assertions.written(value)}"}

    assert holds_outside(case, value)
    assert not holds_outside(case, [value])


FORGED = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=5)
    | st.sampled_from(["int", "set", "ratio", "0x1", "nan"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=12,
) | st.builds(
    lambda kind, rest: [kind, *rest],
    st.sampled_from(["int", "float", "complex", "ratio", "decimal", "bytes", "list", "tuple", "set", "dict", "other"]),
    st.lists(
        st.sampled_from(["0x0", "-0x1", "inf", "", "zz", [], [[]], [["int", "0x1"]], [[None, None]], 7]), max_size=3
    ),
)


@given(tree=FORGED, form=st.sampled_from(FORMS[:3] + FORMS[5:7] + FORMS[8:9] + FORMS[10:]))
def test_a_forged_answer_is_judged_or_refused(tree: object, form: str) -> None:
    check = checks.read_check(form.replace("VALUE == answer", "answer == 7").replace("VALUE", "7"), call="f()")
    with contextlib.suppress(comparing.NotAnAnswer):
        assert check.holds(tree) in (True, False)


@pytest.mark.parametrize(
    "tree",
    [
        pytest.param(["int", "0x" + "f" * 900_000], id="a long integer"),
        pytest.param(["ratio", "0x" + "f" * 400_000, "0x" + "e" * 400_000], id="a fraction that takes long to reduce"),
        pytest.param(["set", [["int", hex(n * (2**61 - 1))] for n in range(30_000)]], id="a set of one hash"),
        pytest.param(json.loads('["list",[' * 400 + "]]" * 400), id="nested"),
        pytest.param(["float", "0x1p99999"], id="a float too large"),
    ],
)
def test_an_answer_made_to_take_long_is_refused_at_once(tree: object) -> None:
    for form in ("answer == {1, 2, 3}", "abs(answer - 2) < 1", "answer is None"):
        with contextlib.suppress(comparing.NotAnAnswer):
            assert checks.read_check(form, call="f()").holds(tree) is False


@given(st.text() | st.text("answer=!<>()[]{}+-*/.,:'\\0129 einots\n\0"))
@example("answer == " + "(" * 500)
@example("answer == " + "-" * 5_000 + "1")
@example("answer == 9" + "9" * 5_000)
@example("abs(answer - 1e999) < 1")
@example("math.isclose(answer, 1, rel_tol=-1)")
@example("math.isclose(answer, 1, key=1)")
@example("answer == {[]}")
def test_any_text_is_a_check_or_refused(text: str) -> None:
    with contextlib.suppress(checks.InvalidCheck):
        checks.read_check(text, call="f()")


def test_the_importer_and_the_environment_have_the_same_bound() -> None:
    assert assertions.MAX_TEXT_CHARS == checks.MAX_TEXT_CHARS
