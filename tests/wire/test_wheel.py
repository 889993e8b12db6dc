"""The wheel contains everything that an installed gateway needs to serve the project's environments, in any folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from ors.client import ORS

from tests.deadlines import COMMAND_S
from tests.pages import PROJECT
from tests.wire.processes import ServerProcess

pytestmark = [pytest.mark.wire, pytest.mark.needs("packages")]


def run(*command: str, cwd: Path = PROJECT, **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    done = subprocess.run(
        command, cwd=cwd, env=inherited | variables, capture_output=True, text=True, timeout=COMMAND_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def sockets() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:  # short: a Unix socket's path has 107 bytes at most
        yield folder


def test_an_installed_wheel_serves_the_environments_of_the_project_in_an_empty_folder(
    tmp_path: Path, sockets: str
) -> None:
    python, empty = str(tmp_path / "venv" / "bin" / "python"), tmp_path / "empty"
    empty.mkdir()
    folders = dict.fromkeys(("XDG_RUNTIME_DIR", "XDG_STATE_HOME"), str(tmp_path)) | {"COLUMNS": "200"}
    run(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    run("scripts/uv", "build", "--wheel", "--python", sys.executable, "--out-dir", str(tmp_path), str(PROJECT))
    [wheel] = tmp_path.glob("*.whl")
    install = ("scripts/uv", "pip", "install", "--python", python)
    run(*install, "--constraint", "constraints.txt", str(wheel))
    gateway = str(Path(python).with_name("gateway"))

    told = run(gateway, "check", cwd=empty, **folders)

    assert "│ math" in told
    advice = re.search(r"game: not available: it needs .*\(textarena\): run `(.*)` and restart", told)
    assert advice is not None, told
    assert shlex.split(advice[1])[:4] == [python, "-m", "pip", "install"]
    run(*install, *shlex.split(advice[1])[4:])
    server = ServerProcess(
        [gateway, "serve"],
        variables=folders | {"GATEWAY_PORT": "0", "GATEWAY_ENVIRONMENTS": "math,game", "GATEWAY_SOCKET_DIR": sockets},
        ready=r"gateway_ready url=(\S+)",
        log=tmp_path / "gateway.log",
        cwd=empty,
    )
    server.start()
    try:
        with ORS(base_url=server.address) as client:
            math = client.environment("math")
            with math.session(task=math.get_task("train", 0)) as session:
                result = session.call_tool("submit", {"answer": "40"})
            game = client.environment("game")
            with game.session(task=game.get_task("train", 0)) as session:
                rules = session.get_prompt()
    finally:
        assert server.stop() == 0
    assert (result.reward, result.finished) == (1.0, True)
    assert rules
    assert list(empty.iterdir()) == []
