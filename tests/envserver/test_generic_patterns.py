"""Tasks' patterns on agents' texts: the answers are right, and no pattern takes the server's time."""

import subprocess

import pytest
from envserver.generic import patterns
from envserver.generic.patterns import MAX_STEPS, MAX_TEXT_CHARS, compiled, matches, steps
from hypothesis import example, given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("pattern", "length"),
    [
        pytest.param(r"(a+)+$", 61, id="nested repeats"),
        pytest.param(r"(a|aa)+$", 61, id="branches that overlap, repeated"),
        pytest.param(r"(a?){40}a{40}b", 60, id="options, repeated"),
        pytest.param(r".*a.*b.*c.*d$", 9_000, id="many repeats, one after the other"),
        pytest.param(r"(x+x+)+y", 60, id="two repeats, repeated"),
        pytest.param(r"(?=(a+)+$)b", 61, id="in an assertion"),
        pytest.param(r"(?:){100000000}", 0, id="required repeats of nothing"),
        pytest.param(r"(?:(?:){10000}b?){10000}", 0, id="required repeats within required repeats"),
        pytest.param(r"(a*)\1\1\1\1b", 1_500, id="references to a long group"),
    ],
)
def test_a_pattern_that_could_take_forever_is_left_to_a_process(pattern: str, length: int) -> None:
    assert steps(compiled(pattern), length) > MAX_STEPS


@pytest.mark.parametrize(("pattern", "text"), [(r"(a+)+$", "a" * 60 + "b"), (r".*a.*b.*c.*d$", "abc" * 3_000)])
def test_a_process_that_takes_too_long_ends_and_its_pattern_matches_nothing(pattern: str, text: str) -> None:
    assert matches(compiled(pattern), text) is False


@pytest.mark.parametrize(
    ("pattern", "text", "whole", "is_match"),
    [
        (r"\d+", "room 42", False, True),
        (r"\d+", "room 42", True, False),
        (r"(\w+) \1", "ho ho", True, True),
        (r"^(yes|no)\.?$", "yes.", False, True),
        (r"(?:red|green){2}", "redgreen", True, True),
        (r"", "", True, True),
        (r"(\d+\s*,\s*)+\d+ items", "x" * 200 + " 1, 2, 3 items", False, True),
        (r"(\d+\s*,\s*)+\d+ items", "x" * 200 + " 1, 2, 3 things", False, False),
        (r"(É+)+x", "ÉÉx", True, True),
    ],
)
def test_a_match_is_the_same_in_the_server_and_in_a_process(
    pattern: str, text: str, whole: bool, is_match: bool
) -> None:
    found = compiled(pattern)

    assert matches(found, text, whole=whole) is is_match
    assert patterns._matches_apart(found, text, whole=whole) is is_match


@pytest.mark.parametrize(
    ("pattern", "length"), [(r"\d+", 1_000), (r"^(yes|no)\.?$", 1_000), (r"abc", MAX_TEXT_CHARS), (r"\d+-\d+", 40)]
)
def test_ordinary_patterns_need_no_process(pattern: str, length: int) -> None:
    assert steps(compiled(pattern), length) <= MAX_STEPS


def test_a_process_that_takes_too_much_memory_ends_and_its_pattern_matches_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patterns, "MAX_CPU_S", 60)  # so that the memory runs out first

    assert matches(compiled(r"(?:(a)|b|){100000000}"), "ab") is False


def test_a_pattern_that_takes_long_to_compile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ranges of the pattern .* 13107200 characters"):
        compiled("[\0-\U0010ffff]" * 200)

    assert matches(compiled("[\u4e00-\u9fff]+[^\0-\x7f]"), "\u4e2d\u6587\u00e9", whole=True)


def test_a_warning_about_a_pattern_is_not_the_servers() -> None:
    assert matches(compiled("[[a]"), "[")  # in tests, a warning is an error


def test_case_is_ignored_on_request_in_a_process_too() -> None:
    found = compiled("(a+)+B", ignore_case=True)

    assert patterns._matches_apart(found, "AAb", whole=True)


def test_a_text_longer_than_the_bound_matches_nothing() -> None:
    assert matches(compiled("a"), "a" * MAX_TEXT_CHARS)
    assert not matches(compiled("a"), "a" * (MAX_TEXT_CHARS + 1))


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "(?P<x>", "x" * 1_001, "(" * 900 + ")" * 900])
def test_an_invalid_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="pattern"):
        compiled(pattern)


def test_a_process_that_cannot_start_is_a_failure_and_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_CHILD", "import sys; sys.exit('broken')")

    with pytest.raises(RuntimeError, match="could not be matched: broken"):
        patterns._matches_apart(compiled("a"), "a", whole=False)


def test_a_process_that_gets_no_time_is_a_failure_and_not_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "_CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(patterns, "MAX_WALL_S", 0.2)

    with pytest.raises(RuntimeError, match=r"not matched in 0\.2 s") as caught:
        patterns._matches_apart(compiled("a"), "a", whole=False)

    assert isinstance(caught.value.__cause__, subprocess.TimeoutExpired)


PIECES = (
    *("a", "b", ".", r"\d", r"\w", "[a-z]", "[^b]", "(", ")", "(?:", "(?=", "(?!", "(?<=a", "(?>", "(?P<n>", "(?P=n)"),
    *("(?(1)", r"\1", "|", "*", "+", "?", "*+", "{2}", "{,3}", "{0,50}", "{1000}", "^", "$", r"\b", "(?i)", "(?s:"),
    *("(?x)", "[[", "é", r"\0"),
)
PATTERNS = st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=12).map("".join)
TEXTS = st.text("ab 1é\n", max_size=30) | st.integers(0, 3_000).map(lambda length: "ab" * length)


@given(pattern=PATTERNS, text=TEXTS, whole=st.booleans(), ignore_case=st.booleans())
@example(pattern="(" * 450 + ")" * 450, text="a", whole=True, ignore_case=False)
@example(pattern="(?:" * 200 + "a" + ")*" * 200, text="a" * 50, whole=False, ignore_case=False)
@example(pattern="(a{0,50}){0,50}b", text="a" * 3_000, whole=False, ignore_case=False)
@example(pattern="\ud800", text="\ud800", whole=True, ignore_case=True)
def test_any_pattern_matches_as_the_engine_does_or_is_refused(
    pattern: str, text: str, whole: bool, ignore_case: bool
) -> None:
    try:
        found = compiled(pattern, ignore_case=ignore_case)
    except ValueError:
        return
    if steps(found, len(text), whole=whole) <= MAX_STEPS:
        is_match = (found.fullmatch if whole else found.search)(text) is not None
        assert matches(found, text, whole=whole) is is_match
