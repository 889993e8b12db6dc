"""`scripts/down` removes only the stack's own objects, whatever else has the same labels."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from tests.deadlines import COMMAND_S

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

PROJECT_DIR = Path(__file__).resolve().parents[2]
INSTANCE, WORKER = "env-gateway.instance", "env-gateway.worker"
COMPOSED, COMPOSED_IN = "com.docker.compose.project", "com.docker.compose.project.working_dir"


class Projects:
    """Stacks of compose as `scripts/down` sees them: volumes, and workers that are not started."""

    def __init__(self, engine: docker.APIClient, image: str) -> None:
        self._engine = engine
        self._image = image
        self._volumes: list[str] = []
        self._containers: list[str] = []

    def volume(self, project: str) -> str:
        """Create the volume of the project's sockets. Return its path on the engine's machine."""
        name = f"{project}_workers"
        self._volumes.append(name)
        where: str = self._engine.create_volume(name)["Mountpoint"]
        return where

    def worker(self, instance: str, sockets: str | None, id: str) -> str:
        """Create a container of worker *id*, with its folder in *sockets* if given. Return the container's id."""
        binds = [f"{sockets}/{id}:/run/envserver"] if sockets is not None else None
        made = self._engine.create_container(
            self._image,
            labels={INSTANCE: instance, WORKER: id},
            host_config=self._engine.create_host_config(binds=binds, network_mode="none"),
        )
        self._containers.append(made["Id"])
        return str(made["Id"])

    def composed(self, project: str, folder: Path) -> str:
        """Create a container as compose does for a service of *folder*. Return its id."""
        made = self._engine.create_container(self._image, labels={COMPOSED: project, COMPOSED_IN: str(folder)})
        self._containers.append(made["Id"])
        return str(made["Id"])

    def left(self) -> list[str]:
        """Return the created containers and volumes that still exist."""
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


def copy_of_project(folder: Path, *, name: str = "env-gateway") -> None:
    """Copy the parts of a checkout that `scripts/down` needs. *name* replaces the project name of compose.yaml."""
    (folder / "scripts").mkdir(parents=True)
    for script in ("down", "compose-project", "env-file"):
        shutil.copy(PROJECT_DIR / "scripts" / script, folder / "scripts" / script)
    text = (PROJECT_DIR / "compose.yaml").read_text()
    assert "\nname: env-gateway\n" in text
    (folder / "compose.yaml").write_text(text.replace("\nname: env-gateway\n", f"\nname: {name}\n"))


def down(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of *folder*, without a project name in the environment."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("COMPOSE_", "GATEWAY_"))}
    script = folder / "scripts" / "down"
    return subprocess.run([script], env=environ, capture_output=True, text=True, check=False, timeout=COMMAND_S)


def test_a_project_named_by_the_env_file_is_removed_and_workers_of_other_projects_stay(
    projects: Projects, tmp_path: Path
) -> None:
    mine, other = (f"eg-test-{secrets.token_hex(4)}" for _ in range(2))
    copy_of_project(tmp_path)
    (tmp_path / ".env").write_text(f"COMPOSE_PROJECT_NAME={mine}\n")
    own, theirs = projects.volume(mine), projects.volume(other)
    for container in ("server", "forwarder"):  # both of one worker; the server's container does not mount the folder
        projects.worker(mine, own if container == "forwarder" else None, "aaaa")
    kept = [
        projects.worker("env-gateway", theirs, "bbbb"),  # with the default label of both projects and of compose.yaml
        projects.worker(mine, theirs, "cccc"),
    ]

    done = down(tmp_path)

    assert done.returncode == 0, done.stderr
    assert projects.left() == [*kept, f"{other}_workers"]


def test_a_stack_with_the_default_name_is_removed_only_from_the_folder_that_created_it(
    projects: Projects, tmp_path: Path
) -> None:
    fixed = f"eg-test-{secrets.token_hex(4)}"
    mine, other = tmp_path / "mine", tmp_path / "other"
    for folder in (mine, other):
        copy_of_project(folder, name=fixed)
    sockets = projects.volume(fixed)
    worker = projects.worker(fixed, sockets, "aaaa")
    service = projects.composed(fixed, mine)

    refused = down(other)

    assert refused.returncode == 1
    assert f"the stack {fixed} is that of {mine}, not of {other}" in refused.stderr
    assert projects.left() == [worker, service, f"{fixed}_workers"]
    done = down(mine)
    assert done.returncode == 0, done.stderr
    assert not {worker, f"{fixed}_workers"} & set(projects.left())
