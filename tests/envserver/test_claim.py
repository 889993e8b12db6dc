"""The first token claims a worker on a Unix socket; later requests need the same token."""

import os
import stat

import pytest

from tests.envserver.conftest import Start
from tests.envserver.worlds import MathEnv

TOKEN = "ab" * 32


async def test_the_first_token_claims_the_worker(start: Start) -> None:
    server = await start(MathEnv, unix=True)
    before = await server.ask("GET", "/sessions")

    claiming = await server.ask("GET", "/tools", headers={"X-Worker-Token": TOKEN})

    assert before.status == claiming.status == 200
    for headers in ({}, {"X-Worker-Token": "cd" * 32}, {"X-Worker-Token": TOKEN[:-1]}, {"X-Worker-Token": ""}):
        refused = await server.ask("GET", "/tools", headers=headers)
        assert (refused.status, refused.json) == (401, {"detail": "worker token required"})
        unknown = await server.ask("GET", "/nosuch", headers=headers)
        assert unknown.status == 401
    assert (await server.ask("GET", "/tools", headers={"x-worker-token": TOKEN})).status == 200
    assert (await server.ask("GET", "/health")).status == 200


@pytest.mark.parametrize("token", ["", "no hex", "ab" * 200, "é"])
async def test_a_malformed_token_claims_nothing(start: Start, token: str) -> None:
    server = await start(MathEnv, unix=True)

    refused = await server.ask("GET", "/tools", headers={"X-Worker-Token": token})

    assert refused.status == 401
    assert (await server.ask("GET", "/tools")).status == 200


async def test_on_tcp_a_token_is_ignored(start: Start) -> None:
    server = await start(MathEnv)

    assert (await server.ask("GET", "/tools", headers={"X-Worker-Token": TOKEN})).status == 200
    assert (await server.ask("GET", "/tools")).status == 200


async def test_every_user_can_use_the_socket_and_a_stale_socket_is_replaced(start: Start) -> None:
    server = await start(MathEnv, unix=True)

    assert stat.S_IMODE(os.stat(server.address).st_mode) == 0o666  # takes microseconds
    again = await start(MathEnv, unix=True)
    assert (await again.ask("GET", "/health")).status == 200
