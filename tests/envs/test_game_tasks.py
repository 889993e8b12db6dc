"""The game environment's tasks, generator and server; a player with a model's view wins each task."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import COMMAND_S
from tests.envs.bundled import RecordProperty, note_plays, play_nonsense
from tests.envs.bundled import win_game as win
from tests.envs.workers import Session, Worker

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tasks" / "game"
MAKER = ROOT / "scripts" / "make-game-tasks"

MOST_RESIDENT_MIB = 64
"""Resident memory in MiB of a server that has played every task."""


def game_module(name: str) -> Any:
    """Import a module of the environment from its folder, as its server does."""
    for folder in ("env_images/base", "env_images/game"):
        if (path := str(ROOT / folder)) not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)


solvers = game_module("game_solvers")
titles = game_module("game_titles")


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").split("\n") if line]


TRAIN, TEST = read("train"), read("test")
ALL = TRAIN + TEST
GAMES = sorted({"grid", *titles.TITLES})


def of_game(name: str) -> list[dict[str, Any]]:
    return [task for task in ALL if task["tags"][0] == name]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker("game", box=Path("unused"))  # a server without sandboxes does not use the box
    try:
        yield started
    finally:
        started.stop()


def observed(session: Session) -> dict[str, Any]:
    """Return the structured observation of the prompt."""
    return dict(session.get("/game/prompt").json()[0]["detail"]["observation"])


# The tasks


def test_there_are_enough_tasks_of_every_game_at_every_level() -> None:
    train, test = (Counter((task["tags"][0], task["difficulty"]) for task in split) for split in (TRAIN, TEST))

    assert (len(TRAIN) >= 60, len(TEST) >= 20) == (True, True)
    assert set(train + test) == {(game, level) for game in GAMES for level in (1, 2, 3, 4)}
    assert {game for game, _ in train} == {game for game, _ in test} == set(GAMES)


def test_no_game_and_no_id_occurs_twice_within_or_across_the_splits() -> None:
    games = Counter(json.dumps({**task["config"], "max_turns": 0}, sort_keys=True) for task in ALL)
    ids = Counter(task["id"] for task in ALL)

    assert [game for game, count in games.items() if count > 1] == []
    assert [name for name, count in ids.items() if count > 1] == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_line_is_one_compact_json_object_with_the_documented_keys(split: str) -> None:
    text = (TASKS / f"{split}.jsonl").read_text("utf-8")
    keys = ["id", "tags", "difficulty", "instruction", "config", "evaluation"]

    tasks = [json.loads(line) for line in text.split("\n")[:-1]]

    assert text == "".join(json.dumps(task, ensure_ascii=False, separators=(",", ":")) + "\n" for task in tasks)
    assert all(list(task) == keys for task in tasks)
    assert all(task["id"].startswith(f"{split}-{task['tags'][0]}-{task['difficulty']}-") for task in tasks)


def test_every_addition_of_words_has_exactly_one_solution() -> None:
    equations = [task["config"]["parameters"]["equation"] for task in of_game("cryptarithm")]

    assert {text: len(solvers.solutions(text)) for text in equations} == dict.fromkeys(equations, 1)


def test_tasks_and_configurations_on_the_pages_can_be_won(worker: Worker) -> None:
    pages = [(ROOT / page / "README.md").read_text("utf-8") for page in ("env_images/game", "tasks/game")]
    configurations, (task,) = (re.findall(r"^```json\n(.+?)^```$", page, re.M | re.S) for page in pages)
    shown = [json.loads(task), *({"config": json.loads(line)} for line in "".join(configurations).splitlines())]

    assert [win(worker.open(task), task)["reward"] for task in shown] == [1.0, 1.0, 1.0]


def test_a_player_wins_every_task_with_reward_1_and_the_worker_stays_within_its_memory_limit(
    worker: Worker, record_property: RecordProperty
) -> None:
    won = {}
    for task in ALL:
        session = worker.open(task)
        won[task["id"]] = win(session, task)["reward"]
        session.close()
    status = Path(f"/proc/{worker.process.pid}/status").read_text()

    note_plays(record_property, "game", "local process", won=sum(reward == 1.0 for reward in won.values()))
    assert {name: reward for name, reward in won.items() if reward != 1.0} == {}
    assert int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024 < MOST_RESIDENT_MIB


@pytest.mark.parametrize("game", GAMES)
def test_a_player_that_makes_nonsense_moves_loses(worker: Worker, game: str, record_property: RecordProperty) -> None:
    for task in of_game(game):
        session = worker.open(task)
        result = play_nonsense(session, task)
        session.close()

        assert (result["reward"] < 0.5, result["metadata"]["won"]) == (True, False), task["id"]
        assert result["metadata"]["turns"] <= task["config"]["max_turns"]
    note_plays(record_property, "game", "local process", lost=len(of_game(game)))


# The generator


def make(*arguments: str, hash_seed: str = "random") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(MAKER), *arguments],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


def test_the_task_files_match_the_generator() -> None:
    checked = make("--check")

    assert (checked.returncode, checked.stdout.count("as made")) == (0, 2), checked.stdout + checked.stderr


def test_another_seed_makes_other_tasks_and_the_check_detects_them(tmp_path: Path) -> None:
    some = ("--games", "grid", "guess_the_number", "slitherlink", "--directory", str(tmp_path))
    made = make("--seed", "7", *some, hash_seed="1")
    same = make("--seed", "7", *some, "--check", hash_seed="2")
    other = make(*some, "--check")

    assert made.returncode == 0, made.stderr
    assert same.returncode == 0, same.stdout
    assert (other.returncode, other.stdout.count("differs")) == (1, 2)


# The server

NUMBER = {"config": {"game": "guess_the_number", "seed": 7, "max_turns": 4}}
CORRIDOR = {
    "instruction": "Go home.",
    "config": {"game": "grid", "level": {"map": ["S...G"]}, "max_turns": 6},
    "evaluation": {"reward_function": "efficiency"},
}


def test_the_prompt_states_the_task_the_rules_the_form_of_a_move_and_the_turns(worker: Worker) -> None:
    session = worker.open(CORRIDOR)

    prompt = session.prompt()

    assert prompt.startswith("Go home.\n\nYou (@) are in a grid world.")
    assert "\n@...G\n" in prompt
    assert "with the tool `act`: one of [up], [down]" in prompt
    assert prompt.endswith("You have 6 turns; an invalid move costs one, too.")


def test_structured_observations_count_the_turns_and_list_the_moves(worker: Worker) -> None:
    session = worker.open(CORRIDOR)

    first, step, *_, last = observed(session), *(session.tool("act", message="right")["data"] for _ in range(4))
    boards = [seen.pop("text") for seen in (first, step)]

    assert first == {"game": "grid", "turn": 0, "max_turns": 6, "valid_moves": ["[right]"]}
    assert step == {"game": "grid", "turn": 1, "max_turns": 6, "valid_moves": ["[left]", "[right]"]}
    assert last.items() >= {"game": "grid", "turn": 4, "max_turns": 6, "won": True}.items()
    assert ["@...G" in boards[0], ".@..G" in boards[1]] == [True, True]


@pytest.mark.parametrize(
    "action",
    [
        pytest.param({"name": "act", "input": {"message": "[right]"}}, id="a tool call"),
        pytest.param({"action": {"message": "[right]"}}, id="an object, as clients of TextArena send it"),
        pytest.param({"text": "The goal is right of me, not [left].\n[right]"}, id="free text"),
    ],
)
def test_a_move_comes_in_three_spellings(worker: Worker, action: dict[str, Any]) -> None:
    session = worker.open(CORRIDOR)

    moved = session.call(**action)["output"]

    assert moved["blocks"][0]["text"].startswith("You went right.\n\n.@..G\n")
    assert (moved["reward"], moved["finished"]) == (None, False)


def test_an_invalid_move_costs_a_turn_and_the_reward_of_an_efficient_player(worker: Worker) -> None:
    session = worker.open(CORRIDOR)

    bumped = session.text("act", message="up")
    results = [session.tool("act", message="right") for _ in range(4)]

    assert bumped.startswith("Invalid move: a wall is up of you.")
    assert bumped.endswith("Turns left: 5.")
    told = {"game": "grid", "won": True, "turns": 5, "status": "completed"}
    assert (results[-1]["reward"], results[-1]["metadata"]) == (0.8, told)


def test_the_last_turn_ends_the_game_and_a_move_after_the_end_does_not_run(worker: Worker) -> None:
    session = worker.open(NUMBER)

    results = [session.tool("act", message=f"[{number}]") for number in (1, 20, 2, 19)]
    after = session.post("/game/call", {"name": "act", "input": {"message": "[11]"}})

    assert [result["finished"] for result in results] == [False, False, False, True]
    assert results[-1]["blocks"][0]["text"].endswith("That was the last turn: the game is over.")
    assert (results[-1]["reward"], results[-1]["metadata"]["won"]) == (0.0, False)
    assert results[-1]["metadata"]["status"] == "task limit reached"
    assert after.status_code >= 400 or "reward" not in after.text


def test_concurrent_sessions_see_the_same_games_as_single_sessions(worker: Worker) -> None:
    def play(turns: list[Session]) -> dict[str, list[str]]:
        seen: dict[str, list[str]] = {}
        for move in ("up", "left", "down", "right", "up", "left"):
            for session in turns:
                seen.setdefault(session.sid, []).append(session.text("act", message=move))
        return seen

    def open_(seed: int) -> Session:
        return worker.open({"config": {"game": "2048", "seed": seed}})

    alone = [next(iter(play([open_(seed)]).values())) for seed in (1, 2, 3)]
    together = list(play([open_(seed) for seed in (1, 2, 3)]).values())

    assert together == alone
    assert alone[0] != alone[1]


def test_a_task_without_a_seed_follows_the_trainers_seed(worker: Worker) -> None:
    task = {"config": {"game": "2048"}}

    prompts = [worker.open(task, seed=seed).prompt() for seed in (4, 4, 5)]

    assert prompts[0] == prompts[1] != prompts[2]


def test_the_players_view_does_not_contain_the_secret(worker: Worker) -> None:
    for seed in range(10):
        session = worker.open({"config": {"game": "mastermind", "seed": seed, "parameters": {"num_numbers": 9}}})

        seen = json.dumps([session.get("/game/prompt").json(), session.tool("act", message="nonsense")])

        assert set(re.findall(r"secret|\[\d(?:,? \d){3}\]", seen)) == {"[2 1 4 5]"}  # an example in the rules


def test_the_short_form_of_the_rfc_is_accepted(worker: Worker) -> None:
    level = {"map": ["S.G"]}

    session = worker.open({"game": "grid", "level": level, "goal": "Go home.", "reward_fn": "won"})

    assert session.prompt().startswith("Go home.")
    assert [session.tool("act", message="right")["reward"] for _ in range(2)] == [None, 1.0]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        pytest.param({}, "config.game", id="nothing"),
        pytest.param({"config": "grid"}, "config: must be an object", id="not an object"),
        pytest.param({"config": {"game": "chess"}}, "config.game: no game 'chess'", id="an unknown game"),
        pytest.param(
            {"config": {"game": "grid", "level": {"map": ["S#G"]}}}, "config.level.map", id="a level without a way"
        ),
        pytest.param(
            {**NUMBER, "evaluation": {"reward_function": "win"}}, "evaluation.reward_function", id="an unknown function"
        ),
        pytest.param(
            {**NUMBER, "evaluation": {"reward_function": "efficiency"}},
            "evaluation.reward_function",
            id="no known optimum",
        ),
    ],
)
def test_a_broken_task_is_an_error_with_its_place_and_never_a_reward(
    worker: Worker, task: dict[str, Any], said: str
) -> None:
    session = Session(worker.http, "game", str(uuid.uuid4()))

    created = session.post("/create", {"env_name": "game", "task_spec": task})
    prompted = session.get("/game/prompt")
    called = session.post("/game/call", {"name": "act", "input": {"message": "[1]"}})

    assert max(created.status_code, prompted.status_code) >= 400
    assert said in created.text + prompted.text
    assert called.status_code >= 400 or "reward" not in called.text


def test_the_image_offers_both_splits_and_one_tool(worker: Worker) -> None:
    counts = {
        split["name"]: worker.http.post("/game/num_tasks", json={"split": split["name"]}).json()["num_tasks"]
        for split in worker.http.get("/game/splits").json()
    }
    tools = worker.http.get("/game/tools").json()["tools"]

    assert counts == {"train": len(TRAIN), "test": len(TEST)}
    assert [tool["name"] for tool in tools] == ["act"]
    assert tools[0]["input_schema"]["required"] == ["message"]
