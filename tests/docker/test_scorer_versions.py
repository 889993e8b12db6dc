"""The version of the scorer in images: that of the same files anywhere, and another after one changed byte."""

from __future__ import annotations

from typing import Any

import docker
import pytest

from gateway.backends.docker.container import variables
from gateway.catalog.toml import read_environment
from tests.envs.container_worker import ROOT, container_worker
from tests.envs.workers import Worker
from tests.fakes.images import built_once

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

LOCAL = ("chat", "coding", "game", "math", "os", "reasoning_gym", "textarena")
REBUILD = "touch math_scorers.py && rm -r __pycache__ && python3 -m compileall -q ."
CHANGE = "echo >> math_scorers.py"


def in_image(engine: docker.APIClient, name: str, image: str = "") -> str:
    """Return the version that a container of this environment reports."""

    def change(body: dict[str, Any]) -> None:
        body["Image"] = image or body["Image"]

    with container_worker(engine, name, change=change) as worker:
        reported: str = worker.http.get("/sessions").json()["scorer"]
        return reported


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.needs(f"image:{name}")) for name in LOCAL],
)
def test_an_image_and_a_local_process_have_the_same_scorer(docker_engine: docker.APIClient, name: str) -> None:
    environment = read_environment(ROOT / "env_images" / name / "environment.toml")
    told = variables(environment, socket="", slots=1)["ENVSERVER_SCORER"]
    worker = Worker(name, settings={"SCORER": told})
    try:
        local = worker.http.get("/sessions").json()["scorer"]
    finally:
        worker.stop()

    assert in_image(docker_engine, name) == local
    assert len(local) == 64


@pytest.mark.needs("image:browser")
def test_the_scorer_of_the_browser_environment_has_a_version(docker_engine: docker.APIClient) -> None:
    assert len(in_image(docker_engine, "browser")) == 64


@pytest.mark.needs("image:math")
def test_a_rebuild_keeps_the_version_and_one_changed_byte_of_the_scorer_changes_it(
    docker_engine: docker.APIClient,
) -> None:
    images = {
        name: built_once(
            docker_engine,
            f"env-gateway-tests/math-{name}",
            {"Dockerfile": f"FROM env-gateway/math\nUSER root\nRUN {how}\nUSER 10001:10001\n".encode()},
        )
        for name, how in (("rebuilt", REBUILD), ("changed", CHANGE))
    }

    first, rebuilt, changed = (in_image(docker_engine, "math", image) for image in ("", *images.values()))

    assert rebuilt == first
    assert changed != first
