"""Several gateways whose episodes are in one folder of the step log."""

from __future__ import annotations

from pathlib import Path

from tests.service.test_step_log import OPERATOR, listed, logging
from tests.service.wire import create, delete


async def test_a_gateway_lists_its_own_episodes_unless_all_are_asked_for(tmp_path: Path) -> None:
    for gateway, name in (("", "older"), ("first", "one"), ("second", "two")):
        async with logging(tmp_path) as (_, replica, client):
            replica.log.gateway = gateway
            await create(client, name)
            await delete(client, name)
            own = [line["name"] for line in await listed(client)]
            every = [line["name"] for line in await listed(client, gateway="*")]
            firsts = [line["name"] for line in await listed(client, gateway="first")]
            page = (await client.get("/dashboard/episodes.json", headers=OPERATOR)).json()

    assert own == [line["name"] for line in page["episodes"]] == ["two", "older"]
    assert every == ["two", "one", "older"]
    assert firsts == ["one", "older"]
