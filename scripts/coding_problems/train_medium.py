"""Medium problems to train on: a known technique, or several rules at once."""

from __future__ import annotations

from .problem import Problem, each

PROBLEMS = [
    Problem(
        slug="balanced_brackets",
        revision=2,
        level=2,
        topic="stacks",
        text="""Say whether the brackets (), [] and {} of a text are balanced and properly nested. Other characters do
        not matter.""",
        reference="""def balanced_brackets(text: str) -> bool:
    pairs, waiting = {")": "(", "]": "[", "}": "{"}, []
    for letter in text:
        if letter in "([{":
            waiting.append(letter)
        elif letter in pairs and (not waiting or waiting.pop() != pairs[letter]):
            return False
    return not waiting
""",
        wrong=("return not waiting", "return True"),
        examples=[(("a(b[c])",), True), (("(]",), False)],
        hidden=each("", "((", "))", "([)]", "{[()()]}", "]", "(" * 5000 + ")" * 5000, "x{y", "()(", "f(a[1], {2: 3})"),
    ),
    Problem(
        slug="merge_intervals",
        level=2,
        topic="sorting",
        text="""Merge intervals [start, end] that overlap or touch; give them in order of their starts.""",
        reference="""def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:
    merged: list[list[int]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged
""",
        wrong=("max(merged[-1][1], end)", "end"),
        examples=[(([[1, 3], [2, 5], [8, 9]],), [[1, 5], [8, 9]]), (([[1, 2], [2, 3]],), [[1, 3]])],
        hidden=each(
            [],
            [[1, 1]],
            [[1, 9], [2, 3]],
            [[5, 6], [1, 2]],
            [[1, 10], [2, 3], [4, 12]],
            [[0, 0], [0, 0]],
            [[-5, -1], [-3, 2], [4, 4]],
            [[i, i + 1] for i in range(0, 60, 3)],
            [[1, 4], [0, 2], [3, 5]],
        ),
    ),
    Problem(
        slug="roman_value",
        level=2,
        topic="parsing",
        text="""Give the value of a Roman numeral (I V X L C D M). A smaller numeral right before a larger one is
        subtracted.""",
        reference="""def roman_value(numeral: str) -> int:
    values = [dict(I=1, V=5, X=10, L=50, C=100, D=500, M=1000)[letter] for letter in numeral]
    return sum(-v if any(v < w for w in values[i + 1 : i + 2]) else v for i, v in enumerate(values))
""",
        wrong=("-v if any(v < w for w in values[i + 1 : i + 2]) else v", "v"),
        examples=[(("XIV",), 14), (("MMXXIV",), 2024)],
        hidden=each("I", "IV", "IX", "XL", "XC", "CD", "CM", "MCMXCIV", "DCCCXC", "MMMCMXCIX", "LXXXVIII"),
    ),
    Problem(
        slug="spiral_order",
        level=2,
        topic="matrices",
        text="""Read a matrix in a spiral: from the top left to the right, then down, left, up and so on inwards.""",
        reference="""def spiral_order(rows: list[list[int]]) -> list[int]:
    order = []
    rest = [tuple(row) for row in rows]
    while rest:
        order += rest[0]
        rest = list(zip(*rest[1:]))[::-1]
    return order
""",
        wrong=("list(zip(*rest[1:]))[::-1]", "[row[::-1] for row in rest[1:]]"),
        examples=[(([[1, 2], [4, 3]],), [1, 2, 3, 4]), (([[1, 2, 3]],), [1, 2, 3])],
        hidden=each(
            [],
            [[5]],
            [[1], [2], [3]],
            [[1, 2, 3], [8, 9, 4], [7, 6, 5]],
            [[1, 2, 3, 4], [8, 7, 6, 5]],
            [[i * 6 + j for j in range(6)] for i in range(4)],
            [[1, 2], [6, 3], [5, 4]],
            [[i * 9 + j for j in range(9)] for i in range(9)],
        ),
    ),
    Problem(
        slug="group_anagrams",
        level=2,
        topic="dictionaries",
        text="""Group words that are anagrams of each other. Words in a group, and groups by their first word, keep the
        order in which they come.""",
        reference="""def group_anagrams(words: list[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for word in words:
        groups.setdefault("".join(sorted(word)), []).append(word)
    return list(groups.values())
""",
        wrong=('"".join(sorted(word))', '"".join(sorted(set(word)))'),
        examples=[((["tea", "tan", "eat"],), [["tea", "eat"], ["tan"]]), (([],), [])],
        hidden=each(
            ["a"],
            ["", ""],
            ["ab", "ba", "abb", "bab"],
            ["aab", "abb", "aba"],
            ["x", "y", "x"],
            ["listen", "silent", "enlist", "tinsel", "list"],
            ["Ab", "ba"],
            ["aaa", "aa", "a"],
            [str(n) for n in range(100, 140)],
        ),
    ),
    Problem(
        slug="evaluate_postfix",
        level=2,
        topic="stacks",
        text="""Evaluate an expression in postfix notation: integers and the operators + - * /, parted by spaces. A
        division drops the fraction (7 / -2 is -3). The expression is well formed and never divides by 0.""",
        reference="""def evaluate_postfix(expression: str) -> int:
    stack = []
    for token in expression.split():
        if token in ("+", "-", "*", "/"):
            b, a = stack.pop(), stack.pop()
            quotient = 0 if token != "/" else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            stack.append({"+": a + b, "-": a - b, "*": a * b, "/": quotient}[token])
        else:
            stack.append(int(token))
    return stack[0]
""",
        wrong=("abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)", "a // b"),
        examples=[(("2 3 + 4 *",), 20), (("7 -2 /",), -3)],
        hidden=each(
            "5",
            "-5",
            "1 2 -",
            "-7 2 /",
            "-8 -3 /",
            "4 13 5 / +",
            "2 3 4 * +",
            "10 6 9 3 + -11 * / * 17 + 5 +",
            "0 5 /",
            "99999999999 99999999999 *",
        ),
    ),
    Problem(
        slug="longest_unique_span",
        level=2,
        topic="sliding window",
        text="Give the length of the longest piece of a text without a repeated character.",
        reference="""def longest_unique_span(text: str) -> int:
    seen: dict[str, int] = {}
    start = best = 0
    for place, letter in enumerate(text):
        start = max(start, seen.get(letter, -1) + 1)
        seen[letter] = place
        best = max(best, place - start + 1)
    return best
""",
        wrong=("max(start, seen.get(letter, -1) + 1)", "seen.get(letter, start - 1) + 1"),
        examples=[(("abcab",), 3), (("aaa",), 1)],
        hidden=each("", "z", "abba", "dvdf", "abcdefg", "tmmzuxt", "aA", "abcabcbb" * 100, "  ", "pwwkew"),
    ),
    Problem(
        slug="binary_search_first",
        level=2,
        topic="searching",
        text="""Find the first index at which a value stands in a sorted list, or -1. Lists may
        have a million items.""",
        reference="""from bisect import bisect_left

def binary_search_first(numbers: list[int], value: int) -> int:
    place = bisect_left(numbers, value)
    return place if place < len(numbers) and numbers[place] == value else -1
""",
        wrong=("place if place < len(numbers) and numbers[place] == value else -1", "place"),
        examples=[(([1, 2, 2, 3], 2), 1), (([1, 3], 2), -1)],
        hidden=[
            ([], 1),
            ([5], 5),
            ([5], 6),
            ([5], 4),
            ([1, 1, 1, 1], 1),
            ([-3, 0, 7], -3),
            ([-3, 0, 7], 7),
            (list(range(0, 2000, 2)), 998),
            (list(range(0, 2000, 2)), 999),
        ],
    ),
    Problem(
        slug="flatten",
        level=2,
        topic="recursion",
        text="""Make one flat list of the integers in a list of integers and lists, nested to any depth up to 200.""",
        reference="""def flatten(nested: list) -> list[int]:
    flat = []
    for item in nested:
        if isinstance(item, list):
            flat += flatten(item)
        else:
            flat.append(item)
    return flat
""",
        wrong=("flat += flatten(item)", "flat += item"),
        examples=[(([1, [2, [3]]],), [1, 2, 3]), (([[]],), [])],
        hidden=each(
            [],
            [1],
            [[[]], []],
            [[1], [2], [3]],
            [[[[4]]]],
            [1, [2, [3, [4, [5]]]]],
            [[0, -1], 2, [[3], []]],
            [[n, [n]] for n in range(30)],
            [[], [[], [7]]],
        ),
    ),
    Problem(
        slug="rows_of_triangle",
        level=2,
        topic="numbers",
        text="""Give the first rows of Pascal's triangle: each row begins and ends with 1, and each number between is
        the sum of the two above it.""",
        reference="""def rows_of_triangle(count: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for _ in range(count):
        above = rows[-1] if rows else []
        rows.append([1] + [a + b for a, b in zip(above, above[1:])] + ([1] if above else []))
    return rows
""",
        wrong=("([1] if above else [])", "[1]"),
        examples=[((3,), [[1], [1, 1], [1, 2, 1]]), ((0,), [])],
        hidden=each(1, 2, 4, 5, 6, 10, 17, 35),
    ),
    Problem(
        slug="compress_ranges",
        level=2,
        topic="formatting",
        text="""Write a list of integers, sorted and without repeats, as ranges: three or more neighbours become
        "first-last", others stand alone; all joined with commas. There are no negative numbers.""",
        reference="""def compress_ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs)
""",
        wrong=("len(r) > 2", "len(r) > 1"),
        examples=[(([1, 2, 3, 7],), "1-3,7"), (([1, 2],), "1,2")],
        hidden=each(
            [],
            [0],
            [5, 6],
            [1, 3, 5],
            [1, 2, 4, 5, 6],
            list(range(50)),
            [8, 9, 10, 12, 13],
            [0, 1, 2, 3, 100],
            [99, 100, 101],
        ),
    ),
    Problem(
        slug="prime_factors",
        level=2,
        topic="numbers",
        text="""Give the prime factors of an integer of at least 1 as [prime, exponent] pairs, smallest prime first. It
        may be as large as 1,000,000,000,000.""",
        reference="""def prime_factors(number: int) -> list[list[int]]:
    factors, p = [], 2
    while p * p <= number:
        exponent = 0
        while number % p == 0:
            number, exponent = number // p, exponent + 1
        if exponent:
            factors.append([p, exponent])
        p += 1
    return factors + ([[number, 1]] if number > 1 else [])
""",
        wrong=("([[number, 1]] if number > 1 else [])", "[]"),
        examples=[((12,), [[2, 2], [3, 1]]), ((1,), [])],
        hidden=each(2, 4, 97, 360, 1024, 9699690, 999983, 10**12, 999999000001, 49 * 121),
    ),
    Problem(
        slug="word_wrap",
        level=2,
        topic="formatting",
        text="""Break a text into lines of at most so many characters: put as many words on a line as fit, with single
        spaces between them. A word that is longer than a line gets a line of its own, uncut.""",
        reference="""def word_wrap(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines
""",
        wrong=("len(lines[-1]) + 1 + len(word) <= width", "len(lines[-1]) + len(word) <= width"),
        examples=[(("the cat sat", 7), ["the cat", "sat"]), (("a bb", 3), ["a", "bb"])],
        hidden=[
            ("", 5),
            ("word", 2),
            ("a b c d", 1),
            ("a b c d", 3),
            ("  many   blanks here ", 11),
            ("aaaa bb aaaa", 4),
            ("one two three four five six seven", 9),
            ("x " * 60, 20),
            ("exactly ten", 11),
            ("ab cd", 4),
        ],
    ),
    Problem(
        slug="best_trade",
        level=2,
        topic="dynamic programming",
        text="""Prices of a share, day by day: buy once and sell once on a later day. Give the largest profit, or 0 if
        there is none.""",
        reference="""def best_trade(prices: list[int]) -> int:
    best, lowest = 0, None
    for price in prices:
        lowest = price if lowest is None else min(lowest, price)
        best = max(best, price - lowest)
    return best
""",
        wrong=(
            """    best, lowest = 0, None
    for price in prices:
        lowest = price if lowest is None else min(lowest, price)
        best = max(best, price - lowest)
    return best
""",
            """    return max(prices, default=0) - min(prices, default=0)
""",
        ),
        examples=[(([7, 1, 5, 3, 6],), 5), (([3, 2, 1],), 0)],
        hidden=each(
            [],
            [4],
            [1, 1],
            [9, 1, 2],
            [2, 9, 1, 5],
            [5, 4, 3, 8, 1, 2],
            [0, 100],
            list(range(100, 0, -1)),
            [n * 37 % 101 for n in range(80)],
            [10, 2, 11, 1, 9],
        ),
    ),
    Problem(
        slug="islands",
        level=2,
        topic="graphs",
        text="""A map is a list of rows of '#' (land) and '.' (water), all of one length. Count the islands: land that
        hangs together over sides, not corners.""",
        reference="""def islands(rows: list[str]) -> int:
    land = {(y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell == "#"}
    count = 0
    while land:
        count += 1
        reached = [land.pop()]
        while reached:
            y, x = reached.pop()
            for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
                if near in land:
                    land.remove(near)
                    reached.append(near)
    return count
""",
        wrong=("(y, x + 1), (y, x - 1))", "(y, x + 1), (y, x - 1), (y + 1, x + 1), (y - 1, x - 1))"),
        examples=[((["#.#", "#..", "..#"],), 3), ((["##", "##"],), 1)],
        hidden=each(
            [],
            ["."],
            ["#"],
            ["#.", ".#"],
            [".#", "#."],
            ["#####", "....#", "###.#", "#...#", "#####"],
            ["#.#.#.#.#"] * 5,
            ["#.#.", ".#.#"] * 6,
            ["." * 40] * 10,
            ["#" * 60] * 60,
        ),
    ),
    Problem(
        slug="query_string",
        level=2,
        topic="parsing",
        text="""Parse "a=1&b=2" into a dictionary from each key to the list of its values, in their order. A part
        without "=" has an empty value; only the first "=" of a part counts; empty parts are left out. "+" is a
        space; nothing else is decoded.""",
        reference="""def query_string(text: str) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    for part in text.split("&"):
        if part:
            key, _, value = part.replace("+", " ").partition("=")
            values.setdefault(key, []).append(value)
    return values
""",
        wrong=('.partition("=")', '.rpartition("=")'),
        examples=[(("a=1&b=2&a=3",), {"a": ["1", "3"], "b": ["2"]}), (("x",), {"x": [""]})],
        hidden=each("", "&&", "a=b=c", "=v", "k=", "q=one+two", "a&a&a", "x=1&&y=2&", "a+b=c", "p==q&r"),
    ),
    Problem(
        slug="next_permutation",
        level=2,
        topic="permutations",
        text="""Give the arrangement of the numbers that comes next in lexicographic order; after the last one comes
        the first.""",
        reference="""def next_permutation(numbers: list[int]) -> list[int]:
    result = list(numbers)
    i = len(result) - 2
    while i >= 0 and result[i] >= result[i + 1]:
        i -= 1
    if i < 0:
        return sorted(result)
    j = max(k for k in range(i + 1, len(result)) if result[k] > result[i])
    result[i], result[j] = result[j], result[i]
    return result[: i + 1] + result[i + 1 :][::-1]
""",
        wrong=("result[i] >= result[i + 1]", "result[i] > result[i + 1]"),
        examples=[(([1, 2, 3],), [1, 3, 2]), (([3, 2, 1],), [1, 2, 3])],
        hidden=each(
            [],
            [1],
            [1, 1],
            [1, 1, 5],
            [5, 1, 1],
            [1, 5, 1],
            [2, 3, 3, 1],
            [1, 3, 3, 2, 2],
            [2, 2, 1, 2],
            [*range(20), 30, 29],
        ),
    ),
    Problem(
        slug="version_order",
        level=2,
        topic="sorting",
        text="""Sort version numbers such as "1.10.2" from oldest to newest, comparing their parts as numbers. Missing
        parts count as 0; versions that are equal then keep their order.""",
        reference="""def version_order(versions: list[str]) -> list[str]:
    def key(version: str) -> list[int]:
        parts = [int(part) for part in version.split(".")]
        while parts and parts[-1] == 0:
            parts.pop()
        return parts
    return sorted(versions, key=key)
""",
        wrong=("sorted(versions, key=key)", "sorted(versions)"),
        examples=[((["1.10", "1.9"],), ["1.9", "1.10"]), ((["2", "1.5"],), ["1.5", "2"])],
        hidden=each(
            [],
            ["1"],
            ["1.0", "1"],
            ["1", "1.0"],
            ["10.0", "9.9.9"],
            ["0.0.1", "0"],
            ["1.2.3", "1.2", "1.2.10"],
            ["3.0.0", "2.12", "2.2", "3"],
            [f"1.{n * 7 % 23}" for n in range(20)],
            ["1.01", "1.1"],
        ),
    ),
    Problem(
        slug="meeting_rooms",
        level=2,
        topic="sorting",
        text="""Meetings are [start, end) with start below end. Give the least number of rooms in which all can be
        held; a room is free again at the moment at which a meeting ends.""",
        reference="""def meeting_rooms(meetings: list[list[int]]) -> int:
    moments = sorted([(end, -1) for _, end in meetings] + [(start, 1) for start, _ in meetings])
    most = now = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    return most
""",
        wrong=(
            "sorted([(end, -1) for _, end in meetings] + [(start, 1) for start, _ in meetings])",
            "sorted([(end, 1, -1) for _, end in meetings] + [(start, 0, 1) for start, _ in meetings])\n"
            "    moments = [(moment, change) for moment, _, change in moments]",
        ),
        examples=[(([[1, 3], [2, 4]],), 2), (([[1, 2], [2, 3]],), 1)],
        hidden=each(
            [],
            [[0, 1]],
            [[1, 5], [5, 9], [9, 10]],
            [[0, 10], [1, 2], [2, 3], [3, 4]],
            [[1, 4]] * 6,
            [[0, 30], [5, 10], [15, 20]],
            [[i, i + 5] for i in range(40)],
            [[7, 10], [2, 4]],
            [[0, 2], [1, 3], [2, 4], [3, 5]],
        ),
    ),
    Problem(
        slug="table_of_scores",
        level=2,
        topic="input and output",
        text="""Each line of the input is a name without blanks and an integer. Add up the numbers of each name, and
        print "name total" lines, the highest total first; equal totals in the alphabetic order of the names.""",
        reference="""import sys
totals: dict[str, int] = {}
for line in sys.stdin:
    if line.strip():
        name, points = line.split()
        totals[name] = totals.get(name, 0) + int(points)
for name in sorted(totals, key=lambda name: (-totals[name], name)):
    print(name, totals[name])
""",
        wrong=("(-totals[name], name)", "-totals[name]"),
        examples=[("bo 2\nal 2\nbo 1\n", "bo 3\nal 2\n"), ("", "")],
        hidden=[
            "x 1\n",
            "b 1\na 1\n",
            "z -5\ny 0\nx 5\n",
            "a 1\na -1\n",
            "c 3\nb 3\na 3\nb 1\n",
            "\nq 7\n\n",
            "Zed 1\nabe 1\nBob 1\n",
            "".join(f"n{n % 7} {n}\n" for n in range(60)),
            "k 99999999999999\nk 1\nj 5\n",
        ],
    ),
    Problem(
        slug="life_step",
        level=2,
        topic="simulation",
        text="""One step of Conway's game of life on a board of rows of '#' and '.', with nothing alive outside: a
        living cell stays with two or three living neighbours of its eight, a dead one comes alive with just
        three.""",
        reference="""def life_step(rows: list[str]) -> list[str]:
    alive = {(y, x) for y, row in enumerate(rows) for x, cell in enumerate(row) if cell == "#"}
    def near(y: int, x: int) -> int:
        return sum((y + j, x + i) in alive for j in (-1, 0, 1) for i in (-1, 0, 1) if i or j)
    return [
        "".join("#" if near(y, x) == 3 or (near(y, x) == 2 and cell == "#") else "." for x, cell in enumerate(row))
        for y, row in enumerate(rows)
    ]
""",
        wrong=(" if i or j)", ")"),
        examples=[((["...", "###", "..."],), [".#.", ".#.", ".#."]), ((["#"],), ["."])],
        hidden=each(
            [],
            ["."],
            ["##", "##"],
            ["##", "#."],
            ["####"],
            ["#.#", ".#.", "#.#"],
            [".#...", "..#..", "###..", ".....", "....."],
            ["#" * 8] * 8,
            ["#.." * 5, ".#." * 5] * 4,
        ),
    ),
    Problem(
        slug="subsequence_count",
        level=2,
        topic="dynamic programming",
        text="Count in how many ways the second text can be had from the first by deleting characters.",
        reference="""def subsequence_count(text: str, wanted: str) -> int:
    ways = [1] + [0] * len(wanted)
    for letter in text:
        for i in range(len(wanted), 0, -1):
            if wanted[i - 1] == letter:
                ways[i] += ways[i - 1]
    return ways[-1]
""",
        wrong=("range(len(wanted), 0, -1)", "range(1, len(wanted) + 1)"),
        examples=[(("rabbbit", "rabbit"), 3), (("abc", "abc"), 1)],
        hidden=[
            ("", ""),
            ("", "a"),
            ("a", ""),
            ("aaaa", "aa"),
            ("babgbag", "bag"),
            ("abc", "cb"),
            ("a" * 60, "a" * 30),
            ("xyzxyz", "xyz"),
            ("ab" * 20, "ba"),
            ("aab", "ab"),
        ],
    ),
]
