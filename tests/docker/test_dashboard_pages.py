"""The dashboard in Chromium: every page in both themes and at 400 px, with the keyboard, and what its buttons change.

The screenshots are in ``build/dashboard`` afterwards.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.docker.chromium import browse
from tests.fakes.command import in_process
from tests.runner.preparation import PROJECT
from tests.wire.gateways import OPERATOR_KEY, TRAINER_KEYS, Gateway, short_folder

pytestmark = [pytest.mark.docker, pytest.mark.needs("image:browser")]

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
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=HANG_S, trust_env=False) as http:
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

    plan = {"pages": pages, "episode": episode, "runs": listed["running"]}
    found = browse(gateway.url, OPERATOR_KEY, SCREENSHOTS, plan)

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
    assert "no open session" in found["changes"]["again"][1], "a refusal is shown"
    assert found["live"]
    assert "2 episodes" in found["report"]
    assert '"is_same":true' in found["remote"]["replayed"].replace(" ", "")
    assert "server_ready" in found["remote"]["log"]
    assert found["remote"]["copied"].startswith("curl ")
