"""What the pages print for a new user to type works as printed, on a gateway that the README's first command starts."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.deadlines import COMMAND_S, HANG_S
from tests.fakes.eventually import eventually_now
from tests.fakes.ports import reserved_port
from tests.pages import PAGES, PROJECT, Block, blocks
from tests.wire.openenv.clients import NEWEST, python_of
from tests.wire.processes import ServerProcess

README = (PROJECT / "README.md").read_text()
USUAL = "http://127.0.0.1:8080"
HERE = re.compile(r"\b(?:127\.0\.0\.1|localhost):8080\b")
"""Where pages say that a server listens."""
START = blocks("README.md")[0]
"""The first command of all; a fixture runs it."""
RUN = [page for page in PAGES if any(block.is_run and block != START for block in blocks(page))]

pytestmark = [pytest.mark.wire, pytest.mark.needs("openenv-clients", "bubblewrap")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway as the README starts it, but for port and folders; it has the curriculum of docs/curricula.md."""
    folder = tmp_path_factory.mktemp("gateway")
    for block in blocks("docs/curricula.md"):
        write(block, folder)
    gateway = ServerProcess(
        ["bash", "-c", START.text],
        variables={
            "XDG_RUNTIME_DIR": str(folder),
            "XDG_STATE_HOME": str(folder),
            "GATEWAY_PORT": "0",
            "GATEWAY_CURRICULA_DIR": str(folder / "curricula"),
            **dict.fromkeys(("MAKEFLAGS", "MAKEOVERRIDES", "ARGS"), ""),  # of the `make test` that runs this
        },
        ready=r"gateway_ready url=(\S+)",
        log=folder / "gateway.log",
        cwd=PROJECT,
    )
    gateway.start()
    try:
        _play_an_episode(gateway.address)  # pages list recorded episodes, whichever page comes first
        yield gateway.address
    finally:
        gateway.stop()


def _play_an_episode(url: str) -> None:
    """Play an episode of `math` with a wrong answer, and wait until it is recorded."""
    with httpx.Client(base_url=url, headers={"X-Session-ID": "first"}, timeout=HANG_S, trust_env=False) as http:
        for path, body in (
            ("/create", {"env_name": "math", "split": "train", "index": 0}),
            ("/math/call", {"name": "submit", "input": {"answer": "none"}}),
            ("/delete", {}),
        ):
            http.post(path, json=body).raise_for_status()

        def is_recorded() -> None:
            (episode,) = http.get("/admin/v1/episodes", params={"environment": "math"}).json()["episodes"]
            assert episode["reward"] == 0.0

        eventually_now(is_recorded)


KEY = "my-secret"
"""The trainer's key in the README."""


@pytest.fixture(scope="module")
def keyed_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway that asks for a key."""
    folder = tmp_path_factory.mktemp("keyed")
    gateway = ServerProcess(
        [str(Path(sys.executable).parent / "gateway"), "serve"],
        variables={
            "XDG_RUNTIME_DIR": str(folder),
            "XDG_STATE_HOME": str(folder),
            "GATEWAY_PORT": "0",
            "GATEWAY_TRAINER_KEYS": f"alice:{KEY}",
        },
        ready=r"gateway_ready url=(\S+)",
        log=folder / "gateway.log",
        cwd=PROJECT,
    )
    gateway.start()
    yield gateway.address
    gateway.stop()


def snippet(name: str = "snippet") -> str:
    found = re.search(rf"<!-- {name}:.*?-->\s*```python\n(.*?)```\s*<!-- end of {name} -->", README, re.S)
    assert found is not None
    return found[1]


def write(block: Block, folder: Path) -> None:
    """Write the file that *block* is the text of, if it is one's."""
    if block.file:
        path = folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text)


def run(command: list[str]) -> str:
    environ = os.environ | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=PROJECT, env=environ, capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snippet_prints_what_the_readme_says(url: str) -> None:
    assert USUAL in snippet()

    lines = run([sys.executable, "-c", snippet().replace(USUAL, url)]).splitlines()

    assert lines[-2:] == ["['submit']", "1.0 True"]
    assert "`['submit']`" in README
    assert "`1.0 True`" in README


def test_the_snippet_for_openenv_prints_its_reward(url: str) -> None:
    lines = run([python_of(NEWEST), "-W", "ignore", "-c", snippet("OpenEnv").replace(USUAL, url)]).splitlines()

    assert lines == ["1.0"]


def test_with_keys_each_client_says_its_key_as_the_readme_has_it(keyed_url: str) -> None:
    given = snippet("keys").replace(USUAL, keyed_url)
    ors, env, areal = given.splitlines()
    of_ors = f"from ors.client import ORS\n{ors}\nprint(ors.environment('math').get_task('train', 0).task_spec['id'])"
    of_openenv = (
        f"from openenv.core import GenericEnvClient\n{env}\nwith env.sync() as math:\n"
        "    math.reset(split='train', index=0)\n    print(math.step({'answer': '40'}).reward)"
    )
    of_areal = f"import httpx\n{areal}\nprint(httpx.get(areal + '/api/task/info').status_code)"

    assert run([sys.executable, "-c", of_ors]).split() == ["train-chain_sum-1-01"]
    assert run([python_of(NEWEST), "-W", "ignore", "-c", of_openenv]).split() == ["1.0"]
    assert run([sys.executable, "-c", of_areal]).split() == ["200"]
    assert httpx.get(f"{keyed_url}/areal/math/api/task/info").status_code == 401
    assert httpx.get(f"{keyed_url}/areal/math/api/task/info", headers={"X-API-Key": KEY}).status_code == 200


def test_the_demo_plays_and_prints_rewards(url: str) -> None:
    printed = run([sys.executable, "examples/demo.py", "--url", url, "--episodes", "12", "--at-once", "6"])

    assert "mean reward" in printed
    assert re.search(r"^12 episodes in ", printed, re.M)


def test_each_make_target_of_the_readme_is_there() -> None:
    named = set(re.findall(r"`make ([a-z]+)", README))
    offered = set(re.findall(r"^([a-z]+):.*## ", (PROJECT / "Makefile").read_text(), re.M))

    assert named
    assert named <= offered


class Checkout:
    """The project as a new user has it, in a folder of its own, and what its pages' blocks leave behind."""

    def __init__(self, folder: Path, url: str, undo: ExitStack) -> None:
        self._folder = folder
        self._undo = undo
        self._address = url.removeprefix("http://")
        """Of the server that blocks speak to: the gateway, or what a block has started."""
        for path in PROJECT.iterdir():
            if path.name in ("env_images", "tasks"):
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif not path.name.startswith("."):
                (folder / path.name).symlink_to(path)
        home = folder / "home"
        home.mkdir()
        (home / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("GATEWAY_", "ENVSERVER_"))
        }
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._variables = inherited | {"PATH": programs, "HOME": str(home), "GATEWAY_URL": url, "NO_PROXY": "*"}
        self._variables["GATEWAY_KEY"] = ""

    def play(self, block: Block) -> None:
        """Do with *block* what its page means; one in ``sh`` may start a server, which the next ones speak to."""
        write(block, self._folder)
        if not block.is_run:
            return
        text = HERE.sub(self._address, block.text)
        python = python_of(NEWEST) if "import GenericEnvClient" in text else sys.executable
        command = ["bash", "-euo", "pipefail", "-c", text] if block.language == "sh" else [python, "-c", text]
        port, log = reserved_port(), self._folder / "home" / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._variables | {"ENVSERVER_PORT": str(port)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._undo.callback(_ended, process)

        def has_ended_or_serves() -> bool:
            if process.poll() is not None:
                return False
            with socket.socket() as client:
                assert client.connect_ex(("127.0.0.1", port)) == 0, f"{block} goes on:\n{log.read_text()}"
            return True

        if eventually_now(has_ended_or_serves):
            self._address = f"127.0.0.1:{port}"
        else:
            assert process.returncode == 0, f"{block}:\n{log.read_text()}"

    def add_benchmarks(self) -> None:
        """Put the files in place that docs/tasks.md imports, each with one entry."""
        mbpp = {"task_id": 11, "text": "Write f.", "test_list": ["assert f(1) == 2", "assert f(2) == 4"]}
        row = {"task_id": 601, "prompt": "Write f.", "test_imports": [], "test_list": mbpp["test_list"]}
        human = {"task_id": "HumanEval/0", "prompt": "def f(): ...", "entry_point": "f", "test": "def check(f): f()"}
        (self._folder / "mbpp.jsonl").write_text(json.dumps(mbpp))
        (self._folder / "sanitized-mbpp.json").write_text(json.dumps([row]))
        (self._folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(json.dumps(human).encode()))
        (self._folder / "gsm8k.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}))
        competition = {"problem": "$1 + 1$?", "solution": r"\boxed{2}", "level": "Level 1"}
        (self._folder / "math.jsonl").write_text(json.dumps(competition))
        items = self._folder / "AgentBench" / "data" / "os_interaction" / "data" / "1"
        items.mkdir(parents=True)
        (items / "stock.json").write_text(json.dumps([{"description": "Say 7.", "evaluation": {"match": "7"}}]))


def _ended(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_as_they_are_printed(page: str, url: str, tmp_path: Path) -> None:
    with ExitStack() as undo:
        checkout = Checkout(tmp_path, url, undo)
        checkout.add_benchmarks()
        for block in blocks(page):
            if block != START:
                checkout.play(block)
