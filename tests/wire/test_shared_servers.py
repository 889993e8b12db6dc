"""Gateways that share an external ORS server never meet in an episode, and a gateway that ends leaves none behind."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import until_now
from tests.wire.gateways import Gateway, short_folder
from tests.wire.processes import ServerProcess
from tests.wire.targets import ENVSERVER, OFFICIAL, World

pytestmark = pytest.mark.wire

SERVER = """
import os
from envserver import Environment, StepResult, serve, tool

class Notes(Environment):
    '''Notes each end of an episode.'''
    name = "counter"

    async def reset(self, task, *, seed):
        return "go"

    @tool
    async def add(self, n: int) -> StepResult:
        '''Add n.'''
        return StepResult(str(n))

    async def close(self):
        with open(os.environ["NOTES"], "a") as notes:
            print(self.task.spec["start"], file=notes)

serve(Notes)
"""

TOML = """
name = "counter"
protocol = "ors"
upstream_name = "counter"

[server]
url = "URL"
"""
Start = Callable[..., Gateway]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts a gateway, with the memory store, before a server of the environment counter."""
    gateways: list[tuple[Gateway, Path]] = []

    def started(url: str) -> Gateway:
        folder = short_folder()
        (folder / "catalog" / "counter").mkdir(parents=True)
        (folder / "catalog" / "counter" / "environment.toml").write_text(TOML.replace("URL", url))
        variables = {"GATEWAY_CATALOG_DIR": str(folder / "catalog"), "GATEWAY_TRAINER_KEYS": ""}
        names = dict.fromkeys(("GATEWAY_ENVIRONMENTS", "GATEWAY_DEFAULT_ENVIRONMENT"), "counter")
        gateway = Gateway(folder, variables | names)
        gateways.append((gateway, folder))
        gateway.start()
        return gateway

    yield started
    for gateway, folder in gateways:
        gateway.stop()
        shutil.rmtree(folder, ignore_errors=True)


class Trainer:
    """A trainer that calls all its episodes alike."""

    def __init__(self, gateway: Gateway, name: str = "rollout-0") -> None:
        self._url = gateway.url
        self._headers = {"X-Session-ID": name, "Accept": "application/json"}

    def begin(self, at: int) -> None:
        self._post("/create", {"env_name": "counter", "task_spec": {"start": at}})
        self._send("GET", "/counter/prompt")

    def add(self, n: int) -> str:
        output = self._post("/counter/call", {"name": "add", "input": {"n": n}})["output"]
        return str(output["blocks"][0]["text"])

    def end(self) -> None:
        self._post("/delete", {})

    def _post(self, path: str, body: Any) -> Any:
        return self._send("POST", path, json=body)

    def _send(self, method: str, path: str, **options: Any) -> Any:
        with httpx.Client(verify=False, trust_env=False, timeout=HANG_S) as http:
            answer = http.request(method, self._url + path, headers=self._headers, **options)
        return answer.raise_for_status().json()


@pytest.mark.parametrize("server", [*OFFICIAL, ENVSERVER])
def test_two_gateways_on_one_server_have_episodes_of_their_own(world: World, start: Start, server: str) -> None:
    url = world.named(server).url
    first, second = Trainer(start(url)), Trainer(start(url))

    first.begin(at=100)
    second.begin(at=0)
    sums = [first.add(1), second.add(1), first.add(1)]
    second.end()
    sums.append(first.add(1))
    first.end()

    assert sums == ["101", "1", "102", "103"]


@pytest.mark.parametrize("server", [*OFFICIAL, ENVSERVER])
@pytest.mark.parametrize("end", [Gateway.stop, Gateway.kill], ids=["SIGTERM", "SIGKILL"])
def test_an_episode_after_a_restart_is_a_new_one(
    world: World, start: Start, server: str, end: Callable[[Gateway], object]
) -> None:
    gateway = start(world.named(server).url)
    Trainer(gateway).begin(at=100)

    end(gateway)
    gateway.restart()
    trainer = Trainer(gateway)
    trainer.begin(at=100)

    assert trainer.add(1) == "101"
    assert Trainer(gateway).add(1) == "102"
    trainer.end()


def test_a_gateway_that_stops_ends_its_episodes_on_the_server(start: Start, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    notes = tmp_path / "notes"
    server = ServerProcess(
        [sys.executable, str(tmp_path / "server.py")],
        variables={"ENVSERVER_HOST": "127.0.0.1", "ENVSERVER_PORT": "0", "NOTES": str(notes)},
        ready=r"server_ready address=(127[0-9.:]+)",
        log=tmp_path / "log",
    )
    server.start()
    try:
        gateway = start(f"http://{server.address}")
        for number in range(8):
            Trainer(gateway, f"rollout-{number}").begin(at=number)

        assert gateway.stop() == 0

        until_now(lambda: sorted(notes.read_text().split()) == [str(number) for number in range(8)])
    finally:
        server.stop()
