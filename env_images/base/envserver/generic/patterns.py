"""Regular expressions from tasks, matched against agents' texts in bounded time.

CPython's engine backtracks, holds the interpreter meanwhile, and cannot be stopped from another thread. A single bad
pattern would delay every session of a worker. This module therefore first counts the ways in which a pattern can match
a text. A cheap pattern runs here. A pattern above `MAX_STEPS` runs in a child process, which the kernel ends after
`MAX_CPU_S` and which gets at most `MAX_MEMORY_BYTES`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from envserver.generic.rewards import without_warnings

MAX_PATTERN_CHARS = 1_000
MAX_RANGE_CHARS = 500_000
"""Maximum number of characters in a pattern's ranges. The compiler visits each one: 10 ms for 65,536 of them."""
MAX_TEXT_CHARS = 20_000
"""Maximum length of a text. A longer text matches nothing."""
MAX_STEPS = 20_000_000
"""Maximum number of steps in this process: about 50 ms on one core at 400 million a second in the worst case tried.
Ordinary cases run ten times faster."""
MAX_CPU_S = 1
"""CPU seconds of the child process, including its start. Beyond them the text counts as not matching."""
MAX_MEMORY_BYTES = 256 * 2**20
"""Address space of the child process. Beyond it the text counts as not matching: no ordinary pattern needs a tenth."""
MAX_WALL_S = 20.0
"""Seconds of real time of the child process. Beyond them it had too little CPU to judge the text, which is a
failure."""

_CHILD = """
import json, re, resource, sys
pattern, flags, text, whole, cpu_s, memory_bytes = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
try:
    compiled = re.compile(pattern, flags)
    sys.exit(10 if (compiled.fullmatch if whole else compiled.search)(text) else 11)
except MemoryError:
    sys.exit(11)
"""


@lru_cache(maxsize=512)
def compiled(pattern: str, *, ignore_case: bool = False) -> re.Pattern[str]:
    """Compile a task's pattern.

    Raises:
        ValueError: The pattern is longer than `MAX_PATTERN_CHARS`, has larger ranges than `MAX_RANGE_CHARS`, or is
            invalid.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"a pattern has at most {MAX_PATTERN_CHARS} characters, not {len(pattern)}")
    flags = re.IGNORECASE if ignore_case else 0
    try:
        if (ranged := _range_chars(_parsed(pattern, flags))) > MAX_RANGE_CHARS:
            raise ValueError(
                f"the ranges of the pattern {pattern!r:.80} have {ranged} characters, and at most {MAX_RANGE_CHARS} "
                "are allowed: use an excluding set such as [^a-z]"
            )
        with without_warnings():
            return re.compile(pattern, flags)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r:.80} is not a pattern: {error}") from None


def matches(pattern: re.Pattern[str], text: str, *, whole: bool = False) -> bool:
    """Return True if *pattern* occurs in *text*, or matches the *whole* text, within the limits of this module.

    Raises:
        RuntimeError: The child process did not start or did not get enough CPU time.
    """
    if len(text) > MAX_TEXT_CHARS:
        return False
    if steps(pattern, len(text), whole=whole) <= MAX_STEPS:
        return (pattern.fullmatch(text) if whole else pattern.search(text)) is not None
    return _matches_apart(pattern, text, whole=whole)


def steps(pattern: re.Pattern[str], length: int, *, whole: bool = False) -> float:
    """Return an upper bound of the steps that matching a text of *length* characters can take."""
    try:
        items = _parsed(pattern.pattern, pattern.flags)
        ways, size = _ways(items, length), _size(items)
    except RecursionError:  # the caller's own stack is deeper than at the compilation
        return float("inf")
    starts = 1 if whole else length + 1
    return ways * starts * max(1, len(pattern.pattern), size)


def _parsed(pattern: str, flags: int) -> Any:
    # The engine's own parser: no other parser reads exactly what the engine runs.
    from re import _parser  # type: ignore[attr-defined]  # no public name since 3.11

    with without_warnings():
        return _parser.parse(pattern, flags)


def _ways(items: Any, length: int) -> float:
    """Return the number of ways to match a sequence: the product of its items' ways."""
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
            # Each repetition may match in every way of its body. If the body has one way, only the number of
            # repetitions varies.
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
        case "GROUPREF":
            return length + 1.0  # the engine compares as many characters as the group has
        case "GROUPREF_EXISTS":
            return _ways(argument[1], length) + (_ways(argument[2], length) if argument[2] else 1.0)
    return 1.0  # a character, a class, an anchor, a reference


def _size(items: Any) -> float:
    """Return the number of items on the longest way through a sequence, with the required repetitions."""
    size = 0.0
    for operation, argument in items:
        least = max(1, int(argument[0])) if str(operation).endswith("_REPEAT") else 1
        size += least * (1 + sum(map(_size, _sequences(argument))))
    return size


def _range_chars(items: Any) -> int:
    """Return the number of characters in all ranges of a sequence, as far as the compiler visits them."""
    total = 0
    for operation, argument in items:
        if str(operation) == "IN":
            ranges = (bounds for kind, bounds in argument if str(kind) == "RANGE")
            total += sum(min(last - first + 1, 65_536) for first, last in ranges)
        else:
            total += sum(map(_range_chars, _sequences(argument)))
    return total


def _sequences(argument: Any) -> Iterator[Any]:
    """Yield the sequences within an item's *argument*."""
    from re import _parser  # type: ignore[attr-defined]  # as above

    if isinstance(argument, _parser.SubPattern):
        yield argument
    elif isinstance(argument, list | tuple):
        for inner in argument:
            yield from _sequences(inner)


def _matches_apart(pattern: re.Pattern[str], text: str, *, whole: bool) -> bool:
    question = json.dumps(
        [pattern.pattern, pattern.flags & re.IGNORECASE, text, whole, MAX_CPU_S, MAX_MEMORY_BYTES]
    ).encode()
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
