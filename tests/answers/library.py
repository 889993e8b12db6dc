"""The families of `reasoning_gym` as groups: puzzles made and judged as the environment's children do it."""

from __future__ import annotations

import base64
import pickle
import re
from collections.abc import Mapping
from typing import Any, Final

from tests.answers import operators
from tests.answers.groups import IS_WHOLE, WRONG_AT_MOST, Group, Item, bundled, module
from tests.answers.operators import Operator

PUZZLES: Final = 30 if IS_WHOLE else 2
"""The puzzles of each family."""

families: Any = module("reasoning_gym", "reasoning_families")
children: Any = module("reasoning_gym", "puzzle_child")
server: Any = module("reasoning_gym", "reasoning_gym_server")


def _half(text: str) -> str | None:
    return text[: len(text) // 2].strip() or None


def _turned(text: str) -> str | None:
    return text[::-1] if text[::-1] != text else None


NEAR: Final[Mapping[str, Operator]] = {
    **operators.NEAR_TEXTS,
    "half": _half,
    "turned": _turned,
    "nan for numbers": lambda text: made if (made := re.sub(r"-?\d+(?:\.\d+)?", "NaN", text)) != text else None,
    "large numbers": lambda text: made if (made := re.sub(r"-?\d+(?:\.\d+)?", "1e400", text)) != text else None,
    "without its first word": lambda text: text.partition(" ")[2] or None,
}
"""Wrong answers near a right one."""


def _names(text: str) -> list[str]:
    return text.split()


_CELLS: Final = (0.9, "right cells earn a part")
_WORDS: Final = (0.999, "right words or letters in their places earn a part")
PARTIAL: Final[Mapping[str, tuple[float, str]]] = {
    **dict.fromkeys(("futoshiki", "mini_sudoku", "sudoku"), _CELLS),
    **dict.fromkeys(
        ("emoji_mystery", "figlet_font", "letter_jumble", "sentence_reordering", "spell_backward", "word_sorting"),
        _WORDS,
    ),
    "calendar_arithmetic": (0.99, "a number of days earns the more, the nearer it is"),
    "knights_knaves": (0.95, "a right part of the inhabitants earns 0.3 and the share of 0.7"),
    "pool_matrix": (0.1, "a matrix of the right shape earns 0.1"),
    "rectangle_count": (0.65, "a count that is wrong by less than five earns a part"),
}
"""Families that pay for answers that are right in part: the most that a near miss earns, and what for."""

_TEXTS: Final = frozenset(operators.NEAR_TEXTS)
_LAST: Final = frozenset({"the last place plus one", "the last place minus one"})
READ: Final[Mapping[str, tuple[frozenset[str], str]]] = {
    "advanced_geometry": (_TEXTS, "finds a point before other text"),
    "cryptarithm": (_LAST | {"a digit changed"}, "any digits that solve the sum are right"),
    "fraction_simplification": (_TEXTS, "finds a fraction in a text"),
    "kakurasu": (_TEXTS | {"another sign"}, "reads the zeros and ones of a text"),
    "knights_knaves": (_TEXTS, "finds the statements in a text"),
    "letter_jumble": (_TEXTS, "reads as many words as the right answer has"),
    "number_format": (_LAST, "the number is one of a few, whose digits need not be exact"),
    "pool_matrix": (_LAST, "a small error counts as rounding"),
    "power_function": (_LAST | {"half"}, "compares three significant figures"),
    "prime_factorization": (frozenset({"turned"}), "any order is right"),
    "quantum_lock": (_TEXTS | {"turned"}, "reads the names of buttons in a text, and any shortest way is right"),
    "sokoban": (_TEXTS, "reads the moves in a text"),
    "spell_backward": (_TEXTS, "reads as many letters as the right answer has"),
    "survo": (_TEXTS, "reads the numbers of a text"),
    "word_sorting": (_TEXTS, "reads as many words as the right answer has"),
}
"""Families in whose scorers some operators leave a right answer right: the operators, and why."""
FEW_ANSWERS: Final[Mapping[str, float]] = {
    **dict.fromkeys(
        _names("acre circuit_logic course_schedule isomorphic_strings mahjong_puzzle ransom_note syllogism"), 0.85
    ),
    **dict.fromkeys(_names("aiw binary_alternation gcd maze rotten_oranges self_reference zebra_puzzles"), 0.7),
    **dict.fromkeys(_names("largest_island letter_counting mini_sudoku rectangle_count"), 0.55),
}
"""Families with few different answers, or with partial rewards for any answer: the most that one answer may earn."""
OTHERWISE: Final = 0.4
"""The most that one answer may earn on average in the other families."""


def best_constant(group: Group) -> tuple[float, str]:
    """Return the mean reward of the reference that earns most in all puzzles of a group, and the reference."""
    texts = sorted({item.reference for item in group.items})
    return max((sum(item.score(text) for item in group.items) / len(group.items), text) for text in texts)


def library_group(family: str, *, puzzles: int = PUZZLES) -> Group:
    """Return the group of a family, with puzzles as its line in the task files makes them."""
    children.import_families()
    (line,) = [task for task in bundled("reasoning_gym") if task["id"] == family]
    parameters = line["config"].get("parameters", {})
    data = children._data_set(family, parameters, seed=0)
    kept, _ = READ.get(family, (frozenset(), ""))
    near, numbers = (
        {name: operator for name, operator in table.items() if name not in kept}
        for table in (NEAR, operators.NEAR_NUMBERS)
    )
    return Group(
        family,
        [_item(family, parameters, seed, data) for seed in range(1, puzzles + 1)],
        ({name: operators.MARKS[name] for name in ("as it is", "blanks")},),
        (near,),
        (numbers,),
        partial=PARTIAL.get(family, (WRONG_AT_MOST, ""))[0],
        read=module("base", "envserver.answers").final_answer,
        are_samples=True,
    )


def _item(family: str, parameters: Mapping[str, Any], seed: int, data: Any) -> Item:
    job = {"family": family, "seed": seed, "parameters": parameters}
    puzzle = server.Puzzle(**job, **children._made(job))
    return Item(f"{family} {seed}", puzzle.question, puzzle.reference, lambda answer: _judged(data, puzzle, answer))


def _judged(data: Any, puzzle: Any, answer: str) -> float:
    """Return the reward of *answer* as the environment does, with its scorer in this process."""
    text, refusal = server.read_answer(puzzle, answer)
    if refusal:
        return 0.0
    entry = pickle.loads(base64.b64decode(puzzle.entry))
    try:
        return float(server.reward_of(data.score_answer(text, entry), puzzle, text))
    except Exception:  # noqa: BLE001 - as the environment: the scorer cannot read the answer
        return 0.0
