"""Sessions of the browser environment in its image: observations, names of tasks, and the ends of an episode."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from tests.deadlines import HANG_S
from tests.envs.browser_solutions import act, bids, follow, played
from tests.envs.browser_worker import BrowserWorker, browser_worker, observation

pytestmark = [pytest.mark.docker, pytest.mark.needs("image:browser")]
pytest_plugins = ["tests.contract.backend_fixtures"]

FIELDS = {"text", "url", "screenshot", "goal", "axtree_txt", "pruned_html", "error", "last_action_error"}
"""Fields of a BrowserGym observation over OpenEnv."""


@pytest.fixture(scope="module")
def worker(docker_engine: docker.APIClient) -> Iterator[BrowserWorker]:
    with browser_worker(docker_engine) as started:
        yield started


def page_task(html: str, evaluation: object = "element_present('#done')", **config: Any) -> dict[str, Any]:
    judged = {"reward_function": evaluation} if isinstance(evaluation, str) else evaluation
    return {"id": "custom/probe", "instruction": "Try it.", "config": {"html": html, **config}, "evaluation": judged}


def pixel_colours(png: str) -> tuple[int, int, set[bytes]]:
    """Read a PNG of 8-bit RGB(A). Return its width, its height and the colours of its first row."""
    data = base64.b64decode(png)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind in (2, 6)) == (8, True)
    packed, place = b"", 8
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        if data[place + 4 : place + 8] == b"IDAT":
            packed += data[place + 8 : place + 8 + length]
        place += length + 12
    channels = 3 if kind == 2 else 4
    rows, stride = zlib.decompress(packed), width * channels + 1
    first = rows[1:stride]
    # Filters of a first row: no row is above it, so Up changes nothing and Paeth equals Sub (bytes minus predecessor).
    assert rows[0] in (0, 1, 2, 4)
    if rows[0] in (1, 4):
        plain = bytearray(first)
        for at in range(channels, len(plain)):
            plain[at] = (plain[at] + plain[at - channels]) % 256
        first = bytes(plain)
    return width, height, {first[at : at + 3] for at in range(0, len(first), channels)}


def test_the_first_observation_shows_the_page_in_text_and_picture(worker: BrowserWorker) -> None:
    html = "<title>Red</title><body style='margin:0;background:#f01020'><button id=go>Go</button>"
    with worker.session(page_task(html, viewport={"width": 320, "height": 200})) as session:
        text, image = session.get("/browser/prompt").json()

    seen = text["detail"]["observation"]
    assert seen.keys() >= FIELDS
    assert "button 'Go'" in seen["axtree_txt"]
    assert 'id="go"' in seen["pruned_html"]
    assert (seen["url"], seen["goal"], seen["error"]) == ("http://task.test/", "Try it.", "")
    assert seen["axtree_txt"] in text["text"]
    assert image["mimeType"] == "image/png"
    width, height, colours = pixel_colours(image["data"])
    assert (width, height) == (320, 200)
    assert bytes.fromhex("f01020") in colours


def test_a_step_has_a_picture_unless_the_task_disables_it(worker: BrowserWorker) -> None:
    kinds = []
    for config in ({}, {"screenshot": False}):
        with worker.session(page_task("<p>x", **config)) as session:
            kinds.append([block["type"] for block in act(session, "noop(0)")["blocks"]])

    assert kinds == [["text", "image"], ["text"]]


def test_the_structured_observation_has_the_picture_as_pixels_where_a_task_requests_it(worker: BrowserWorker) -> None:
    task = page_task(
        "<body style='margin:0;background:#f01020'>", viewport={"width": 320, "height": 200}, screenshot="pixels"
    )
    with worker.session(task) as session:
        seen = observation(session)["screenshot"]

    assert (len(seen), len(seen[0]), seen[100][100]) == (200, 320, [0xF0, 0x10, 0x20])


def test_a_free_text_in_a_fence_is_an_action(worker: BrowserWorker) -> None:
    html = "<button onclick=\"this.outerHTML='<b id=done>ok</b>'\">Go</button>"
    with worker.session(page_task(html)) as session:
        bid = bids(observation(session)["axtree_txt"], "button 'Go'")[0]
        answer = session.say(f"```python\nclick('{bid}')\n```")

    assert answer["output"]["reward"] == 1.0


def test_an_object_is_an_action_of_the_default_tool(worker: BrowserWorker) -> None:
    with worker.session(page_task("<p>x")) as session:
        answer = session.call(action={"action_str": "noop(0)"})

    assert answer["output"]["data"]["error"] == ""


@pytest.mark.parametrize(
    "action",
    [
        "reset()",
        "step('noop()')",
        "state()",
        "import os",
        "__import__('os').system('id')",
        "page.evaluate('1')",
        "click('1'); noop()",
        "noop(wait_ms=__import__('os'))",
        "noop(60000)",
        "mouse_click(1e308, 1e308)",
        "mouse_drag_and_drop(1, 1, -1e7, 1)",
        "scroll(0, 1e999)",
        "noop(5000)\nnoop(5000)",
        f"keyboard_type('{'x' * 1001}')",
        "upload_file('1', '/srv/env/tasks/train.jsonl')",
        "mouse_upload_file(1, 1, '/proc/self/environ')",
        "execute_python_code('1')",
        "I would click the button.",
        "",
        "(" * 3000,
        "noop()\n" * 11,
    ],
)
def test_a_text_that_is_not_an_action_is_an_error_that_the_agent_reads(worker: BrowserWorker, action: str) -> None:
    with worker.session(page_task("<p>x", screenshot=False)) as session:
        output = act(session, action)

    assert output["data"]["last_action_error"]
    assert output["data"]["error"] in output["blocks"][0]["text"]
    assert (output["reward"], output["finished"]) == (None, False)


def test_the_last_step_ends_an_episode_with_the_reward_reached_so_far(worker: BrowserWorker) -> None:
    html = "<input id=a><input id=b>"
    parts = [{"reward_function": "input_value_equals('#a', 'x')", "weight": 3}, "input_value_equals('#b', 'y')"]
    task = page_task(html, {"all": parts, "partial": True}, max_steps=2)
    with worker.session(task) as session:
        first, last = follow(session, ["fill({textbox}, 'x')", "noop(0)"])

    assert (first["reward"], first["finished"]) == (None, False)
    assert (last["reward"], last["finished"]) == (0.75, True)
    assert last["metadata"]["truncated"] is True


def test_a_condition_that_cannot_be_judged_is_an_error_without_a_reward(worker: BrowserWorker) -> None:
    with worker.session(page_task("<p>x", "element_present('p:no-such-thing(')")) as session:
        answer = session.call(name="act", input={"action_str": "noop(0)"})

    assert (answer["ok"], answer["reason"]) == (False, "author_fault")
    assert "the task cannot be judged" in answer["error"]


def test_reporting_a_feasible_task_as_infeasible_ends_it_with_reward_zero(worker: BrowserWorker) -> None:
    with worker.session(page_task("<p>x")) as session:
        output = act(session, "report_infeasible('no such button')")

    assert (output["reward"], output["finished"]) == (0.0, True)


# The RFC's classes


def test_copy_paste_rewards_errors_the_copy_and_success_as_the_rfc_has_it(worker: BrowserWorker) -> None:
    with worker.session({"id": "custom/copy-paste"}) as session:
        seen = observation(session)["axtree_txt"]
        target, submit = bids(seen, "textbox 'Target'")[0], bids(seen, "button 'Submit'")[0]
        outputs = [
            act(session, action)
            for action in ("click('zz9')", f"fill('{target}', 'The quick brown fox')", f"click('{submit}')")
        ]

    assert [output["reward"] for output in outputs] == [-0.1, 0.5, 1.0]
    assert [output["finished"] for output in outputs] == [False, False, True]
    assert outputs[0]["metadata"] | {"step": 1} == outputs[0]["metadata"]
    assert (outputs[0]["metadata"]["benchmark"], outputs[0]["metadata"]["task_name"]) == ("custom", "copy-paste")


def test_copy_paste_multitab_rewards_each_part(worker: BrowserWorker) -> None:
    steps = [
        "click({link 'Open the target page'})",
        "fill({textbox 'Text'}, 'Quarterly report 2031, final version')",
        "click({button 'Submit'})",
    ]
    with worker.session({"id": "custom/copy-paste-multitab"}) as session:
        outputs = follow(session, steps)

    assert [output["reward"] for output in outputs] == [0.3, 0.6, 1.0]
    assert outputs[-1]["finished"]


def test_login_demo_ends_signed_in(worker: BrowserWorker) -> None:
    steps = [
        "fill({textbox 'User'}, 'demo')\nfill({textbox 'Password'}, 'demo123')",
        "click({button 'Sign in'})",
    ]

    assert played(worker, {"id": "custom/login-demo"}, steps)["reward"] == 1.0


def test_the_configuration_may_name_the_benchmark_and_the_task(worker: BrowserWorker) -> None:
    with worker.session({"config": {"benchmark": "miniwob", "task_name": "click-test"}}) as session:
        assert observation(session)["goal"] == "Click the button."


def test_registered_tasks_include_the_builtin_classes(worker: BrowserWorker) -> None:
    listed = worker.http.get("/browser/registered").json()

    ids = {task["id"] for task in (listed["tasks"] if isinstance(listed, dict) else listed)}
    assert ids >= {"custom/copy-paste", "custom/copy-paste-multitab", "custom/login-demo"}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"colour": 1}, "config.colour: no such key"),
        ({"benchmark": "custom", "task_name": "login-dem"}, "Unknown custom task: login-dem; close names: login-demo"),
        ({"benchmark": "miniwob", "task_name": "clik-test"}, "miniwob task: clik-test; close names: click-test"),
        ({"benchmark": "miniwob", "task_name": "0"}, "Unknown miniwob task: 0; 125 are known"),
    ],
)
def test_a_create_with_a_task_that_cannot_be_played_is_refused(
    worker: BrowserWorker, config: dict[str, Any], problem: str
) -> None:
    body = {"env_name": "browser", "task_spec": {"id": "custom/x", "config": config}}

    refused = worker.http.post("/create", json=body, headers={"X-Session-ID": "unplayable"})

    assert refused.status_code == 400
    assert problem in refused.text


def test_an_official_task_is_found_by_its_id_alone_and_an_unknown_id_is_refused(worker: BrowserWorker) -> None:
    with worker.session({"id": "miniwob/use-slider"}) as session:
        goal = observation(session)["goal"]
    refused = worker.http.post(
        "/create",
        json={"env_name": "browser", "task_spec": {"id": "miniwob/none-such"}},
        headers={"X-Session-ID": "none-such"},
    )

    assert "slider" in goal
    assert 400 <= refused.status_code < 500
    assert "Unknown task: miniwob/none-such" in refused.text


MOUNTED = '''
from typing import Any

from browser_tasks import CustomBrowserGymEnvironment
from custom_base import CustomBrowserGymEnvironment as SameBase
from custom_tasks import register_custom_task

assert SameBase is CustomBrowserGymEnvironment


@register_custom_task("my-task")
class MyTask(CustomBrowserGymEnvironment):
    """Press the button twice."""

    task_name = "my-task"
    max_steps = 4

    def _get_html_content(self) -> str:
        return self.read_beside("my_page.html")

    def _calculate_reward(self, page_data: dict[str, Any], action: str, error: str | None = None) -> float:
        return 1.0 if self._check_done(page_data) else 0.0

    def _check_done(self, page_data: dict[str, Any]) -> bool:
        return page_data["fields"]["count"] == "2"
'''
MY_PAGE = "<input id=count value=0 readonly><button onclick='count.value = +count.value + 1'>More</button>"


def test_a_container_ends_itself_on_sigterm(docker_engine: docker.APIClient) -> None:
    with browser_worker(docker_engine) as worker:
        created = worker.http.post(
            "/create",
            json={"env_name": "browser", "task_spec": page_task("<p>x")},
            headers={"X-Session-ID": "left-open"},
        )
        docker_engine.kill(worker.container, "SIGTERM")
        ended = docker_engine.wait(worker.container, timeout=HANG_S)

    assert created.status_code == 200
    assert ended["StatusCode"] == 0


WRONG_REWARDS = '''
from browser_tasks import CustomBrowserGymEnvironment, register_custom_task


@register_custom_task("wrong-rewards")
class WrongRewards(CustomBrowserGymEnvironment):
    """Wait."""

    def _get_html_content(self):
        return "<p>x"

    def _calculate_reward(self, page_data, action, error=None):
        if action == "noop(1)":
            raise RuntimeError("no such reward")
        return float(action.removeprefix("noop(2)#"))

    def _check_done(self, page_data):
        return True
'''


def mounting(files: dict[str, str], *variables: str) -> Callable[[dict[str, Any]], None]:
    """Return a change that mounts *files* as custom tasks and sets *variables*."""

    def mount(body: dict[str, Any]) -> None:
        folder = body["HostConfig"]["Mounts"][0]["Source"]
        for name, text in files.items():
            Path(folder, name).write_text(text)
        body["HostConfig"]["Mounts"].append(
            {"Type": "bind", "Source": folder, "Target": "/opt/openenv/custom_tasks", "ReadOnly": True}
        )
        body["Env"] += variables

    return mount


def test_a_class_whose_reward_raises_or_is_not_finite_is_an_error_without_a_reward(
    docker_engine: docker.APIClient,
) -> None:
    change = mounting({"wrong.py": WRONG_REWARDS}, "OPENENV_TASK_MODULE=custom_tasks.wrong")
    told = {
        "noop(1)": "the task cannot be judged: RuntimeError: no such reward",
        "noop(2)#nan": "returned the reward nan; a reward is a finite number",
        "noop(2)#-inf": "returned the reward -inf; a reward is a finite number",
    }
    answers = {}
    with browser_worker(docker_engine, change=change) as worker:
        for action in told:
            with worker.session({"id": "custom/wrong-rewards"}) as session:
                answers[action] = session.call(name="act", input={"action_str": action})

    for action, text in told.items():
        answer = answers[action]
        assert (answer["ok"], answer["reason"], "output" in answer) == (False, "author_fault", False), answer
        assert text in answer["error"]


def test_variables_may_name_a_mounted_class_as_the_default_task(docker_engine: docker.APIClient) -> None:
    change = mounting(
        {"my_task.py": MOUNTED, "my_page.html": MY_PAGE},
        "OPENENV_TASK_MODULE=custom_tasks.my_task",
        "BROWSERGYM_BENCHMARK=custom",
        "BROWSERGYM_TASK_NAME=my-task",
    )
    with browser_worker(docker_engine, change=change) as worker:
        by_variables = played(worker, {}, ["click({button 'More'})", "click({button 'More'})"])
        by_id = played(worker, {"id": "custom/my-task"}, ["click({button 'More'})\nclick({button 'More'})"])

    assert by_variables["reward"] == by_id["reward"] == 1.0
    assert by_id["metadata"]["task_name"] == "my-task"
