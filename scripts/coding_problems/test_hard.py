"""Hard problems to test on: an algorithm that has to be found, or many rules that have to hold together."""

from __future__ import annotations

from .problem import Problem, each

PROBLEMS = [
    Problem(
        slug="knapsack_items",
        level=3,
        topic="dynamic programming",
        text="""Items are [weight, value] with positive weights; each can be taken once. Give the greatest value that
        fits into a capacity, and the least weight with which it can be had, as [value, weight].""",
        reference="""def knapsack_items(items: list[list[int]], capacity: int) -> list[int]:
    best: list[tuple[int, int]] = [(0, 0)] * (capacity + 1)
    for weight, value in items:
        for room in range(capacity, weight - 1, -1):
            before = best[room - weight]
            best[room] = max(best[room], (before[0] + value, before[1] - weight))
    return [best[capacity][0], -best[capacity][1]]
""",
        wrong=("range(capacity, weight - 1, -1)", "range(weight, capacity + 1)"),
        examples=[(([[2, 3], [3, 4], [4, 5]], 5), [7, 5]), (([[9, 1]], 5), [0, 0])],
        hidden=[
            ([], 0),
            ([], 10),
            ([[1, 1]], 0),
            ([[1, 1]], 1),
            ([[2, 5], [3, 5]], 4),
            ([[5, 10], [4, 40], [6, 30], [3, 50]], 10),
            ([[1, 0], [2, 0]], 3),
            ([[3, 3], [1, 1], [2, 2]], 3),
            ([[n % 7 + 1, n * 5 % 11] for n in range(40)], 60),
        ],
    ),
    Problem(
        slug="median_of_two",
        level=3,
        topic="searching",
        text="""Give the median of the numbers of two sorted lists together, of which at least one has an item; for an
        even count it is the mean of the two in the middle. Do not assume that the lists are of like length.""",
        reference="""def median_of_two(first: list[int], second: list[int]) -> float:
    if len(first) > len(second):
        first, second = second, first
    half = (len(first) + len(second) + 1) // 2
    low, high = 0, len(first)
    infinite = float("inf")
    while True:
        i = (low + high) // 2
        j = half - i
        a_left = first[i - 1] if i else -infinite
        a_right = first[i] if i < len(first) else infinite
        b_left = second[j - 1] if j else -infinite
        b_right = second[j] if j < len(second) else infinite
        if a_left > b_right:
            high = i - 1
        elif b_left > a_right:
            low = i + 1
        elif (len(first) + len(second)) % 2:
            return float(max(a_left, b_left))
        else:
            return (max(a_left, b_left) + min(a_right, b_right)) / 2
""",
        wrong=("float(max(a_left, b_left))", "float(b_left)"),
        examples=[(([1, 3], [2]), 2.0), (([1, 2], [3, 4]), 2.5)],
        hidden=[
            ([], [1]),
            ([1], []),
            ([], [2, 3]),
            ([0, 0], [0, 0]),
            ([1, 2, 3, 4, 5], [6]),
            ([6], [1, 2, 3, 4]),
            ([-5, 3, 6, 12, 15], [-12, -10, -6, -3, 4, 10]),
            (list(range(0, 100, 2)), list(range(1, 40, 2))),
            ([7, 8, 9], [1, 2]),
            ([1, 1, 1], [2]),
        ],
    ),
    Problem(
        slug="csv_rows",
        level=3,
        topic="parsing",
        text="""Parse CSV text into rows of fields: commas part fields, "\\n" or "\\r\\n" rows. A field that begins
        with a double quote goes to the closing one; within it commas and line ends are text, and "" is one
        quote. A line end at the very end begins no further row; the empty text has no rows; an empty line is a
        row with one empty field.""",
        reference="""def csv_rows(text: str) -> list[list[str]]:
    rows: list[list[str]] = []
    row: list[str] = []
    place = 0
    while place < len(text):
        if text[place] == '"':
            field, place = "", place + 1
            while True:
                end = text.find('"', place)
                end = len(text) if end < 0 else end
                field += text[place:end]
                place = end + 1
                if text[place : place + 1] != '"':
                    break
                field, place = field + '"', place + 1
        else:
            start = place
            while place < len(text) and text[place] not in ",\\n" and text[place : place + 2] != "\\r\\n":
                place += 1
            field = text[start:place]
        row.append(field)
        if text[place : place + 1] == ",":
            place += 1
            if place == len(text):
                row.append("")
        else:
            rows.append(row)
            row = []
            place += 2 if text[place : place + 2] == "\\r\\n" else 1
    return rows + ([row] if row else [])
""",
        wrong=(
            "if text[place : place + 1] != '\"':\n                    break\n"
            "                field, place = field + '\"', place + 1",
            "break",
        ),
        examples=[(('a,"b,c"\nd,e\n',), [["a", "b,c"], ["d", "e"]]), (("",), [])],
        hidden=each(
            "a",
            ",",
            "a,\n",
            '"say ""hi"""',
            '"two\nlines",x',
            "a\r\nb\r\n",
            "\n",
            "a\n\nb",
            '"",""',
            '""""',
            'x"y,z',
            '1,"a\r\nb",2\r\n3,4,5',
        ),
    ),
    Problem(
        slug="longest_valid_brackets",
        level=3,
        topic="stacks",
        text="Give the length of the longest piece of a text of '(' and ')' that is balanced.",
        reference="""def longest_valid_brackets(text: str) -> int:
    best, stack = 0, [-1]
    for place, letter in enumerate(text):
        if letter == "(":
            stack.append(place)
        else:
            stack.pop()
            if not stack:
                stack.append(place)
            best = max(best, place - stack[-1])
    return best
""",
        wrong=(
            """    best, stack = 0, [-1]
    for place, letter in enumerate(text):
        if letter == "(":
            stack.append(place)
        else:
            stack.pop()
            if not stack:
                stack.append(place)
            best = max(best, place - stack[-1])
    return best
""",
            """    best = opened = length = 0
    for letter in text:
        if letter == "(":
            opened += 1
        elif opened:
            opened, length = opened - 1, length + 2
            best = max(best, length)
        else:
            length = 0
    return best
""",
        ),
        examples=[((")()())",), 4), (("((",), 0)],
        hidden=each(
            "", "(", ")", "()", "()(()", "(()", ")()())()()(", "(((())))", "()" * 500, "(" * 300 + ")" * 200, "())(())"
        ),
    ),
    Problem(
        slug="minimum_cut_palindromes",
        level=3,
        topic="dynamic programming",
        text="""Give the fewest cuts that part a text into pieces that all read the same backwards. Texts have up to
        500 letters.""",
        reference="""def minimum_cut_palindromes(text: str) -> int:
    cuts = list(range(-1, len(text)))
    for centre in range(2 * len(text) - 1):
        left, right = centre // 2, centre // 2 + centre % 2
        while left >= 0 and right < len(text) and text[left] == text[right]:
            cuts[right + 1] = min(cuts[right + 1], cuts[left] + 1)
            left, right = left - 1, right + 1
    return max(0, cuts[-1])
""",
        wrong=(
            """    cuts = list(range(-1, len(text)))
    for centre in range(2 * len(text) - 1):
        left, right = centre // 2, centre // 2 + centre % 2
        while left >= 0 and right < len(text) and text[left] == text[right]:
            cuts[right + 1] = min(cuts[right + 1], cuts[left] + 1)
            left, right = left - 1, right + 1
    return max(0, cuts[-1])
""",
            """    pieces = start = 0
    while start < len(text):
        start = max(e for e in range(start + 1, len(text) + 1) if text[start:e] == text[start:e][::-1])
        pieces += 1
    return max(0, pieces - 1)
""",
        ),
        examples=[(("aab",), 1), (("aba",), 0)],
        hidden=each(
            "", "a", "ab", "aaabaa", "abcbm", "cdd", "abacdcaba", "aaaa" * 50, "abababab", "leveltacocat", "ccaacabacb"
        ),
    ),
    Problem(
        slug="network_delay",
        level=3,
        topic="graphs",
        text="""Links [a, b, ms] connect n nodes, 0 to n - 1, in both directions; ms is not negative. A message starts
        at a node and spreads over all links. Give [the time at which the last node has it, that node] (the
        smallest such node), leaving out nodes that it never reaches.""",
        reference="""import heapq

def network_delay(n: int, links: list[list[int]], start: int) -> list[int]:
    near: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    for a, b, ms in links:
        near[a].append((b, ms))
        near[b].append((a, ms))
    times: dict[int, int] = {}
    waiting = [(0, start)]
    while waiting:
        time, node = heapq.heappop(waiting)
        if node in times:
            continue
        times[node] = time
        for other, ms in near[node]:
            if other not in times:
                heapq.heappush(waiting, (time + ms, other))
    last = max(times.values())
    return [last, min(node for node, time in times.items() if time == last)]
""",
        wrong=("        near[b].append((a, ms))\n", ""),
        examples=[((3, [[0, 1, 5], [1, 2, 1]], 0), [6, 2]), ((2, [], 1), [0, 1])],
        hidden=[
            (1, [], 0),
            (2, [[0, 1, 0]], 1),
            (3, [[0, 1, 4], [0, 2, 4]], 0),
            (3, [[0, 1, 9], [0, 2, 1], [2, 1, 1]], 0),
            (4, [[1, 0, 1], [2, 1, 1], [3, 2, 1]], 0),
            (4, [[0, 1, 7]], 0),
            (2, [[0, 1, 9], [1, 0, 3]], 0),
            (5, [[0, 0, 2], [3, 4, 1]], 4),
            (60, [[i, i * 7 % 60, i % 9 + 1] for i in range(60)] + [[i, i + 1, 5] for i in range(59)], 17),
        ],
    ),
    Problem(
        slug="text_justify",
        level=3,
        topic="formatting",
        text="""Lay out words in lines of a width, as many words a line as fit with one space between. Spread further
        spaces evenly between the words of a line, those that are left over from the left; the last line, and
        lines of one word, are filled with spaces on the right. No word is longer than the width; no words give
        no lines.""",
        reference="""def text_justify(words: list[str], width: int) -> list[str]:
    lines: list[list[str]] = []
    for word in words:
        if lines and sum(map(len, lines[-1])) + len(lines[-1]) + len(word) <= width:
            lines[-1].append(word)
        else:
            lines.append([word])
    laid_out = []
    for number, line in enumerate(lines, 1):
        gaps = len(line) - 1
        if number == len(lines) or gaps == 0:
            laid_out.append(" ".join(line).ljust(width))
            continue
        spaces = width - sum(map(len, line))
        even, more = divmod(spaces, gaps)
        text = "".join(word + " " * (even + (place < more)) for place, word in enumerate(line[:-1]))
        laid_out.append(text + line[-1])
    return laid_out
""",
        wrong=("number == len(lines) or gaps == 0", "gaps == 0"),
        examples=[
            ((["a", "bb", "c", "dd"], 6), ["a bb c", "dd    "]),
            ((["ab", "c", "defg"], 6), ["ab   c", "defg  "]),
        ],
        hidden=[
            ([], 5),
            (["x"], 1),
            (["x"], 4),
            (["aa", "bb"], 2),
            (["a", "b", "c", "d", "e"], 8),
            (["aaa", "b", "cc", "dddd"], 9),
            (["this", "is", "an", "example", "of", "text", "justification"], 16),
            (["four", "four", "four", "four"], 9),
            ([f"w{n * n}" for n in range(30)], 23),
        ],
    ),
    Problem(
        slug="lru_log",
        level=3,
        topic="data structures",
        text="""Replay operations on a cache of a capacity of at least 1: ["put", key, value] and ["get", key]. Both
        use the key; when a new key would make the cache too large, the key unused for longest goes. Give the
        results of the gets, None for a key that is not there.""",
        reference="""def lru_log(capacity: int, operations: list[list]) -> list:
    cache: dict = {}
    results = []
    for name, key, *value in operations:
        if name == "get":
            results.append(cache.get(key))
            if key in cache:
                cache[key] = cache.pop(key)
            continue
        cache.pop(key, None)
        cache[key] = value[0]
        if len(cache) > capacity:
            del cache[next(iter(cache))]
    return results
""",
        wrong=("cache.pop(key, None)\n", "pass\n"),
        examples=[
            ((1, [["put", "a", 1], ["put", "b", 2], ["get", "a"], ["get", "b"]]), [None, 2]),
            ((2, [["get", "x"]]), [None]),
        ],
        hidden=[
            (1, []),
            (2, [["put", "a", 1], ["put", "b", 2], ["get", "a"], ["put", "c", 3], ["get", "b"], ["get", "a"]]),
            (2, [["put", "a", 1], ["put", "b", 2], ["put", "a", 9], ["put", "c", 3], ["get", "a"], ["get", "b"]]),
            (1, [["put", "a", 1], ["put", "a", 2], ["get", "a"]]),
            (3, [["put", "k", 0], ["get", "k"]]),
            (2, [["put", "a", 1], ["get", "z"], ["put", "b", 2], ["get", "a"], ["get", "b"]]),
            (5, [[["put", f"k{n * 3 % 8}", n], ["get", f"k{n % 7}"]][n % 2] for n in range(120)]),
            (
                2,
                [
                    ["put", "x", 1],
                    ["put", "y", 2],
                    ["put", "x", 3],
                    ["put", "z", 4],
                    ["get", "x"],
                    ["get", "y"],
                    ["get", "z"],
                ],
            ),
        ],
    ),
    Problem(
        slug="inventory_report",
        level=3,
        topic="input and output",
        text="""Each line is "in ITEM COUNT PRICE" or "out ITEM COUNT"; all numbers are positive integers. Goods leave
        first in, first out. For an "out" print the total price at which its goods had come in; if there are
        not enough, print "short N" with the number that lacks, and nothing leaves. In the end print "stock"
        and the price of all that is left.""",
        reference="""import sys
from collections import deque
stock: dict[str, deque[list[int]]] = {}
for line in sys.stdin:
    match line.split():
        case ["in", item, count, price]:
            stock.setdefault(item, deque()).append([int(count), int(price)])
        case ["out", item, count]:
            lots, wanted = stock.setdefault(item, deque()), int(count)
            held = sum(lot[0] for lot in lots)
            if held < wanted:
                print("short", wanted - held)
                continue
            total = 0
            while wanted:
                taken = min(wanted, lots[0][0])
                total += taken * lots[0][1]
                lots[0][0] -= taken
                wanted -= taken
                if lots[0][0] == 0:
                    lots.popleft()
            print(total)
print("stock", sum(count * price for lots in stock.values() for count, price in lots))
""",
        wrong=("if lots[0][0] == 0:\n                    lots.popleft()", "lots.rotate(-1)"),
        examples=[("in a 2 5\nin a 2 7\nout a 3\n", "17\nstock 7\n"), ("out b 1\n", "short 1\nstock 0\n")],
        hidden=[
            "",
            "in x 1 1\n",
            "in x 1 1\nout x 1\nout x 1\n",
            "in a 5 2\nout a 9\nout a 5\n",
            "in a 1 1\nin b 1 9\nout b 1\n",
            "in a 3 1\nin a 3 2\nin a 3 3\nout a 4\nout a 4\n",
            "in q 10 10\nout q 3\nout q 3\nin q 1 1\nout q 5\n",
            "in a 1 5\nin a 1 6\nout a 1\nin a 1 7\nout a 2\n",
            "".join(f"in i{n % 3} {n + 1} {n * 7 % 5 + 1}\nout i{n % 4} {n % 6 + 1}\n" for n in range(30)),
        ],
    ),
]
