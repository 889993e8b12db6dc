"""Servers by others, played by their own client and through the gateway by the clients of all protocols.

The same actions earn the same rewards, and an agent of any protocol reads every value that the server's own client got.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli.main import app
from tests.fakes.ports import reserved_port
from tests.wire.any.players import TRAINERS, Trainer
from tests.wire.any.strangers import SECRET, STRANGERS, Launch, Stranger, gym_trainer, missing, nemo_launch, transcript
from tests.wire.gateways import Gateway, short_folder
from tests.wire.openenv.clients import DriverOf
from tests.wire.processes import ServerProcess

pytestmark = [pytest.mark.wire, pytest.mark.needs("nemo-gym")]

FRONTS = ("openreward", "areal", "openenv-0.10.0", "nemo")


class World:
    """The servers, and a gateway to which ``gateway env add`` added each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.urls: dict[str, str] = {}
        own = {
            name: self._process(name, one.launch(self._made(name), reserved_port()))
            for name, one in STRANGERS.items()
            if one.launch
        }
        ports = {name: reserved_port() for name, one in STRANGERS.items() if not one.launch}
        shared = nemo_launch({STRANGERS[name].rows: port for name, port in ports.items()})
        nemo = self._process("nemo", shared, ready="all are (ready)")
        for process in (nemo, *own.values()):
            stack.callback(process.stop)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ServerProcess.start, (nemo, *own.values())))
        self.urls = {name: process.address for name, process in own.items()}
        self.urls |= {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        for stranger in STRANGERS.values():
            self._add(stranger)
        self.gateway = Gateway(
            folder,
            {
                "GATEWAY_CATALOG_DIR": str(folder / "catalog"),
                "GATEWAY_ENVIRONMENTS": "",
                "GATEWAY_DEFAULT_ENVIRONMENT": "gallery",
                "GATEWAY_TRAINER_KEYS": "",
                "STRANGERS_TOKEN": SECRET,
            },
        )
        stack.callback(self.gateway.stop)
        self.gateway.start()

    def _made(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder

    def _process(
        self, name: str, launch: Launch, *, ready: str = r"Uvicorn running on (http://[^\s]+)"
    ) -> ServerProcess:
        log = self.folder / f"{name}.log"
        return ServerProcess(launch.command, variables=launch.variables, ready=ready, log=log, cwd=launch.cwd)

    def _add(self, stranger: Stranger) -> None:
        named = ["--environment", stranger.environment] if stranger.environment else []
        self._command("env", "add", self.urls[stranger.name], "--name", stranger.name, *named)
        if stranger.rows:
            place = ["--environment", stranger.name, "--split", "train"]
            self._command("tasks", "import", "nemo-gym", str(stranger.data), *place)
        toml = self.folder / "catalog" / stranger.name / "environment.toml"
        text = toml.read_text() + stranger.more
        if stranger.name == "areal-named":
            text, count = re.subn(r"^sample_ids = \[\].*$", 'sample_ids = ["dev-000", "dev-001"]', text, flags=re.M)
            assert count == 1, text
        toml.write_text(text)

    def _command(self, *arguments: str) -> None:
        """Run a command of the gateway, in this process because there are 18."""
        done = CliRunner().invoke(app, arguments, env={"GATEWAY_CATALOG_DIR": str(self.folder / "catalog")})
        assert done.exit_code == 0, (done.output, done.exception)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    folder = short_folder()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        yield World(folder, stack)


def trainer(name: str, driver_of: DriverOf) -> Trainer:
    return gym_trainer() if name == "gym" else TRAINERS[name](driver_of)


@pytest.mark.parametrize("name", list(STRANGERS))
async def test_the_same_actions_earn_the_same_and_show_the_same_over_all_protocols(
    world: World, name: str, driver_of: DriverOf
) -> None:
    stranger = STRANGERS[name]
    own = await transcript(trainer(stranger.own, driver_of), stranger.direct(world.urls[name]), stranger.acts)
    problems = []

    for front in FRONTS:
        over = await transcript(trainer(front, driver_of), stranger.through(world.gateway.url), stranger.acts)
        if front == "nemo" or stranger.own == "nemo":
            if sum(over.rewards) != pytest.approx(sum(own.rewards)):
                problems.append(f"{front}: earned {over.rewards}")
        elif list(over.rewards) != pytest.approx(list(own.rewards)):
            problems.append(f"{front}: earned {over.rewards}")
        for place, (wanted, shown) in enumerate(zip(own.seen, over.seen, strict=True)):
            if front == "areal" and over.done and place == len(stranger.acts):
                continue  # its last observation is null
            problems += [f"{front}, action {place}: {one[:200]!r} is not shown" for one in missing(wanted, shown)]
        if over.done != own.done and front != "nemo":
            problems.append(f"{front}: ended {over.done}, and directly {own.done}")

    assert list(own.rewards) == pytest.approx(list(stranger.rewards))
    assert problems == []
