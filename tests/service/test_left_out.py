"""An environment that this machine cannot run: every protocol refuses it with the reason and the remedy."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from tests.service.stack import environment, running

REASON = "no bwrap on PATH: install bubblewrap"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/create", {"env_name": "shell", "task_spec": {}}),
        ("GET", "/shell/tools", None),
        ("GET", "/areal/shell/api/task/info", None),
        ("GET", "/areal/shell/api/health", None),
        ("POST", "/areal/shell/api/episode/start", {"sample_id": "0"}),
        ("POST", "/openenv/shell/reset", {}),
    ],
)
async def test_a_request_for_an_environment_that_cannot_run_is_refused_with_the_reason(
    method: str, path: str, body: Any
) -> None:
    async with running(environment(), environment("game")) as (_, gateway, client):
        gateway.catalog.left_out["shell"] = REASON

        answer = await client.request(method, path, json=body)

        assert answer.status_code == 404, answer.text
        assert f"environment 'shell' is not available: {REASON}" in answer.text
        assert not await gateway.store.sessions()


async def test_a_socket_to_an_environment_that_cannot_run_here_is_refused_with_the_reason() -> None:
    async with running(environment()) as (_, gateway, client):
        gateway.catalog.left_out["shell"] = REASON
        url = httpx.URL(str(client.base_url)).copy_with(scheme="ws", path="/openenv/shell/ws")

        with pytest.raises(InvalidStatus) as refused:
            async with connect(str(url), proxy=None):
                raise AssertionError("it was let in")

        assert refused.value.response.status_code == 404
        assert REASON in refused.value.response.body.decode()
