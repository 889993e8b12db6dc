"""Browser tasks as data: reading, refusals with the fault's path, and the files of tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gateway.backends.docker.container import container_body
from gateway.catalog.toml import read_environment
from gateway.core.ids import WorkerId
from gateway.core.worker import Worker
from gateway.node.policy import Rules, refusal
from scripts.browser_problems import MINIWOB, SPLITS
from tests.envs.browser_modules import browser_module

ROOT = Path(__file__).resolve().parents[2]
actions, spec, rewards, site, window = (
    browser_module(f"browser_{name}") for name in ("actions", "spec", "rewards", "site", "window")
)

PAGE = "<p id=a>text</p>"
DONE = {"reward_function": "element_present('#done')"}


def task(config: dict[str, Any] | None = None, evaluation: Any = DONE, **more: Any) -> dict[str, Any]:
    given = {"html": PAGE} if config is None else config
    return {"id": "custom/probe", "instruction": "Do it.", "config": given, "evaluation": evaluation, **more}


def test_the_rfcs_short_form_is_a_declarative_task() -> None:
    read = spec.read_spec(
        {
            "id": "custom/login-test",
            "env_type": "browsergym",
            "start_url": "http://localhost:8000/login",
            "goal": "log in",
            "reward_fn": "check_url_contains('dashboard')",
            "pages": {"/login": PAGE},
        }
    )

    assert (read.benchmark, read.goal, read.start_url) == ("custom", "log in", "http://localhost:8000/login")
    assert read.evaluation.goal.call.name == "check_url_contains"


@pytest.mark.parametrize(
    ("given", "variables", "expected"),
    [
        ({"id": "custom/copy-paste"}, {}, ("custom", "copy-paste")),
        ({"id": "miniwob/click-test"}, {}, ("miniwob", "click-test")),
        ({"config": {"benchmark": "miniwob", "task_name": "click-link"}}, {}, ("miniwob", "click-link")),
        ({"id": "train-7", "config": {"task_name": "mine"}}, {}, ("custom", "mine")),
        ({}, {"BROWSERGYM_BENCHMARK": "miniwob", "BROWSERGYM_TASK_NAME": "click-tab"}, ("miniwob", "click-tab")),
        ({}, {"BROWSERGYM_TASK_NAME": "copy-paste"}, ("custom", "copy-paste")),
        ({"id": "miniwob/click-test", "config": {"task_name": "click-link"}}, {}, ("miniwob", "click-link")),
    ],
)
def test_a_task_is_named_by_its_configuration_its_id_or_the_variables(
    given: dict[str, Any], variables: dict[str, str], expected: tuple[str, str]
) -> None:
    read = spec.read_spec(given, variables=variables)

    assert (read.benchmark, read.name) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (task({"html": PAGE, "colour": 1}), "config.colour: no such key"),
        (task({"benchmark": "webarena"}), "config.benchmark: 'webarena' is not one of custom, miniwob"),
        (task({"benchmark": 3}), "config.benchmark: must be a text"),
        (task({"html": ""}), "config.html"),
        (task({"html": PAGE, "template": "x.html"}), "config.template: either html or template"),
        (task({"template": "../server.py"}), "config.template: must be the name of a file"),
        (task({"template": "/etc/passwd"}), "config.template: must be the name of a file"),
        (task({"template": "none.html"}), "config.template: there is no file"),
        (task({"template": "my_tasks.py"}), "config.template: must be the name of an .html file"),
        (task({"start_url": "http://localhost:8000/login"}), "config.pages: nothing is there"),
        (task({"start_url": "/a", "pages": {"/b": PAGE}}), "config.start_url: no page is there"),
        (task({"start_url": "file:///etc/passwd", "html": PAGE}), "config.start_url: must be a path"),
        (task({"pages": {"ftp://x/": PAGE}}), "config.pages['ftp://x/']: must be a path"),
        (task({"pages": {"/": 3}}), "config.pages['/']: must be a text"),
        (task({"html": PAGE, "viewport": {"width": 9999}}), "config.viewport.width: must be a whole number"),
        (task({"html": PAGE, "viewport": {"depth": 1}}), "config.viewport.depth: no such key"),
        (task({"html": PAGE, "max_steps": 0}), "config.max_steps: must be a whole number from 1 to 200"),
        (task({"html": PAGE, "max_steps": True}), "config.max_steps"),
        (task({"html": PAGE, "step_timeout_s": 1e9}), "config.step_timeout_s"),
        (task({"html": PAGE, "screenshot": "no"}), "config.screenshot: must be true, false or pixels"),
        (task({"html": PAGE, "dialogs": "eat"}), "config.dialogs: must be dismiss or accept"),
        (task({"html": PAGE, "cookies": [{"name": "a"}]}), "config.cookies[0]: name and value"),
        (task({"html": PAGE, "cookies": [{"name": "a", "value": "b", "x": 1}]}), "config.cookies[0].x: no such key"),
        (task({"html": PAGE, "local_storage": {"a": 1}}), "config.local_storage.a: must be a text"),
        (task(evaluation={}), "evaluation: must have exactly one of reward_function, all, any and not"),
        (task(evaluation={"script": "exit 0"}), "evaluation.script: this environment runs none"),
        (task(evaluation={"reward_function": "no_such('x')"}), "no reward function 'no_such'"),
        (task(evaluation={"reward_function": "element_present(1)"}), "selector must be str"),
        (task(evaluation={"reward_function": "element_present('')"}), "a selector has 1 to"),
        (task(evaluation={"reward_function": "__import__('os').system('id')"}), "evaluation.reward_function"),
        (task(evaluation={"all": []}), "evaluation.all: must be a list of 1 to"),
        (task(evaluation={"all": ["tab_count(1)", 3]}), "evaluation.all[1]: must be a text such as"),
        (task(evaluation={"all": ["tab_count(1)"], "weigth": 2}), "evaluation.weigth: no such key"),
        (task(evaluation={"any": ["tab_count(1)"], "partial": True}), "evaluation.partial"),
        (task(evaluation={"all": [{"not": "nothing("}]}), "evaluation.all[0].not"),
        (task(evaluation={**DONE, "fail": "nothing()"}), "evaluation.fail: no reward function 'nothing'"),
        ({"id": "custom/x", "config": {"html": PAGE}, "evaluation": DONE}, "instruction: the task has none"),
        ({"id": "miniwob/click-test", "config": {"html": PAGE}}, "config.html: not for MiniWoB tasks"),
        ({"id": "custom/copy-paste", "evaluation": DONE}, "evaluation: this task is judged by its own class"),
        ({"instruction": "Do it."}, "config.task_name: the task names neither"),
        ({"id": "custom/x", "config": []}, "config: must be an object"),
    ],
)
def test_a_fault_in_a_task_is_reported_with_its_path(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(spec.InvalidTask) as raised:
        spec.read_spec(given, variables={})

    assert problem in str(raised.value)


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """Return a folder of pages in a folder of task modules, as an operator mounts it."""
    folder = tmp_path / "custom_tasks" / "templates"
    (folder / "shop").mkdir(parents=True)
    (folder / "login.html").write_text(PAGE)
    (folder / "shop" / "cart.html").write_text("<p>cart</p>")
    (folder / "notes.txt").write_text("the password is 7")
    (folder / "broken.html").write_bytes(b"\xff")
    for beside in ("my_tasks.py", "answers.html"):
        (folder.parent / beside).write_text("EXPECTED = 7")
    (folder / "code.html").symlink_to(folder / "notes.txt")
    (folder / "out.html").symlink_to(folder.parent / "answers.html")
    return folder


@pytest.mark.parametrize(
    ("name", "text"),
    [("login.html", PAGE), ("templates/login.html", PAGE), ("shop/cart.html", "<p>cart</p>")],
)
def test_a_template_is_a_page_in_the_folder_of_pages(templates: Path, name: str, text: str) -> None:
    assert spec.read_template(name, (templates,)) == text


@pytest.mark.parametrize(
    "name",
    [
        *("my_tasks.py", "notes.txt", "answers.html", "../answers.html", "code.html", "out.html", "broken.html"),
        *("custom_tasks/my_tasks.py", "templates/../../my_tasks.py", "shop", "templates/", "", ".html", None, 7),
        *("x.html\0", "/etc/passwd", "login.html/", "a" * 5_000 + ".html"),
    ],
)
def test_no_other_file_of_an_operator_is_shown_as_a_page(templates: Path, name: object) -> None:
    with pytest.raises(spec.InvalidTask, match=r"config\.template: "):
        spec.read_template(name, (templates,))


def test_the_folders_of_pages_hold_no_code() -> None:
    assert [folder.name for folder in spec.TEMPLATES] == ["templates", "templates"]
    assert spec.read_spec(task({"template": "login-demo.html"}), variables={})


def test_an_overlong_action_with_an_unclosed_fence_takes_no_time() -> None:
    text = "```\n" + " " * 1_000_000 + "x"

    assert actions.unfenced(text) == text
    assert actions.unfenced("```python\nclick('a')\n```") == "click('a')"


def test_conditions_nested_too_deep_are_refused() -> None:
    nested: Any = "tab_count(1)"
    for _ in range(10):
        nested = {"not": nested}

    with pytest.raises(spec.InvalidTask, match="nested more than"):
        spec.read_spec(task(evaluation=nested), variables={})


def test_cookies_and_storage_belong_to_the_starts_origin() -> None:
    config = {"start_url": "http://shop.test/a", "html": PAGE, "cookies": {"k": "v"}, "local_storage": {"a": "b"}}

    view = spec.read_spec(task(config), variables={}).view

    assert view.cookies == ({"name": "k", "value": "v", "domain": "shop.test", "path": "/"},)
    assert view.local_storage == {"http://shop.test": {"a": "b"}}


class FakeMessages:
    """A window that only holds the agent's messages."""

    def __init__(self, *messages: str) -> None:
        self.messages = list(messages)


@pytest.mark.parametrize(
    ("condition", "messages", "score"),
    [
        ("numeric_match(3)", ["3"], 1.0),
        ("numeric_match(3)", [], 0.0),
        ("contains('x')", ["x", "y"], 0.0),
        ({"not": "contains('x')"}, ["y"], 1.0),
        ({"any": ["contains('x')", "contains('y')"]}, ["y"], 1.0),
        ({"all": ["contains('x')", "contains('y')"]}, ["y"], 0.0),
        ({"all": ["contains('x')", "contains('y')"], "partial": True}, ["y"], 0.5),
        ({"all": [{"reward_function": "contains('x')", "weight": 3}, "contains('y')"], "partial": True}, ["x"], 0.75),
        ({"reward_function": "contains('X')", "case": False}, ["x"], 1.0),
    ],
)
def test_conditions_are_scored(condition: Any, messages: list[str], score: float) -> None:
    assert rewards.read_condition(condition, "evaluation").score(FakeMessages(*messages)) == score


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://task.test/a?b#c", "http://task.test"),
        ("http://TASK.test:80/", "http://task.test"),
        ("https://x:443", "https://x"),
        ("http://x:8000/", "http://x:8000"),
        ("http://task.test@evil/", ""),
        ("file:///etc/passwd", ""),
        ("javascript:1", ""),
        ("http://[::1/", ""),
        ("http://x:port/", ""),
        ("//task.test/", ""),
    ],
)
def test_the_origin_of_an_address(url: str, origin: str) -> None:
    assert site.origin_of(url) == origin


def test_a_site_serves_its_pages_and_nothing_else() -> None:
    pages = site.Site()
    pages.put("/", "start")
    pages.put("http://other.test/a", "other")

    assert pages.find("http://task.test/?q=1#x").body == b"start"
    assert pages.find("http://task.test").body == b"start"
    assert pages.find("http://other.test/a").body == b"other"
    assert pages.find("http://task.test/none").status == 404
    assert pages.find("http://elsewhere.test/") is None
    assert pages.find("file:///etc/passwd") is None
    assert [pages.may_open(url) for url in ("about:blank", "http://other.test/b", "http://task.test:81/")] == [
        True,
        True,
        False,
    ]


def test_a_folders_source_does_not_lead_out_of_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.html").write_text("a")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "secret")
    read = site.folder_source((tmp_path / "in").resolve())

    assert read("/a.html").body == b"a"
    assert [read(path) for path in ("/../secret", "/%2e%2e/secret", "/link", "/", "/none", "/\0")] == [None] * 6


# The files


def lines(split: str) -> list[dict[str, Any]]:
    text = (ROOT / "tasks" / "browser" / f"{split}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_task_files_match_the_problems() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "make-browser-tasks"), "--check"], capture_output=True, check=False
    )

    assert done.returncode == 0, done.stdout.decode() + done.stderr.decode()


def test_there_are_enough_tasks_and_every_id_is_unique() -> None:
    ids = [entry["id"] for split in SPLITS for entry in lines(split)]

    assert len(ids) == len(set(ids))
    assert sum(id.startswith("custom/") for id in ids) >= 20
    assert sum(id.startswith("miniwob/") for id in ids) == sum(len(names) for names in MINIWOB.values()) >= 10


@pytest.mark.parametrize("split", sorted(SPLITS))
def test_every_task_can_be_read(split: str) -> None:
    for entry in lines(split):
        spec.read_spec(entry, variables={})


def test_no_solution_is_in_a_task() -> None:
    problems = {f"custom/{problem.slug}": problem for problems in SPLITS.values() for problem in problems}

    for split in SPLITS:
        for entry in lines(split):
            if problem := problems.get(entry["id"]):
                assert not any(step in json.dumps(entry) for step in problem.solution)


def test_the_engine_gate_allows_the_environments_container() -> None:
    environment = read_environment(ROOT / "env_images" / "browser" / "environment.toml")
    rules = Rules.of([environment], instance="probe", socket_root="/sockets")
    worker = Worker(id=WorkerId("w1"), environment=environment.name, digest=environment.digest(), slots=1)

    body = container_body(worker, environment, instance="probe", source="/sockets/w1")

    assert refusal(body, rules) is None
    assert (body["User"], body["HostConfig"]["NetworkMode"]) == ("0:0", "none")
    assert body["HostConfig"]["CapAdd"] == ["KILL", "SETGID", "SETUID"]


GIVEN = "attempting click action\n- element is stable\n- performing click action\n- waiting for navigations"


@pytest.mark.parametrize(
    ("calls", "log", "is_carried_out"),
    [
        pytest.param("click()\n", GIVEN, True, id="the last call, whose input was given"),
        pytest.param("move()\nclick()\n", GIVEN, True, id="after another one"),
        pytest.param("click()\nmove()\n", GIVEN, False, id="a call that another one follows"),
        pytest.param(
            "click()\n", f"{GIVEN}\nretrying click action\n- not visible", False, id="a later attempt without"
        ),
        pytest.param("click()\n", "attempting click action\n- element is not enabled", False, id="no input"),
    ],
)
def test_a_call_that_times_out_counts_as_made_if_its_input_was_given_and_no_call_follows(
    calls: str, log: str, is_carried_out: bool
) -> None:
    code = f"def click():\n    raise TimeoutError({log!r})\n\ndef move(): ...\n{calls}"

    with pytest.raises(TimeoutError) as late:
        exec(code, {})  # as BrowserGym runs an action

    assert window._was_carried_out(late.value, code) is is_carried_out
