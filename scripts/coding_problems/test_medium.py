"""Medium problems to test on: a known technique, or several rules at once."""

from __future__ import annotations

from .problem import Problem, each

PROBLEMS = [
    Problem(
        slug="simplify_path",
        level=2,
        topic="parsing",
        text="""Simplify an absolute Unix path: "." parts and repeated slashes go, ".." takes the part before it (none
        at the root). No slash at the end, but for the root itself.""",
        reference="""def simplify_path(path: str) -> str:
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)
""",
        wrong=('part not in ("", ".")', 'part.strip(".")'),
        examples=[(("/a/./b/../c/",), "/a/c"), (("/..",), "/")],
        hidden=each("/", "//", "/a//b", "/...", "/a/.../b", "/a/b/../../..", "/.hidden/x", "/x/..y/..", "/a./b"),
    ),
    Problem(
        slug="top_k",
        level=2,
        topic="dictionaries",
        text="""Give the k numbers that occur most often, the most frequent first; of those that occur equally often,
        smaller numbers first. If there are fewer different numbers, give all.""",
        reference="""from collections import Counter

def top_k(numbers: list[int], k: int) -> list[int]:
    counts = Counter(numbers)
    return sorted(counts, key=lambda number: (-counts[number], number))[:k]
""",
        wrong=(
            "sorted(counts, key=lambda number: (-counts[number], number))[:k]",
            "[number for number, _ in counts.most_common(k)]",
        ),
        examples=[(([1, 1, 2], 1), [1]), (([3, 2], 2), [2, 3])],
        hidden=[
            ([], 2),
            ([5], 0),
            ([5], 3),
            ([2, 1, 2, 1], 2),
            ([-1, -1, 4, 4, 0], 2),
            ([9, 8, 7], 2),
            ([1] * 50 + [0], 2),
            ([n * n % 11 for n in range(100)], 4),
            ([3, 3, 2, 2, 1], 3),
        ],
    ),
    Problem(
        slug="water_held",
        level=2,
        topic="two pointers",
        text="""Bars of width 1 with the given heights stand side by side. Give the units of rain water that stay
        between them.""",
        reference="""def water_held(heights: list[int]) -> int:
    total, left, right = 0, 0, len(heights) - 1
    left_most = right_most = 0
    while left <= right:
        if left_most <= right_most:
            left_most = max(left_most, heights[left])
            total += left_most - heights[left]
            left += 1
        else:
            right_most = max(right_most, heights[right])
            total += right_most - heights[right]
            right -= 1
    return total
""",
        wrong=("while left <= right", "while left + 1 < right"),
        examples=[(([2, 0, 2],), 2), (([1, 2, 3],), 0)],
        hidden=each(
            [],
            [5],
            [5, 0],
            [0, 1, 0, 2, 1, 0, 1, 3, 2, 1, 2, 1],
            [4, 2, 0, 3, 2, 5],
            [3, 3, 3],
            [5, 1, 1, 5],
            [9, 0, 0, 1],
            [n * 13 % 17 for n in range(120)],
            [1, 0, 2, 0, 1],
        ),
    ),
    Problem(
        slug="zigzag",
        revision=2,
        level=2,
        topic="strings",
        text="""Write a text in a zigzag over so many rows (down, then up again, one character a row), then read row by
        row. With one row it stays as it is.""",
        reference="""def zigzag(text: str, rows: int) -> str:
    if rows == 1:
        return text
    lines = [""] * rows
    for i, letter in enumerate(text):
        place = i % (2 * rows - 2)
        lines[min(place, 2 * rows - 2 - place)] += letter
    return "".join(lines)
""",
        wrong=("i % (2 * rows - 2)", "i % rows"),
        examples=[(("abcde", 3), "aebdc"), (("abc", 1), "abc")],
        hidden=[
            ("", 3),
            ("a", 5),
            ("ab", 1),
            ("ab", 2),
            ("PAYPALISHIRING", 3),
            ("PAYPALISHIRING", 4),
            ("abcdef", 2),
            ("abcd", 9),
            ("0123456789" * 5, 6),
            ("xyz w", 3),
        ],
    ),
    Problem(
        slug="course_order",
        level=2,
        topic="graphs",
        text="""There are n courses, 0 to n - 1, and pairs [course, earlier course]. Give the order in which all can be
        taken that comes first lexicographically, or an empty list if there is none.""",
        reference="""import heapq

def course_order(n: int, pairs: list[list[int]]) -> list[int]:
    waits = [0] * n
    after: list[list[int]] = [[] for _ in range(n)]
    for course, earlier in pairs:
        waits[course] += 1
        after[earlier].append(course)
    free = [course for course in range(n) if waits[course] == 0]
    order = []
    while free:
        course = heapq.heappop(free)
        order.append(course)
        for later in after[course]:
            waits[later] -= 1
            if waits[later] == 0:
                heapq.heappush(free, later)
    return order if len(order) == n else []
""",
        wrong=("return order if len(order) == n else []", "return order"),
        examples=[((3, [[0, 2]]), [1, 2, 0]), ((2, [[0, 1], [1, 0]]), [])],
        hidden=[
            (0, []),
            (1, []),
            (1, [[0, 0]]),
            (4, [[1, 0], [2, 0], [3, 1], [3, 2]]),
            (3, [[0, 1], [1, 2]]),
            (4, [[0, 3], [1, 3]]),
            (5, [[1, 2], [2, 1]]),
            (3, [[1, 0], [1, 0]]),
            (30, [[n, n + 1] for n in range(29)]),
        ],
    ),
    Problem(
        slug="decode_lengths",
        level=2,
        topic="recursion",
        text="""Decode a text in which 3[ab] stands for ababab. Counts have one or more digits, and brackets may be
        nested. Letters outside stand for themselves. The input is well formed.""",
        reference="""def decode_lengths(text: str) -> str:
    stack: list[tuple[str, int]] = []
    now, count = "", 0
    for letter in text:
        if letter.isdigit():
            count = count * 10 + int(letter)
        elif letter == "[":
            stack.append((now, count))
            now, count = "", 0
        elif letter == "]":
            before, times = stack.pop()
            now = before + now * times
        else:
            now += letter
    return now
""",
        wrong=("count * 10 + int(letter)", "int(letter)"),
        examples=[(("3[a]2[bc]",), "aaabcbc"), (("2[a2[b]]",), "abbabb")],
        hidden=each(
            "", "xyz", "10[a]", "0[abc]d", "1[1[1[z]]]", "2[3[a]b]", "100[x]y", "a2[b3[c]]d", "2[]q", "12[ab]3[c]"
        ),
    ),
    Problem(
        slug="matching_majority",
        level=2,
        topic="lists",
        text="List, smallest first, the numbers that make up more than a third of a list.",
        reference="""from collections import Counter

def matching_majority(numbers: list[int]) -> list[int]:
    return sorted(number for number, count in Counter(numbers).items() if 3 * count > len(numbers))
""",
        wrong=("3 * count > len(numbers)", "count > len(numbers) // 3 + 1"),
        examples=[(([3, 2, 3],), [3]), (([1, 2],), [1, 2])],
        hidden=each(
            [],
            [7],
            [1, 2, 3],
            [1, 1, 2, 2, 3],
            [2, 2, 1, 1, 1, 3, 3],
            [0, 0, 0],
            [5, 4, 5, 4, 5, 4, 9, 9],
            [1, 1, 1, 2, 2, 2, 3, 3],
            [n % 2 for n in range(99)],
        ),
    ),
    Problem(
        slug="shortest_path_steps",
        level=2,
        topic="graphs",
        text="""A maze is a list of rows of '.' (free) and '#' (wall). Give the fewest steps from the top left to the
        bottom right cell over free cells, up, down, left and right; -1 if there is no way. The maze has at
        least one cell.""",
        reference="""from collections import deque

def shortest_path_steps(rows: list[str]) -> int:
    height, width = len(rows), len(rows[0])
    if rows[0][0] == "#":
        return -1
    steps = {(0, 0): 0}
    waiting = deque(steps)
    while waiting:
        y, x = waiting.popleft()
        for near in ((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)):
            j, i = near
            if 0 <= j < height and 0 <= i < width and rows[j][i] == "." and near not in steps:
                steps[near] = steps[y, x] + 1
                waiting.append(near)
    return steps.get((height - 1, width - 1), -1)
""",
        wrong=("((y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1))", "((y + 1, x), (y, x + 1))"),
        examples=[(([".#", ".."],), 2), (([".#", "#."],), -1)],
        hidden=each(
            ["."],
            ["#"],
            ["..#", "#..", "..."],
            [".....", "####.", ".....", ".####", "....."],
            ["." * 30] * 30,
            ["...", ".#.", "..#"],
            ["..", ".#"],
            ["." * 50],
            [".#...", ".#.#.", ".#.#.", "...#."],
        ),
    ),
    Problem(
        slug="spell_number",
        level=2,
        topic="formatting",
        text="""Write an integer from 0 to 999,999 in English words, parted by spaces, without "and" and without
        hyphens: 342 is "three hundred forty two", 7005 is "seven thousand five".""",
        reference="""SMALL = ("zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
         "fifteen sixteen seventeen eighteen nineteen").split()
TENS = "_ _ twenty thirty forty fifty sixty seventy eighty ninety".split()

def spell_number(number: int) -> str:
    def words(n: int) -> list[str]:
        if n >= 1000:
            return words(n // 1000) + ["thousand"] + (words(n % 1000) if n % 1000 else [])
        if n >= 100:
            return [SMALL[n // 100], "hundred"] + (words(n % 100) if n % 100 else [])
        if n >= 20:
            return [TENS[n // 10]] + ([SMALL[n % 10]] if n % 10 else [])
        return [SMALL[n]]
    return " ".join(words(number))
""",
        wrong=('["thousand"] + (words(n % 1000) if n % 1000 else [])', '["thousand"] + words(n % 1000)'),
        examples=[((342,), "three hundred forty two"), ((7005,), "seven thousand five")],
        hidden=each(0, 13, 20, 21, 100, 110, 1000, 10_010, 100_000, 999_999, 600_001),
    ),
    Problem(
        slug="longest_palindrome_length",
        level=2,
        topic="strings",
        text="Give the length of the longest piece of a text that reads the same backwards.",
        reference="""def longest_palindrome_length(text: str) -> int:
    best = 0
    for centre in range(2 * len(text) - 1):
        left, right = centre // 2, centre // 2 + centre % 2
        while left >= 0 and right < len(text) and text[left] == text[right]:
            left, right = left - 1, right + 1
        best = max(best, right - left - 1)
    return best
""",
        wrong=("range(2 * len(text) - 1)", "range(0, 2 * len(text) - 1, 2)"),
        examples=[(("babad",), 3), (("cbbd",), 2)],
        hidden=each("", "a", "ab", "aa", "abccba", "forgeeksskeegfor", "a" * 300, "abcda", "xabax yy", "abacdfgdcaba"),
    ),
    Problem(
        slug="bank_log",
        level=2,
        topic="input and output",
        text="""Each input line is "deposit NAME CENTS", "withdraw NAME CENTS" or "move FROM TO CENTS". Accounts begin
        with 0. What would make an account negative is refused: print "refused" for it. In the end print each
        account that was named in a deposit or as a TO of a move that was done, in alphabetic order: name,
        space, cents.""",
        reference="""import sys
accounts: dict[str, int] = {}
for line in sys.stdin:
    match line.split():
        case ["deposit", name, cents]:
            accounts[name] = accounts.get(name, 0) + int(cents)
        case ["withdraw", name, cents]:
            if accounts.get(name, 0) < int(cents):
                print("refused")
            elif name in accounts:
                accounts[name] -= int(cents)
        case ["move", giver, taker, cents]:
            if accounts.get(giver, 0) < int(cents):
                print("refused")
            else:
                if giver in accounts:
                    accounts[giver] -= int(cents)
                accounts[taker] = accounts.get(taker, 0) + int(cents)
for name in sorted(accounts):
    print(name, accounts[name])
""",
        wrong=("if accounts.get(name, 0) < int(cents)", "if accounts.get(name, 0) <= int(cents)"),
        examples=[("deposit a 5\nmove a b 3\nwithdraw b 9\n", "refused\na 2\nb 3\n"), ("", "")],
        hidden=[
            "deposit x 1\nwithdraw x 1\n",
            "withdraw q 1\n",
            "move a b 1\ndeposit a 1\n",
            "deposit b 2\ndeposit a 1\n",
            "deposit a 10\nmove a a 10\nwithdraw a 10\n",
            "deposit a 3\nwithdraw a 4\nwithdraw a 3\nwithdraw a 1\n",
            "deposit z 100\nmove z y 50\nmove y x 50\nmove x z 50\nwithdraw z 100\n",
            "deposit k 0\n",
            "".join(f"deposit u{n % 4} {n}\nwithdraw u{(n + 1) % 4} {n}\n" for n in range(12)),
        ],
    ),
]
