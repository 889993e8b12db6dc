"""Compares the results of a recorded episode with those of its replay.

A difference is of one of three kinds. `REWARD` and `END` are what trainers learn from: a task on which they differ is
flaky. `TEXT` is what the agent saw. It may contain a clock, so it differs on steady tasks too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from gateway.stores.step_log.encoding import EMBEDDED_CHARS, as_logged

REWARD: Final = "reward"
END: Final = "end"
TEXT: Final = "text"
COMPARED: Final[Mapping[str, str]] = {
    "reward": REWARD,
    "finished": END,
    "blocks": TEXT,
    "text": TEXT,
    "observation": TEXT,
    "data": TEXT,
    "error": TEXT,
}
"""Compared fields of a result with their kinds. Other fields, such as metadata, are seen by no agent."""
EXCERPT_CHARS: Final = 600
"""Maximum length of a text in a difference. Of a longer text, the part around the first difference is kept."""


class Difference(NamedTuple):
    """A value that differs."""

    kind: str
    field: str
    """Path of the value, such as ``blocks[0].text``."""
    recorded: Any
    replayed: Any


def differences(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the values in which two results differ, as `steps.result_of` returns results.

    The protocols write an absent value differently, so null, false and an empty list equal a missing field. A reward of
    0 does not equal a missing reward.
    """
    for field, kind in COMPARED.items():
        for place in _differences(field, _present(recorded.get(field)), _present(replayed.get(field))):
            yield Difference(kind, *place)


def _differences(path: str, one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        for name in {**one, **other}:
            yield from _differences(f"{path}.{name}", one.get(name), other.get(name))
    elif isinstance(one, list) and isinstance(other, list):
        for place, (a, b) in enumerate(zip_longest(one, other)):
            yield from _differences(f"{path}[{place}]", a, b)
    elif isinstance(one, str) and isinstance(other, str):
        if one != other and (one := _referenced(one)) != (other := _referenced(other)):
            place = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), -1)
            begin = max(0, (min(len(one), len(other)) if place < 0 else place) - EXCERPT_CHARS // 2)
            yield path, _excerpt(one, begin), _excerpt(other, begin)
    elif (type(one) is bool, one) != (type(other) is bool, other) and not (one != one and other != other):  # NaN
        yield path, one, other


def _present(value: Any) -> Any:
    return None if value is False or value in ([], {}) else value


def _referenced(text: str) -> str:
    """Return *text* with digests in place of long base64 texts, such as images.

    The log has the digests only where it found the base64 in one piece, which the chunks of a stream are not.
    """
    if len(text) < EMBEDDED_CHARS:
        return text
    logged: bytes = as_logged(f'"{text}"'.encode(errors="surrogatepass"), lambda data: hashlib.sha256(data).hexdigest())
    return logged[1:-1].decode(errors="surrogatepass")


def _excerpt(text: str, begin: int) -> str:
    end = begin + EXCERPT_CHARS
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"
