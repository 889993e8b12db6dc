"""The families of reasoning-gym: the offered ones, and the excluded ones with the reason."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

TOPICS: Mapping[str, str] = {
    "algebra": "simple_equations",
    "algorithmic": (
        "ab base_conversion binary_alternation caesar_cipher count_primes cryptarithm group_anagrams "
        "isomorphic_strings jugs letter_counting letter_jumble manipulate_matrix number_filtering "
        "palindrome_generation palindrome_partitioning pool_matrix ransom_note rotate_matrix "
        "rotten_oranges sentence_reordering spell_backward string_manipulation string_splitting "
        "string_synthesis word_ladder word_sequence_reversal word_sorting"
    ),
    "arc": "arc_1d arc_agi rearc",
    "arithmetic": (
        "basic_arithmetic bitwise_arithmetic calendar_arithmetic chain_sum count_bits decimal_chain_sum dice "
        "fraction_simplification gcd lcm leg_counting number_format power_function prime_factorization "
        "products"
    ),
    "code": "bf",
    "cognition": "color_cube_rotation figlet_font modulo_grid needle_haystack number_sequence rectangle_count",
    "games": (
        "emoji_mystery futoshiki kakurasu mahjong_puzzle maze mini_sudoku sokoban sudoku survo tower_of_hanoi tsumego"
    ),
    "geometry": "advanced_geometry simple_geometry",
    "graphs": "course_schedule family_relationships largest_island path_star quantum_lock shortest_path",
    "induction": "acre list_functions",
    "logic": "aiw circuit_logic knights_knaves self_reference syllogism zebra_puzzles",
}
"""The offered families by the library's folder of their modules."""

_OTHER_MODULES: Mapping[str, str] = {
    "acre": "acre.acre",
    "figlet_font": "figlet_fonts",
    "list_functions": "list_functions.list_functions",
    "mahjong_puzzle": "mahjong",
    "number_sequence": "number_sequences",
    "syllogism": "syllogisms",
}
"""Modules that are not named like their family."""

MODULES: Mapping[str, str] = {
    family: f"{topic}.{_OTHER_MODULES.get(family, family)}"
    for topic, families in TOPICS.items()
    for family in families.split()
}
"""Offered family → its module below `reasoning_gym`."""

_PARSED = "its scorer parses the answer with sympy, which evaluates it: 9**9**9**9 never returns"
_EVALUATED = "its scorer evaluates the answer as Python code"
_NO_REFERENCE = "it has no reference answer, so that a fault of its scorer looks like a wrong answer"

EXCLUDED: Mapping[str, str] = {
    "binary_matrix": _EVALUATED,
    "boxnet": _NO_REFERENCE,
    "codeio": "half of its questions ask for an input with a given output; its scorer accepts one of several",
    "coin_flip": "its scorer gives the answer 0 the full reward for nearly any probability",
    "complex_arithmetic": "its scorer gives the answer nan the full reward (the environment math has its own scorer)",
    "composite": "it is a mixture of other families",
    "countdown": _PARSED,
    "decimal_arithmetic": "its scorer accepts an error of 0.001 where 12 digits are asked (math has its own scorer)",
    "game_of_life": "a board without living cells earns 0.96 on average",
    "game_of_life_halting": "its scorer gives any answer the full reward if the right one is False",
    "graph_color": _NO_REFERENCE,
    "gsm_symbolic": "its templates come from GSM-Symbolic, which has a research licence",
    "intermediate_integration": _PARSED,
    "knight_swap": "the search for a board takes from milliseconds to more than 10 s",
    "n_queens": _EVALUATED,
    "number_sorting": "a list of nan has the full reward, and so has a list whose numbers are wrong by 1",
    "polynomial_equations": "the answer 0 earns 0.39 on average (math has its own scorer)",
    "polynomial_multiplication": _PARSED,
    "propositional_logic": _NO_REFERENCE,
    "puzzle24": _PARSED,
    "rubiks_cube": _NO_REFERENCE,
    "rush_hour": _NO_REFERENCE,
    "simple_integration": _PARSED,
    "spiral_matrix": _EVALUATED,
    "string_insertion": _EVALUATED,
    "time_intervals": "one time of the day earns 0.5 on average (math has its own scorer)",
}
"""The reason for each family of the library that is not offered."""


def check_family(name: object) -> str:
    """Return *name* if it is an offered family.

    Raises:
        ValueError: It is not; the text has the reason, or names that are close.
    """
    if isinstance(name, str) and name in MODULES:
        return name
    if isinstance(name, str) and name in EXCLUDED:
        raise ValueError(f"family: {name!r} is not offered: {EXCLUDED[name]}")
    if not isinstance(name, str):
        raise ValueError(f"family: {name!r:.100} is not a text; write the name of a family, such as 'chain_sum'")
    close = difflib.get_close_matches(name[:100], MODULES, n=3, cutoff=0.5) or sorted(MODULES)[:3]
    raise ValueError(f"family: there is no {name[:100]!r}; {', '.join(close)} are close or first of {len(MODULES)}")
