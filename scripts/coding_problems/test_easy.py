"""Easy problems to test on: one idea each."""

from __future__ import annotations

from .problem import Problem, each

PROBLEMS = [
    Problem(
        slug="acronym",
        level=1,
        topic="strings",
        text="""Make an acronym of the words of a text that begin with a capital letter A to Z; leave out the others,
        whatever they begin with.""",
        reference="""def acronym(text: str) -> str:
    return "".join(word[0] for word in text.split() if "A" <= word[0] <= "Z")
""",
        wrong=('word[0] for word in text.split() if "A" <= word[0] <= "Z"', "word[0].upper() for word in text.split()"),
        examples=[(("United States of America",), "USA"), (("none here",), "")],
        hidden=each(
            "",
            "X",
            "Light Amplification by Stimulated Emission of Radiation",
            "a B c D",
            "  Two  Words ",
            "1st Place",
            "North-West Wind",
            "\u00c9cole A",
            "ALL CAPS",
        ),
    ),
    Problem(
        slug="clock_angle",
        level=1,
        topic="geometry",
        text="""Give the smaller angle in degrees between the hands of a twelve-hour clock. The hour hand moves on
        evenly. Hours are from 0 to 23.""",
        reference="""def clock_angle(hour: int, minute: int) -> float:
    angle = abs(30 * (hour % 12) - 5.5 * minute) % 360
    return float(min(angle, 360 - angle))
""",
        wrong=("min(angle, 360 - angle)", "angle"),
        examples=[((3, 0), 90.0), ((12, 30), 165.0)],
        hidden=[(0, 0), (6, 0), (9, 0), (1, 5), (23, 59), (11, 1), (15, 15), (10, 10), (18, 45)],
    ),
    Problem(
        slug="rotate_left",
        level=1,
        topic="lists",
        text="Rotate a list to the left by so many places; a negative number rotates it to the right.",
        reference="""def rotate_left(items: list[int], places: int) -> list[int]:
    if not items:
        return []
    places %= len(items)
    return items[places:] + items[:places]
""",
        wrong=("    places %= len(items)\n", ""),
        examples=[(([1, 2, 3, 4], 1), [2, 3, 4, 1]), (([1, 2, 3], -1), [3, 1, 2])],
        hidden=[
            ([], 3),
            ([1], 5),
            ([1, 2], 0),
            ([1, 2, 3], 3),
            ([1, 2, 3], 4),
            ([1, 2, 3], -4),
            (list(range(20)), 1007),
            ([5, 6], -3),
            ([9, 8, 7], -300),
        ],
    ),
    Problem(
        slug="count_inside",
        level=1,
        topic="geometry",
        text="Count the points [x, y] that are within the radius of the origin; those on the circle count.",
        reference="""def count_inside(points: list[list[int]], radius: int) -> int:
    return sum(x * x + y * y <= radius * radius for x, y in points)
""",
        wrong=("<=", "<"),
        examples=[(([[0, 0], [3, 4], [4, 4]], 5), 2), (([], 1), 0)],
        hidden=[
            ([[0, 0]], 0),
            ([[1, 0], [0, 1], [1, 1]], 1),
            ([[-3, -4]], 5),
            ([[5, 12], [12, 5]], 13),
            ([[9, 9]], 1),
            ([[x, y] for x in range(-6, 7) for y in range(-6, 7)], 5),
            ([[8, 6], [6, 8], [10, 0]], 10),
            ([[0, -2], [2, 0]], 2),
        ],
    ),
    Problem(
        slug="swap_pairs",
        level=1,
        topic="strings",
        text="""Exchange the first and second character of a text, the third and fourth, and so on; a last single one
        stays.""",
        reference="""def swap_pairs(text: str) -> str:
    return "".join(text[i : i + 2][::-1] for i in range(0, len(text), 2))
""",
        wrong=("range(0, len(text), 2)", "range(0, len(text) - 1, 2)"),
        examples=[(("abcd",), "badc"), (("abc",), "bac")],
        hidden=each("", "a", "ab", "12345", "aa bb", "xyzzy", "k" * 31 + "l", "even", "\u00fcber!"),
    ),
    Problem(
        slug="divisors",
        level=1,
        topic="numbers",
        text="""List all divisors of a positive integer, smallest first. It may be as large as 1,000,000,000,000.""",
        reference="""def divisors(number: int) -> list[int]:
    small, large, d = [], [], 1
    while d * d <= number:
        if number % d == 0:
            small.append(d)
            if d * d != number:
                large.append(number // d)
        d += 1
    return small + large[::-1]
""",
        wrong=("if d * d != number", "if True"),
        examples=[((12,), [1, 2, 3, 4, 6, 12]), ((7,), [1, 7])],
        hidden=each(1, 2, 4, 36, 97, 360, 1024, 10**6, 999983, 10**12),
    ),
    Problem(
        slug="merge_counts",
        level=1,
        topic="dictionaries",
        text="Add two dictionaries of counts key by key; keys whose sum is 0 are left out.",
        reference="""def merge_counts(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    sums = {key: first.get(key, 0) + second.get(key, 0) for key in [*first, *second]}
    return {key: value for key, value in sums.items() if value != 0}
""",
        wrong=("if value != 0", "if value > 0"),
        examples=[(({"a": 1}, {"a": 2, "b": 1}), {"a": 3, "b": 1}), (({"a": 1}, {"a": -1}), {})],
        hidden=[
            ({}, {}),
            ({"x": 0}, {}),
            ({}, {"y": -4}),
            ({"a": 2, "b": 3}, {"c": 4}),
            ({"k": -5}, {"k": 2}),
            ({"": 1}, {"": 1}),
            ({"p": 1, "q": -1}, {"p": -1, "q": -1}),
            ({"z": 10**12}, {"z": 1}),
        ],
    ),
    Problem(
        slug="is_pangram",
        revision=2,
        level=1,
        topic="strings",
        text="Say whether a text has every letter from a to z at least once, in either case.",
        reference="""def is_pangram(text: str) -> bool:
    return set("abcdefghijklmnopqrstuvwxyz") <= set(text.lower())
""",
        wrong=("set(text.lower())", "set(text)"),
        examples=[(("The quick brown fox jumps over the lazy dog",), True), (("hello",), False)],
        hidden=each(
            "",
            "abcdefghijklmnopqrstuvwxyz",
            "ABCDEFGHIJKLMNOPQRSTUVWXYZ",
            "abcdefghijklmnopqrstuvwxy",
            "Pack my box with five dozen liquor jugs.",
            "a" * 26,
            "bcdefghijklmnopqrstuvwxyz \u00e4",
            "Sphinx of black quartz, judge my vow!",
            "Zabcdefghijklmnopqrstuvwxy",
        ),
    ),
    Problem(
        slug="change_coins",
        level=1,
        topic="numbers",
        text="""Pay an amount of cents with coins of 50, 20, 10, 5, 2 and 1 cents, with as few coins as can be. Give
        the number of each coin, the 50s first.""",
        reference="""def change_coins(cents: int) -> list[int]:
    counts = []
    for coin in (50, 20, 10, 5, 2, 1):
        counts.append(cents // coin)
        cents %= coin
    return counts
""",
        wrong=("cents %= coin", "cents -= coin"),
        examples=[((88,), [1, 1, 1, 1, 1, 1]), ((40,), [0, 2, 0, 0, 0, 0])],
        hidden=each(0, 1, 4, 9, 50, 99, 100, 1234, 70, 10**9 + 3),
    ),
    Problem(
        slug="longest_increase",
        level=1,
        topic="lists",
        text="""Give the length of the longest run of neighbours in a list in which each is larger than the one
        before.""",
        reference="""def longest_increase(numbers: list[int]) -> int:
    best = run = 0
    last = None
    for number in numbers:
        run = run + 1 if last is not None and number > last else 1
        best, last = max(best, run), number
    return best
""",
        wrong=("number > last", "number >= last"),
        examples=[(([1, 2, 2, 3, 4],), 3), (([],), 0)],
        hidden=each(
            [5],
            [3, 2, 1],
            [1, 1, 1],
            [1, 2, 3],
            [0, 1, 0, 1, 2],
            [-3, -2, -1, -1, 0],
            list(range(200)),
            [9, 1, 2, 3, 0, 4, 5, 6, 7],
            [2, 2, 3, 3, 4],
        ),
    ),
    Problem(
        slug="word_lengths_table",
        level=1,
        topic="input and output",
        text="""Read one line of words. Print for each length of a word that occurs, shortest first, one line: the
        length, a colon, a space, and how many words have it. For an empty line print nothing.""",
        reference="""import sys
from collections import Counter
counts = Counter(map(len, sys.stdin.readline().split()))
for length in sorted(counts):
    print(f"{length}: {counts[length]}")
""",
        wrong=("sorted(counts)", "counts"),
        examples=[("a bb c\n", "1: 2\n2: 1\n"), ("\n", "")],
        hidden=[
            "one\n",
            "three one two four\n",
            "aa aa aa\n",
            "   \n",
            "x yy zzz yy x\n",
            "longest long longer\n",
            "a  b   c\n",
            "ddd cc b aaaa\n",
            " ".join(["w" * (n % 7 + 1) for n in range(60)]) + "\n",
        ],
    ),
]
