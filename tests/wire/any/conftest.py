"""Fixtures of the tests with servers that know nothing of the gateway."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.wire.any.places import Place, Places


@pytest.fixture(scope="session")
def places() -> Iterator[Places]:
    places = Places()
    try:
        yield places
    finally:
        places.close()


@pytest.fixture
async def place(request: pytest.FixtureRequest, places: Places) -> AsyncIterator[Place]:
    """A running gateway; the test also has to leave no session and no unexpected error behind."""
    place = places.place(request.param)
    already_logged = len(place.gateway.log)
    yield place
    await place.nothing_is_left()
    logged = place.gateway.log[already_logged:]
    assert "Traceback" not in logged, logged
