"""The dashboard's files of other projects, its templates and its cookies."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gateway.core.environment import Environment, TaskView
from gateway.core.ids import EnvironmentName, Owner
from gateway.core.outcomes import EpisodeOutcome
from gateway.core.ports.step_log import UNRECORDED
from gateway.core.session import CloseReason
from gateway.frontends.dashboard.pages import for_trainer, histogram
from gateway.frontends.dashboard.rendering import (
    LINE_CHARS,
    OUTCOMES,
    REASONS,
    SHORT_CHARS,
    action_text,
    bars,
    beside_blocks,
    end_text,
    image_source,
    number,
    overview,
    render,
    seconds,
    static_files,
    task_parts,
    when,
)
from gateway.frontends.dashboard.sign_in import COOKIE, VALID_S, SignIn, Viewer
from gateway.settings.keys import Keyring, digest_of
from tests.fakes.clock import Clock

FOLDER = Path(__file__).parents[3] / "gateway/frontends/dashboard"
TRAINER, OPERATOR = "alice-key-5f1c", "operator-key-91d2"


def test_the_files_of_other_projects_are_the_named_versions() -> None:
    files = static_files()
    known = {file["name"]: file["sha256"] for file in tomllib.loads(files["vendored.toml"].decode())["file"]}

    assert {name: hashlib.sha256(files[name]).hexdigest() for name in known} == known
    assert files.keys() - known.keys() == {"dashboard.css", "dashboard.js", "vendored.toml"}


@pytest.mark.parametrize("template", sorted(path.name for path in (FOLDER / "templates").glob("*.html")))
def test_templates_have_no_scripts_and_styles_of_their_own(template: str) -> None:
    text = (FOLDER / "templates" / template).read_text()

    assert not re.search(r"<script(?![^>]*src=)|\son[a-z]+=|\sstyle=|javascript:|hx-on|hx-vals=.js:", text)
    assert ("<style" in text) == (template == "report.html"), "only the report is one file"
    assert "|safe" not in text or template == "report.html"


def test_text_of_an_agent_is_escaped() -> None:
    page = render("refused.html", viewer=Viewer(Owner("<b>"), True), detail="<script>alert(1)</script>", path="/x")

    assert "<script>alert" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.0, "0"), (1.0, "1"), (0.25, "0.25"), (1234567, "1,234,567"), (-0.5, "-0.5")]
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (0.0021, "2.1 ms"), (3.0, "3 s"), (90.0, "1.5 min"), (7200.0, "2 h"), (1e6, "11.6 d")],
)
def test_durations_have_a_unit(value: float | None, text: str) -> None:
    assert seconds(value) == text


def test_times_bars_and_images() -> None:
    assert when(0.0) == "1970-01-01 00:00:00"
    assert bars([0, 1, 1000]) == [0, 2, 100]
    assert image_source({"image": "blob:sha256:ab"}, "/b/") == "/b/ab"
    assert image_source({"image": "AAAA", "mime_type": "image/gif"}, "/b/") == "data:image/gif;base64,AAAA"
    assert histogram([0.0, 1.0, 1.0]) == {"bounds": [0.0, 1.0], "counts": [1, 2]}
    assert sum(histogram([value / 100 for value in range(100)])["counts"]) == 100


# -- what an episode says -------------------------------------------------------------------------------------------


def step(**more: Any) -> dict[str, Any]:
    return {"operation": "call", "number": 1, "outcome": "ok", "seconds": 0.1, "action": None, **more}


def test_each_outcome_and_reason_has_a_text() -> None:
    assert OUTCOMES.keys() == set(EpisodeOutcome)
    assert REASONS.keys() == {*CloseReason, UNRECORDED}
    assert len(set(REASONS.values())) == len(REASONS)


def test_an_ordinary_end_needs_no_words() -> None:
    assert end_text("deleted", "finished") == end_text(None, None) == ""
    assert end_text("deleted", "stopped") == "closed by the trainer"
    assert end_text("expired", "finished") == "without a call for too long"
    assert end_text("of a newer version", "finished") == "of a newer version"


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (None, []),
        ({}, []),
        ("text", [("task", "text")]),
        ({"question": "1+1"}, [("task", {"question": "1+1"})]),
        (
            {"id": "a", "evaluation": {"expected": "2"}, "instruction": "1+1"},
            [("instruction", "1+1"), ("evaluation", {"expected": "2"}), ("other fields", {"id": "a"})],
        ),
        ({"instruction": "1+1", "evaluation": None}, [("instruction", "1+1"), ("other fields", {"evaluation": None})]),
    ],
)
def test_a_task_begins_with_what_explains_its_reward(spec: Any, parts: list[Any]) -> None:
    assert task_parts(spec) == parts


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (None, ""),
        ("left", "left"),
        ({"tool": "submit", "input": {"answer": "ä", "sure": True}}, "submit\nanswer: ä\nsure: true"),
        ({"tool": "run", "input": {"script": "cd /\nls", "wait_s": 3}}, "run\nscript:\ncd /\nls\nwait_s: 3"),
        ({"tool": "odd", "input": "text"}, '{"tool": "odd", "input": "text"}'),
        ({"frame": "x" * SHORT_CHARS}, '{\n  "frame": "' + "x" * SHORT_CHARS + '"\n}'),
    ],
)
def test_an_action_is_readable_text(action: Any, text: str) -> None:
    assert action_text(action) == text


def test_an_observation_does_not_repeat_the_blocks() -> None:
    blocks = [{"text": "S...G"}, {"image": "AAAA"}, "odd"]

    assert beside_blocks(step(blocks=blocks, data={"text": "S...G", "turn": 3}, text="S...G")) == {"data": {"turn": 3}}
    assert beside_blocks(step(blocks=blocks, data={"text": "S...G"}, observation="")) == {}
    assert beside_blocks(step(observation={"x": 0}, data=0, text="more")) == {
        "observation": {"x": 0},
        "data": 0,
        "text": "more",
    }


def test_the_overview_has_a_line_for_each_step() -> None:
    fault = {"kind": "author", "place": "judge", "error": "KeyError: 'x'", "traceback": "…"}
    steps = [
        step(operation="prompt", number=0, blocks=[{"text": "\nWhat is 1+1?\nThink."}]),
        step(action="a" * 200, blocks=[{"image": "AAAA"}], reward=0.0),
        step(number=2, outcome="author_fault", error="it failed", faults=[fault]),
        step(number=3, outcome="refused", error={"code": "busy"}),
        step(number=4, text="only text", reward=1.0, finished=True),
        step(number=5, blocks=[{"text": " "}]),
    ]
    lines = overview(steps)

    assert [line["number"] for line in lines] == [0, 1, 2, 3, 4, 5]
    assert [line["is_prompt"] for line in lines] == [True, *[False] * 5]
    assert [line["result"] for line in lines] == [
        "What is 1+1? / Think.",
        "[image]",
        "author_fault: author fault: KeyError: 'x'",
        'refused: {"code": "busy"}',
        "only text",
        "",
    ]
    assert lines[1]["action"] == "a" * LINE_CHARS + " …"
    assert [line["failed"] for line in lines] == [False, False, True, True, False, False]
    assert [line["reward"] for line in lines] == [None, 0.0, None, None, 1.0, None]
    assert [line["finished"] for line in lines] == [False] * 4 + [True, False]


@pytest.mark.parametrize(
    ("split", "known", "spec"),
    [
        ("train", "yes", {"id": "a", "instruction": "1+1", "tags": (), "difficulty": None}),
        ("train", "in full", {"id": "a", "instruction": "1+1", "evaluation": "2"}),
        ("train", "no", {}),
        ("", "yes", {"id": "a", "instruction": "1+1", "evaluation": "2"}),
    ],
)
def test_a_trainer_sees_no_fault_and_no_answer_of_a_listed_task(split: str, known: str, spec: Any) -> None:
    begin = {"spec": {"id": "a", "instruction": "1+1", "evaluation": "2"}}
    episode = {"split": split, "task": "a", "begin": begin, "steps": [step(faults=["judge.py, line 3"])], "end": None}
    view = TaskView.FULL if known == "in full" else TaskView.PUBLIC
    made = Environment(name=EnvironmentName("sums"), image="i", directory=Path("/"), command=(), task_view=view)
    environment = None if known == "no" else made
    seen = for_trainer(episode, environment)
    ended = for_trainer({**episode, "end": {"reward": None, "faults": ["judge.py, line 3"]}}, environment)

    assert seen == {**episode, "begin": {"spec": spec}, "steps": [step()]}
    assert ended["end"] == {"reward": None, "faults": []}


# -- cookies --------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sign_in(clock: Clock) -> SignIn:
    return SignIn(b"secret", Keyring({"alice": TRAINER}, {"boss": OPERATOR}), clock=clock)


def test_a_cookie_stands_for_its_key_and_does_not_contain_it(sign_in: SignIn) -> None:
    for key, viewer in ((TRAINER, Viewer(Owner("alice"), False)), (OPERATOR, Viewer(Owner("boss"), True))):
        token = sign_in.token(key)
        assert token is not None
        assert key not in token
        digest = sign_in.digest_in(f"other=1; {COOKIE}={token}")
        assert digest == digest_of(key)
        assert sign_in.viewer(digest) == viewer


def test_an_unknown_key_gets_no_cookie(sign_in: SignIn) -> None:
    assert sign_in.token("wrong") is None
    assert sign_in.needs_key
    assert not SignIn(b"secret", Keyring({})).needs_key


def test_a_cookie_ends_after_some_hours(sign_in: SignIn, clock: Clock) -> None:
    token = sign_in.token(TRAINER)
    clock.advance(VALID_S - 1)
    assert sign_in.digest_in(f"{COOKIE}={token}") is not None
    clock.advance(2)
    assert sign_in.digest_in(f"{COOKIE}={token}") is None


@pytest.mark.parametrize(
    "spoil", [lambda t: t[:-1] + "x", lambda t: "0" + t[1:], lambda t: "", lambda t: "a-b-c", lambda t: "ä"]
)
def test_a_forged_cookie_is_none(sign_in: SignIn, spoil: object) -> None:
    token = sign_in.token(TRAINER)
    assert callable(spoil)
    assert sign_in.digest_in(f"{COOKIE}={spoil(token)}") is None
    assert sign_in.digest_in("") is None


def test_the_cookie_of_another_gateway_is_none(sign_in: SignIn) -> None:
    other = SignIn(b"another secret", Keyring({"alice": TRAINER}))
    assert sign_in.digest_in(f"{COOKIE}={other.token(TRAINER)}") is None
