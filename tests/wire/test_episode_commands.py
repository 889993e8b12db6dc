"""The commands that show, export, verify, replay and audit episodes of a running gateway, as an operator types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.command import Command, Done, in_process
from tests.wire.gateways import OPERATOR_KEY, TRAINER_KEYS, Gateway, short_folder

pytestmark = pytest.mark.wire

FLAKY, STEADY, CLOCK, PICTURE, FIRST = range(5)
"""Indices of the tasks of ``unsteady``."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ExitStack() as stack:
        gateway = Gateway(short_folder(), {"GATEWAY_ENVIRONMENTS": "probe,unsteady"})
        stack.callback(gateway.stop)
        gateway.start()
        yield gateway


@pytest.fixture
def run(gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Command]:
    """Return a function that runs the command for the gateway with the operator's key."""
    with in_process(monkeypatch, capfd) as command:
        variables = {"GATEWAY_URL": gateway.url, "GATEWAY_KEY": OPERATOR_KEY, "COLUMNS": "200"}
        yield lambda *arguments, **more: command(*arguments, **(variables | more))


def play(
    gateway: Gateway,
    sid: str,
    index: int = STEADY,
    *,
    answer: str = "right",
    ends: bool = True,
    accept: str = "application/json",
) -> None:
    """Play an episode of one step."""
    headers = {"X-Session-ID": sid, "X-API-Key": TRAINER_KEYS["alice"], "Accept": accept}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=HANG_S, trust_env=False) as http:
        body = {"env_name": "unsteady", "split": "train", "index": index}
        for path, content in (
            ("/create", body),
            ("/unsteady/call", {"name": "answer", "input": {"text": answer}}),
            *([("/delete", None)] if ends else []),
        ):
            text = json.dumps(content or {})  # in ASCII: an answer may have a lone surrogate
            response = http.post(path, content=text, headers={"Content-Type": "application/json"})
            assert response.status_code == 200, response.text


def rows(done: Done, status: int = 0) -> Any:
    """Return the JSON that a command printed: its value, or a list of the values of its lines."""
    assert done.returncode == status, (done.stdout, done.stderr)
    values = [json.loads(line) for line in done.stdout.splitlines()]
    return values[0] if len(values) == 1 else values


def test_an_operator_finds_the_step_behind_a_reward(gateway: Gateway, run: Command) -> None:
    play(gateway, "wrong-one", answer="left")

    (found,) = rows(run("sessions", "list", "-e", "unsteady", "--where", "name=wrong-one", "--json"))
    table = run("sessions", "list", "--where", "reward_max=0", "--where", "name=wrong-one")
    shown = run("sessions", "show", "wrong-one")
    whole = rows(run("sessions", "show", found["id"], "--json"))

    assert (found["reward"], found["outcome"], found["owner"]) == (0.0, "finished", "alice")
    assert "wrong-one" in table.stdout
    order = (
        "outcome finished, reward 0",
        "\ntask\n",
        "\n1     0 end   answer",
        "step 1 (",
        "reward 0, finished",
    )
    places = [shown.stdout.index(text) for text in order]
    assert places == sorted(places), shown.stdout
    assert "    action: answer\n    text: left\n    judged\n" in shown.stdout
    assert whole["steps"][-1]["action"] == {"tool": "answer", "input": {"text": "left"}}


def test_a_lone_surrogate_of_an_agent_spoils_no_command(gateway: Gateway, run: Command, tmp_path: Path) -> None:
    play(gateway, "surrogate", answer="\ud800")
    file = tmp_path / "episode.html"
    shown, whole = run("sessions", "show", "surrogate"), run("sessions", "show", "surrogate", "--json")
    written = run("report", "surrogate", "--out", str(file))

    assert "text: \\ud800" in shown.stdout
    assert json.loads(whole.stdout)["steps"][-1]["action"]["input"] == {"text": "\ud800"}
    assert (written.returncode, "\\ud800" in file.read_text()) == (0, True)


def test_an_export_is_verified_and_played_again(gateway: Gateway, run: Command, tmp_path: Path) -> None:
    for number in range(3):
        play(gateway, f"exported-{number}")
    file, key = tmp_path / "episodes.jsonl", tmp_path / "gateway.pub"
    with httpx.Client(headers={"X-API-Key": OPERATOR_KEY}, trust_env=False) as http:
        key.write_bytes(http.get(f"{gateway.url}/admin/v1/signing-key").content)
    written = run("sessions", "export", *(f"exported-{number}" for number in range(3)), "--out", str(file))
    verified = run("verify", str(file))
    offline = run("verify", str(file), "--trusted", str(key), GATEWAY_URL="http://127.0.0.1:9")
    replayed = rows(run("replay", str(file), "--json"))
    file.write_bytes(file.read_bytes() * 2)
    twice = run("verify", str(file))
    content = bytearray(file.read_bytes()[: file.stat().st_size // 2])
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    spoilt = run("verify", str(file))
    told = rows(run("verify", str(file), "--json"), status=3)

    assert "3 episodes written" in written.stdout
    assert (verified.returncode, verified.stdout) == (0, "3 episodes verified, 0 not\n")
    assert offline.stdout == verified.stdout
    assert [one["result"] for one in replayed] == ["same"] * 3
    assert (twice.returncode, twice.stdout) == (3, "3 episodes verified, 3 not\n")
    assert "stands on line 1 already" in twice.stderr
    assert (spoilt.returncode, spoilt.stdout) == (3, "2 episodes verified, 1 not\n")
    assert f"{file}:2: " in spoilt.stderr
    assert [one["is_valid"] for one in told] == [True, False, True]


def test_a_replay_that_differs_is_shown_with_its_step(gateway: Gateway, run: Command, tmp_path: Path) -> None:
    play(gateway, "changed")
    episode = rows(run("sessions", "show", "changed", "--json"))
    episode["steps"][-1]["reward"] = episode["reward"] = 0.25
    file = tmp_path / "changed.json"
    file.write_text(json.dumps(episode))
    done = run("replay", str(file))

    assert done.returncode == 3
    assert "different, 1 step, reward 0.25 recorded, 1.0 replayed; rewards differ" in done.stdout
    assert "step 1: reward: recorded 0.25, replayed 1.0" in done.stdout


def test_texts_that_differ_are_shown_as_a_diff_and_count_on_demand(gateway: Gateway, run: Command) -> None:
    play(gateway, "clock", CLOCK)
    replayed, strict = run("replay", "clock"), run("replay", "clock", "--texts")
    audited = rows(run("audit", "--environment", "unsteady", "--task", "train/2", "--repeat", "30", "--json"))

    assert (replayed.returncode, strict.returncode) == (0, 3), (replayed.stdout, replayed.stderr)
    assert "same, 1 step, reward 1.0 recorded, 1.0 replayed; texts differ" in replayed.stdout
    assert "different, 1 step, reward 1.0 recorded, 1.0 replayed; texts differ" in strict.stdout
    *_, heading, _, _, _, answered, before, after = replayed.stdout.splitlines()
    assert (heading, answered) == ("  step 1: blocks[0].text:", "     answered")
    assert (before[:8], after[:8]) == ("    -at ", "    +at ")
    (row,) = audited["tasks"]
    assert (row["replays"], row["differing"], row["texts_differing"], row["verdict"]) == (30, 0, 30, "steady")


@pytest.mark.parametrize("form", ["application/json", "text/event-stream"])
def test_a_picture_is_the_same_in_a_replay_over_either_form(
    gateway: Gateway, run: Command, tmp_path: Path, form: str
) -> None:
    play(gateway, f"picture-{form}", PICTURE, accept=form)
    (found,) = rows(run("sessions", "list", "--where", f"name=picture-{form}", "--json"))
    episode = rows(run("sessions", "show", found["id"], "--json"))
    file = tmp_path / "other-form.json"
    was_streamed = [step.pop("streamed", False) for step in episode["steps"]]
    file.write_text(
        json.dumps({**episode, "steps": [{**step, "streamed": form[0] == "a"} for step in episode["steps"]]})
    )
    reports = [rows(run("replay", place, "--json")) for place in (found["id"], str(file))]

    assert was_streamed == [form[0] == "t"]
    assert [(one["result"], one["differs_in"]) for one in reports] == [("same", [])] * 2, reports


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("replay", "no-such-episode"), 3, "not replayed: no episode 'no-such-episode' is recorded"),
        (("replay", "folder/none.jsonl"), 2, "there is no such file"),
        (("verify", "none.jsonl"), 2, "none.jsonl: No such file"),
        (("sessions", "show", "no-such-episode"), 2, "no episode 'no-such-episode' is recorded"),
        (("sessions", "export", "no-such-episode"), 2, "no episode 'no-such-episode' is recorded"),
        (("sessions", "end", "no-such-session"), 2, "there is no open session 'no-such-session'"),
        (("sessions", "list", "--where", "reward"), 2, "must be NAME=VALUE"),
        (("sessions", "list", "--where", "colour=red"), 2, "colour: no such parameter"),
        (("audit", "--task", "no-such-task"), 2, "no episode"),
    ],
)
def test_wrong_arguments_are_refused(run: Command, arguments: tuple[str, ...], status: int, told: str) -> None:
    done = run(*arguments)

    assert (done.returncode, told in done.stdout + done.stderr) == (status, True), (done.stdout, done.stderr)


def test_an_operator_ends_a_live_session(gateway: Gateway, run: Command) -> None:
    play(gateway, "live", ends=False)
    before = run("sessions", "export", "live")
    ended = run("sessions", "end", "live")
    found = rows(run("sessions", "show", "live", "--json"))

    assert (before.returncode, "has not ended" in before.stderr) == (2, True)
    assert ended.stdout == "session live of alice has ended\n"
    # Its trainer has the reward: the environment had ended the episode before.
    assert (found["reason"], found["outcome"], found["reward"]) == ("operator", "finished", 1.0)


def test_audits_find_a_task_whose_judge_errs_in_a_tenth_of_the_episodes(gateway: Gateway, run: Command) -> None:
    """150 replays miss such a task with a probability of 0.01 %."""
    for index in (FLAKY, STEADY):
        play(gateway, f"audited-{index}", index)
    options = ("audit", "--environment", "unsteady", "--sample", "1")
    first, second = (
        rows(run(*options, "--task", "train/0", "--repeat", "75", "--json", *more), status=status)["tasks"][0]
        for more, status in ((("--confirm", "0", "--threshold", "0.9"), 0), (("--mark",), 3))
    )
    (steady,) = rows(run(*options, "--task", "train/1", "--repeat", "60", "--mark", "--json"))["tasks"]
    table = run(*options, "--task", "train/0")
    listed, marks = run("curricula", "marks"), rows(run("curricula", "marks", "--environment", "unsteady", "--json"))
    removed, again = run("curricula", "unmark", "unsteady", "flaky"), run("curricula", "unmark", "unsteady", "flaky")

    assert (first["replays"], first["total"]["replays"], first["is_marked"]) == (75, 75, False)
    assert first["differing"] >= 1
    assert (second["total"]["replays"], second["verdict"], second["is_marked"]) == (150, "flaky", True)
    assert second["total"]["differing"] == first["differing"] + second["differing"] >= 4
    assert 0.01 < second["interval"][0] <= second["rate"] <= second["interval"][1]
    assert (steady["replays"], steady["differing"], steady["verdict"], steady["is_marked"]) == (60, 0, "steady", False)
    assert (table.returncode, "flaky, marked" in table.stdout) == (3, True)
    (mark,) = marks
    assert (mark["task"], mark["replays"], mark["marked_by"]) == ("flaky", 151, "operator")
    assert {one["recorded"] for one in mark["episodes"]} <= {0.0, 1.0}
    assert mark["episodes"][0]["recorded"] == 1.0 - mark["episodes"][0]["replayed"]
    assert (mark["episodes"][0]["episode"] in listed.stdout, "operator" in listed.stdout) == (True, True)
    assert "flaky of unsteady is not marked any more" in removed.stdout
    assert (again.returncode, "it has no mark" in again.stderr) == (2, True)


def test_one_difference_decides_nothing_and_leads_to_further_replays(gateway: Gateway, run: Command) -> None:
    play(gateway, "first", FIRST)
    options = ("audit", "--environment", "unsteady", "--task", "train/4")
    (one,) = rows(run(*options, "--confirm", "0", "--mark", "--json"))["tasks"]
    table = run(*options, "--confirm", "0")
    (confirmed,) = rows(run(*options, "--json"), status=3)["tasks"]

    assert (one["total"], one["verdict"], one["is_marked"]) == ({"replays": 1, "differing": 1}, "undecided", False)
    assert (table.returncode, "undecided" in table.stdout) == (0, True)
    assert "unsteady first: episode " in table.stdout
    assert ": reward 0.0 recorded, 1.0 replayed" in table.stdout
    assert (confirmed["replays"], confirmed["differing"]) == (21, 21)
    assert (confirmed["total"], confirmed["verdict"]) == ({"replays": 23, "differing": 23}, "flaky")
    assert (confirmed["is_marked"], rows(run("curricula", "marks", "--json"))) == (False, [])


def test_workers_their_logs_and_the_load_are_shown(gateway: Gateway, run: Command) -> None:
    play(gateway, "watched", ends=False)
    workers = rows(run("ps", "--json"))["workers"]
    (worker,) = [one for one in workers if one["environment"] == "unsteady"]
    by_name = run("logs", "unsteady")
    by_id = rows(run("logs", worker["id"], "--lines", "1", "--json"))
    unknown = run("logs", "none")
    (line,) = [row for row in rows(run("top", "--once", "--every", "0.2", "--json"))["environments"] if row["used"]]
    table = run("top", "--once", "--every", "0.2")
    run("sessions", "end", "watched")

    assert "server_ready" in by_name.stdout
    assert (by_id["worker"], by_id["environment"]) == (worker["id"], "unsteady")
    assert (unknown.returncode, "there is no such worker" in unknown.stderr) == (2, True)
    assert (line["environment"], line["ready"], line["used"], line["waiting"]) == ("unsteady", 1, 1, 0)
    assert "unsteady" in table.stdout


def test_the_doctor_reports_this_machine(run: Command, tmp_path: Path) -> None:
    catalog = str(Path(__file__).parent / "environments")
    here = {"GATEWAY_CATALOG_DIR": catalog, "GATEWAY_ENVIRONMENTS": "probe", "GATEWAY_STATE_DIR": str(tmp_path)}
    well = run("doctor", **here)
    broken = rows(run("doctor", "--json", **here, GATEWAY_STORE="redis://127.0.0.1:1"), status=3)
    told = run("doctor", **here, GATEWAY_STORE="redis://127.0.0.1:1")

    assert (well.returncode, "ok      kernel: Linux" in well.stdout) == (0, True), well.stdout
    assert {one["check"] for one in broken["findings"] if one["status"] == "failed"} == {"redis"}
    assert "FAILED  redis: 127.0.0.1:1 database 0: " in told.stdout
    assert "to mend it: start Redis" in told.stdout
