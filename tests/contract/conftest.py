"""Longer limits of the stores: a busy machine may hold a Redis server for seconds."""

from __future__ import annotations

import pytest

from gateway.stores.redis import client


@pytest.fixture(autouse=True)
def _time_for_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_S", 10.0)
    monkeypatch.setattr(client, "CONNECT_S", 10.0)
