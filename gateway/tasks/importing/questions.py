"""Imports files of questions with answers, such as GSM8K and MATH, as tasks of the math environment.

The caller names the columns with a row's question and answer. The final answer follows the last ``####`` (as in GSM8K),
or is in the last ``\\boxed{}`` (as in MATH), or is the whole text. The rest of an answer goes into no task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from envserver.generic.texts import math_match

from gateway.tasks.importing.rows import Entry, InvalidEntry, convert, read_rows, text_of

_MARK: Final = "####"
_BOXES: Final = ("\\boxed{", "\\fbox{")
MAX_FINAL_CHARS: Final = 500
"""Maximum length of a final answer: a longer text explains more than it answers."""


def read_questions(
    path: Path, *, question: str, answer: str, id: str = "", tags: Sequence[str] = ()
) -> Iterator[Entry]:
    """Read the rows of a file; *question*, *answer*, *id* and *tags* are names of columns.

    Without a column for ids, the ids are the file's name and the number of the row, from 0.

    Raises:
        ConfigError: The file cannot be read, or is not JSON.
    """
    rows = read_rows(path)
    name = path.name.partition(".")[0]
    for number, row in enumerate(rows):

        def task_of(value: Mapping[str, Any], number: int = number) -> dict[str, Any]:
            final = final_of(text_of(value, answer))
            named = str(value[id]) if id and isinstance(value.get(id), str | int) else ""
            if id and not named:
                raise InvalidEntry(f"{id}: must be a text or a number")
            return {
                "id": named or f"{name}-{number}",
                "tags": [str(value[tag]) for tag in tags if value.get(tag) is not None],
                "instruction": text_of(value, question),
                "config": {},
                "evaluation": {"reward_function": "math_match", "expected": final},
            }

        yield from convert([row], task_of)


def final_of(answer: str) -> str:
    """Return the final answer in the text of an *answer*. Raises ``InvalidEntry`` if there is none."""
    final = answer
    if _MARK in answer:
        final = answer.rpartition(_MARK)[2]
    elif (begin := max(answer.rfind(box) + len(box) if box in answer else -1 for box in _BOXES)) >= 0:
        final = answer[begin : _end_of_group(answer, begin)]
    final = final.strip()
    if not final or len(final) > MAX_FINAL_CHARS:
        raise InvalidEntry(
            f"no final answer of 1 to {MAX_FINAL_CHARS} characters: neither #### nor \\boxed{{}} is in it"
        )
    if math_match(final, final) != 1.0:
        raise InvalidEntry(f"the final answer {final!r:.80} cannot be compared")
    return final


def _end_of_group(text: str, begin: int) -> int:
    """Return where the group in braces ends whose content begins at *begin*. Raises ``InvalidEntry``."""
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return at
    raise InvalidEntry("the braces of \\boxed{} are not closed")
