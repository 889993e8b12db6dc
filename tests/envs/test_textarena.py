"""The textarena environment: its names and their tasks, games by seed, hostile moves, parameters, and its server."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.answers.groups import module
from tests.answers.textarena import play_of, win
from tests.deadlines import COMMAND_S
from tests.envs.workers import Session, Worker

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tasks" / "textarena"
README = (ROOT / "env_images" / "textarena" / "README.md").read_text("utf-8")
games, names, play = (module("textarena", f"textarena_{name}") for name in ("games", "names", "play"))
parse_task = module("base", "envserver.generic").parse_task
OFFERED = names.offered()
FOLDERS = {name: names.registered()[name].folder for name in OFFERED}
SAMPLE = {folder: name for name, folder in reversed(FOLDERS.items())}
"""One name of each game."""
MOST_MOVE_S = 1.0
"""Seconds that a hostile move may take, for the slowest machine that runs the tests. Usual ones take 0.1 ms."""
MOST_RESIDENT_MIB = 256
"""Resident memory in MiB of a server that has opened every game."""


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").splitlines()]


# Names


def test_each_offered_name_is_a_line_of_the_training_tasks_and_the_files_are_as_made() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "scripts" / "make-textarena-tasks", "--check"],
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )

    assert (made.returncode, made.stdout.count("as made")) == (0, 2), made.stdout + made.stderr
    assert [task["config"]["game"] for task in read("train")] == list(OFFERED)
    assert {task.get("seeds") for task in read("train")} == {1000, None}
    assert {FOLDERS[task["config"]["game"]] for task in read("train") if "seeds" not in task} == games.FIXED


def test_every_single_player_game_is_offered_or_excluded_with_a_reason() -> None:
    listing = (Path(games_folder()) / "__init__.py").read_text("utf-8")
    marked = set(re.findall(r'entry_point="textarena\.envs\.(\w+)\.', listing.split("# Alquerque")[0]))

    assert marked == {folder for folder in (*games.GAMES, *games.EXCLUDED) if folder != "BabyAiText"}
    assert not games.GAMES.keys() & games.EXCLUDED.keys()
    assert set(FOLDERS.values()) == games.GAMES.keys()


def games_folder() -> str:
    """Return the library's folder of games."""
    return str(Path(sys.modules["textarena.core"].__file__ or "").parent / "envs") if _loaded() else ""


def _loaded() -> bool:
    play.load()
    return True


def test_the_excluded_games_that_cannot_be_imported_cannot_be_imported() -> None:
    source = (Path(games_folder()) / "Klondike" / "env.py").read_text("utf-8")

    with pytest.raises(SyntaxError):
        ast.parse(source)


def test_the_page_names_every_offered_and_every_excluded_game() -> None:
    rows = {row[1]: row[0] for row in re.finditer(r"^\| `?([\w-]+)`? \|.*$", README, re.M)}

    for name, folder in FOLDERS.items():
        base = re.search(r"`([\w-]+)`", rows[folder].split("|")[2])
        assert base is not None
        assert name == base[1] or f"`{name.removeprefix(base[1])}`" in rows[folder], name
        assert all(f"`{key}` (" in rows[folder] for key in games.GAMES[folder].parameters), folder
    for name, reason in {**games.EXCLUDED, **games.EXCLUDED_NAMES}.items():
        assert reason in rows[name]
    assert f"{len(games.GAMES)} games under {len(OFFERED)} names" in README


# Seeds

SCRIPT = """
import sys, json
sys.path[:0] = [{root!r}]
from tests.envs.test_textarena import digests
print(json.dumps(digests()))
"""


def moves_for(name: str) -> list[str]:
    """Return moves with which most games go on for some turns."""
    chance = random.Random(name)
    letters = "".join(chance.sample("abcdefghijklmnopqrstuvwxyz", 26))
    return [
        *(f"[{step}]" for step in ("up", "left", "down", "right", "hit", "stand", "continue", "e", "a")),
        *(f"[{letter}]" for letter in letters[:4]),
        *(f"[{chance.randint(0, 5)} {chance.randint(0, 5)}]" for _ in range(4)),
    ]


def digest(name: str, seed: int) -> str:
    """Return the hash of all that a player of the game sees with `moves_for`, and of its reward."""
    game = play_of(name, seed)
    seen = [game.opening]
    for move in moves_for(name):
        if not game.is_over:
            seen.append(game.move(move))
    return hashlib.sha256("\n".join([*seen, str(game.reward() if game.is_over else None)]).encode()).hexdigest()


def digests() -> dict[str, str]:
    play.load()
    return {name: digest(name, 7) for name in OFFERED}


def test_each_name_has_the_same_game_for_the_same_seed_in_another_process() -> None:
    here = digests()
    others = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT.format(root=str(ROOT))],
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert [json.loads(text.splitlines()[-1]) for text in others] == [here, here]


@pytest.mark.parametrize("name", OFFERED)
def test_another_seed_is_another_game_where_the_tasks_say_so(name: str) -> None:
    openings = {play_of(name, seed).opening for seed in range(4)}

    # Hidden words and numbers do not show in the opening.
    hidden = ("GuessTheNumber", "Hangman", "Mastermind", "Minesweeper", "Wordle")
    if FOLDERS[name] in hidden:
        secrets = {json.dumps(play_of(name, seed)._game.state.game_state, default=str) for seed in range(4)}
        openings |= secrets
    fixed = FOLDERS[name] in games.FIXED
    assert (len(openings) == 1) == fixed or (FOLDERS[name] == "FrozenLake" and len(openings) > 1)


def test_games_that_are_played_in_turns_do_not_disturb_each_other_and_leave_the_process_its_dice() -> None:
    alone = {name: digest(name, 3) for name in OFFERED}
    random.seed(5)
    state = random.getstate()

    together = {name: play_of(name, 3) for name in OFFERED}
    seen = {name: [game.opening] for name, game in together.items()}
    for turn in range(len(moves_for(OFFERED[0]))):
        for name, game in together.items():
            if not game.is_over:
                seen[name].append(game.move(moves_for(name)[turn]))

    rewards = {name: str(game.reward() if game.is_over else None) for name, game in together.items()}
    hashes = {name: hashlib.sha256("\n".join([*seen[name], rewards[name]]).encode()).hexdigest() for name in together}
    assert hashes == alone
    assert random.getstate() == state


# Moves

HOSTILE = [
    *("", "[]", "[", "]", "[[[[", "]]]]", "\x00", "[\ud800]", "²", "[²]", "[٣ ٣]", "[1, ², 3]", "[-1]", "[-1 -1]"),
    *("[1e9]", f"[{'9' * 90}]", f"[{'9' * 45} {'9' * 45}]", "[nan]", "[0 0 /]", "[%s]", "[{0}]", "[\\]", "[__class__]"),
    *(
        "[(a+)+$] " + "a" * 5_000 + "!",
        "x" * 1_000_000,
        "[" * 500_000,
        "[a]" * 300_000,
        "[[" * 200_000 + "]]" * 200_000,
    ),
    *("[ 1\n2 ]", "\u202e[up]", "[0]", "[0 0 0]", "[999 999 9]", "[h 99 99]", "[v -1 0]", "[A A]", "[A 99]", "[Z+]"),
    *("[1, 1, 1]", "[0 0 0 0]", "[alice park X]", "[Player]", "[GAME]", "[aaaaa]", "[a b c d e f g h i j k l m]"),
]


@pytest.mark.parametrize("folder", sorted(SAMPLE))
def test_hostile_moves_take_no_time_and_have_no_reward_of_their_own(folder: str) -> None:
    slowest, game = 0.0, play_of(SAMPLE[folder], 0)
    for seed, move in enumerate(HOSTILE):
        if game.is_over:
            assert -1 <= game.reward() <= 1
            game = play_of(SAMPLE[folder], seed % 3)
        begin = time.monotonic()
        assert isinstance(game.move(move), str)
        slowest = max(slowest, time.monotonic() - begin)

    assert slowest < MOST_MOVE_S


@pytest.mark.parametrize("name", OFFERED)
def test_every_game_ends_and_with_a_reward_from_minus_one_to_one(name: str) -> None:
    game = play_of(name, 1)
    moves = ["[up]", "[left]", "[nothing]", "[right]", "[down]", "[hit]", "[e]", "[continue]", "[1 2]"]
    for number in range(game.max_moves):
        if not game.is_over:
            game.move(moves[number % len(moves)])

    assert game.is_over
    assert -1 <= game.reward() <= 1


def test_words_that_are_guessed_for_ever_end_a_game_by_its_last_move() -> None:
    game = play_of("Hangman-v0", 1)

    last = [game.move("[nonsense]") for _ in range(game.max_moves)][-1]

    assert last.endswith("That was the last of 50 moves: the game is over.")
    assert (game.is_over, game.has_ended, game.reward()) == (True, False, 0.0)


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1.5, -2, None, "0.5"])
def test_a_reward_that_is_no_number_from_minus_one_to_one_is_a_fault(reward: object) -> None:
    with pytest.raises(ValueError, match="no number from -1 to 1"):
        games.checked(reward)


def test_a_card_that_is_named_twice_is_no_set() -> None:
    game = play_of("Set-v0", 1)

    seen = game.move("[1, 01, 1]")

    assert "invalid move" in seen
    assert game._game.state.game_state["score"] == 0


def test_an_invalid_move_says_its_reason_and_ends_with_the_progress() -> None:
    game = play_of("Countdown-v0", 1)

    first = game.move("[nothing]")
    game.move("[nothing]")

    assert "Reason: Invalid action format." in first
    assert (game.has_failed, game.reward()) == (True, pytest.approx(0.568))


def test_several_moves_in_a_text_count_in_their_order() -> None:
    won, moves = win("Crosswords-v0", 1)
    cells = moves[0].split(" [")
    board = play_of("Crosswords-v0", 1)

    board.move(" and then [".join([*cells[:3], f"0 0 {'x'}]"]))
    board.move("[nothing]")

    assert (won, len(moves)) == (1.0, 1)
    assert board.reward() == pytest.approx(3 / len(cells))


# Parameters


@pytest.mark.parametrize("folder", sorted(SAMPLE))
@pytest.mark.parametrize("end", ["least", "most"])
def test_a_game_at_the_bounds_of_its_parameters_starts_soon_or_is_refused(folder: str, end: str) -> None:
    def at(parameter: Any) -> Any:
        match parameter:
            case games.Number():
                return getattr(parameter, end)
            case games.Several():
                return [at(parameter.kind)] * getattr(parameter, end)
            case games.Flag():
                return end == "most"
            case games.OneOf():
                return parameter.texts[0 if end == "least" else -1]
        return parameter.example

    given = {key: at(parameter) for key, parameter in games.GAMES[folder].parameters.items()}
    begin = time.monotonic()
    with contextlib.suppress(names.InvalidGame):
        assert play_of(SAMPLE[folder], 1, **given).opening

    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({}, "config.game: there is no game None; similar names: ", id="nothing"),
        pytest.param({"game": "Wordl-v0"}, "no game 'Wordl-v0'; similar names: Wordle-v0", id="nearly a name"),
        pytest.param({"game": "Chess-v0"}, "Chess-v0 is not offered: it is for several players", id="two players"),
        pytest.param({"game": "GuessWho-v0"}, "not offered: a language model answers", id="a judge"),
        pytest.param({"game": "Sudoku-v0-hard"}, "Sudoku-v0-hard is not offered: the library takes", id="a slow name"),
        pytest.param({"game": "Wordle-v0", "seeds": 1}, "config.seeds: unknown key; there are game, seed", id="a key"),
        pytest.param({"game": "Wordle-v0", "seed": -1}, "config.seed: -1 must be a whole number", id="a seed"),
        pytest.param({"game": "Wordle-v0", "seed": True}, "config.seed: True must be", id="a flag as a seed"),
        pytest.param({"game": "Wordle-v0", "parameters": []}, "config.parameters: must be an object", id="a list"),
        pytest.param(
            {"game": "Wordle-v0", "parameters": {"length": 5}},
            "Wordle-v0 has no parameter 'length'; known: word_length, num_guesses, hardcore",
            id="an unknown parameter",
        ),
        pytest.param(
            {"game": "Set-v0", "parameters": {"seed": 5}}, "no parameter 'seed'; known: none", id="no parameters"
        ),
        pytest.param(
            {"game": "Wordle-v0", "parameters": {"word_length": 99}},
            "config.parameters.word_length: 99 must be a whole number from 3 to 10",
            id="a large value",
        ),
        pytest.param(
            {"game": "Wordle-v0", "parameters": {"hardcore": "yes"}},
            "config.parameters.hardcore: 'yes' must be true or false",
            id="another type",
        ),
        pytest.param(
            {"game": "LogicPuzzle-v0", "parameters": {"difficulty": "x"}}, "'x' must be one of easy", id="a text"
        ),
        pytest.param(
            {"game": "Sokoban-v0", "parameters": {"dim_room": [6]}}, "must be a list of 2 to 2", id="a short list"
        ),
        pytest.param(
            {"game": "Cryptarithm-v0", "parameters": {"equation": "1"}}, "such as 'SEND + MORE", id="no addition"
        ),
        pytest.param(
            {"game": "2048-v0", "parameters": {"target_tile": 100}}, "must be a power of two", id="a combination"
        ),
        pytest.param(
            {"game": "WordLadder-v0", "parameters": {"min_distance": 9}},
            "min_distance must not be above max_distance",
            id="a value against a default",
        ),
    ],
)
def test_a_task_that_cannot_be_played_is_refused_with_what_works(config: dict[str, Any], said: str) -> None:
    with pytest.raises(names.InvalidGame, match=re.escape(said)):
        play.arguments(names.read_task(parse_task({"config": config}), seed=0))


def test_a_name_of_other_wrappers_means_the_name_itself() -> None:
    plain, *others = (play_of(f"GuessTheNumber-v0-hardcore{ending}", 3) for ending in ("", "-raw", "-train"))

    assert {other.opening for other in others} == {plain.opening}
    assert {other.name for other in others} == {"GuessTheNumber-v0-hardcore"}


def test_parameters_change_the_name_s_own() -> None:
    assert "Word Ladder" not in play_of("Wordle-v0", 1, word_length=6).opening
    assert "A secret 6-letter word" in play_of("Wordle-v0", 1, word_length=6).opening
    assert "A secret 7-letter word" in play_of("Wordle-v0-long", 1).opening


# The server


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker("textarena", box=Path("unused"))  # a server without sandboxes does not use the box
    try:
        yield started
    finally:
        started.stop()


def test_a_task_has_its_keys_in_the_configuration_or_at_the_top(worker: Worker) -> None:
    given = {"game": "Wordle-v0", "seed": 7, "parameters": {"word_length": 6}}

    prompts = [worker.open(task).prompt() for task in (given, {"config": given}, {"config": {**given, "seed": 8}})]

    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("You are Playing Wordle.\nA secret 6-letter word")
    assert prompts[0].endswith("The game ends after 600 moves at the latest; an invalid move costs one, too.")
    assert "with the tool `move`: a word, such as [apple]." in prompts[0]


@pytest.mark.parametrize(
    "action",
    [
        pytest.param({"name": "move", "input": {"text": "[A C]"}}, id="a tool call"),
        pytest.param({"action": {"text": "[A C]"}}, id="an object"),
        pytest.param({"text": "Not [A B], but\n[A C]"}, id="free text"),
    ],
)
def test_a_move_comes_in_three_spellings(worker: Worker, action: dict[str, Any]) -> None:
    session = worker.open({"game": "TowerOfHanoi-v0"})

    moved = session.call(**action)["output"]

    assert (moved["reward"], moved["finished"]) == (None, False)
    assert moved["data"].items() >= {"game": "TowerOfHanoi-v0", "move": 1, "max_moves": 600}.items()


def test_the_end_has_the_librarys_reward_and_says_how_it_came(worker: Worker) -> None:
    moves = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]
    session, lost = worker.open({"game": "TowerOfHanoi-v0"}), worker.open({"game": "Secretary-v0"})

    results = [session.tool("move", text=f"[{move}]") for move in moves]
    failures = [lost.tool("move", text="[maybe]") for _ in range(2)]

    assert [result["finished"] for result in results] == [False] * 6 + [True]
    assert "Congratulations! You solved the Tower of Hanoi puzzle." in results[-1]["blocks"][0]["text"]
    told = {"game": "TowerOfHanoi-v0", "moves": 7, "status": "completed"}
    assert (results[-1]["reward"], results[-1]["metadata"]) == (1.0, told)
    assert [failure["reward"] for failure in failures] == [None, -1.0]
    assert failures[-1]["metadata"] == {"game": "Secretary-v0", "moves": 2, "status": "invalid move"}


def test_an_impossible_task_is_refused_when_it_is_opened(worker: Worker) -> None:
    task = {"game": "Wordle-v0", "parameters": {"length": 5}}

    session = Session(worker.http, "textarena", "impossible")
    created = session.post("/create", {"env_name": "textarena", "task_spec": task})

    assert (created.status_code, "known: word_length" in created.text) == (400, True), created.text


def test_a_move_on_which_the_library_fails_ends_the_session_without_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    server = module("textarena", "textarena_server")
    world = server.TextArena()
    world.reset({"config": {"game": "Wordle-v0"}}, seed=1)

    def fail(action: str) -> None:
        raise KeyError(action)

    monkeypatch.setattr(world._play._game, "step", fail)

    with pytest.raises(server.SessionFailed, match="Wordle-v0 failed on a move: KeyError"):
        world.move("[apple]")


def test_a_server_that_has_opened_every_game_stays_within_its_memory(worker: Worker) -> None:
    for name in OFFERED:
        session = worker.open({"game": name, "seed": 1})
        assert session.prompt()
        session.close()
    status = Path(f"/proc/{worker.process.pid}/status").read_text()

    assert int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024 < MOST_RESIDENT_MIB
