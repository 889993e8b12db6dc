"""The chat environment: right and wrong replies to its tasks, conversations, scores, generator and server."""

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
from tests.envs.bundled import RecordProperty, hold, note_plays
from tests.envs.bundled import chat_replies as references
from tests.envs.bundled import wrong_chat_reply as wrong
from tests.envs.workers import Session, Worker

ROOT = Path(__file__).resolve().parents[2]
TASKS = ROOT / "tasks" / "chat"
MAKER = ROOT / "scripts" / "make-chat-tasks"

MOST_RESIDENT_MIB = 64


def chat_module(name: str) -> Any:
    """Import a module of the environment from its folder, as its server does."""
    for folder in ("env_images/base", "env_images/chat"):
        if (path := str(ROOT / folder)) not in sys.path:
            sys.path.append(path)
    return importlib.import_module(name)


dialogue = chat_module("chat_dialogue")
scoring = chat_module("chat_scoring")
families = chat_module("chat_families")
Dialogue = dialogue.Dialogue
Evaluation = scoring.Evaluation
InvalidChat = dialogue.InvalidChat


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").split("\n") if line]


TRAIN, TEST = read("train"), read("test")
ALL = TRAIN + TEST
ONE_OF_EACH = {task["tags"][0]: task for task in TRAIN if task["difficulty"] == 2}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    started = Worker("chat", box=Path("unused"))  # a server without sandboxes does not use the box
    try:
        yield started
    finally:
        started.stop()


# The tasks


def test_there_are_enough_tasks_of_every_family_at_every_level() -> None:
    train, test = (Counter((task["tags"][0], task["difficulty"]) for task in split) for split in (TRAIN, TEST))
    all_ = {(family, level) for family in families.FAMILIES for level in (1, 2, 3, 4)}

    assert (len(TRAIN) >= 80, len(TEST) >= 20, len(families.FAMILIES) >= 8) == (True, True, True)
    assert set(train) == set(test) == all_
    assert (set(train.values()), set(test.values())) == ({2}, {1})


def test_no_question_and_no_id_occurs_twice_within_or_across_the_splits() -> None:
    questions = Counter(json.dumps([task["instruction"], task["config"]]) for task in ALL)
    ids = Counter(task["id"] for task in ALL)

    assert [question for question, count in questions.items() if count > 1] == []
    assert [name for name, count in ids.items() if count > 1] == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_each_line_is_one_compact_json_object_with_the_documented_keys(split: str) -> None:
    text = (TASKS / f"{split}.jsonl").read_text("utf-8")
    keys = ["id", "tags", "difficulty", "instruction", "config", "evaluation"]

    tasks = [json.loads(line) for line in text.split("\n")[:-1]]

    assert text == "".join(json.dumps(task, ensure_ascii=False, separators=(",", ":")) + "\n" for task in tasks)
    assert all(list(task) == keys for task in tasks)
    assert all(task["id"].startswith(f"{split}-{task['tags'][0]}-{task['difficulty']}-") for task in tasks)


@pytest.mark.parametrize("page", ["env_images/chat/README.md", "tasks/chat/README.md"])
def test_a_task_that_a_page_shows_is_won_by_its_reference(worker: Worker, page: str) -> None:
    (shown,) = re.findall(r"^```json\n(.+?)^```$", (ROOT / page).read_text("utf-8"), re.M | re.S)
    task = json.loads(shown)

    assert hold(worker.open(task), references(task))["reward"] == 1.0


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_the_reference_of_every_task_earns_1_and_a_wrong_reply_0(
    worker: Worker, family: str, record_property: RecordProperty
) -> None:
    tasks = [task for task in ALL if task["tags"][0] == family]
    for task in tasks:
        *asked, right = references(task)
        rewards = [hold(worker.open(task), [*asked, last])["reward"] for last in (right, wrong(task), "I do not know.")]

        assert rewards == [1.0, 0.0, 0.0], task["id"]
    note_plays(record_property, "chat", "local process", won=len(tasks), lost=len(tasks))


@pytest.mark.parametrize("family", sorted(families.FAMILIES))
def test_the_agents_view_does_not_depend_on_the_reference(worker: Worker, family: str) -> None:
    task = ONE_OF_EACH[family]
    other = json.loads(json.dumps(task))
    del other["evaluation"]["reference"]

    seen = []
    for variant in (task, other):
        session = worker.open(variant)
        prompts = [session.get(f"/chat/{path}").json() for path in ("prompt", "messages")]
        seen.append((prompts, [session.tool("reply", message=reply) for reply in references(task)]))

    assert seen[0] == seen[1]


def test_a_worker_that_served_every_task_stays_within_its_memory_limit(worker: Worker) -> None:
    for task in ALL:
        session = worker.open(task)
        hold(session, references(task))
        session.close()

    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{worker.process.pid}/status").read_text())
    assert found is not None
    assert int(found[1]) / 1024 < MOST_RESIDENT_MIB


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
    made = make("--seed", "7", "--directory", str(tmp_path), hash_seed="1")
    same = make("--seed", "7", "--directory", str(tmp_path), "--check", hash_seed="2")
    other = make("--directory", str(tmp_path), "--check")

    assert made.returncode == 0, made.stderr
    assert same.returncode == 0, same.stdout
    assert (other.returncode, other.stdout.count("differs")) == (1, 2)


# Conversations


def talk(config: dict[str, Any], *replies: str) -> list[str | None]:
    conversation = Dialogue("Hello.", config)
    return [conversation.answer(reply) for reply in replies]


@pytest.mark.parametrize(
    ("config", "replies", "heard"),
    [
        pytest.param({}, ["a"], [None], id="one turn"),
        pytest.param({"follow_ups": ["x", "y"]}, ["a", "b", "c"], ["x", "y", None], id="fixed follow-ups"),
        pytest.param({"follow_ups": ["x", "y"], "max_turns": 2}, ["a", "b"], ["x", None], id="the last turn"),
        pytest.param({"max_turns": 5}, ["a"], [None], id="turns without follow-ups"),
        pytest.param(
            {"follow_ups": [{"when": "contains('?')", "say": "x"}]}, ["a?", "b?"], ["x", None], id="each is said once"
        ),
        pytest.param(
            {"follow_ups": [{"when": "contains('?')", "say": "x"}]}, ["a"], [None], id="no follow-up that fits"
        ),
        pytest.param(
            {"follow_ups": [{"when": "contains('b')", "say": "x"}, {"when": "contains('a')", "say": "y"}]},
            ["a", "ab", "ab"],
            ["y", "x", None],
            id="the first that fits, in any order",
        ),
        pytest.param(
            {"follow_ups": [{"when": "not_contains('{')", "say": "JSON, please."}, "Thanks?"], "max_turns": 3},
            ["a", "{}", "b"],
            ["JSON, please.", "Thanks?", None],
            id="conditional and fixed follow-ups mixed",
        ),
    ],
)
def test_the_user_says_the_first_follow_up_that_fits_until_no_follow_up_fits(
    config: dict[str, Any], replies: list[str], heard: list[str | None]
) -> None:
    assert talk(config, *replies) == heard


@pytest.mark.parametrize(
    ("instruction", "config", "said"),
    [
        pytest.param("", {}, "instruction: the conversation must end with what the user says", id="nothing said"),
        pytest.param("", {"messages": [{"role": "assistant", "content": "a"}]}, "must end with", id="the agent last"),
        pytest.param("a", {"messages": "b"}, "config.messages: must be a list", id="messages that are a text"),
        pytest.param("a", {"messages": [{"role": "tool", "content": "b"}]}, "config.messages[0].role", id="a role"),
        pytest.param(
            "a", {"messages": [{"role": "user", "content": ""}]}, "config.messages[0].content", id="empty content"
        ),
        pytest.param("a", {"messages": [{"role": "user"}]}, "config.messages[0]: must be an object", id="no content"),
        pytest.param("a", {"max_turns": 0}, "config.max_turns", id="no turn"),
        pytest.param("a", {"max_turns": True}, "config.max_turns", id="turns that are not a number"),
        pytest.param("a", {"turns": 3}, "config.turns: unknown key", id="an unknown key"),
        pytest.param("a", {"follow_ups": [3]}, "config.follow_ups[0]: must be a text", id="a number to say"),
        pytest.param("a", {"follow_ups": ["x"] * 51}, "config.follow_ups: must be a list of at most 50", id="51"),
        pytest.param(
            "a", {"follow_ups": [{"when": "has('b')", "say": "x"}]}, "config.follow_ups[0].when", id="no such function"
        ),
        pytest.param(
            "a", {"follow_ups": [{"when": "contains()", "say": "x"}]}, "config.follow_ups[0].when", id="no argument"
        ),
        pytest.param(
            "a", {"follow_ups": [{"when": "contains(open('f'))", "say": "x"}]}, "config.follow_ups[0].when", id="code"
        ),
        pytest.param("a", {"follow_ups": [{"when": "contains('b')"}]}, "must be a text", id="nothing to say"),
    ],
)
def test_a_conversation_that_cannot_be_held_is_refused_with_its_place(
    instruction: str, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidChat) as refused:
        Dialogue(instruction, config)

    assert said in str(refused.value)


# Scores

TWO: list[dict[str, Any]] = [
    {"reward_function": "contains('a')", "weight": 3},
    {"reward_function": "contains", "part": "b"},
]


@pytest.mark.parametrize(
    ("evaluation", "message", "reward"),
    [
        pytest.param({"reward_function": "exact_match('a')"}, " a\n", 1.0, id="one function"),
        pytest.param({"reward_function": "exact_match", "expected": "a"}, "b", 0.0, id="its argument next to it"),
        pytest.param({"all": TWO}, "ab", 1.0, id="all hold"),
        pytest.param({"all": TWO}, "a", 0.75, id="the heavier function holds"),
        pytest.param({"all": TWO}, "b", 0.25, id="the lighter function holds"),
        pytest.param({"all": TWO, "combine": "least"}, "a", 0.0, id="least"),
        pytest.param({"all": TWO, "combine": "least"}, "ba", 1.0, id="least, and all hold"),
        pytest.param(
            {"all": [{"reward_function": "contains('a')", "weight": weight} for weight in (0.1, 0.2, 0.7)]},
            "a",
            1.0,
            id="weights that floats do not sum to 1",
        ),
    ],
)
def test_a_message_is_scored_by_the_functions_of_the_task(
    evaluation: dict[str, Any], message: str, reward: float
) -> None:
    assert Evaluation.read(evaluation).score(message).reward == reward


@pytest.mark.parametrize(
    ("evaluation", "said"),
    [
        pytest.param({}, "evaluation.reward_function", id="nothing"),
        pytest.param({"reward_function": "good()"}, "no reward function 'good'", id="no such function"),
        pytest.param({"reward_function": "contains('a', 'b', 'c', 'd')"}, "too many", id="too many arguments"),
        pytest.param(
            {"reward_function": "exact_match('a')", "reference": "b"}, "does not earn 1", id="a wrong reference"
        ),
        pytest.param({"reward_function": "exact_match('a')", "reference": 3}, "evaluation.reference", id="a number"),
        pytest.param({"all": []}, "evaluation.all: must be a list", id="an empty list"),
        pytest.param({"all": TWO, "combine": "most"}, "evaluation.combine", id="another combination"),
        pytest.param({"all": TWO, "reward_function": "contains('a')"}, "unknown key beside all", id="both"),
        pytest.param({"all": ["contains('a')"]}, "evaluation.all[0]: must be an object", id="a text in all"),
        pytest.param({"all": [{**TWO[0], "weight": 0}]}, "evaluation.all[0].weight", id="no weight"),
        pytest.param({"all": [TWO[0], {"weight": 1}]}, "evaluation.all[1].reward_function", id="only a weight"),
    ],
)
def test_an_invalid_evaluation_is_refused_with_the_place_of_the_fault(evaluation: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidChat) as refused:
        Evaluation.read(evaluation)

    assert said in str(refused.value)


# The server

QUESTION = {"instruction": "Say a.", "evaluation": {"reward_function": "exact_match('a')", "reference": "a"}}
LONG = {
    "instruction": "And now?",
    "config": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Hi!"},
        ],
        "follow_ups": ["Sure?"],
    },
    "evaluation": {"all": TWO},
}


def test_a_question_is_the_prompt_and_the_users_only_message(worker: Worker) -> None:
    session = worker.open(QUESTION)

    (block,) = session.get("/chat/prompt").json()
    (message,) = session.get("/chat/messages").json()

    assert block["text"].startswith("Say a.\n\nAnswer with the tool `reply`")
    assert block["detail"]["observation"]["messages"] == [{"role": "user", "content": "Say a."}]
    assert (message["role"], [one["text"] for one in message["blocks"]]) == ("user", ["Say a."])


def test_a_conversation_is_served_as_messages_and_continues_in_the_observations(worker: Worker) -> None:
    session = worker.open(LONG)

    prompt, messages = session.prompt(), session.get("/chat/messages").json()
    heard, over = session.tool("reply", message="[reset]"), session.tool("reply", message="a")

    assert prompt.startswith("[system]\nBe brief.\n\n[user]\nHi.\n\n[assistant]\nHi!\n\n[user]\nAnd now?\n\n")
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "user"]
    assert (heard["blocks"][0]["text"], heard["reward"], heard["finished"]) == ("Sure?", None, False)
    assert [one["content"] for one in over["data"]["messages"]][4:] == ["[reset]", "Sure?", "a"]
    assert (over["reward"], over["finished"], over["metadata"]) == (0.75, True, {"turns": 2, "scores": [1.0, 0.0]})


@pytest.mark.parametrize(
    "action",
    [
        pytest.param({"name": "reply", "input": {"message": "a"}}, id="a tool call"),
        pytest.param({"action": {"message": "a"}}, id="an object"),
        pytest.param({"text": "a"}, id="free text"),
    ],
)
def test_a_reply_comes_in_three_spellings(worker: Worker, action: dict[str, Any]) -> None:
    said = worker.open(QUESTION).call(**action)["output"]

    assert (said["reward"], said["finished"], said["blocks"][0]["text"]) == (1.0, True, "The conversation is over.")


@pytest.mark.parametrize(
    "message", ["reset", "[reset]", "/reset", '{"method": "reset"}', '{"type": "step", "data": {"reward": 1}}', "state"]
)
def test_no_message_controls_the_server(worker: Worker, message: str) -> None:
    session = worker.open({**QUESTION, "config": {"follow_ups": ["Sure?"]}})

    heard = session.tool("reply", message=message)

    assert (heard["blocks"][0]["text"], heard["reward"], heard["finished"]) == ("Sure?", None, False)
    assert [one["content"] for one in heard["data"]["messages"]] == ["Say a.", message, "Sure?"]


def test_a_reply_of_a_megabyte_counts_as_empty(worker: Worker) -> None:
    session = worker.open({**QUESTION, "evaluation": {"reward_function": "contains('a')"}})

    flooded = session.tool("reply", message="a" * 1_000_000)

    assert (flooded["reward"], flooded["finished"], flooded["data"]["messages"][-1]["content"]) == (0.0, True, "")


def test_a_reply_after_the_end_does_not_run(worker: Worker) -> None:
    session = worker.open(QUESTION)
    session.tool("reply", message="b")

    after = session.post("/chat/call", {"name": "reply", "input": {"message": "a"}})

    assert after.status_code >= 400 or "reward" not in after.text


def test_the_short_form_of_the_rfc_is_accepted(worker: Worker) -> None:
    session = worker.open({"goal": "Say a.", "reward_fn": "exact_match('a')", "max_turns": 1})

    assert session.prompt().startswith("Say a.")
    assert hold(session, ["a"])["reward"] == 1.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"instruction": ""}, "instruction: the conversation must end", id="no question"),
        pytest.param({"instruction": 3}, "instruction: must be a text", id="a question that is not a text"),
        pytest.param({"evaluation": {}}, "evaluation.reward_function", id="no evaluation"),
        pytest.param(
            {"evaluation": {"reward_function": "exact_match('b')", "reference": "a"}}, "earn 1", id="unsolvable"
        ),
        pytest.param({"evaluation": {"reward_function": "os.system('id')"}}, "evaluation.reward_function", id="code"),
        pytest.param({"config": {"max_turns": 51}}, "config.max_turns", id="too many turns"),
    ],
)
def test_a_broken_task_is_an_error_with_its_place_and_never_a_reward(
    worker: Worker, change: dict[str, Any], said: str
) -> None:
    session = Session(worker.http, "chat", str(uuid.uuid4()))

    created = session.post("/create", {"env_name": "chat", "task_spec": {**QUESTION, **change}})
    prompted = session.get("/chat/prompt")
    called = session.post("/chat/call", {"name": "reply", "input": {"message": "a"}})

    assert max(created.status_code, prompted.status_code) >= 400
    assert said in created.text + prompted.text
    assert called.status_code >= 400 or "reward" not in called.text


def test_the_image_offers_both_splits_and_one_tool(worker: Worker) -> None:
    counts = {
        split["name"]: worker.http.post("/chat/num_tasks", json={"split": split["name"]}).json()["num_tasks"]
        for split in worker.http.get("/chat/splits").json()
    }
    tools = worker.http.get("/chat/tools").json()["tools"]

    assert counts == {"train": len(TRAIN), "test": len(TEST)}
    assert [tool["name"] for tool in tools] == ["reply"]
    assert tools[0]["input_schema"]["required"] == ["message"]
