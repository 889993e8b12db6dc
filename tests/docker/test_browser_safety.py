"""Limits of the browser, of a page in it, and of an agent that drives it, tested in the environment's image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import docker
import pytest

from tests.envs.browser_solutions import act, follow, written
from tests.envs.browser_worker import BrowserWorker, browser_worker, observation

pytestmark = [pytest.mark.docker, pytest.mark.needs("image:browser")]
pytest_plugins = ["tests.contract.backend_fixtures"]

SERVER, BROWSER = "10001", "10002"


@pytest.fixture(scope="module")
def worker(docker_engine: docker.APIClient) -> Iterator[BrowserWorker]:
    with browser_worker(docker_engine) as started:
        yield started


def page_task(html: str, evaluation: object = "element_present('#done')", **config: Any) -> dict[str, Any]:
    judged = {"reward_function": evaluation} if isinstance(evaluation, str) else evaluation
    return {
        "id": "custom/probe",
        "instruction": "Try it.",
        "config": {"html": html, "screenshot": False, **config},
        "evaluation": judged,
    }


# Requests of an agent


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "file:///srv/env/tasks/train.jsonl",
        "chrome://version",
        "devtools://devtools/bundled/inspector.html",
        "view-source:http://task.test/",
        "javascript:document.title='Done'",
        "data:text/html,<p id=done>",
        "blob:http://task.test/1",
        "http://127.0.0.1:8080/",
        "http://localhost/",
        "http://[::1]/",
        "http://task.test@127.0.0.1/",
        "http://task.test:81/",
        "https://example.org/",
        "ws://127.0.0.1/",
        "unix:/run/envserver/worker.sock",
        "",
    ],
)
def test_goto_opens_nothing_but_the_tasks_own_pages(worker: BrowserWorker, url: str) -> None:
    with worker.session(page_task("<title>Start</title>")) as session:
        output = act(session, f"goto({url!r})")

    assert "goto opens the pages of this task only" in output["data"]["error"]
    assert output["data"]["url"] == "http://task.test/"


LINKS = ("file:///etc/passwd", "chrome://version", "view-source:http://task.test/", "http://127.0.0.1:8080/")


@pytest.mark.parametrize("url", LINKS)
@pytest.mark.parametrize("target", ["_self", "_blank"])
def test_a_link_opens_nothing_but_the_tasks_own_pages(worker: BrowserWorker, url: str, target: str) -> None:
    with worker.session(page_task(f"<a target={target} href='{url}'>Away</a>")) as session:
        (output,) = follow(session, ["click({link 'Away'})"])

    seen = output["data"]
    assert "root:" not in seen["axtree_txt"] + seen["pruned_html"]
    if seen["url"] == "http://127.0.0.1:8080/":
        assert "This address is not part of the task." in seen["axtree_txt"]
    else:
        assert seen["url"] in ("http://task.test/", "about:blank", "chrome-error://chromewebdata/", ":")


PROBE = """
<pre id=found role=status></pre><iframe src="file:///etc/passwd"></iframe><iframe src="http://127.0.0.1:8080/"></iframe>
<script>
const found = {};
const tell = (name, value) => { found[name] = value; document.getElementById("found").textContent =
  Object.keys(found).length === 8 ? JSON.stringify(found) : ""; };
const ask = (name, url) => fetch(url).then(answer => answer.text()).then(
  text => tell(name, "read " + text.length), () => tell(name, "refused"));
ask("file", "file:///etc/passwd"); ask("server", "http://127.0.0.1:8080/health"); ask("name", "http://localhost:9222/json");
ask("elsewhere", "https://example.org/"); ask("debugging", "http://127.0.0.1:9222/json/version");
const request = new XMLHttpRequest();
try { request.open("GET", "file:///proc/self/environ", false); request.send(); tell("request", "read"); }
catch { tell("request", "refused"); }
const socket = new WebSocket("ws://127.0.0.1:9222/");
socket.onopen = () => tell("socket", "read"); socket.onerror = () => tell("socket", "refused");
const image = new Image(); image.onload = () => tell("image", "read"); image.onerror = () => tell("image", "refused");
image.src = "file:///usr/share/pixmaps/debian-logo.png";
</script>
"""


def test_a_page_reads_no_file_and_reaches_no_port(worker: BrowserWorker) -> None:
    # localhost is a secure context: no function is missing there.
    task = page_task(PROBE, "element_text_contains('#found', '{')", start_url="http://localhost:7777/", settle_ms=500)
    with worker.session(task) as session:
        output = act(session, "noop(1000)")

    text = output["data"]["pruned_html"]
    found = json.loads(text[text.index("{") : text.index("}") + 1].replace("&quot;", '"'))
    assert found == dict.fromkeys(found, "refused")
    assert len(found) == 8
    assert "root:" not in text


def test_a_download_leaves_no_file(worker: BrowserWorker) -> None:
    html = "<a download='loot-4711.txt' href='data:text/plain,loot'>Get</a>"
    with worker.session(page_task(html, settle_ms=500)) as session:
        follow(session, ["click({link 'Get'})", "noop(300)"])
        for user in (SERVER, BROWSER):
            _, printed = worker.run("find", "/tmp", "/dev/shm", "/run", "/var", "-name", "*loot*", user=user)
            assert "loot-4711" not in printed


def test_the_number_of_pages_that_a_page_opens_is_bounded(worker: BrowserWorker) -> None:
    html = "<button onclick=\"for (let n = 0; n < 60; n++) open('/', '_blank')\">Many</button>"
    with worker.session(page_task(html)) as session:
        follow(session, ["click({button 'Many'})"])
        output = act(session, "\n".join(["new_tab()"] * 9))

    assert len(output["data"]["open_pages_titles"]) <= 8


LIAR = """
<h1 id=title>Not yet</h1><input id=field value=no><input type=checkbox id=box><button id=done hidden>x</button>
<script>
const lie = (owner, name, value) => Object.defineProperty(owner, name, {get: () => value, configurable: true});
lie(HTMLElement.prototype, "innerText", "Done"); lie(Node.prototype, "textContent", "Done");
lie(HTMLInputElement.prototype, "value", "yes"); lie(HTMLInputElement.prototype, "checked", true);
lie(Document.prototype, "title", "Done"); lie(Document.prototype, "URL", "http://task.test/dashboard");
lie(Element.prototype, "offsetParent", document.body);
Document.prototype.querySelectorAll = () => [document.body]; Document.prototype.querySelector = () => document.body;
Element.prototype.matches = () => true; Element.prototype.getBoundingClientRect = () => new DOMRect(0, 0, 50, 50);
Storage.prototype.getItem = () => "yes"; lie(Document.prototype, "cookie", "state=yes");
window.getComputedStyle = () => ({visibility: "visible", display: "block"});
Array.prototype.includes = () => true; String.prototype.includes = () => true; JSON.stringify = () => '"Done"';
</script>
"""
LIES = [
    "element_text_equals('#title', 'Done')",
    "element_text_contains('#title', 'Done')",
    "input_value_equals('#field', 'yes')",
    "checkbox_checked('#box')",
    "page_title_contains('Done')",
    "check_url_contains('dashboard')",
    "local_storage_equals('state', 'yes')",
    "cookie_equals('state', 'yes')",
    "element_present('#done')",
    "element_count('#nothing', 1)",
]


def test_no_script_of_a_page_fakes_the_judged_state(worker: BrowserWorker) -> None:
    judged = {"all": [{"reward_function": lie} for lie in LIES], "partial": True}
    with worker.session(page_task(LIAR, judged, max_steps=1)) as session:
        output = act(session, "noop(0)")

    assert (output["reward"], output["finished"]) == (0.0, True)


# Rights of the browser's processes


STATUS = """
import json, pathlib
found = []
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        lines["Command"] = (folder / "cmdline").read_text().replace(chr(0), " ")
        lines["OomScore"] = (folder / "oom_score_adj").read_text()
    except OSError:
        continue  # it ended while it was looked at
    found.append({name: value.strip() for name, value in lines.items()})
print(json.dumps(found))
"""


def processes(worker: BrowserWorker) -> list[dict[str, str]]:
    status, printed = worker.run("python3", "-c", STATUS)
    assert status == 0, printed
    return [dict(process) for process in json.loads(printed)]


def test_the_browser_runs_as_another_user_without_any_right(worker: BrowserWorker) -> None:
    with worker.session(page_task("<p>x")):
        found = processes(worker)

    browsers = [process for process in found if process["Name"].startswith("chromium")]
    servers = [
        process for process in found if "browser_server.py" in process["Command"] and process["Uid"].split()[0] != "0"
    ]
    assert len(browsers) >= 2
    assert len(servers) == 1
    for process in browsers:
        assert process["Uid"].split() == process["Gid"].split() == [BROWSER] * 4
        assert process["Groups"] == ""
        assert {process[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert (process["NoNewPrivs"], process["Seccomp"]) == ("1", "2")
        assert int(process["Seccomp_filters"]) > int(servers[0]["Seccomp_filters"])
        assert int(process["OomScore"]) >= 200
    assert servers[0]["Uid"].split() == [SERVER] * 4
    assert int(servers[0]["CapPrm"], 16) == 1 << 7 | 1 << 6  # SETUID and SETGID
    assert int(servers[0]["OomScore"]) == 0


def test_nothing_in_the_container_listens_on_a_port(worker: BrowserWorker) -> None:
    with worker.session(page_task("<p>x")):
        commands = [process["Command"] for process in processes(worker) if process["Name"].startswith("chromium")]
        _, tcp = worker.run("cat", "/proc/net/tcp", "/proc/net/tcp6")

    assert any("--remote-debugging-pipe" in command for command in commands)
    assert not any("--remote-debugging-port" in command for command in commands)
    assert [line for line in tcp.splitlines() if " 0A " in line] == []


AS_THE_BROWSER = """
import json, os, socket, sys
sys.path.insert(0, "/srv/env")
import browser_launch
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
command = lambda pid: open(f"/proc/{pid}/cmdline").read()
server = next(pid for pid in pids if "browser_server.py" in command(pid) and os.stat(f"/proc/{pid}").st_uid == 10001)
sys.stdin.close()
# In a child: it ends with its parent, and the parent of what the engine executes is a thread that may end any time.
if (child := os.fork()) != 0:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
browser_launch.drop(browser_launch.USER)
if len(sys.argv) > 1:
    import tempfile
    assert browser_launch.confine(tempfile.mkdtemp())
found = {}
def attempt(name, work):
    try:
        work()
    except OSError as error:
        found[name] = error.strerror
    else:
        found[name] = "done"
attempt("code", lambda: open("/srv/env/browser_server.py").read())
attempt("rewards", lambda: open("/srv/env/browser_rewards.py").read())
attempt("tasks", lambda: open("/srv/env/tasks/train.jsonl").read())
attempt("list", lambda: os.listdir("/srv/env"))
attempt("mounted", lambda: os.listdir("/opt/openenv/custom_tasks"))
attempt("environment", lambda: open(f"/proc/{server}/environ").read())
attempt("memory", lambda: open(f"/proc/{server}/mem", "rb").read(1))
attempt("descriptors", lambda: os.listdir(f"/proc/{server}/fd"))
attempt("signal", lambda: os.kill(server, 0))
attempt("root", lambda: os.setuid(0))
attempt("back", lambda: os.setuid(10001))
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect("/run/envserver/worker.sock"))
attempt("loopback", lambda: socket.socket(socket.AF_INET).connect(("127.0.0.1", 80)))
attempt("datagram", lambda: socket.socket(socket.AF_INET6, socket.SOCK_DGRAM))
attempt("netlink", lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW))
if len(sys.argv) > 1:
    attempt("planted", lambda: open("/run/envserver/planted", "w"))
    attempt("unlinked", lambda: os.unlink("/run/envserver/worker.sock"))
    attempt("elsewhere", lambda: open("/tmp/elsewhere", "w"))
print(json.dumps(found))
"""


@pytest.mark.parametrize("confined", [False, True], ids=["by its user", "with Landlock too"])
def test_the_browsers_user_reads_nothing_of_the_server_and_opens_no_socket(
    worker: BrowserWorker, confined: bool
) -> None:
    status, printed = worker.run("python3", "-c", AS_THE_BROWSER, *(["confined"] if confined else []))

    assert status == 0, printed
    found = json.loads(printed)
    assert len(found) == (18 if confined else 15)
    assert [name for name, outcome in found.items() if outcome == "done"] == []


# A failure is an error, and never a reward


def is_failed(answer: dict[str, Any]) -> bool:
    return not answer["ok"] and answer["reason"] == "session_failed"


SPIN = "<button onclick='while (true) {}'>Spin</button>"
HOARD = """<button onclick="const kept = [];
for (;;) kept.push(new Uint8Array(2 ** 26).fill(7))">Hoard</button>"""


@pytest.mark.parametrize(
    ("html", "action", "deadline_s"),
    [
        pytest.param(SPIN, "click({button 'Spin'})", 3, id="a page that never ends"),
        pytest.param(HOARD, "click({button 'Hoard'})", 60, id="a page that takes all memory"),
    ],
)
def test_a_page_that_breaks_the_browser_ends_in_a_typed_error(
    worker: BrowserWorker, html: str, action: str, deadline_s: int
) -> None:
    with worker.session(page_task(html, step_timeout_s=deadline_s)) as session:
        answer = session.call(name="act", input={"action_str": written(action, observation(session)["axtree_txt"])})
        for _ in range(10):  # on a slow machine, the click itself ends before the page has taken all memory
            if not is_failed(answer):
                answer = session.call(name="act", input={"action_str": "noop(1000)"})
        again = session.post("/browser/call", {"name": "act", "input": {"action_str": "noop()"}})
    with worker.session(page_task("<p id=done>ok")) as session:
        after = act(session, "noop(0)")

    assert is_failed(answer), answer
    assert again.status_code == 500
    assert after["reward"] == 1.0


def test_a_browser_that_is_killed_ends_in_a_typed_error(worker: BrowserWorker) -> None:
    with worker.session(page_task("<p id=done>ok")) as session:
        observation(session)
        worker.run("sh", "-c", "kill -9 -1", user=BROWSER)
        answer = session.call(name="act", input={"action_str": "noop(0)"})
        summary = session.post("/delete", {}).json()["summary"]

    assert is_failed(answer), answer
    assert summary["reward"] in (None, 0)
    assert not summary["finished"]


def test_the_browser_ends_with_a_driver_that_is_killed(worker: BrowserWorker) -> None:
    with worker.session(page_task("<p id=done>ok")) as session:
        observation(session)
        (driver,) = [process["Pid"] for process in processes(worker) if process["Name"] == "node"]
        assert worker.run("sh", "-c", f"kill -9 {driver}", user=SERVER) == (0, "")
        answer = session.call(name="act", input={"action_str": "noop(0)"})

    assert is_failed(answer), answer
    assert "browser" in answer["error"]


def test_a_container_without_its_two_capabilities_does_not_start(docker_engine: docker.APIClient) -> None:
    def take(body: dict[str, Any]) -> None:
        body["HostConfig"]["CapAdd"] = []

    with (
        pytest.raises(AssertionError, match="it ended"),
        browser_worker(docker_engine, change=take),
    ):
        pass
