"""Limits of the stores, scaled like every deadline of tests: a busy machine may hold a Redis server for seconds."""

from __future__ import annotations

import pytest

from gateway.stores.redis import client
from tests.deadlines import scaled


@pytest.fixture(autouse=True)
def _time_for_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", scaled(client.ANSWER_S))
    monkeypatch.setattr(client, "CONNECT_S", scaled(client.CONNECT_S))
