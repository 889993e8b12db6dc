"""Several trainers' keys on one gateway: each within its limits, and no key at the expense of another."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from gateway.core.ids import EnvironmentName
from gateway.settings.keys import NO_LIMITS, KeyLimits, Role, add_key, revoke_key
from tests.fakes.eventually import eventually
from tests.service.openenv_world import World, world
from tests.service.stack import environment, impatience, tasks
from tests.service.wire import under_way

TASKS: dict[str, Any] = {"tasks": tasks(train=[{"question": "1+1"}], test=[{"question": "2+2"}])}


class Tenants:
    """A gateway whose keys come from a file."""

    def __init__(self, here: World, path: Path, keys: dict[str, str]) -> None:
        self.here = here
        self.path = path
        self._keys = keys

    def headers(self, owner: str, sid: str = "one") -> dict[str, str]:
        return {"X-API-Key": self._keys[owner], "X-Session-ID": sid}

    async def create(self, owner: str, sid: str = "one", env: str = "math", **headers: str) -> httpx.Response:
        body = {"env_name": env, "task_spec": {"question": "1+1"}}
        return await self.here.http.post("/create", json=body, headers=self.headers(owner, sid) | headers)

    async def call(self, owner: str, sid: str = "one") -> httpx.Response:
        body = {"name": "go_on", "input": {}}
        return await self.here.http.post("/math/call", json=body, headers=self.headers(owner, sid))

    async def delete(self, owner: str, sid: str = "one") -> None:
        answer = await self.here.http.post("/delete", headers=self.headers(owner, sid))
        assert answer.status_code == 200, answer.text

    async def get(self, owner: str, path: str) -> httpx.Response:
        return await self.here.http.get(path, headers=self.headers(owner))

    async def held(self, owner: str) -> list[tuple[str, str]]:
        """Return environment and worker of each session of *owner*."""
        sessions = await self.here.gateway.store.sessions()
        return [(str(one.environment), str(one.worker)) for one in sessions if one.owner == owner]


@contextlib.asynccontextmanager
async def tenants(folder: Path, *environments: Any, **limits: KeyLimits) -> AsyncIterator[Tenants]:
    """Run a gateway with a key of each name in *limits*."""
    path = folder / "keys.json"
    keys = {name: add_key(path, name, role=Role.TRAINER, limits=one) for name, one in limits.items()}
    async with world(*environments, **TASKS, keys_file=path) as here:
        yield Tenants(here, path, keys)


@pytest.mark.parametrize(
    "limits", [KeyLimits(max_sessions=2), KeyLimits(pool_share=0.125)], ids=["sessions", "share of the pool"]
)
async def test_a_key_at_its_limit_waits_and_no_opening_of_another_key_waits_behind_it(
    tmp_path: Path, limits: KeyLimits
) -> None:
    async with tenants(tmp_path, environment(slots=16, max_workers=1), busy=limits, calm=NO_LIMITS) as here:
        store, name = here.here.gateway.store, EnvironmentName("math")
        assert (await here.create("calm", "warm")).status_code == 200
        for sid in ("a", "b"):
            assert (await here.create("busy", sid)).status_code == 200
        async with under_way(*(here.create("busy", f"w{n}") for n in range(20))) as openings:
            await here.here.gateway.eventually_waiting(20)
            before = (await store.load())[name]
            for n in range(5):
                assert (await here.create("calm", f"c{n}")).status_code == 200
                assert len(await here.held("busy")) == 2, "none of the openings that came first got a slot"
            after = (await store.load())[name]
            await here.delete("busy", "a")
            done, _ = await asyncio.wait(openings, return_when=asyncio.FIRST_COMPLETED)
            assert [one.result().status_code for one in done] == [200]
            assert len(await here.held("busy")) == 2
            for opening in openings:
                opening.cancel()

    # A p99 of the calm key's waits is that of a gateway without the busy key: all of its openings were hits.
    assert after.hits - before.hits == after.arrivals - before.arrivals == 5
    assert after.wanted == 0, "openings at a key's limit are no demand for workers"


async def test_an_opening_that_waited_at_the_limit_says_so(tmp_path: Path) -> None:
    async with tenants(tmp_path, environment(), busy=KeyLimits(max_sessions=1)) as here:
        assert (await here.create("busy", "a")).status_code == 200
        with impatience(here.here.gateway, timeouts={"open_s": 0.2}):
            refused = await here.create("busy", "b")

    assert refused.status_code == 429
    assert "the key 'busy' has 1" in refused.json()["detail"]
    assert "max_sessions" in refused.json()["detail"]


async def test_openings_beyond_the_rate_of_a_key_wait_or_are_refused_with_the_time(tmp_path: Path) -> None:
    async with tenants(tmp_path, environment(), slow=KeyLimits(opens_per_s=0.001), calm=NO_LIMITS) as here:
        first, second = await here.create("slow", "a"), await here.create("slow", "b")
        other = await here.create("calm", "a")

    assert (first.status_code, second.status_code, other.status_code) == (200, 429, 200)
    assert int(second.headers["retry-after"]) > 0
    assert "'slow'" in second.json()["detail"]


async def test_calls_beyond_the_rate_of_a_key_wait_and_no_call_of_another_key_waits_behind_them(tmp_path: Path) -> None:
    one = environment(max_workers=1, call_s=120.0)
    async with tenants(tmp_path, one, fast=KeyLimits(calls_per_s=0.01), calm=NO_LIMITS) as here:
        for owner in ("fast", "calm"):
            assert (await here.create(owner, "a")).status_code == 200
        assert (await here.call("fast", "a")).status_code == 200
        async with under_way(here.call("fast", "a")) as (waiting,):
            for _ in range(20):
                assert (await here.call("calm", "a")).status_code == 200
            assert not waiting.done(), "it starts after 100 s"
            await here.delete("fast", "a")
            ended = await waiting
        ran = here.here.stack.backend.only.ran

    assert ended.status_code == 404, "the end of its session ends the wait"
    assert ran == ["go_on"] * 21


async def test_a_call_that_would_wait_too_long_is_refused_with_the_time_and_does_not_run(tmp_path: Path) -> None:
    one = environment(max_workers=1, call_s=5.0)
    async with tenants(tmp_path, one, fast=KeyLimits(calls_per_s=0.01)) as here:
        assert (await here.create("fast", "a")).status_code == 200
        first, second = await here.call("fast", "a"), await here.call("fast", "a")
        async with here.here.client("math", additional_headers=here.headers("fast")) as client:
            await client.ask("reset")
            framed = await client.step()
            state = await client.ask("state")
        ran = here.here.stack.backend.only.ran

    assert (first.status_code, second.status_code, second.json()["code"]) == (200, 429, "rate_limited")
    assert int(second.headers["retry-after"]) > 5
    assert "'fast' may make 0.01 calls a second" in second.json()["detail"]
    assert (framed["type"], framed["data"]["retry_after_s"] > 5) == ("error", True), framed
    assert state["type"] == "state", "the episode goes on"
    assert ran == ["go_on"]


async def test_a_key_has_a_budget_of_bytes_of_its_own(tmp_path: Path) -> None:
    large = {"X-Secrets": base64.b64encode(b'{"a":{"value":"%s"}}' % (b"x" * 45_000)).decode()}  # 60,000 characters
    one = environment(slots=1, max_workers=1)
    async with tenants(tmp_path, one, small=KeyLimits(max_held_bytes=100_000), calm=NO_LIMITS) as here:
        assert (await here.create("calm", "a")).status_code == 200
        async with under_way(*(here.create(owner, "w", **large) for owner in ("small", "calm"))) as openings:
            await here.here.gateway.eventually_waiting(2)
            refused = await here.create("small", "x", **large)
            async with under_way(here.create("calm", "x", **large)) as more:
                await here.here.gateway.eventually_waiting(3)
                for opening in (*openings, *more):
                    opening.cancel()

    assert (refused.status_code, refused.json()["code"]) == (429, "too_many_bytes")


async def test_a_key_sees_only_its_environments_on_every_frontend(tmp_path: Path) -> None:
    two = environment("math"), environment("coding")
    async with tenants(tmp_path, *two, bob=KeyLimits(environments=("coding",)), alice=NO_LIMITS) as here:
        listed = await here.get("bob", "/list_environments")
        created = await here.create("bob", env="math")
        answers = [
            await here.get("bob", path)
            for path in ("/math/splits", "/areal/math/api/task/info", "/openenv/math/schema", "/math/tools")
        ]
        own = await here.create("bob", env="coding")
        info = await here.get("bob", "/areal/coding/api/task/info")
        with pytest.raises(InvalidStatus) as socket:
            async with here.here.client("math", additional_headers=here.headers("bob")):
                pass
        async with here.here.client("coding", additional_headers=here.headers("bob")):
            pass
        everything = await here.get("alice", "/list_environments")

    assert listed.json() == ["coding"]
    assert everything.json() == ["math", "coding"]
    assert created.status_code == 404
    assert "this key may use only coding" in created.json()["detail"]
    assert [answer.status_code for answer in answers] == [404] * 4
    assert "may use only coding" in answers[1].json()["detail"]
    assert socket.value.response.status_code == 404
    assert (own.status_code, info.status_code) == (200, 200)


async def test_a_key_without_an_available_environment_gets_one_plain_answer(tmp_path: Path) -> None:
    async with tenants(tmp_path, environment(), bob=KeyLimits(environments=("gone",))) as here:
        answers = [
            await here.get("bob", path)
            for path in ("/list_environments", "/areal/math/api/task/info", "/openenv/math/schema")
        ]
        with pytest.raises(InvalidStatus) as socket:
            async with here.here.client("math", additional_headers=here.headers("bob")):
                pass

    assert [answer.status_code for answer in answers] == [403] * 3
    assert all("may use only gone" in answer.json()["detail"] for answer in answers)
    assert socket.value.response.status_code == 403


async def test_a_socket_of_a_revoked_key_opens_no_other_episode(tmp_path: Path) -> None:
    async with (
        tenants(tmp_path, environment(), bob=KeyLimits(max_sessions=1)) as here,
        here.here.client("math", additional_headers=here.headers("bob")) as client,
    ):
        first = await client.ask("reset")
        revoke_key(here.path, "bob")
        await here.here.gateway.keys.look()
        second = await client.ask("reset")

    assert first["type"] == "observation", first
    assert (second["type"], "the key 'bob' was revoked" in str(second)) == ("error", True), second


async def test_separate_tenants_share_no_worker(tmp_path: Path) -> None:
    one = environment(slots=4, max_workers=2, is_separate=True)
    async with tenants(tmp_path, one, alice=NO_LIMITS, bob=NO_LIMITS) as here:
        for sid in ("a", "b"):
            for owner in ("alice", "bob"):
                assert (await here.create(owner, sid)).status_code == 200
        alices, bobs = await here.held("alice"), await here.held("bob")
        played = await here.here.http.post(
            "/math/call", json={"name": "echo", "input": {"x": 1}}, headers=here.headers("alice", "a")
        )
        revoke_key(here.path, "bob")
        await here.here.gateway.keys.look()
        refused = await here.create("bob", "c")
        for name in ("a", "b"):
            await here.here.gateway.sessions.close("bob", name)  # type: ignore[arg-type]  # an owner is a text

        async def bobs_workers_are_gone() -> None:
            assert not await here.here.gateway.workers("math@bob")

        await eventually(bobs_workers_are_gone)
        assert await here.here.gateway.workers("math@alice")

    assert {name for name, _ in alices} == {"math@alice"}
    assert {name for name, _ in bobs} == {"math@bob"}
    assert not {worker for _, worker in alices} & {worker for _, worker in bobs}
    assert played.status_code == 200, played.text
    assert refused.status_code == 401
