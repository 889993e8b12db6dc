"""`scripts/down`: what it removes is the stack's own, whatever bears the same labels."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.deadlines import scaled

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

PROJECT_DIR = Path(__file__).resolve().parents[2]
INSTANCE, WORKER = "env-gateway.instance", "env-gateway.worker"


class Projects:
    """Stacks of compose as far as `scripts/down` sees them: volumes, and workers that are not started."""

    def __init__(self, engine: docker.APIClient, image: str) -> None:
        self._engine = engine
        self._image = image
        self._volumes: list[str] = []
        self._containers: list[str] = []

    def volume(self, project: str) -> str:
        """Make the volume of its workers' sockets; returns where the engine has it."""
        name = f"{project}_workers"
        self._volumes.append(name)
        where: str = self._engine.create_volume(name)["Mountpoint"]
        return where

    def worker(self, instance: str, sockets: str | None, id: str) -> str:
        """Make a container of worker *id*, with its folder in *sockets* if that is given; returns its id."""
        binds = [f"{sockets}/{id}:/run/envserver"] if sockets is not None else None
        made = self._engine.create_container(
            self._image,
            labels={INSTANCE: instance, WORKER: id},
            host_config=self._engine.create_host_config(binds=binds, network_mode="none"),
        )
        self._containers.append(made["Id"])
        return str(made["Id"])

    def left(self) -> list[str]:
        """What is there yet of what was made."""
        there = {entry["Id"] for entry in self._engine.containers(all=True)}
        volumes = {entry["Name"] for entry in self._engine.volumes()["Volumes"] or ()}
        return [*(one for one in self._containers if one in there), *(one for one in self._volumes if one in volumes)]

    def close(self) -> None:
        for container in set(self._containers) & set(self.left()):
            self._engine.remove_container(container, force=True)
        for volume in set(self._volumes) & set(self.left()):
            self._engine.remove_volume(volume, force=True)


@pytest.fixture
def projects(docker_engine: docker.APIClient, worker_image: str) -> Iterator[Projects]:
    made = Projects(docker_engine, worker_image)
    yield made
    made.close()


def test_a_project_that_only_the_env_file_names_is_taken_down_and_workers_of_others_stay(
    projects: Projects, tmp_path: Path
) -> None:
    mine, other = (f"eg-test-{secrets.token_hex(4)}" for _ in range(2))
    (tmp_path / "scripts").mkdir()
    for script in ("down", "compose-project"):
        shutil.copy(PROJECT_DIR / "scripts" / script, tmp_path / "scripts" / script)
    shutil.copy(PROJECT_DIR / "compose.yaml", tmp_path / "compose.yaml")
    (tmp_path / ".env").write_text(f"COMPOSE_PROJECT_NAME={mine}\n")
    own, theirs = projects.volume(mine), projects.volume(other)
    for container in ("server", "forwarder"):  # of one worker; the first has no part in the folder
        projects.worker(mine, own if container == "forwarder" else None, "aaaa")
    kept = [
        projects.worker("env-gateway", theirs, "bbbb"),  # by the default label of both, and of compose.yaml
        projects.worker(mine, theirs, "cccc"),
    ]

    environ = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "GATEWAY_"))}
    subprocess.run([tmp_path / "scripts" / "down"], env=environ, check=True, timeout=scaled(60))

    assert projects.left() == [*kept, f"{other}_workers"]
