"""The tasks that come with the environments: a play that wins each task, and a wrong play that loses it.

A play acts in a session of the task and ends the episode. The server is a local process or a container. The plays of
the browser environment are in `browser_solutions`.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.coding_problems import SPLITS
from scripts.math_problems import references
from tests.envs.workers import Session
from tests.runner.lanes import PLAYED

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]
Play = Callable[[Session, Json], Json]
"""Plays a task and returns the result of the last step, the only step with a reward."""
RecordProperty = Callable[[str, object], None]
"""The type of pytest's `record_property`."""


def tasks_of(environment: str) -> list[Json]:
    """Return the environment's tasks, training tasks first."""
    files = [ROOT / "tasks" / environment / f"{split}.jsonl" for split in ("train", "test")]
    return [json.loads(line) for file in files for line in file.read_text("utf-8").split("\n") if line]


def note_plays(record: RecordProperty, environment: str, where: str, *, won: int = 0, lost: int = 0) -> None:
    """Record how many tasks the reference won and a wrong play lost, once per test; the runner reports the counts."""
    record(PLAYED, {"environment": environment, "where": where, "won": won, "lost": lost})


def _module(environment: str, name: str) -> Any:
    """Import a module of an environment from its folder, as the environment's server does."""
    for folder in ("env_images/base", f"env_images/{environment}"):
        if (path := str(ROOT / folder)) not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)


# math


def math_answer(task: Json) -> str:
    return str(task["evaluation"]["entry"]["answer"])


def wrong_math_answer(task: Json) -> str:
    """Return a plausible wrong answer: another weekday, a plan that fills one jug, or a changed digit."""
    answer, weekdays = math_answer(task), references.WEEKDAYS
    if answer in weekdays:
        return str(weekdays[weekdays.index(answer) - 1])
    if task["tags"][0] == "jugs":
        return '["fill A"]'
    changed = re.sub(r"[1-9]|0$", lambda digit: "2" if digit[0] == "1" else "1", answer, count=1)
    return changed if changed != answer else f"{answer}1"  # "ff" in hexadecimal


# chat


def chat_replies(task: Json) -> list[str]:
    given = task["evaluation"]["reference"]
    return given if isinstance(given, list) else [given]


def wrong_chat_reply(task: Json) -> str:
    """Return a plausible wrong final reply: another number, another order of words, or a superfluous word."""
    last = chat_replies(task)[-1]
    match task["tags"][0]:
        case "json" | "clarifying":
            return (
                re.sub(r"\d+", "123", last, count=1)
                if re.search(r"\d", last)
                else last.replace('name": "', 'name": "X')
            )
        case "constraint":
            return f"and {last}"
        case "translation":
            return f"{last} xyz"
        case "history" | "ordering" if "," in last:
            return ", ".join(reversed(last.split(", ")))
    return f"9{last}"


def hold(session: Session, replies: list[str]) -> Json:
    """Say *replies* in order and return the last result, the only result that ends the conversation."""
    results = [session.tool("reply", message=reply) for reply in replies]
    assert [(result["reward"], result["finished"]) for result in results[:-1]] == [(None, False)] * (len(replies) - 1)
    return results[-1]


# game


def win_game(session: Session, task: Json) -> Json:
    """Let the solver play; it sees the same texts as a model."""
    solvers, titles = _module("game", "game_solvers"), _module("game", "game_titles")
    last: Json = {}

    def act(message: str) -> tuple[str, bool]:
        nonlocal last
        last = session.tool("act", message=message)
        return last["blocks"][0]["text"], last["finished"]

    game, config = task["config"]["game"], task["config"]
    parameters = {} if game == "grid" else titles.read_parameters(game, config["parameters"])
    solvers.play(solvers.player_of(game, config, parameters, session.prompt()), act)
    return last


def play_nonsense(session: Session, task: Json) -> Json:
    """Make moves that no game has until the game is over."""
    result = session.tool("act", message="[nonsense]")
    while not result["finished"]:
        assert result["reward"] is None
        result = session.tool("act", message="[nonsense]")
    return result


# os


def solve_os(session: Session, solution: Json) -> Json:
    """Run the commands of *solution* and end with its answer.

    Where the solution has commands and an answer, the last command prints the answer.
    """
    printed = ""
    for command in solution["commands"]:
        result = session.tool("bash_action", script=command)
        assert (result["reward"], result["finished"]) == (None, False), result
        printed = result["blocks"][0]["text"]
    answer = solution["answer"]
    if answer is None:
        return session.tool("finish_action", thought="")
    assert not solution["commands"] or printed == f"The output of the OS:\n{answer}", printed
    return session.tool("answer_action", answer=answer)


# coding

PROBLEMS = {problem.task_id(split): problem for split, problems in SPLITS.items() for problem in problems}
"""The problems by the ids of the tasks that were made from them."""

PLAYS: Mapping[str, tuple[Play, Play]] = {
    "math": (
        lambda session, task: session.tool("submit", answer=math_answer(task)),
        lambda session, task: session.tool("submit", answer=wrong_math_answer(task)),
    ),
    "chat": (
        lambda session, task: hold(session, chat_replies(task)),
        lambda session, task: hold(session, [*chat_replies(task)[:-1], wrong_chat_reply(task)]),
    ),
    "game": (win_game, play_nonsense),
    "os": (
        lambda session, task: solve_os(session, task["reference"]),
        lambda session, task: solve_os(session, task["reference"]["wrong"]),
    ),
    "coding": (
        lambda session, task: session.tool("submit", code=PROBLEMS[task["id"]].reference),
        lambda session, task: session.tool("submit", code=PROBLEMS[task["id"]].wrong_solution),
    ),
}
"""For each environment, a play that wins a task and a play that loses it."""


def complaint(session: Session, task: Json, play: Play, *, wins: bool) -> str:
    """Play *task* and describe what is wrong with its end; return an empty text if nothing is wrong."""
    try:
        last = play(session, task)
    except Exception as error:  # noqa: BLE001 - the test fails with this task's name, after the others
        return repr(error)
    if last["finished"] and last["reward"] is not None and (last["reward"] == 1.0 if wins else last["reward"] < 1.0):
        return ""
    return f"{'not won' if wins else 'not lost'}: {last}"
