"""Hard problems to train on: an algorithm that has to be found, or many rules that have to hold together."""

from __future__ import annotations

from .problem import Problem, each

PROBLEMS = [
    Problem(
        slug="edit_distance",
        level=3,
        topic="dynamic programming",
        text="""Give the fewest single-character insertions, deletions, replacements and exchanges of two neighbours
        that turn the first text into the second; no piece is edited twice (optimal string alignment).""",
        reference="""def edit_distance(first: str, second: str) -> int:
    rows = [list(range(len(second) + 1))]
    for i, a in enumerate(first, 1):
        row = [i]
        for j, b in enumerate(second, 1):
            cost = min(row[-1] + 1, rows[-1][j] + 1, rows[-1][j - 1] + (a != b))
            if i > 1 and j > 1 and a == second[j - 2] and b == first[i - 2]:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
""",
        wrong=("rows[-2][j - 2] + 1", "rows[-2][j - 2] + 2"),
        examples=[(("kitten", "sitting"), 3), (("ab", "ba"), 1)],
        hidden=[
            ("", ""),
            ("", "abc"),
            ("abc", ""),
            ("ca", "abc"),
            ("abcd", "badc"),
            ("same", "same"),
            ("a" * 60, "b" * 50),
            ("intention", "execution"),
            ("abcdef", "abdcef"),
            ("xy" * 30, "yx" * 30),
        ],
    ),
    Problem(
        slug="calculate",
        level=3,
        topic="parsing",
        text="""Evaluate an arithmetic expression of non-negative integers, + - * and /, unary minus, brackets and
        spaces with the usual precedence, left to right; / is floor division as Python's //. The expression is
        well formed; give None if it divides by 0 anywhere.""",
        reference="""import re

def calculate(expression: str) -> int | None:
    tokens = re.findall(r"\\d+|[-+*/()]", expression)[::-1]

    def total() -> int:
        value = product()
        while tokens and tokens[-1] in "+-":
            value = value + product() if tokens.pop() == "+" else value - product()
        return value

    def product() -> int:
        value = factor()
        while tokens and tokens[-1] in "*/":
            value = value * factor() if tokens.pop() == "*" else value // factor()
        return value

    def factor() -> int:
        token = tokens.pop()
        if token == "-":
            return -factor()
        if token == "(":
            value = total()
            tokens.pop()
            return value
        return int(token)

    try:
        return total()
    except ZeroDivisionError:
        return None
""",
        wrong=(
            """        while tokens and tokens[-1] in "+-":
            value = value + product() if tokens.pop() == "+" else value - product()
        return value
""",
            """        if tokens and tokens[-1] in "+-":
            value = value + total() if tokens.pop() == "+" else value - total()
        return value
""",
        ),
        examples=[(("2 + 3 * (4 - 1)",), 11), (("1/0",), None)],
        hidden=each(
            "7",
            "-3",
            "10 - 2 - 3",
            "100 / 7 / 2",
            "-(2 + 3) * 4",
            "--5",
            "2*-3",
            "7 / -2",
            "((((1))))",
            "1 - (2 - (3 - (4 - 5)))",
            "5 / (3 - 3)",
            "12345678901234567890 * 98765432109876543210",
            " 4 *  ( 1+1 ) ",
        ),
    ),
    Problem(
        slug="n_queens",
        level=3,
        topic="backtracking",
        text="""Count the ways to put n queens on an n by n board so that none attacks another, with some squares [row,
        column] blocked. n is at most 8.""",
        reference="""def n_queens(n: int, blocked: list[list[int]]) -> int:
    closed = {tuple(square) for square in blocked}

    def count(row: int, columns: int, falling: int, rising: int) -> int:
        if row == n:
            return 1
        ways = 0
        for column in range(n):
            bits = 1 << column, 1 << (row - column + n), 1 << (row + column)
            if (row, column) in closed or columns & bits[0] or falling & bits[1] or rising & bits[2]:
                continue
            ways += count(row + 1, columns | bits[0], falling | bits[1], rising | bits[2])
        return ways

    return count(0, 0, 0, 0)
""",
        wrong=("(row, column) in closed or ", ""),
        examples=[((4, []), 2), ((1, [[0, 0]]), 0)],
        hidden=[
            (0, []),
            (1, []),
            (2, []),
            (3, []),
            (5, []),
            (6, []),
            (8, []),
            (4, [[0, 1]]),
            (4, [[0, 1], [0, 2]]),
            (5, [[0, 0], [1, 1], [2, 2]]),
            (6, [[0, 1], [5, 5]]),
            (8, [[0, 0], [0, 1], [3, 5], [7, 7], [4, 4]]),
        ],
    ),
    Problem(
        slug="cheapest_route",
        level=3,
        topic="graphs",
        text="""Roads [from, to, cost] lead one way between n towns, 0 to n - 1; costs are not negative. Give the
        cheapest cost from start to goal over at most `stops` towns in between, or -1.""",
        reference="""def cheapest_route(n: int, roads: list[list[int]], start: int, goal: int, stops: int) -> int:
    best = {start: 0}
    for _ in range(stops + 1):
        after = dict(best)
        for a, b, cost in roads:
            if a in best and best[a] + cost < after.get(b, float("inf")):
                after[b] = best[a] + cost
        best = after
    return best.get(goal, -1)
""",
        wrong=(
            'best[a] + cost < after.get(b, float("inf")):\n                after[b] = best[a] + cost\n'
            "        best = after",
            'best[a] + cost < best.get(b, float("inf")):\n                best[b] = best[a] + cost',
        ),
        examples=[
            ((3, [[0, 1, 1], [1, 2, 1], [0, 2, 5]], 0, 2, 1), 2),
            ((3, [[0, 1, 1], [1, 2, 1], [0, 2, 5]], 0, 2, 0), 5),
        ],
        hidden=[
            (1, [], 0, 0, 0),
            (2, [], 0, 1, 5),
            (2, [[1, 0, 3]], 0, 1, 3),
            (4, [[0, 1, 1], [1, 2, 1], [2, 3, 1]], 0, 3, 1),
            (4, [[0, 1, 1], [1, 2, 1], [2, 3, 1]], 0, 3, 2),
            (3, [[0, 1, 0], [1, 0, 0], [1, 2, 0]], 0, 2, 9),
            (4, [[0, 1, 1], [1, 2, 1], [0, 2, 5], [2, 3, 1]], 0, 3, 1),
            (2, [[0, 1, 7], [0, 1, 4]], 0, 1, 0),
            (20, [[i, j, (i * 7 + j * 5) % 13 + 1] for i in range(20) for j in range(20) if i != j], 0, 19, 3),
        ],
    ),
    Problem(
        slug="longest_increasing_subsequence",
        level=3,
        topic="dynamic programming",
        text="""Give the length of the longest strictly increasing subsequence of a list (its items need not be
        neighbours). Lists may have 20,000 items.""",
        reference="""from bisect import bisect_left

def longest_increasing_subsequence(numbers: list[int]) -> int:
    ends: list[int] = []
    for number in numbers:
        place = bisect_left(ends, number)
        ends[place : place + 1] = [number]
    return len(ends)
""",
        wrong=("from bisect import bisect_left", "from bisect import bisect_right as bisect_left"),
        examples=[(([10, 9, 2, 5, 3, 7, 101, 18],), 4), (([2, 2],), 1)],
        hidden=each(
            [],
            [1],
            [3, 2, 1],
            [1, 2, 3],
            [7, 7, 7, 7],
            [0, 1, 0, 3, 2, 3],
            [4, 10, 4, 3, 8, 9],
            [n * 7919 % 1009 for n in range(2000)],
            list(range(20000)),
            [-1, -5, 0, -2, 3],
        ),
    ),
    Problem(
        slug="smallest_window",
        level=3,
        topic="sliding window",
        text="""Find the shortest piece of a text that has every character of another text, each at least as often as
        there. Of several, the leftmost; if there is none, or nothing is wanted, the empty text.""",
        reference="""from collections import Counter

def smallest_window(text: str, wanted: str) -> str:
    need = Counter(wanted)
    lacking, start, best = len(wanted), 0, ""
    if not wanted:
        return ""
    for end, letter in enumerate(text):
        lacking -= need[letter] > 0
        need[letter] -= 1
        while lacking == 0:
            if not best or end - start + 1 < len(best):
                best = text[start : end + 1]
            need[text[start]] += 1
            lacking += need[text[start]] > 0
            start += 1
    return best
""",
        wrong=(
            "Counter(wanted)\n    lacking, start, best = len(wanted), 0",
            "Counter(set(wanted))\n    lacking, start, best = len(set(wanted)), 0",
        ),
        examples=[(("ADOBECODEBANC", "ABC"), "BANC"), (("a", "aa"), "")],
        hidden=[
            ("", "a"),
            ("a", ""),
            ("a", "a"),
            ("aab", "aa"),
            ("abab", "ab"),
            ("xaybzbc", "abb"),
            ("aaaa", "aaa"),
            ("hello world", "lol"),
            ("ab" * 300 + "c" + "ba" * 300, "cab"),
            ("bba", "ab"),
            ("acbdbaab", "aabd"),
        ],
    ),
    Problem(
        slug="sudoku",
        level=3,
        topic="backtracking",
        text="""Solve a sudoku of nine rows of nine digits, '.' for an empty cell: each row, column and 3 by 3 box has
        each digit once. Give the solved rows, or an empty list if there is no solution. None has more than
        one.""",
        reference="""def sudoku(rows: list[str]) -> list[str]:
    cells = [list(row) for row in rows]

    def choices(y: int, x: int) -> set[str]:
        taken = set(cells[y]) | {cells[j][x] for j in range(9)}
        taken |= {cells[j][i] for j in range(y // 3 * 3, y // 3 * 3 + 3) for i in range(x // 3 * 3, x // 3 * 3 + 3)}
        return set("123456789") - taken

    def is_sound() -> bool:
        for y in range(9):
            for x in range(9):
                digit, cells[y][x] = cells[y][x], "."
                fits = digit == "." or digit in choices(y, x)
                cells[y][x] = digit
                if not fits:
                    return False
        return True

    def solve() -> bool:
        empty = [(y, x) for y in range(9) for x in range(9) if cells[y][x] == "."]
        if not empty:
            return True
        y, x = min(empty, key=lambda place: len(choices(*place)))
        for digit in sorted(choices(y, x)):
            cells[y][x] = digit
            if solve():
                return True
        cells[y][x] = "."
        return False

    return ["".join(row) for row in cells] if is_sound() and solve() else []
""",
        wrong=("is_sound() and solve()", "solve()"),
        examples=[
            (
                (
                    [
                        "53..7....",
                        "6..195...",
                        ".98....6.",
                        "8...6...3",
                        "4..8.3..1",
                        "7...2...6",
                        ".6....28.",
                        "...419..5",
                        "....8..79",
                    ],
                ),
                [
                    "534678912",
                    "672195348",
                    "198342567",
                    "859761423",
                    "426853791",
                    "713924856",
                    "961537284",
                    "287419635",
                    "345286179",
                ],
            ),
            ((["11......."] + ["." * 9] * 8,), []),
        ],
        hidden=each(
            [
                "534678912",
                "672195348",
                "198342567",
                "859761423",
                "426853791",
                "713924856",
                "961537284",
                "287419635",
                "345286179",
            ],
            [
                "534678912",
                "672195348",
                "198342567",
                "859761423",
                "426853791",
                "713924856",
                "961537284",
                "287419635",
                "345286171",
            ],
            [
                "534678912",
                "672195348",
                "198342567",
                "859761423",
                "4268.3791",
                "713924856",
                "961537284",
                "287419635",
                "34528617.",
            ],
            [
                "53467891.",
                "67219534.",
                "19834256.",
                "85976142.",
                "42685379.",
                "71392485.",
                "96153728.",
                "28741963.",
                "34528617.",
            ],
            [
                "5...7.9..",
                "6..195...",
                ".98....6.",
                "8...6...3",
                "4..8.3..1",
                "7...2...6",
                ".6....28.",
                "...419..5",
                "....8..79",
            ],
            [
                "53..7....",
                "6..195...",
                ".98....6.",
                "8...6...3",
                "4..8.3..1",
                "7...2...6",
                ".6....28.",
                "...419..5",
                "...58..79",
            ],
            [
                "12345678.",
                ".........",
                "9........",
                "........9",
                ".........",
                ".........",
                ".........",
                ".........",
                ".........",
            ],
            [
                ".34678912",
                ".72195348",
                ".98342567",
                ".59761423",
                ".26853791",
                ".13924856",
                ".61537284",
                ".87419635",
                ".45286179",
            ],
            [
                "534678912",
                "672195348",
                "198342567",
                ".........",
                "426853791",
                "713924856",
                "961537284",
                "287419635",
                "345286179",
            ],
        ),
    ),
    Problem(
        slug="max_rectangle",
        level=3,
        topic="stacks",
        text="""In a picture of rows of '#' and '.', all of one length, give the area of the largest upright rectangle
        of '#'.""",
        reference="""def max_rectangle(rows: list[str]) -> int:
    best = 0
    heights = [0] * (len(rows[0]) if rows else 0)
    for row in rows:
        heights = [height + 1 if cell == "#" else 0 for height, cell in zip(heights, row)]
        stack: list[tuple[int, int]] = []
        for place, height in enumerate([*heights, 0]):
            start = place
            while stack and stack[-1][1] >= height:
                start, tall = stack.pop()
                best = max(best, tall * (place - start))
            stack.append((start, height))
    return best
""",
        wrong=("enumerate([*heights, 0])", "enumerate(heights)"),
        examples=[((["##.", "##.", "..#"],), 4), (([".."],), 0)],
        hidden=each(
            [],
            ["#"],
            ["...."],
            ["####"],
            ["#"] * 7,
            ["#.#", "###", "###"],
            ["#.#..", "#.###", "#####", "#..#."],
            ["#" * 40] * 30,
            ["##..", ".##.", "..##"],
            [("#" * (n % 9 + 1)).ljust(9, ".") for n in range(40)],
        ),
    ),
    Problem(
        slug="word_segmentations",
        level=3,
        topic="dynamic programming",
        text="""Give all ways to cut a text without spaces into words of a list, each written with single spaces, in
        alphabetic order. A word may be used again. There are at most a few hundred ways; an empty text has
        none.""",
        reference="""from functools import cache

def word_segmentations(text: str, words: list[str]) -> list[str]:
    known = {word for word in words if word}

    @cache
    def ways(start: int) -> tuple[str, ...]:
        if start == len(text):
            return ("",)
        return tuple(
            (text[start:end] + " " + rest).strip()
            for end in range(start + 1, len(text) + 1) if text[start:end] in known
            for rest in ways(end)
        )

    return sorted(ways(0)) if text else []
""",
        wrong=(
            "for end in range(start + 1, len(text) + 1) if text[start:end] in known",
            "for end in [max((e for e in range(start + 1, len(text) + 1) if text[start:e] in known), default=0)] "
            "if end",
        ),
        examples=[
            (("catsanddog", ["cat", "cats", "and", "sand", "dog"]), ["cat sand dog", "cats and dog"]),
            (("abc", ["ab"]), []),
        ],
        hidden=[
            ("", ["a"]),
            ("a", []),
            ("a", ["a"]),
            ("aaaa", ["a", "aa"]),
            ("aaa", ["aa"]),
            ("abcd", ["a", "abc", "b", "cd"]),
            ("a" * 60 + "b", ["a", "aa", "aaa"]),
            ("aaaaaaaa", ["a", "aa", "aaa"]),
            ("noon", ["no", "on", "noon", "o"]),
            ("ab", ["a", "b", "ab", ""]),
        ],
    ),
    Problem(
        slug="strongly_connected",
        level=3,
        topic="graphs",
        text="""In a directed graph of nodes 0 to n - 1 and edges [from, to], group the nodes that can reach each
        other. Give the groups with their nodes sorted, in the order of their smallest nodes. n is at most
        1,000.""",
        reference="""def strongly_connected(n: int, edges: list[list[int]]) -> list[list[int]]:
    ahead: list[list[int]] = [[] for _ in range(n)]
    back: list[list[int]] = [[] for _ in range(n)]
    for a, b in edges:
        ahead[a].append(b)
        back[b].append(a)
    seen: set[int] = set()
    finished: list[int] = []
    for root in range(n):
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(ahead[root]))]
        while stack:
            node, rest = stack[-1]
            for near in rest:
                if near not in seen:
                    seen.add(near)
                    stack.append((near, iter(ahead[near])))
                    break
            else:
                finished.append(node)
                stack.pop()
    groups, taken = [], set()
    for root in reversed(finished):
        if root in taken:
            continue
        group, waiting = [], [root]
        taken.add(root)
        while waiting:
            node = waiting.pop()
            group.append(node)
            for near in back[node]:
                if near not in taken:
                    taken.add(near)
                    waiting.append(near)
        groups.append(sorted(group))
    return sorted(groups)
""",
        wrong=("for near in back[node]", "for near in back[node] + ahead[node]"),
        examples=[((3, [[0, 1], [1, 0], [1, 2]]), [[0, 1], [2]]), ((2, []), [[0], [1]])],
        hidden=[
            (0, []),
            (1, [[0, 0]]),
            (3, [[0, 1], [1, 2], [2, 0]]),
            (4, [[0, 1], [1, 2], [2, 3]]),
            (5, [[4, 0], [0, 4], [1, 2], [2, 1], [2, 4]]),
            (6, [[0, 1], [1, 2], [2, 0], [3, 4], [4, 3], [2, 3]]),
            (4, [[0, 1], [0, 1], [1, 0], [3, 3]]),
            (1000, [[i, i + 1] for i in range(999)]),
            (1000, [[i, (i + 1) % 1000] for i in range(1000)]),
        ],
    ),
    Problem(
        slug="regex_match",
        revision=2,
        level=3,
        topic="dynamic programming",
        text="""Say whether a pattern matches a whole text: '.' is any character, 'x*' any number of x (also none),
        '.*' any text; other characters are themselves. '*' is never first and never follows '*'. Patterns must
        not take exponential time.""",
        reference="""from functools import cache

def regex_match(text: str, pattern: str) -> bool:
    @cache
    def fits(i: int, j: int) -> bool:
        if j == len(pattern):
            return i == len(text)
        first = i < len(text) and pattern[j] in (".", text[i])
        if pattern[j + 1 : j + 2] == "*":
            return fits(i, j + 2) or (first and fits(i + 1, j))
        return first and fits(i + 1, j + 1)
    return fits(0, 0)
""",
        wrong=("fits(i, j + 2) or (first and fits(i + 1, j))", "fits(i + 1, j) if first else fits(i, j + 2)"),
        examples=[(("aab", "c*a*b"), True), (("ab", "."), False)],
        hidden=[
            ("", ""),
            ("", "a*"),
            ("a", ""),
            ("aa", "a"),
            ("aaa", "a*a"),
            ("ab", ".*c"),
            ("mississippi", "mis*is*p*."),
            ("a" * 25, "a*" * 20 + "b"),
            ("abc", ".*.*c"),
            ("a.b", "a.b"),
            ("aaa", "ab*a*c*a"),
        ],
    ),
    Problem(
        slug="bursting_order",
        level=3,
        topic="dynamic programming",
        text="""Balloons in a row carry numbers. To burst one earns its number times those of its two neighbours at
        that time (1 where there is none), and then they are neighbours. Give the most that can be earned by
        bursting all.""",
        reference="""def bursting_order(numbers: list[int]) -> int:
    row = [1, *numbers, 1]
    best = [[0] * len(row) for _ in row]
    for width in range(2, len(row)):
        for left in range(len(row) - width):
            right = left + width
            best[left][right] = max(
                best[left][k] + row[left] * row[k] * row[right] + best[k][right] for k in range(left + 1, right)
            )
    return best[0][-1]
""",
        wrong=(
            """    row = [1, *numbers, 1]
    best = [[0] * len(row) for _ in row]
    for width in range(2, len(row)):
        for left in range(len(row) - width):
            right = left + width
            best[left][right] = max(
                best[left][k] + row[left] * row[k] * row[right] + best[k][right] for k in range(left + 1, right)
            )
    return best[0][-1]
""",
            """    row, total = [1, *numbers, 1], 0
    while len(row) > 2:
        k = min(range(1, len(row) - 1), key=lambda place: row[place])
        total += row[k - 1] * row[k] * row[k + 1]
        del row[k]
    return total
""",
        ),
        examples=[(([3, 1, 5, 8],), 167), (([5],), 5)],
        hidden=each(
            [],
            [1, 5],
            [0],
            [0, 0, 0],
            [9, 76, 64, 21],
            [7, 9, 8, 0, 7, 1, 3, 5],
            [2, 2, 2, 2],
            [1, 100, 1],
            [5, 3, 8, 2, 9, 4, 7, 6, 1, 10],
            [n * 17 % 19 for n in range(40)],
        ),
    ),
    Problem(
        slug="json_paths",
        level=3,
        topic="recursion",
        text="""Give every leaf of a JSON value as "path=value", in document order: keys joined with dots, list indexes
        as [0]; a key that is not made of the letters a-z, A-Z, digits and '_' (or is empty) is written as
        ["key"], as JSON. Leaves (also {} and []) are written as compact JSON. The path of a leaf at the top is
        "$".""",
        reference="""import json
import re

def json_paths(text: str) -> list[str]:
    found = []
    def walk(value: object, path: str) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                if re.fullmatch("[A-Za-z0-9_]+", key):
                    walk(item, f"{path}.{key}" if path else key)
                else:
                    walk(item, f"{path}[{json.dumps(key)}]")
        elif isinstance(value, list) and value:
            for place, item in enumerate(value):
                walk(item, f"{path}[{place}]")
        else:
            found.append(f"{path or '$'}={json.dumps(value)}")
    walk(json.loads(text), "")
    return found
""",
        wrong=("isinstance(value, list) and value", "isinstance(value, list)"),
        examples=[(('{"a": {"b": [1, "x"]}}',), ["a.b[0]=1", 'a.b[1]="x"']), (("3",), ["$=3"])],
        hidden=each(
            "null",
            "[]",
            "{}",
            '{"a": []}',
            "[[1], [[]]]",
            '{"a b": 1, "": {"c-d": true}}',
            '{"x": {"y": {}}}',
            '[{"k": 1.5}, {"k": null}]',
            '{"b": 1, "a": 2}',
            '"text"',
            '{"q\\"": ["\\u00e9"]}',
        ),
    ),
    Problem(
        slug="task_schedule",
        level=3,
        topic="greedy",
        text="""Jobs are [deadline, reward]; each takes one day, one job a day, and a job done on day d (from 1) counts
        if d is at most its deadline. Give the greatest total reward. There may be 10,000 jobs.""",
        reference="""import heapq

def task_schedule(jobs: list[list[int]]) -> int:
    chosen: list[int] = []
    for deadline, reward in sorted(jobs):
        heapq.heappush(chosen, reward)
        if len(chosen) > deadline:
            heapq.heappop(chosen)
    return sum(chosen)
""",
        wrong=("heapq.heappop(chosen)", "chosen.remove(reward)"),
        examples=[(([[1, 10], [1, 20], [2, 5]],), 25), (([],), 0)],
        hidden=each(
            [[1, 1]],
            [[2, 1], [2, 2], [2, 3]],
            [[4, 20], [1, 10], [1, 40], [1, 30]],
            [[1, 5], [2, 1], [2, 9]],
            [[3, 0], [3, 0]],
            [[5, 7]] * 9,
            [[n % 50 + 1, n * 31 % 97] for n in range(500)],
            [[10000, n] for n in range(2000)],
            [[1, 3], [3, 1], [3, 1], [3, 10], [2, 8]],
        ),
    ),
    Problem(
        slug="big_modular_sum",
        level=3,
        topic="numbers",
        text="""Give the n-th number, modulo m, of the sequence that begins with 0, 1, 1 and in which each further
        number is the sum of the three before it. n counts from 0 and may be as large as 10 to the 18th; m is
        at least 1.""",
        reference="""def big_modular_sum(n: int, m: int) -> int:
    def times(a: list[list[int]], b: list[list[int]]) -> list[list[int]]:
        return [[sum(a[i][k] * b[k][j] for k in range(3)) % m for j in range(3)] for i in range(3)]
    power, step = [[1, 0, 0], [0, 1, 0], [0, 0, 1]], [[1, 1, 1], [1, 0, 0], [0, 1, 0]]
    while n:
        if n & 1:
            power = times(power, step)
        step, n = times(step, step), n >> 1
    return (power[2][0] + power[2][1]) % m
""",
        wrong=("(power[2][0] + power[2][1]) % m", "(power[2][0] + power[2][2]) % m"),
        examples=[((5, 100), 7), ((0, 7), 0)],
        hidden=[
            (1, 10),
            (2, 10),
            (3, 10),
            (4, 1),
            (10, 1000),
            (100, 10**9 + 7),
            (10**6, 97),
            (10**18, 10**9 + 7),
            (10**18 - 1, 2),
            (37, 10**12),
        ],
    ),
    Problem(
        slug="skyline",
        level=3,
        topic="sweep line",
        text="""Buildings are [left, right, height] with left < right and height > 0. Give the outline against the sky
        as [x, height] points, left to right, one at each place where the height changes; the last one has
        height 0.""",
        reference="""import heapq

def skyline(buildings: list[list[int]]) -> list[list[int]]:
    outline: list[list[int]] = []
    starts = sorted(buildings)
    live: list[tuple[int, int]] = []
    place = 0
    for x in sorted({edge for left, right, _ in buildings for edge in (left, right)}):
        while place < len(starts) and starts[place][0] <= x:
            heapq.heappush(live, (-starts[place][2], starts[place][1]))
            place += 1
        while live and live[0][1] <= x:
            heapq.heappop(live)
        height = -live[0][0] if live else 0
        if height != (outline[-1][1] if outline else 0):
            outline.append([x, height])
    return outline
""",
        wrong=("if height != (outline[-1][1] if outline else 0)", "if True"),
        examples=[(([[1, 4, 3], [2, 6, 5]],), [[1, 3], [2, 5], [6, 0]]), (([],), [])],
        hidden=each(
            [[0, 1, 1]],
            [[0, 2, 3], [2, 5, 3]],
            [[0, 2, 3], [3, 5, 3]],
            [[1, 9, 2], [3, 5, 2]],
            [[1, 5, 4], [2, 3, 9]],
            [[2, 9, 10], [3, 7, 15], [5, 12, 12], [15, 20, 10], [19, 24, 8]],
            [[0, 5, 1], [0, 5, 2], [0, 5, 3]],
            [[-3, -1, 2], [-2, 4, 1]],
            [[n, n + 4, n * 7 % 10 + 1] for n in range(40)],
        ),
    ),
    Problem(
        slug="assembler",
        level=3,
        topic="input and output",
        text="""Run a program for a small machine with registers a to d, all 0 at first, one instruction a line: "set R
        V", "add R V", "mul R V" (V is a register or an integer), "jump N" (go N lines on; negative: back),
        "jumpif R N" (jump unless R is 0), "out V" (print V). It ends when it leaves the lines, or after 10,000
        instructions; then print "limit".""",
        reference="""import sys
lines = [line.split() for line in sys.stdin if line.strip()]
registers = dict.fromkeys("abcd", 0)

def value(word: str) -> int:
    return registers[word] if word in registers else int(word)

place = steps = 0
while 0 <= place < len(lines):
    if steps == 10_000:
        print("limit")
        break
    steps += 1
    name, *words = lines[place]
    jump = 1
    if name == "set":
        registers[words[0]] = value(words[1])
    elif name == "add":
        registers[words[0]] += value(words[1])
    elif name == "mul":
        registers[words[0]] *= value(words[1])
    elif name == "jump":
        jump = int(words[0])
    elif name == "jumpif":
        jump = int(words[1]) if registers[words[0]] else 1
    else:
        print(value(words[0]))
    place += jump
""",
        wrong=("while 0 <= place < len(lines)", "while place < len(lines)"),
        examples=[("set a 3\nout a\nadd a -1\njumpif a -2\n", "3\n2\n1\n"), ("out 7\n", "7\n")],
        hidden=[
            "",
            "jump 0\n",
            "out a\njump -5\nout 1\n",
            "set b 5\nset a b\nmul a b\nout a\n",
            "jump 2\nout 1\nout 2\n",
            "set a 5\nset b 1\nmul b a\nadd a -1\njumpif a -2\nout b\n",
            "jumpif c 2\nout 0\njumpif c 99\nout c\n",
            "set d -7\nmul d d\nout d\nadd d d\nout d\n",
            "out 1\njump -1\nout 2\n" * 2,
            "set a 2499\nadd a -1\njump 1\njump 1\njumpif a -3\nout a\n",
        ],
    ),
    Problem(
        slug="tiling_ways",
        level=3,
        topic="dynamic programming",
        text="""Count the ways to cover a board of the given height and width with 2 by 1 dominoes, lying or standing.
        Height and width are at most 10; a board without cells is covered in one way.""",
        reference="""def tiling_ways(height: int, width: int) -> int:
    ways = {0: 1}
    for cell in range(height * width):
        column = cell % width
        after: dict[int, int] = {}
        for filled, count in ways.items():
            bit = 1 << column
            if filled & bit:
                after[filled ^ bit] = after.get(filled ^ bit, 0) + count
                continue
            after[filled | bit] = after.get(filled | bit, 0) + count
            if column + 1 < width and not filled & (bit << 1):
                after[filled | (bit << 1)] = after.get(filled | (bit << 1), 0) + count
        ways = after
    return ways.get(0, 0)
""",
        wrong=(" and not filled & (bit << 1)", ""),
        examples=[((2, 3), 3), ((3, 3), 0)],
        hidden=[(0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (4, 4), (3, 4), (8, 8), (10, 10), (5, 7), (0, 5), (7, 10)],
    ),
]
