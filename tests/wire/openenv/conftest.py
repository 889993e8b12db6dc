"""Fixtures of the OpenEnv tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fakes.eventually import eventually
from tests.wire.openenv.servers import Place, Servers


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark that all tests here need official clients or servers."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.needs("openenv-clients"))


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    try:
        yield servers
    finally:
        servers.close()


@pytest.fixture
async def place(request: pytest.FixtureRequest, servers: Servers) -> AsyncIterator[Place]:
    """A running server. On a gateway, the test must leave no session and no unexpected error behind."""
    place = servers.named(request.param)
    already_logged = len(place.gateway.log) if place.gateway else 0
    yield place
    if place.gateway is not None:
        await eventually(lambda: nothing_is_left(place))
        logged = place.gateway.log[already_logged:]
        assert "\nTraceback" not in logged, logged


async def nothing_is_left(place: Place) -> None:
    """Assert that no session holds a slot."""
    assert await place.behind().sessions() == []
