"""A step of the browser environment waits for everything that its action started, however slow the machine is.

The tests cause the delay: they stop a renderer, or keep a page busy, just when a tab or a page is about to open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import docker
import pytest

from tests.deadlines import HANG_S
from tests.envs.browser_solutions import act, bids, follow
from tests.envs.browser_worker import BrowserWorker, browser_worker, observation
from tests.fakes.eventually import eventually_now

pytestmark = [pytest.mark.docker, pytest.mark.needs("image:browser")]
pytest_plugins = ["tests.contract.backend_fixtures"]

BROWSER = "10002"
BUSY = """<script>
const busy = ms => { const end = performance.now() + ms; while (performance.now() < end); };
</script>"""
PAGES = {"/next": "<title>Next</title><p id=next>Here", "/last": "<title>Last</title><p id=last>Here"}


@pytest.fixture(scope="module")
def worker(docker_engine: docker.APIClient) -> Iterator[BrowserWorker]:
    with browser_worker(docker_engine) as started:
        yield started


def page_task(html: str, evaluation: str, **config: Any) -> dict[str, Any]:
    """Return a task with a single step."""
    config = {"html": BUSY + html, "pages": PAGES, "screenshot": False, "max_steps": 1, **config}
    return {
        "id": "custom/probe",
        "instruction": "Try it.",
        "config": config,
        "evaluation": {"reward_function": evaluation},
    }


def clicked(worker: BrowserWorker, task: dict[str, Any], start: str = "button") -> dict[str, Any]:
    """Click the element whose line starts with *start*, in one step. Return the output."""
    with worker.session(task) as session:
        return act(session, f"click({bids(observation(session)['axtree_txt'], start)[0]!r})")


STOP_NEXT_RENDERER = """
import os, pathlib, signal, sys, time

def browsers():
    found = set()
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == 10002:
                found.add(int(name))
        except OSError:
            continue  # it ended while it was looked at
    return found

known = browsers()
pathlib.Path(sys.argv[1]).touch()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    if new := browsers() - known:
        for pid in new:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        for pid in new:
            os.kill(pid, signal.SIGCONT)
        print("stopped")
        break
"""


def watches(worker: BrowserWorker) -> None:
    assert worker.run("test", "-e", "/tmp/watches")[0] == 0


@contextmanager
def next_renderer_stopped(worker: BrowserWorker) -> Iterator[None]:
    """Stop the next process that the browser starts, for a while. Fail if it starts none."""
    printed: list[str] = []
    script = ("python3", "-c", STOP_NEXT_RENDERER, "/tmp/watches")
    watch = threading.Thread(target=lambda: printed.append(worker.run(*script, user=BROWSER)[1]))
    watch.start()
    try:
        eventually_now(lambda: watches(worker))
        yield
    finally:
        watch.join(timeout=HANG_S)
        worker.run("rm", "/tmp/watches")
    assert printed == ["stopped\n"]


def test_a_tab_whose_renderer_is_late_is_judged(worker: BrowserWorker) -> None:
    with worker.session({"id": "custom/copy-paste-multitab"}) as session, next_renderer_stopped(worker):
        (output,) = follow(session, ["click({link 'Open the target page'})"])
    assert output["reward"] == 0.3, output


@pytest.mark.parametrize(
    ("html", "start"),
    [
        pytest.param("<button onclick=\"window.open('/next'); busy(800)\">Go</button>", "button", id="a tab"),
        pytest.param("<button onclick=\"location.href = '/next'; busy(800)\">Go</button>", "button", id="an address"),
        pytest.param("<a href=/next onclick='setTimeout(busy, 0, 800)'>Go</a>", "link", id="a link"),
        pytest.param(
            "<form action=/next onsubmit='setTimeout(busy, 0, 800)'><button>Go</button></form>", "button", id="a form"
        ),
        pytest.param(
            "<button onclick=\"requestAnimationFrame(() => { busy(800); location.href = '/next'; })\">Go</button>",
            "button",
            id="an address after the next frame",
        ),
    ],
)
def test_the_page_that_a_busy_page_opens_is_judged(worker: BrowserWorker, html: str, start: str) -> None:
    output = clicked(worker, page_task(html, "check_url_contains('next')"), start)

    assert (output["reward"], output["data"]["url"].rstrip("?")) == (1.0, "http://task.test/next")
    assert output["data"]["error"] == ""


def test_a_step_waits_beyond_a_page_that_redirects_immediately(worker: BrowserWorker) -> None:
    on = BUSY + "<title>On</title><script>location.replace('/last'); setTimeout(busy, 0, 800)</script>"
    task = page_task("<a href=/on>Go</a>", "check_url_contains('last')", pages={**PAGES, "/on": on})

    assert clicked(worker, task, "link")["reward"] == 1.0


def test_a_frame_that_is_late_is_seen(worker: BrowserWorker) -> None:
    html = """<iframe name=part></iframe>
    <button onclick="frames.part.location.href = '/next'; setTimeout(busy, 0, 800)">Go</button>"""
    output = clicked(worker, page_task(html, "element_present('#next')"))

    assert "Here" in output["data"]["axtree_txt"]


def test_a_click_with_late_effects_is_no_error(worker: BrowserWorker) -> None:
    html = "<body onpagehide='busy(5500)'><a href=/next>Go</a>"  # longer than the limit of a call
    with worker.session(page_task(html, "element_present('#next')")) as session:
        bid = bids(observation(session)["axtree_txt"], "link")[0]
        output = act(session, f"mouse_move(1, 1)\nclick({bid!r})")

    assert (output["data"]["error"], output["reward"]) == ("", 1.0)


def test_an_element_that_is_late_is_clicked(worker: BrowserWorker) -> None:
    html = "<button disabled onclick=\"title = 'done'\">Go</button><script>setTimeout(() => go(), 1500); " + (
        "const go = () => { document.querySelector('button').disabled = false; };</script>"
    )
    output = clicked(worker, page_task(html, "element_present('[title=done]')"))

    assert (output["data"]["error"], output["reward"]) == ("", 1.0)


ASK = """<button onclick="%s">Go</button><p id=got></p><script>
const show = text => { busy(300); got.textContent = text.includes("Here") ? "got" : ""; };
const read = ask => { ask.open("GET", "/last"); ask.onload = () => show(ask.responseText); ask.send(); };
</script>"""


@pytest.mark.parametrize(
    "script",
    [
        "fetch('/next').then(answer => answer.text()).then(show)",
        "busy(200); read(new XMLHttpRequest())",
    ],
)
def test_a_response_to_a_scripts_request_is_seen(worker: BrowserWorker, script: str) -> None:
    task = page_task(ASK % script, "element_text_equals('#got', 'got')", settle_ms=0)

    assert clicked(worker, task)["reward"] == 1.0


def test_a_click_on_a_covered_element_is_an_error(worker: BrowserWorker) -> None:
    html = """<button onclick="location.href = '/next'">Go</button>
    <div style="position: fixed; inset: 0">performing click action</div>"""
    output = clicked(worker, page_task(html, "check_url_contains('next')"))

    assert "intercepts pointer events" in output["data"]["error"]
    assert output["reward"] == 0.0


# An event that never comes blocks no step for long


@pytest.mark.parametrize(
    ("html", "start"),
    [
        pytest.param("<a target=_blank href='mailto:someone@task.test'>Go</a>", "link", id="a tab without a page"),
        pytest.param(
            "<button onclick=\"frame.src = 'file:///etc/passwd'\">Go</button><iframe id=frame></iframe>",
            "button",
            id="a frame that is refused",
        ),
        pytest.param("<a href='mailto:someone@task.test'>Go</a>", "link", id="an address without a page"),
        pytest.param("<button onclick=\"location.href = '/next'; stop()\">Go</button>", "button", id="a stop"),
        pytest.param(
            "<button onclick=\"document.open(); document.write('<button>Go</button><p>Open')\">Go</button>",
            "button",
            id="a document without an end",
        ),
        pytest.param(
            "<button onclick='(async () => { for (;;) await fetch(\"/next\"); })()'>Go</button>",
            "button",
            id="a page that sends requests all the time",
        ),
        pytest.param("<button onclick=\"fetch('/next')\">Go</button>", "button", id="a response that no script reads"),
        pytest.param(
            "<button onclick=\"fetch('http://elsewhere.test/')\">Go</button>", "button", id="a request that is refused"
        ),
        pytest.param("<button onclick=\"alert('1'); confirm('2')\">Go</button>", "button", id="dialogs"),
        pytest.param(
            "<button onclick='requestAnimationFrame = setTimeout = () => {}; Promise = null'>Go</button>",
            "button",
            id="a page without frames and timers",
        ),
    ],
)
def test_a_step_waits_only_once_for_an_event_that_never_comes(worker: BrowserWorker, html: str, start: str) -> None:
    # Less time than two full waits: the first wait has its full length, and a second one would fail the session.
    task = page_task(html + "<p id=there>", "tab_count(7)", max_steps=3, step_timeout_s=14)
    with worker.session(task) as session:
        first = act(session, f"click({bids(observation(session)['axtree_txt'], start)[0]!r})")
        second, third = act(session, "noop(0)"), act(session, "new_tab()\nnew_tab()")

    assert [output["reward"] for output in (first, second, third)] == [None, None, 0.0]
    assert [output["data"]["error"] for output in (second, third)] == ["", ""]
    assert len(third["data"]["open_pages_titles"]) == 3


def test_the_acting_page_may_close(worker: BrowserWorker) -> None:
    task = page_task("<a href=/next target=_blank>Go</a>", "tab_count(7)", max_steps=3)
    with worker.session(task) as session:
        follow(session, ["click({link 'Go'})"])
        output = act(session, "tab_close()")

    assert (output["data"]["error"], output["data"]["open_pages_titles"]) == ("", [""])
