"""Regular expressions of tasks, matched on agents' texts in bounded time.

CPython's engine backtracks, holds the interpreter meanwhile, and cannot be stopped from another thread: one bad pattern
would hold up every session of a worker. So the ways in which a pattern can match a text are counted first. A few are
tried here; more than `MAX_STEPS` are left to a child process, which the kernel ends after `MAX_CPU_S`.
"""

import json
import re
import subprocess
import sys
from functools import lru_cache
from typing import Any

MAX_PATTERN_CHARS = 1_000
MAX_TEXT_CHARS = 20_000
"""A text that is longer matches nothing."""
MAX_STEPS = 20_000_000
"""At most some 50 ms on one core: 400 million a second in the worst case tried, ten times that in ordinary ones."""
MAX_CPU_S = 1
"""Of the child process, its start included. Whoever is past that is taken to match nothing."""
MAX_WALL_S = 20.0
"""A child that had so little of the processor says nothing about the text: that is a failure."""

_CHILD = """
import json, re, resource, sys
pattern, flags, text, whole, cpu_s = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
compiled = re.compile(pattern, flags)
sys.exit(10 if (compiled.fullmatch if whole else compiled.search)(text) else 11)
"""


@lru_cache(maxsize=512)
def compiled(pattern: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """Compile a task's pattern.

    Raises:
        ValueError: it is longer than `MAX_PATTERN_CHARS`, or no pattern.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"a pattern has at most {MAX_PATTERN_CHARS} characters")
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.80} is no pattern: {error}") from None


def matches(pattern: re.Pattern[str], text: str, *, whole: bool = False) -> bool:
    """Whether *pattern* is found in *text*, or matches the *whole* of it, within the bounds of this module.

    Raises:
        RuntimeError: the child process could not be run, or did not get the processor.
    """
    if len(text) > MAX_TEXT_CHARS:
        return False
    if steps(pattern, len(text), whole=whole) <= MAX_STEPS:
        return (pattern.fullmatch(text) if whole else pattern.search(text)) is not None
    return _matches_apart(pattern, text, whole=whole)


def steps(pattern: re.Pattern[str], length: int, *, whole: bool = False) -> float:
    """Bound the steps that matching a text of *length* characters can take, by the ways that there are to match."""
    ways = _ways(_parsed(pattern), length)
    starts = 1 if whole else length + 1
    return ways * starts * max(1, len(pattern.pattern))


def _parsed(pattern: re.Pattern[str]) -> Any:
    # The engine's own parser: no other reads exactly what the engine will run.
    from re import _parser  # type: ignore[attr-defined]  # no public name since 3.11

    return _parser.parse(pattern.pattern, pattern.flags)


def _ways(items: Any, length: int) -> float:
    """Count the ways to match a sequence: the product of those of its items."""
    product = 1.0
    for operation, argument in items:
        product *= _ways_of(str(operation), argument, length)
        if product > 1e12:
            return float("inf")
    return product


def _ways_of(operation: str, argument: Any, length: int) -> float:
    match operation:
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, body = argument
            most = min(int(most), max(length, int(least)))
            inner = _ways(body, length)
            # Each repetition may match in every way of its body; with a single one what is open is their number.
            counts: int = most - least + 1
            if inner <= 1:
                return counts
            return counts * min(inner, 1e6) ** most if most <= 40 else float("inf")
        case "BRANCH":
            return sum(_ways(branch, length) for branch in argument[1])
        case "SUBPATTERN":
            return _ways(argument[-1], length)
        case "ASSERT" | "ASSERT_NOT":
            return _ways(argument[1], length)
        case "ATOMIC_GROUP":
            return _ways(argument, length)
        case "GROUPREF_EXISTS":
            return _ways(argument[1], length) + (_ways(argument[2], length) if argument[2] else 1.0)
    return 1.0  # a character, a class, an anchor, a reference


def _matches_apart(pattern: re.Pattern[str], text: str, *, whole: bool) -> bool:
    question = json.dumps([pattern.pattern, pattern.flags & re.IGNORECASE, text, whole, MAX_CPU_S]).encode()
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD],
            input=question,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"a pattern was not matched in {MAX_WALL_S:g} s") from error
    if done.returncode in (10, 11):
        return done.returncode == 10
    if done.returncode < 0:  # SIGXCPU or SIGKILL, by its limit
        return False
    raise RuntimeError(f"a pattern could not be matched: {done.stderr.decode(errors='replace').strip()[-200:]}")
