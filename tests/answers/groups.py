"""The groups of bundled tasks that one piece of code judges, with a judge of answers for each task."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tests.answers import operators
from tests.answers.operators import Operator

ROOT: Final = Path(__file__).resolve().parents[2]
WRONG_AT_MOST: Final = 0.05
"""The most that a wrong answer may earn."""
CONSTANT_AT_MOST: Final = 0.1
"""The most that one answer may earn on average in a group."""
GUESSABLE_AT_MOST: Final = 0.3
"""The most that it may earn in the few groups that state why their answers can be guessed."""
IS_WHOLE: Final = os.environ.get("BUNDLED_TASKS") == "all"
"""True to play all tasks, as `make certify` does; else groups whose tasks take long play a sample."""


def module(environment: str, name: str) -> Any:
    """Import a module of an environment from its folder, as its server does."""
    for folder in ("base", environment):
        if (path := str(ROOT / "env_images" / folder)) not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)


@dataclass(frozen=True)
class Item:
    """A task of a group."""

    id: str
    prompt: str
    reference: str
    """An answer with the full reward, in the form in which the question asks for it."""
    score: Callable[[Any], float]
    """Returns the reward of an answer, which is None if the agent gave none."""


@dataclass(frozen=True)
class Result:
    """What the answers of a group earned."""

    findings: list[str]
    """A line for each rule that an answer breaks."""
    tasks: int
    notations: int
    """The number of notations that apply to a task at least."""
    near_misses: int
    """The number of wrong answers in all tasks."""
    worst: float
    """The most that one of them earned."""
    floor: float
    """The most that an empty answer, an echo of the prompt, and no answer earned."""
    constant: str
    """The answer that earned most in all tasks."""
    mean: float
    """Its mean reward."""


@dataclass(frozen=True)
class Group:
    """Tasks that one piece of code judges, and how their answers may be written."""

    name: str
    items: list[Item]
    notations: tuple[Mapping[str, Operator], ...]
    """Operators whose texts earn the full reward."""
    near: tuple[Mapping[str, Operator], ...]
    """Operators whose texts earn at most `WRONG_AT_MOST`, or *partial*."""
    near_numbers: tuple[Mapping[str, Operator], ...] = ()
    """Operators on each number of the reference, whose texts earn as little."""
    mutations: Mapping[str, Callable[[str], Iterator[str]]] = field(default_factory=dict)
    """Operators that change the reference in one place each. At least one of the texts of each earns as little."""
    equal: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Tasks and mutations all of whose texts are right, with the reason."""
    partial: float = WRONG_AT_MOST
    """The documented reward of an answer that is right in part."""
    read: Callable[[str], str] | None = None
    """Returns the answer in a model's text, as the environment's server reads it."""
    takes_none: bool = False
    """True if an episode can end without an answer."""
    constants: Mapping[str, Operator] | None = None
    """Operators that make the same answer of all references; by default, each reference is such an answer."""
    are_samples: bool = False
    """True if the tasks are samples, so that the best constant means nothing."""
    guessable: str = ""
    """The reason why one answer may earn `GUESSABLE_AT_MOST` on average."""
    every: int = 1
    """One of so many tasks is played, unless `IS_WHOLE`."""

    def findings(self) -> list[str]:
        """Return a line for each rule that an answer of the group breaks."""
        return self.play().findings

    def play(self) -> Result:
        """Judge right, wrong, empty and constant answers of the tasks."""
        items = self.items if IS_WHOLE else self.items[:: self.every]
        right = [(item, name, text, item.score(text)) for item in items for name, text in self.right_answers(item)]
        wrong = [(item, name, text, item.score(text)) for item in items for name, text in self.near_misses(item)]
        floor = [(item, name, item.score(text)) for item in items for name, text in self.no_answers(item)]
        mean, constant = self.best_constant(items)
        at_most = GUESSABLE_AT_MOST if self.guessable else CONSTANT_AT_MOST
        findings = [
            *(f"{i.id}: {n}: {t!r} earns {r:.2f}, and is right" for i, n, t, r in right if r != 1.0),
            *(f"{i.id}: {n}: {t!r} earns {r:.2f}, and is wrong" for i, n, t, r in wrong if r > self.partial),
            *(f"{item.id}: {name}: earns {reward:.2f}" for item, name, reward in floor if reward),
            *([f"{self.name}: the answer {constant!r} earns {mean:.2f} on average"] if mean > at_most else []),
        ]
        return Result(
            findings,
            tasks=len(items),
            notations=len({name for _, name, *_ in right}),
            near_misses=len(wrong),
            worst=max((reward for *_, reward in wrong), default=0.0),
            floor=max((reward for *_, reward in floor), default=0.0),
            constant=constant,
            mean=mean,
        )

    def right_answers(self, item: Item) -> Iterator[tuple[str, str]]:
        """Yield the reference of *item* in other notations, by the name of their operator."""
        yield from operators.variants(item.reference, *self.notations)
        if self.read is not None:
            for name, text in operators.variants(item.reference, operators.IN_TEXT):
                yield name, self.read(text)

    def near_misses(self, item: Item) -> Iterator[tuple[str, str]]:
        """Yield wrong answers near the reference of *item*, by the name of their operator."""
        yield from operators.variants(item.reference, *self.near)
        yield from operators.number_variants(item.reference, *self.near_numbers)
        for name, mutation in self.mutations.items():
            made = list(mutation(item.reference))
            first = next((text for text in made if item.score(text) <= self.partial), None)
            if first is not None or (made and (item.id, name) not in self.equal):
                yield name, first or made[-1]

    def no_answers(self, item: Item) -> Iterator[tuple[str, str | None]]:
        """Yield answers that say nothing: empty, an echo of the prompt and, where an episode can end so, none."""
        yield from (("empty", ""), ("blank", " \n"), ("echo", item.prompt))
        if self.takes_none:
            yield "none", None

    def best_constant(self, items: list[Item]) -> tuple[float, str]:
        """Return the mean reward of the answer that earns most in all *items*, and the answer or its name.

        The mean of some of the tasks means nothing.
        """
        if self.are_samples or len(items) < len(self.items):
            return 0.0, ""
        answers = self.constants or {item.reference: always(item.reference) for item in self.items}
        return max(
            (sum(item.score(made(item.reference)) for item in items) / len(items), name)
            for name, made in answers.items()
        )


def always(answer: str) -> Operator:
    """Return an operator that makes *answer* of every reference."""
    return lambda _: answer


def bundled(environment: str) -> list[dict[str, Any]]:
    """Return all tasks of a bundled set."""
    folder = ROOT / "tasks" / environment
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.jsonl"))]
    return [json.loads(line) for text in texts for line in text.split("\n") if line]


# -- math

_NUMBERS: Final = (operators.MARKS, operators.NUMBERS)


def math_groups() -> dict[str, Group]:
    """Return the families of `math`."""
    scorers = module("math", "math_scorers")
    families: defaultdict[str, list[Item]] = defaultdict(list)
    for task in bundled("math"):
        evaluation = scorers.Evaluation.read(task["evaluation"])
        family = evaluation.family
        item = Item(task["id"], task["instruction"], _asked_for(family, evaluation.answer), _judge(evaluation))
        families[family].append(item)
    return {family: _math_group(family, items) for family, items in families.items()}


def _judge(evaluation: Any) -> Callable[[str], float]:
    return lambda answer: float(evaluation.judge(answer).score)


def _asked_for(family: str, reference: str) -> str:
    """Return a reference in the form and with the digits that the question asks for."""
    if family == "power_function":
        return f"{float(reference):.2e}"
    return reference


def _math_group(family: str, items: list[Item]) -> Group:
    read = module("base", "envserver.answers").final_answer
    group = Group(family, items, (operators.MARKS,), (operators.NEAR_TEXTS,), (operators.NEAR_NUMBERS,), read=read)
    match family:
        case "polynomial_equations":  # the share of the roots
            return replace(group, partial=0.99)
        case "advanced_geometry":  # 0.5 for a close radius
            return replace(group, partial=0.5)
        case "jugs":  # any moves that reach the target are right, and a list in marks is no list
            plain = {name: operators.MARKS[name] for name in ("as it is", "blanks")}
            return replace(group, notations=(plain,), near_numbers=())
    if all(re.fullmatch(r"-?\d+(?:\.\d+)?", item.reference) for item in items) and family != "base_conversion":
        return replace(group, notations=_NUMBERS)
    return group


# -- chat


CHAT: Final = {
    "exact_match": Group("", [], (operators.TEXTS,), (operators.NEAR_TEXTS, operators.NEAR_WORDS)),
    "numeric_match": Group("", [], (operators.MARKS, operators.NUMBERS), (operators.NEAR_TEXTS,)),
    "json_equals": Group("", [], (operators.JSON,), (operators.NEAR_TEXTS, operators.NEAR_JSON)),
    "one_of": Group("", [], (operators.TEXTS, operators.CASES), (operators.NEAR_TEXTS,)),
    "several": Group("", [], (operators.TEXTS,), ({"a word more": lambda text: f"and {text}"},)),
}
"""The reward functions that bundled tasks name. Tasks of several functions have rules instead of one answer."""


def chat_groups() -> dict[str, Group]:
    """Return the reward functions of `chat`'s tasks."""
    scoring = module("chat", "chat_scoring")
    functions: defaultdict[str, list[Item]] = defaultdict(list)
    for task in bundled("chat"):
        evaluation = scoring.Evaluation.read(task["evaluation"])
        name = evaluation.calls[0].name if len(evaluation.calls) == 1 else "several"
        functions[name].append(Item(task["id"], task["instruction"], evaluation.references[-1], _chat(evaluation)))
    numbers = (operators.NEAR_NUMBERS,)
    return {
        name: replace(CHAT[name], name=name, items=items, near_numbers=numbers) for name, items in functions.items()
    }


def _chat(evaluation: Any) -> Callable[[str], float]:
    return lambda answer: float(evaluation.score(answer).reward)


# -- game

SEVERAL_GUESSES: Final = {
    "guess_the_number": "four guesses find four of 24 numbers",
    "mastermind": "four guesses find four of 24 codes",
    "tower_of_hanoi": "the smallest of its four tasks needs three moves",
    "lights_out": "a board of 3 x 3 may need three or four lights",
    "countdown": "two of its 12 tasks are solved by the same three moves",
}
"""Titles in which a cycle of at most four moves earns more than `CONSTANT_AT_MOST` on average, with the reason."""
CLIMBS: Final = 12
TRIED_AT_MOST: Final = 150 if IS_WHOLE else 50
"""Cycles that are tried in a title, besides the last climb."""
CYCLE_AT_MOST: Final = 0.3
"""The most that a cycle may earn on average in those titles."""


def game_tasks() -> dict[str, list[dict[str, Any]]]:
    """Return the tasks of `game` by their titles."""
    titles: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for task in bundled("game"):
        titles[task["config"]["game"]].append(task)
    return dict(titles)


def cycle_moves(title: str, tasks: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the moves of which cycles are made: all of a title with few moves, else moves that win some task."""
    games = module("game", "game_config")
    match title:
        case "grid" | "frozen_lake" | "2048":
            return ["up", "down", "left", "right"]
        case "tower_of_hanoi":
            return [f"{a} {b}" for a in "ABC" for b in "ABC" if a != b]
        case "lights_out" | "minesweeper":
            return [f"{row} {column}" for row in range(4) for column in range(4)]
        case "countdown":
            return [f"{i} {j} {sign}" for i in range(3) for j in range(3) for sign in "+-*/" if i != j]
    played = [games.read_game(task["config"], seed=0)[0]._game for task in tasks]
    match title:
        case "guess_the_number":
            return sorted({str(game.game_number) for game in played})
        case "mastermind":
            return sorted({" ".join(map(str, game.state.game_state["secret_code"])) for game in played})
        case "sudoku":
            cells = [(row, column) for row in range(9) for column in range(9)]
            return sorted({f"{r + 1} {c + 1} {game.full_grid[r][c]}" for game in played for r, c in cells})[::60]
        case "cryptarithm":
            return [f"{letter} {digit}" for letter in "ABDES" for digit in (0, 1, 9)]
    return [f"{kind} {row} {column}" for kind in "hv" for row in range(3) for column in range(3)]


def best_cycle(
    tasks: Sequence[Any], moves: list[str], reward: Callable[[Any, tuple[str, ...]], float]
) -> tuple[float, tuple[str, ...]]:
    """Return the mean *reward* of the best cycle of at most four moves that `CLIMBS` climbs find."""
    means: dict[tuple[str, ...], float] = {}

    def mean(cycle: tuple[str, ...]) -> float:
        if cycle not in means:
            means[cycle] = sum(reward(task, cycle) for task in tasks) / len(tasks)
        return means[cycle]

    chance = random.Random(1)
    single = sorted(((move,) for move in moves), key=mean)[-4:]  # together, the best single moves are a good start
    best = max([*single, tuple(move for (move,) in single)], key=mean)
    for climb in range(CLIMBS):
        if len(means) > TRIED_AT_MOST:
            break
        cycle = best if climb == 0 else tuple(chance.choices(moves, k=chance.choice((3, 4))))
        for at in range(len(cycle)):
            others = chance.sample(moves, min(len(moves), 12))
            cycle = max([cycle, *((*cycle[:at], move, *cycle[at + 1 :]) for move in others)], key=mean)
        best = max(best, cycle, key=mean)
    return mean(best), best
