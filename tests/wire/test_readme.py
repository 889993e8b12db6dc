"""What the README prints for a new user to type works as printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deadlines import scaled
from tests.wire.openenv.clients import NEWEST, python_of
from tests.wire.processes import ServerProcess

PROJECT = Path(__file__).resolve().parents[2]
README = (PROJECT / "README.md").read_text()
USUAL = "http://127.0.0.1:8080"
WAIT_S = scaled(60)

pytestmark = [pytest.mark.wire, pytest.mark.needs("openenv-clients")]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway as `make run` starts it, but for its port and its folders."""
    folder = tmp_path_factory.mktemp("gateway")
    gateway = ServerProcess(
        [str(Path(sys.executable).with_name("gateway")), "serve"],
        variables={"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": str(folder), "GATEWAY_PORT": "0"},
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


def run(command: list[str]) -> str:
    environ = os.environ | {"NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, cwd=PROJECT, env=environ, capture_output=True, text=True, timeout=WAIT_S)
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


def test_the_demo_plays_and_prints_rewards(url: str) -> None:
    printed = run([sys.executable, "examples/demo.py", "--url", url, "--episodes", "12", "--at-once", "6"])

    assert "mean reward" in printed
    assert re.search(r"^12 episodes in ", printed, re.M)


def test_each_make_target_of_the_readme_is_there() -> None:
    named = set(re.findall(r"`make ([a-z]+)", README))
    offered = set(re.findall(r"^([a-z]+):.*## ", (PROJECT / "Makefile").read_text(), re.M))

    assert named
    assert named <= offered
