"""docs/trainers.md shows what unmodified clients show after a trainer's mistake."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from tests.deadlines import COMMAND_S, HANG_S
from tests.trainers.page import PAGE
from tests.trainers.runs import VENVS
from tests.wire.catalog import EMBEDDED, PROJECT, serving
from tests.wire.gateways import Gateway

pytestmark = [pytest.mark.wire, pytest.mark.needs("trainers")]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with serving(EMBEDDED, "math", "game") as gateway:
        yield gateway


def test_the_page_shows_the_errors_of_unmodified_clients(gateway: Gateway) -> None:
    done = subprocess.run(
        [VENVS / "learning" / "bin" / "python", PROJECT / "tests" / "trainers" / "mistakes.py", gateway.url],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )

    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"')]
    shown = {row["mistake"]: row["shown"] for row in rows}
    page = PAGE.read_text()
    assert f"`{shown['openreward: a split that is missing']}" in page
    assert f"`{shown['openenv: a split that is missing']}`" in page
    assert shown["client: a split that is missing"].startswith("UnknownTask: Invalid split: there is no 'nope'")
    before, _, after = shown["openenv: a text"].partition("Invalid action: ")
    assert f"`{before}Invalid action: …;{after.partition(';')[2]}`" in page
    assert shown["openenv: after the text"] == "1.0"


def test_a_repeated_create_gets_the_same_session_only_for_the_same_task(gateway: Gateway) -> None:
    def create(index: int) -> httpx.Response:
        body = {"env_name": "math", "split": "train", "index": index}
        return httpx.post(f"{gateway.url}/create", json=body, headers={"X-Session-ID": "again"}, timeout=HANG_S)

    assert [create(index).json() for index in (0, 0)] == [{"sid": "again"}] * 2
    refused = create(1)
    assert (refused.status_code, refused.json()["detail"]) == (400, "Session already exists")
    assert "`400 Session already exists`" in PAGE.read_text()
    httpx.post(f"{gateway.url}/delete", headers={"X-Session-ID": "again"}, timeout=HANG_S)


def test_areal_gets_the_answers_of_the_page(gateway: Gateway) -> None:
    def start(environment: str, sample: int) -> httpx.Response:
        return httpx.post(
            f"{gateway.url}/areal/{environment}/api/episode/start", json={"sample_id": sample}, timeout=HANG_S
        )

    def answer(environment: str, text: str) -> dict[str, object]:
        id = start(environment, 0).json()["episode_id"]
        action = {"episode_id": id, "action": {"type": "text", "content": text}}
        reply = httpx.post(f"{gateway.url}/areal/{environment}/api/episode/step", json=action, timeout=HANG_S)
        httpx.post(f"{gateway.url}/areal/{environment}/api/episode/cancel", json={"episode_id": id}, timeout=HANG_S)
        return dict(reply.json())

    missing = start("math", 99_999)
    assert missing.status_code == 404
    assert f"`{json.dumps(missing.json())}`" in PAGE.read_text()
    assert (answer("math", "it is forty")["done"], answer("game", "to the right")["done"]) == (True, False)
