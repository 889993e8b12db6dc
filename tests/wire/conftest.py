"""Fixtures of the wire tests. ``targets.py`` has the servers that they run against."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.wire.openenv.clients import NEWEST, Driver, DriverOf
from tests.wire.raw import create, new_sid
from tests.wire.sdks import SDKS, Client, Sdk
from tests.wire.targets import Folder, Target, World


@pytest.fixture(scope="session", autouse=True)
def _quiet_clients() -> Iterator[None]:
    """Keep the clients from contacting the internet or a proxy, and from using keys of the current user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENREWARD_DISABLE_UPDATE_CHECK", "1")
        for name in ("NO_PROXY", "no_proxy"):
            patch.setenv(name, "127.0.0.1,localhost")
        for name in ("ORS_API_KEY", "OPENREWARD_API_KEY", "OPENREWARD_SESSION_URL", "OPENREWARD_API_URL"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    world = World()
    try:
        yield world
    finally:
        world.close()


@pytest.fixture
async def target(request: pytest.FixtureRequest, world: World) -> AsyncIterator[Target]:
    """A running server. On a gateway, the test must leave no session and no unexpected error behind."""
    target = world.named(request.param)
    already_logged = len(target.log())
    yield target
    if target.gateway is not None:
        await eventually(lambda: _nothing_is_left(target))
        logged = target.log()[already_logged:]
        assert "\nTraceback" not in logged, logged


async def _nothing_is_left(target: Target) -> None:
    assert target.gateway is not None
    assert await target.gateway.sessions() == []


@pytest.fixture
def sdk(request: pytest.FixtureRequest) -> Sdk:
    """One of the two official packages."""
    return SDKS[request.param]


@pytest.fixture
async def client(target: Target, sdk: Sdk) -> AsyncIterator[Client]:
    """An open client of that package."""
    async with sdk.connect(target.url, target.key) as client:
        yield client


@pytest.fixture
async def http(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client with the target's key."""
    async with target.http() as http:
        yield http


@pytest.fixture
async def narrow_worker(http: httpx.AsyncClient) -> None:
    """Start the worker of ``narrow``: its first start may take longer than the 5 s for which an opening waits."""

    async def has_opened() -> None:
        response = await create(http, sid := new_sid(), env_name="narrow", task_spec={})
        assert response.status_code == 200, response.text
        await http.post("/delete", headers={"X-Session-ID": sid})

    await eventually(has_opened)


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Folder:
    """A folder that the test shares with the workers."""
    return target.folder(tmp_path)


@pytest.fixture(scope="session")
def driver_of() -> Iterator[DriverOf]:
    """A function that returns the driver of a release of OpenEnv's clients, one driver for all tests."""
    drivers: dict[str, Driver] = {}
    with contextlib.ExitStack() as undo:

        def driver_of(version: str) -> Driver:
            if version not in drivers:
                drivers[version] = undo.enter_context(contextlib.closing(Driver(version)))
            return drivers[version]

        yield driver_of


@pytest.fixture
def newest(driver_of: DriverOf) -> Driver:
    """The driver of the newest release."""
    return driver_of(NEWEST)
