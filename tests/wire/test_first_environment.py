"""Mistakes and small tasks of an author's first environment, on a gateway as its users run it."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.wire.gateways import Gateway, short_folder

pytestmark = pytest.mark.wire

SERVER = """
from envserver import Environment, StepResult, serve, tool

class Words(Environment):
    '''Say the word.'''
    name = "words"

    async def reset(self, task, *, seed):
        return f"the task is {task.spec['id']}"

    @tool
    async def say(self, word: str) -> StepResult:
        '''Say it.'''
        return StepResult(word, reward=1.0, finished=True)

    @tool
    async def wait(self) -> StepResult:
        '''Do nothing.'''
        return StepResult("waited")
"""
TASKS = '{"id": "pack-1"}\n{"id": "pack-2"}\n'


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    folder = short_folder()
    for name, ending in (("words", "serve(Words)\n"), ("silent", "")):
        own = folder / "catalog" / name
        (own / "tasks").mkdir(parents=True)
        (own / "server.py").write_text(f"{SERVER.replace('words', name)}\n{ending}")
        (own / "environment.toml").write_text(f'name = "{name}"\n\n[tasks]\ndirectory = "{own}/tasks"\n')
        (own / "tasks" / "train.jsonl").write_text(TASKS)
    gateway = Gateway(
        folder,
        {
            "GATEWAY_CATALOG_DIR": str(folder / "catalog"),
            "GATEWAY_ENVIRONMENTS": "words,silent",
            "GATEWAY_DEFAULT_ENVIRONMENT": "words",
            "GATEWAY_TRAINER_KEYS": "",
        },
    )
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def http(gateway: Gateway) -> Iterator[httpx.Client]:
    headers = {"X-Session-ID": uuid.uuid4().hex, "Accept": "application/json"}
    with httpx.Client(base_url=gateway.url, headers=headers, timeout=HANG_S, trust_env=False) as http:
        yield http
        http.post("/delete", json={})


@pytest.mark.parametrize("wish", [{"split": "train", "index": 1}, {"task_spec": {"id": "pack-2"}}], ids=["place", "id"])
def test_a_task_that_has_an_id_only_is_played(http: httpx.Client, wish: dict[str, Any]) -> None:
    created = http.post("/create", json={"env_name": "words", **wish})
    prompt = http.get("/words/prompt").json()
    said = http.post("/words/call", json={"name": "say", "input": {"word": "yes"}}).json()

    assert created.status_code == 200, created.text
    assert prompt[0]["text"] == "the task is pack-2"
    assert said["output"]["reward"] == 1.0


def test_an_id_that_no_task_has_is_refused(http: httpx.Client) -> None:
    refused = http.post("/create", json={"env_name": "words", "task_spec": {"id": "pack-3"}})

    assert (refused.status_code, "Unknown task: pack-3" in refused.text) == (400, True), refused.text


def test_a_text_for_several_tools_is_refused_with_their_names(http: httpx.Client) -> None:
    http.post("/create", json={"env_name": "words", "split": "train", "index": 0})

    refused = http.post("/words/call", json={"text": "yes"}).json()

    assert refused["ok"] is False
    assert refused["error"].endswith("call one by its name, with its arguments: say, wait")


def test_a_program_that_ends_without_serving_is_reported_as_that(http: httpx.Client) -> None:
    refused = http.post("/create", json={"env_name": "silent", "split": "train", "index": 0})

    assert refused.status_code == 503, refused.text
    assert "it ended without an error before it was ready: its program has to serve until SIGTERM" in refused.text
