"""Easy problems to train on: one idea each."""

from __future__ import annotations

from .problem import Problem, each

PROBLEMS = [
    Problem(
        slug="count_vowels",
        level=1,
        topic="strings",
        text="Count the vowels (a, e, i, o, u, in either case) in a text.",
        reference="""def count_vowels(text: str) -> int:
    return sum(letter in "aeiou" for letter in text.lower())
""",
        wrong=("text.lower()", "text"),
        examples=[(("Ocean",), 3), (("sky",), 0)],
        hidden=each("", "AEIOU", "Queueing", "rhythm", "a" * 500, "Hello, World!", "1234", "yYy aA", "\n\tE"),
    ),
    Problem(
        slug="second_largest",
        level=1,
        topic="lists",
        text="Give the second largest of the different values in a list, or None if there are fewer than two.",
        reference="""def second_largest(numbers: list[int]) -> int | None:
    values = sorted(set(numbers))
    return values[-2] if len(values) > 1 else None
""",
        wrong=("sorted(set(numbers))", "sorted(numbers)"),
        examples=[(([3, 9, 4],), 4), (([5, 5],), None)],
        hidden=each([], [1], [7, 7, 3], [-1, -2, -3], [2, 2, 1, 1], [0, 0, 0], [10, 9], list(range(100)), [4, 9, 9, 4]),
    ),
    Problem(
        slug="seconds_as_clock",
        level=1,
        topic="formatting",
        text="""Write a number of seconds as H:MM:SS: the hours without leading zeros, minutes and seconds with two
        digits. A negative number has a minus sign in front.""",
        reference="""def seconds_as_clock(seconds: int) -> str:
    sign, rest = ("-" if seconds < 0 else ""), abs(seconds)
    return f"{sign}{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
""",
        wrong=("abs(seconds)", "seconds"),
        examples=[((3661,), "1:01:01"), ((-5,), "-0:00:05")],
        hidden=each(0, 59, 60, 3599, 3600, 86400, 360000, -1, -3661, 45296),
    ),
    Problem(
        slug="is_rotation",
        revision=2,
        level=1,
        topic="strings",
        text="""Say whether the second text is a rotation of the first: cut it somewhere and swap the two parts.""",
        reference="""def is_rotation(first: str, second: str) -> bool:
    return len(first) == len(second) and second in first + first
""",
        wrong=("len(first) == len(second) and ", ""),
        examples=[(("stone", "nesto"), True), (("stone", "notes"), False)],
        hidden=[
            ("", ""),
            ("a", "a"),
            ("a", ""),
            ("ab", "ba"),
            ("abab", "ab"),
            ("aab", "aba"),
            ("aab", "abb"),
            ("abcd", "dcba"),
            ("xyz" * 50, "zxy" * 50),
            ("ab", "abab"),
        ],
    ),
    Problem(
        slug="digit_sum_until_one",
        level=1,
        topic="numbers",
        text="""Add up the digits of a non-negative integer, and again those of the sum, until one digit is left.""",
        reference="""def digit_sum_until_one(number: int) -> int:
    while number > 9:
        number = sum(map(int, str(number)))
    return number
""",
        wrong=("while number > 9", "if number > 9"),
        examples=[((987,), 6), ((4,), 4)],
        hidden=each(0, 9, 10, 18, 99, 199, 999999, 10**30 - 1, 12345678987654321, 19),
    ),
    Problem(
        slug="run_lengths",
        level=1,
        topic="strings",
        text="Turn a text into a list of [character, count] pairs, one for each run of equal characters.",
        reference="""def run_lengths(text: str) -> list[list]:
    runs: list[list] = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return runs
""",
        wrong=("runs and runs[-1][0] == letter", "runs and runs[-1][0] == letter and runs[-1][1] < 9"),
        examples=[(("aab",), [["a", 2], ["b", 1]]), (("aba",), [["a", 1], ["b", 1], ["a", 1]])],
        hidden=each("", "x", "zzzzzzzzzzzz", "aAa", "112233", "  \t", "abcabc", "q" * 40 + "p", "mississippi"),
    ),
    Problem(
        slug="interleave",
        level=1,
        topic="lists",
        text="""Take items from two lists in turn, beginning with the first list; when one is used up, the rest of the
        other follows.""",
        reference="""def interleave(first: list[int], second: list[int]) -> list[int]:
    shared = min(len(first), len(second))
    taken = [item for pair in zip(first, second) for item in pair]
    return taken + first[shared:] + second[shared:]
""",
        wrong=(" + first[shared:] + second[shared:]", ""),
        examples=[(([1, 3], [2, 4]), [1, 2, 3, 4]), (([1], [2, 5, 6]), [1, 2, 5, 6])],
        hidden=[
            ([], []),
            ([1], []),
            ([], [1]),
            ([1, 2, 3], [9]),
            ([0, 0], [1, 1]),
            ([5], [6]),
            (list(range(50)), list(range(100, 120))),
            ([-1, -2], [3, 4, 5, 6]),
        ],
    ),
    Problem(
        slug="leap_years_between",
        level=1,
        topic="calendar",
        text="""Count the leap years from the first year to the last, both included: years divisible by 4, but those
        divisible by 100 only if they are divisible by 400 too. If the first is after the last there are none.""",
        reference="""def leap_years_between(first: int, last: int) -> int:
    return sum(year % 4 == 0 and (year % 100 != 0 or year % 400 == 0) for year in range(first, last + 1))
""",
        wrong=(" or year % 400 == 0", ""),
        examples=[((2019, 2024), 2), ((1900, 1903), 0)],
        hidden=[
            (2000, 2000),
            (1900, 1900),
            (1, 400),
            (2001, 2003),
            (1996, 2004),
            (2024, 2024),
            (2024, 2023),
            (1600, 2400),
            (1999, 2001),
        ],
    ),
    Problem(
        slug="caesar",
        level=1,
        topic="strings",
        text="""Shift each letter a to z and A to Z by some places in the alphabet, round the end, keeping its case;
        leave all else. The shift may be negative or large.""",
        reference="""def caesar(text: str, shift: int) -> str:
    def move(letter: str, base: int) -> str:
        return chr((ord(letter) - base + shift) % 26 + base)
    return "".join(
        move(c, 97) if "a" <= c <= "z" else move(c, 65) if "A" <= c <= "Z" else c for c in text
    )
""",
        wrong=('move(c, 65) if "A" <= c <= "Z"', 'move(c, 97) if "A" <= c <= "Z"'),
        examples=[(("abz!", 1), "bca!"), (("Hi", -1), "Gh")],
        hidden=[
            ("", 5),
            ("XYZ", 3),
            ("xyz", 29),
            ("Hello, World", 13),
            ("abc", 0),
            ("abc", -27),
            ("A1b2", 25),
            ("\u00e9A", 1),
            ("Zz" * 30, 260001),
        ],
    ),
    Problem(
        slug="common_prefix",
        level=1,
        topic="strings",
        text="Find the longest text that all the given texts begin with; for no texts it is empty.",
        reference="""def common_prefix(texts: list[str]) -> str:
    prefix = ""
    for letters in zip(*texts):
        if len(set(letters)) > 1:
            break
        prefix += letters[0]
    return prefix
""",
        wrong=("break", "continue"),
        examples=[((["flow", "flower"],), "flow"), ((["dog", "cat"],), "")],
        hidden=each(
            [],
            ["only"],
            ["", "a"],
            ["ab", "ab"],
            ["abc", "xbc"],
            ["interview", "internet", "interval"],
            ["a" * 50, "a" * 49],
            ["Aa", "aa"],
            ["abcd", "abxd"],
        ),
    ),
    Problem(
        slug="moving_average",
        level=1,
        topic="lists",
        text="""Give the averages of each window of so many neighbouring numbers, from left to right; none if the list
        is shorter than the window. The width is at least 1.""",
        reference="""def moving_average(numbers: list[float], width: int) -> list[float]:
    return [sum(numbers[i : i + width]) / width for i in range(len(numbers) - width + 1)]
""",
        wrong=("len(numbers) - width + 1", "len(numbers) - width"),
        examples=[(([1, 2, 3, 4], 2), [1.5, 2.5, 3.5]), (([1], 2), [])],
        hidden=[
            ([], 1),
            ([5], 1),
            ([1, 2, 3], 3),
            ([0.1, 0.2, 0.3], 2),
            (list(range(30)), 7),
            ([-1, 1, -1, 1], 2),
            ([10, 20], 2),
            ([1e9, 1e-9, 3.0], 1),
            ([2, 4, 6], 4),
        ],
    ),
    Problem(
        slug="perfect_squares_up_to",
        level=1,
        topic="numbers",
        text="List all squares of positive integers that are at most the limit, smallest first.",
        reference="""def perfect_squares_up_to(limit: int) -> list[int]:
    squares, n = [], 1
    while n * n <= limit:
        squares.append(n * n)
        n += 1
    return squares
""",
        wrong=("n * n <= limit", "n * n < limit"),
        examples=[((10,), [1, 4, 9]), ((16,), [1, 4, 9, 16])],
        hidden=each(0, 1, 2, 3, 4, -7, 99, 100, 101, 2500),
    ),
    Problem(
        slug="title_case",
        level=1,
        topic="strings",
        text="""Write each word with a capital first letter and the rest small. Words are parted by spaces, and the
        spaces stay as they are. An apostrophe does not begin a new word.""",
        reference="""def title_case(text: str) -> str:
    return " ".join(word[:1].upper() + word[1:].lower() for word in text.split(" "))
""",
        wrong=('" ".join(word[:1].upper() + word[1:].lower() for word in text.split(" "))', "text.title()"),
        examples=[(("the OLD man",), "The Old Man"), (("it's me",), "It's Me")],
        hidden=each(
            "", " ", "a", "don't STOP", "two  spaces", " lead", "trail ", "x-ray", "o'neil's mcBAIN", "3rd day"
        ),
    ),
    Problem(
        slug="missing_number",
        level=1,
        topic="lists",
        text="""A list holds all integers from 0 to n but one, in any order; n is its length. Find the one that is
        missing.""",
        reference="""def missing_number(numbers: list[int]) -> int:
    n = len(numbers)
    return n * (n + 1) // 2 - sum(numbers)
""",
        wrong=("n * (n + 1) // 2 - sum(numbers)", "next((i for i, x in enumerate(sorted(numbers)) if x != i), 0)"),
        examples=[(([3, 0, 1],), 2), (([1, 2],), 0)],
        hidden=each(
            [0],
            [1],
            [],
            [0, 1, 2],
            [4, 2, 1, 0],
            [9, 6, 4, 2, 3, 5, 7, 0, 1],
            list(range(1, 300)),
            [x for x in range(200) if x != 137],
            [0, 2],
        ),
    ),
    Problem(
        slug="transpose",
        level=1,
        topic="matrices",
        text="""Transpose a matrix, given as a list of rows of equal length. A matrix without rows stays as it is.""",
        reference="""def transpose(rows: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*rows)]
""",
        wrong=(
            "[list(column) for column in zip(*rows)]",
            "[[rows[j][i] for j in range(len(rows))] for i in range(len(rows))]",
        ),
        examples=[(([[1, 2], [3, 4]],), [[1, 3], [2, 4]]), (([[1, 2, 3]],), [[1], [2], [3]])],
        hidden=each(
            [],
            [[7]],
            [[1], [2]],
            [[1, 2, 3], [4, 5, 6]],
            [[0] * 5] * 2,
            [[1, 2], [3, 4], [5, 6]],
            [[i * j for i in range(9)] for j in range(4)],
            [[-1, -2]],
        ),
    ),
    Problem(
        slug="bounded",
        level=1,
        topic="numbers",
        text="""Bring each number into the range from low to high: smaller ones become low, larger ones high. If low is
        above high, the two are exchanged first.""",
        reference="""def bounded(numbers: list[int], low: int, high: int) -> list[int]:
    low, high = min(low, high), max(low, high)
    return [max(low, min(high, number)) for number in numbers]
""",
        wrong=("low, high = min(low, high), max(low, high)", "pass"),
        examples=[(([1, 5, 9], 2, 6), [2, 5, 6]), (([1, 5, 9], 6, 2), [2, 5, 6])],
        hidden=[
            ([], 0, 1),
            ([0], 0, 0),
            ([-5, 5], -1, 1),
            ([3, 3], 4, 4),
            ([1, 2, 3], 3, 1),
            ([10, -10], 5, -5),
            (list(range(20)), 7, 11),
            ([100], -3, 3),
            ([0, 1], 9, 8),
        ],
    ),
    Problem(
        slug="most_common_word",
        level=1,
        topic="dictionaries",
        text="""Find the word that occurs most often, whatever its case; words are runs of the letters a to z. Of
        several, give the one that comes first in the alphabet. Answer in small letters; with no word at all,
        the empty text.""",
        reference="""import re
from collections import Counter

def most_common_word(text: str) -> str:
    counts = Counter(re.findall("[a-z]+", text.lower()))
    return min(counts, key=lambda word: (-counts[word], word), default="")
""",
        wrong=("(-counts[word], word)", "-counts[word]"),
        examples=[(("The cat and the dog",), "the"), (("b a",), "a")],
        hidden=each(
            "",
            "123",
            "z z y y",
            "One. one, ONE! two",
            "a-b-a",
            "don't",
            "x",
            "zeta alpha zeta alpha",
            "b a c b c a",
            "to be or not to be",
        ),
    ),
    Problem(
        slug="steps_to_one",
        level=1,
        topic="numbers",
        text="""Halve a positive number if it is even, else triple it and add one. Count how often until it is 1.""",
        reference="""def steps_to_one(number: int) -> int:
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps
""",
        wrong=("steps = 0", "steps = 1"),
        examples=[((6,), 8), ((1,), 0)],
        hidden=each(2, 3, 4, 7, 27, 97, 1024, 871, 6171, 2**60),
    ),
    Problem(
        slug="without_repeats",
        level=1,
        topic="lists",
        text="Drop every item that came before in the list; the others keep their order.",
        reference="""def without_repeats(items: list[int]) -> list[int]:
    return list(dict.fromkeys(items))
""",
        wrong=("list(dict.fromkeys(items))", "sorted(set(items))"),
        examples=[(([3, 1, 3, 2, 1],), [3, 1, 2]), (([],), [])],
        hidden=each(
            [1], [1, 1, 1], [2, 1], [5, 4, 5, 4, 3], [0, -1, 0], list(range(50)) * 3, [9, 8, 7, 8, 9], [100, 1, 100, 1]
        ),
    ),
    Problem(
        slug="initials",
        level=1,
        topic="strings",
        text="""Give the initials of a name: the first letter of each part, in capitals, each with a dot after it.
        Parts are parted by blanks or hyphens, one or several.""",
        reference="""import re

def initials(name: str) -> str:
    return "".join(part[0].upper() + "." for part in re.split(r"[\\s-]+", name) if part)
""",
        wrong=('re.split(r"[\\s-]+", name)', "name.split()"),
        examples=[(("Ada Lovelace",), "A.L."), (("jean-paul sartre",), "J.P.S.")],
        hidden=each("", "x", "  padded  name ", "a - b", "Anna-Lena von Ha", "--", "Mary  Ann", "one\ttwo", "Q-R-S T"),
    ),
    Problem(
        slug="sum_of_lines",
        level=1,
        topic="input and output",
        text="""The first line has a number n; n lines follow with some integers each, parted by spaces, perhaps none.
        Print the sum of each of these lines, one a line.""",
        reference="""for _ in range(int(input())):
    print(sum(map(int, input().split())))
""",
        wrong=("sum(map(int, input().split()))", "sum(map(int, input().split()[:2]))"),
        examples=[("2\n1 2 3\n4\n", "6\n4\n"), ("1\n\n", "0\n")],
        hidden=[
            "0\n",
            "1\n5\n",
            "3\n1 1\n\n2 2 2\n",
            "1\n-1 1\n",
            "2\n1000000000000 1\n7 7\n",
            "1\n1 2 3 4 5 6 7 8 9\n",
            "4\n0\n0\n0\n0\n",
            "2\n-5 -6 -7\n3 3 3\n",
            "1\n" + " ".join(["1"] * 500) + "\n",
        ],
    ),
    Problem(
        slug="triangle_kind",
        level=1,
        topic="geometry",
        text="""Three side lengths: say "equilateral", "isosceles" (just two are equal) or "scalene", or "none" if no
        triangle with an area has these sides.""",
        reference="""def triangle_kind(a: int, b: int, c: int) -> str:
    x, y, z = sorted((a, b, c))
    if x <= 0 or x + y <= z:
        return "none"
    return ("equilateral", "isosceles", "scalene")[len({a, b, c}) - 1]
""",
        wrong=("x + y <= z", "x + y < z"),
        examples=[((3, 3, 3), "equilateral"), ((3, 4, 5), "scalene")],
        hidden=[
            (2, 2, 3),
            (3, 2, 2),
            (1, 2, 3),
            (1, 1, 2),
            (0, 0, 0),
            (5, 1, 1),
            (-3, -3, -3),
            (7, 8, 9),
            (10, 10, 19),
            (10, 10, 20),
        ],
    ),
]
