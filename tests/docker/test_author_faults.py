"""Author's faults in a container: client and operator get the same reports as for a local process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import docker
import pytest

from tests.contract.backend_world import remove_labelled
from tests.fakes.images import built_once, files_of
from tests.wire.author_faults import FAULTY, OWN, OWN_ROWS, play_and_check
from tests.wire.gateways import Gateway, short_folder
from tests.wire.stack import SHARED_MEMORY

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]


@pytest.fixture(scope="module")
def gateway(docker_engine: docker.APIClient) -> Iterator[Gateway]:
    built_once(docker_engine, "env-gateway-test/faulty", files_of(FAULTY / "catalog" / OWN))
    folder = short_folder(SHARED_MEMORY)
    folder.chmod(0o755)
    instance = f"eg-test-{folder.name[3:]}"
    settings = {
        "GATEWAY_BACKEND": "docker",
        "GATEWAY_INSTANCE": instance,
        "GATEWAY_CATALOG_DIR": str(FAULTY / "catalog"),
        "GATEWAY_ENVIRONMENTS": OWN,
        "GATEWAY_DEFAULT_ENVIRONMENT": OWN,
        "GATEWAY_TRAINER_KEYS": "",
        "GATEWAY_SOCKET_DIR": str(folder / "s"),
    }
    gateway = Gateway(folder, settings)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()
        remove_labelled(docker_engine, instance)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("way", ["ors", "areal"])
@pytest.mark.parametrize(("fails", "expected"), OWN_ROWS)
async def test_an_authors_fault_in_a_container_is_a_typed_error_without_a_reward(
    gateway: Gateway, fails: str, expected: str, way: str
) -> None:
    await play_and_check(gateway, OWN, fails, expected, way)
