"""A Redis that refuses a gateway: the error states the reason, a start fails at once, and no password is shown."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.adapters import start_store
from gateway.catalog.catalog import Catalog
from gateway.catalog.doctor import Status, examine
from gateway.core.errors import StoreUnavailable
from gateway.settings import Settings
from gateway.stores.redis.client import facts
from gateway.stores.redis.sessions import RedisStore
from tests.contract.store_worlds import RedisServer, needs_redis_server
from tests.fakes.sentinels import Failover
from tests.service.stack import environment

pytestmark = pytest.mark.redis

LOGINS = {
    "": "Authentication required",
    ":wrong-one@": "invalid username-password pair",
    "reader:secret-one@": "no permissions",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    needs_redis_server()
    server = RedisServer(tmp_path)
    server.start()
    with server.client() as client:
        client.acl_setuser(
            "reader", enabled=True, passwords=["+secret-one"], categories=["-@all"], commands=["+client"]
        )
        client.config_set("requirepass", "secret-one")
    yield server
    server.stop()


@pytest.mark.parametrize("login", LOGINS)
async def test_a_start_fails_at_once_with_the_reason(server: RedisServer, login: str) -> None:
    store = RedisStore(url=f"unix://{login}{server.socket}", prefix="test", replica="a")

    with pytest.raises(StoreUnavailable, match=LOGINS[login]) as refused:
        await start_store(store)

    assert refused.value.is_refusal
    assert "-one" not in str(refused.value)


@pytest.mark.parametrize("login", LOGINS)
async def test_the_finding_of_a_check_says_what_to_correct(server: RedisServer, tmp_path: Path, login: str) -> None:
    settings = Settings(store=f"unix://{login}{server.socket}", state_dir=tmp_path / "state")

    (found,) = [finding for finding in await examine(settings, Catalog((environment(),))) if finding.check == "redis"]

    assert found.status is Status.FAILED
    assert LOGINS[login] in found.detail
    assert "GATEWAY_STORE" in found.fix
    assert "start Redis" not in found.fix
    assert "-one" not in f"{found}"


async def test_the_error_states_that_sentinels_refuse_the_password(tmp_path: Path) -> None:
    needs_redis_server()
    failover = Failover(tmp_path, password="secret-one", sentinel_password="sentinel-one")
    try:
        failover.start()
        with pytest.raises(StoreUnavailable, match="sentinel_password") as refused:
            await facts(failover.url.replace("sentinel-one", "wrong-one"))
    finally:
        failover.stop()

    assert refused.value.is_refusal
    assert "-one" not in str(refused.value)


async def test_the_error_states_that_a_database_does_not_exist(server: RedisServer) -> None:
    with pytest.raises(StoreUnavailable, match="DB index is out of range"):
        await facts(f"unix://:secret-one@{server.socket}?db=99")


async def test_the_right_password_is_accepted(server: RedisServer) -> None:
    store = RedisStore(url=f"unix://:secret-one@{server.socket}", prefix="test", replica="a")

    await start_store(store)
    await store.aclose()
