"""Fixtures of the tests with third-party servers."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.wire.any.places import Place, Places


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what all tests here need: official clients or servers, and on an engine the images of ``tests/foreign``."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            images = ("third-party-images",) if item.get_closest_marker("docker") else ()
            item.add_marker(pytest.mark.needs("openenv-clients", *images))


@pytest.fixture(scope="session")
def places() -> Iterator[Places]:
    places = Places()
    try:
        yield places
    finally:
        places.close()


@pytest.fixture
async def place(request: pytest.FixtureRequest, places: Places) -> AsyncIterator[Place]:
    """A running gateway. The test must leave no session and no unexpected error behind."""
    place = places.named(request.param)
    already_logged = len(place.gateway.log)
    yield place
    await place.nothing_is_left()
    logged = place.gateway.log[already_logged:]
    assert "\nTraceback" not in logged, logged
