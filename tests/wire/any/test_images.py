"""Clients of an image's own protocol play directly on the image, without the gateway."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import docker
import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.wire.any.cases import CASES
from tests.wire.any.players import TRAINERS, Door, plays_both
from tests.wire.openenv.clients import DriverOf
from tests.wire.stack import INSTANCE_LABEL

pytestmark = [pytest.mark.wire, pytest.mark.docker]


@contextlib.contextmanager
def published(image: str, port: int) -> Iterator[str]:
    """Run *image*, hardened as the gateway runs it, with its port on the loopback, and yield its server's URL."""
    engine = docker.from_env(version="auto")
    try:
        container = engine.containers.run(
            image,
            detach=True,
            ports={f"{port}/tcp": ("127.0.0.1", 0)},
            labels={INSTANCE_LABEL: "wire-tests"},
            environment={"OPENREWARD_DISABLE_UPDATE_CHECK": "1"},
            read_only=True,
            user="10001:10001",
            cap_drop=["ALL"],
            tmpfs={"/tmp": ""},
        )
        try:
            container.reload()
            (published_at,) = container.ports[f"{port}/tcp"] or [{}]
            yield f"http://127.0.0.1:{published_at['HostPort']}"
        finally:
            container.remove(force=True)
    finally:
        engine.close()


async def answers(url: str) -> None:
    """Assert that a server is up, whichever protocol it speaks."""
    async with httpx.AsyncClient(verify=False, trust_env=False) as http:
        try:
            statuses = [(await http.get(url + path)).status_code for path in ("/health", "/api/health")]
        except httpx.TransportError as error:
            raise AssertionError("not up yet") from error
    assert 200 in statuses


@pytest.mark.parametrize("name", CASES)
async def test_an_image_without_the_gateway_is_played_by_the_clients_of_its_protocol(
    name: str, driver_of: DriverOf
) -> None:
    case = CASES[name]
    with published(f"env-gateway-test/{case.image}", case.port) as url:
        await eventually(lambda: answers(url))
        for client in case.own:
            await plays_both(TRAINERS[client](driver_of), case, Door(url, "riddles", url, url))
