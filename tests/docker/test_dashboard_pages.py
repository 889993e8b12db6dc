"""The dashboard in Chromium: every page in both themes and at 400 px, with the keyboard, and what its buttons change.

The screenshots are in ``build/dashboard`` afterwards.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import scaled
from tests.fakes.command import in_process
from tests.runner.preparation import PROJECT
from tests.wire.gateways import OPERATOR_KEY, TRAINER_KEYS, Gateway, short_folder

pytestmark = [pytest.mark.docker, pytest.mark.needs("image:browser")]

PROGRAM = Path(__file__).with_name("dashboard_browsing.py")
SCREENSHOTS = PROJECT / "build" / "dashboard"
CURRICULUM = """
[sampler]
kind = "uniform"
[[components]]
environment = "unsteady"
split = "train"
"""
GROUP = 4


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with ExitStack() as stack:
        folder = short_folder()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "curricula").mkdir()
        (folder / "curricula" / "all.toml").write_text(CURRICULUM)
        settings = {"GATEWAY_ENVIRONMENTS": "probe,unsteady", "GATEWAY_CURRICULA_DIR": str(folder / "curricula")}
        gateway = Gateway(folder, settings)
        stack.callback(gateway.stop)
        gateway.start()
        yield gateway


def play(gateway: Gateway, sid: str, answer: str | None, **more: str) -> None:
    """Open an episode with the headers *more*; answer and end it, unless *answer* is None."""
    headers = {"X-Session-ID": sid, "X-API-Key": TRAINER_KEYS["alice"], "Accept": "application/json"} | more
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=scaled(60), trust_env=False) as http:
        body = {"env_name": "unsteady", "split": "train", "index": 1}
        answered = [("/unsteady/call", {"name": "answer", "input": {"text": answer}}), ("/delete", None)]
        for path, content in [("/create", body), *(answered if answer is not None else [])]:
            response = http.post(path, json=content)
            assert response.status_code == 200, response.text
            if path == "/create":
                assert http.get("/unsteady/prompt").status_code == 200


async def test_people_use_the_dashboard(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    group = {"X-Group-ID": "g1", "X-Group-Size": str(GROUP)}
    with ThreadPoolExecutor(GROUP) as pool:  # members of a group begin together
        for number in range(GROUP):
            pool.submit(play, gateway, f"member-{number}", "right" if number % 2 else "left", **group)
    play(gateway, "running", None)
    listed = {row["name"]: row["id"] for row in (await gateway.ask("episodes"))["episodes"]}
    episode = listed["member-1"]
    pages = [
        "now",
        "environments/unsteady",
        "episodes",
        f"episodes/{episode}",
        "curricula",
        "curricula/all",
        "doctor",
        "groups/unsteady/g1",
    ]
    shutil.rmtree(SCREENSHOTS, ignore_errors=True)
    SCREENSHOTS.mkdir(parents=True)
    with in_process(monkeypatch, capfd) as command:
        variables = {"GATEWAY_URL": gateway.url, "GATEWAY_KEY": OPERATOR_KEY}
        report = command("report", episode, listed["member-2"], "--out", str(SCREENSHOTS / "report.html"), **variables)
    assert report.returncode == 0, report.stderr

    found = browse(gateway, {"pages": pages, "episode": episode, "runs": listed["running"]})

    assert found["problems"] == []
    assert found["screenshots"] == 4 * len(pages)
    assert found["keys"]["focused"] == "q"
    assert found["keys"]["second"]
    before, after, kept = found["keys"]["themes"]
    assert (before, after, kept) == ("", "light", "light")  # the last look was dark
    assert '"is_same":true' in found["changes"]["replayed"].replace(" ", "")
    assert found["changes"]["copied"].startswith("curl ")
    assert len(found["changes"]["questions"]) == 2
    assert found["changes"]["kept"] == 1, "a question that is answered with no changes nothing"
    assert "operator" in found["changes"]["end"]
    assert found["live"]
    assert "2 episodes" in found["report"]


def browse(gateway: Gateway, plan: dict[str, Any]) -> dict[str, Any]:
    """Run the program in a container that sees this machine's network, and return what it prints."""
    name = f"eg-test-dashboard-{uuid.uuid4().hex[:8]}"
    command = ["docker", "run", "--rm", "--interactive", "--name", name, "--label", f"env-gateway.instance={name}"]
    command += ["--network", "host", "--volume", f"{PROGRAM}:/program.py:ro", "--volume", f"{SCREENSHOTS}:/screenshots"]
    command += ["--entrypoint", "python3", "env-gateway/browser:latest", "/program.py"]
    command += [gateway.url, OPERATOR_KEY, "/screenshots"]
    try:
        done = subprocess.run(
            command, input=json.dumps(plan), capture_output=True, text=True, check=False, timeout=scaled(240)
        )
    finally:
        subprocess.run(["docker", "rm", "--force", name], capture_output=True, check=False, timeout=scaled(60))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found
