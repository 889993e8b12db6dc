"""A store that does not answer is reported as unavailable, never as "not found"."""

from __future__ import annotations

import asyncio

import pytest

from gateway.core.errors import StoreUnavailable
from tests.fakes.clock import Clock
from tests.service.stack import stack
from tests.service.wire import call, create, delete


class Switch(Clock):
    """The store's clock. Every store operation reads it, so a clock that raises acts as a store that is down."""

    is_off = False

    def __call__(self) -> float:
        if self.is_off:
            raise StoreUnavailable("the store does not answer")
        return super().__call__()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/create"),
        ("POST", "/ping"),
        ("GET", "/math/prompt"),
        ("GET", "/math/task_tools"),
        ("POST", "/math/call"),
        ("POST", "/math/score_group"),
        ("GET", "/math/tools"),
        ("POST", "/delete"),
    ],
)
async def test_a_request_that_needs_the_store_is_503_while_it_is_down_and_never_404(method: str, path: str) -> None:
    switch = Switch()
    async with stack(clock=switch) as built, built.first.looping(), built.first.serving() as client:
        switch.is_off = True
        body = {"task_spec": {}} if path == "/create" else {"name": "echo", "input": {}}
        answer = await client.request(method, path, json=body)
        switch.is_off = False

        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1


async def test_calls_of_sessions_that_this_replica_serves_go_on_without_the_store() -> None:
    switch = Switch()
    async with stack(clock=switch) as built, built.first.looping(), built.first.serving() as client:
        await create(client)
        switch.is_off = True
        answers = [await call(client) for _ in range(3)]
        switch.is_off = False

        assert [answer.status_code for answer in answers] == [200] * 3
        assert built.backend.only.ran == ["echo"] * 3


async def test_a_replica_without_its_store_is_ready_and_reports_itself_as_degraded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch = Switch()
    async with stack(clock=switch) as built, built.first.looping(), built.first.serving() as client:
        switch.is_off = True
        refused = await client.get("/readyz")
        switch.is_off = False
        monkeypatch.setattr("gateway.frontends.admin.app.STORE_S", 0.01)
        monkeypatch.setattr(built.store, "ping", asyncio.Event().wait)
        silent = [await client.get("/readyz") for _ in range(2)]

        assert [answer.status_code for answer in (refused, *silent)] == [200] * 3
        assert refused.json() == {
            "status": "degraded",
            "reason": "store_unavailable",
            "detail": "the store does not answer",
        }
        assert [answer.json()["status"] for answer in silent] == ["degraded"] * 2


async def test_everything_goes_on_when_the_store_is_back() -> None:
    switch = Switch()
    async with stack(clock=switch) as built, built.first.looping(), built.first.serving() as client:
        await create(client)
        switch.is_off = True
        await asyncio.gather(create(client, sid="two"), call(client), client.get("/math/tools"))
        switch.is_off = False

        assert (await create(client, sid="two")).status_code == 200
        assert (await delete(client)).status_code == 200
        assert await built.first.used() == 1


async def test_notes_that_could_not_be_written_are_written_later() -> None:
    switch = Switch()
    async with stack(clock=switch) as built, built.first.serving() as client:
        async with built.first.looping():
            await create(client)
        await call(client)
        switch.advance(200)
        switch.is_off = True
        with pytest.raises(StoreUnavailable):
            await built.first.session_cache.write_notes()
        switch.is_off = False
        await built.first.session_cache.write_notes()

        switch.advance(200)
        assert await built.store.late(10) == []
