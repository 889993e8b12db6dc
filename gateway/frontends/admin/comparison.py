"""Compares the results of a recorded episode with those of its replay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, Final

COMPARED: Final = ("blocks", "text", "observation", "data", "error", "reward", "finished")
"""What the agent sees of a step, and what trainers learn from. Other fields, such as metadata, may contain times."""
EXCERPT_CHARS: Final = 200
"""Maximum length of a text in a difference. Of a longer text, the part around the first difference is kept."""

Difference = tuple[str, Any, Any]
"""Path of a value, such as ``blocks[0].text``, and the value in the recorded and in the replayed result."""


def differences(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the values in which two results differ, as `steps.result_of` returns results.

    The protocols write an absent value differently, so null, false and an empty list equal a missing field. A reward of
    0 does not equal a missing reward.
    """
    for field in COMPARED:
        yield from _differences(field, _present(recorded.get(field)), _present(replayed.get(field)))


def _differences(path: str, one: Any, other: Any) -> Iterator[Difference]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in {**one, **other}:
            yield from _differences(f"{path}.{name}", one.get(name), other.get(name))
    elif isinstance(one, list) and isinstance(other, list):
        for place, (a, b) in enumerate(zip_longest(one, other)):
            yield from _differences(f"{path}[{place}]", a, b)
    elif isinstance(one, str) and isinstance(other, str):
        if one != other:
            place = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
            begin = max(0, (min(len(one), len(other)) if place < 0 else place) - EXCERPT_CHARS // 2)
            yield path, _excerpt(one, begin), _excerpt(other, begin)
    elif (type(one) is bool, one) != (type(other) is bool, other) and not (one != one and other != other):  # NaN
        yield path, one, other


def _present(value: Any) -> Any:
    return None if value is False or value in ([], {}) else value


def _excerpt(text: str, begin: int) -> str:
    end = begin + EXCERPT_CHARS
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"
