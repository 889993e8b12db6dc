"""The bytes that requests hold in a replica are bounded for each key and for all keys, with each protocol's errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from gateway.frontends.ors.create import KEPT_MAX_BYTES
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.service.openenv_world import World, world
from tests.service.stack import environment, tasks
from tests.service.wire import under_way

MIB = 2**20
ALICE, BOB, OLGA = "alice-key-1234", "bobs-key-1234", "olgas-key-1234"
KEYS: dict[str, Any] = {"trainers": {"alice": ALICE, "bob": BOB}, "operators": {"olga": OLGA}}
SMALL: dict[str, Any] = {**KEYS, "max_body_bytes": MIB, "max_held_bytes_per_key": MIB, "max_held_bytes": 2 * MIB}
TASKS: dict[str, Any] = {"tasks": tasks(train=[{"question": "1+1"}], test=[{"question": "2+2"}])}
TWO = (environment(), environment("coding"))
ROUTES = [
    ("/create", ALICE, 429, "ors"),
    ("/math/call", ALICE, 429, "ors"),
    ("/areal/math/api/episode/start", ALICE, 503, "areal"),
    ("/openenv/math/reset", ALICE, 429, "openenv"),
    ("/openenv/math/mcp", ALICE, 429, "openenv"),
    ("/admin/v1/tasks", OLGA, 429, "admin"),
]


@contextlib.asynccontextmanager
async def half_sent(here: World, path: str, key: str, count: int) -> AsyncIterator[asyncio.StreamReader]:
    """Send *count* bytes of a longer body, and yield the reader of its answer."""
    url = httpx.URL(here.base)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\nX-Session-ID: one\r\n"
    writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {MIB}\r\n\r\n".encode() + b" " * count)
    try:
        await writer.drain()
        yield reader
    finally:
        writer.close()


def held(here: World) -> int:
    """Return the number of bytes that the gateway holds."""
    app: Any = here.gateway.app
    count: int = app._budget._all
    return count


async def eventually_held(here: World, least: int, most: int) -> None:
    async def check() -> None:
        assert least <= held(here) <= most

    await eventually(check)


@pytest.mark.parametrize(("path", "key", "status", "protocol"), ROUTES)
async def test_a_key_whose_half_sent_bodies_use_up_its_budget_is_refused_in_its_protocol(
    path: str, key: str, status: int, protocol: str
) -> None:
    async with world(environment(), **SMALL, **TASKS) as here:
        async with half_sent(here, path, key, MIB - 4096):
            await eventually_held(here, MIB - 5000, MIB)
            answer = await here.http.post(path, content=b"x" * 8192, headers=_headers(key))
            other = await here.http.post("/create", json=_inline(), headers=_headers(BOB))
        await eventually_held(here, 0, 0)
        again = await here.http.post(path, content=b"x" * 8192, headers=_headers(key))

    assert answer.status_code == status, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert "hold" in answer.json()["detail"]
    assert answer.json().get("code") == (None if protocol == "areal" else "too_many_bytes")
    assert other.status_code == 200, "another key is served"
    assert again.status_code not in (429, 503), "the budget is free again"


async def test_all_keys_together_have_a_budget_too() -> None:
    small = {**SMALL, "max_held_bytes": MIB}
    async with world(environment(), **small, **TASKS) as here, half_sent(here, "/create", ALICE, MIB - 4096):
        await eventually_held(here, MIB - 5000, MIB)
        answer = await here.http.post("/create", content=b"x" * 8192, headers=_headers(BOB))

    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_bytes")
    assert "all keys" in answer.json()["detail"]


async def test_a_refusal_reaches_a_client_that_still_sends_its_body() -> None:
    async with world(environment(), **SMALL, **TASKS) as here, half_sent(here, "/create", ALICE, MIB - 4096):
        await eventually_held(here, MIB - 5000, MIB)
        async with half_sent(here, "/create", ALICE, MIB) as reader:
            async with asyncio.timeout(HANG_S):
                assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")


async def test_a_single_body_may_have_any_size_that_is_allowed() -> None:
    small = {**KEYS, "max_body_bytes": 4 * MIB, "max_held_bytes_per_key": MIB, "max_held_bytes": MIB}
    async with world(environment(), **small, **TASKS) as here:
        large = b" " * 3 * MIB + b'{"split": "train"}'
        assert (await here.http.post("/num_tasks", content=large, headers=_headers(ALICE))).json() == {"num_tasks": 1}
        assert held(here) == 0


async def test_creates_that_wait_for_the_name_of_their_environment_are_bounded_in_size_and_sum() -> None:
    async with world(*TWO, **SMALL, **TASKS) as here:
        late = {"split": "train", "index": 0}
        large = {**late, "secrets": {"a": "x" * KEPT_MAX_BYTES}}
        refused = await here.http.post("/create", json=large, headers=_headers(ALICE))
        some = {**late, "secrets": {"a": "x" * (KEPT_MAX_BYTES - 4096)}}
        statuses = []
        for number in range(40):
            answer = await here.http.post("/create", json=some, headers=_headers(ALICE, f"s{number}"))
            statuses.append(answer.status_code)
        other = await here.http.post("/create", json=some, headers=_headers(BOB))
        kept = held(here)
        for number in range(40):
            await here.http.post("/delete", headers=_headers(ALICE, f"s{number}"))
        await here.http.post("/delete", headers=_headers(BOB))

        assert refused.status_code == 413
        assert "env_name" in refused.json()["detail"]
        assert (statuses[0], statuses[-1], answer.json()["code"]) == (200, 429, "too_many_bytes")
        assert statuses == sorted(statuses)
        assert (MIB / 2 < kept <= 2 * MIB, other.status_code) == (True, 200)
        assert held(here) == 0


async def test_a_bound_create_no_longer_counts() -> None:
    async with world(*TWO, **SMALL, **TASKS) as here:
        late = {"split": "train", "index": 0, "secrets": {"a": "x" * 32_000}}
        await here.http.post("/create", json=late, headers=_headers(ALICE))
        before = held(here)
        await here.http.get("/coding/prompt", headers=_headers(ALICE))

        assert before > 32_000
        assert held(here) == 0


async def test_openings_in_the_queue_count_until_they_are_answered() -> None:
    one = environment(slots=1, max_workers=1)
    async with world(one, **SMALL, **TASKS) as here:
        assert (await here.http.post("/create", json=_inline(), headers=_headers(ALICE, "first"))).status_code == 200
        large = _inline(secrets={"a": "x" * 400_000})
        waiting = [here.http.post("/create", json=large, headers=_headers(ALICE, f"w{n}")) for n in range(2)]
        async with under_way(*waiting) as openings:
            await here.gateway.eventually_waiting(2)
            answer = await here.http.post("/create", json=large, headers=_headers(ALICE, "w3"))
            for name in ("first", "w0", "w1"):
                await here.http.post("/delete", headers=_headers(ALICE, name))
            await asyncio.wait(openings, timeout=HANG_S)
        await eventually_held(here, 0, 0)

    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_bytes")


async def test_secrets_in_headers_count_too() -> None:
    one = environment(slots=1, max_workers=1)
    async with world(one, **SMALL, **TASKS) as here:
        assert (await here.http.post("/create", json=_inline(), headers=_headers(ALICE, "first"))).status_code == 200
        secret = {"X-Secrets": base64.b64encode(b'{"a":{"value":"%s"}}' % (b"x" * 45_000)).decode()}
        waiting = [
            here.http.post("/create", json=_inline(), headers=_headers(ALICE, f"w{n}") | secret) for n in range(17)
        ]
        async with under_way(*waiting) as openings:
            await here.gateway.eventually_waiting(17)
            answer = await here.http.post("/create", json=_inline(), headers=_headers(ALICE, "last") | secret)
            for opening in openings:
                opening.cancel()
        await eventually_held(here, 0, 0)

    assert (answer.status_code, answer.json()["code"]) == (429, "too_many_bytes")


async def test_frames_count_until_they_are_answered_and_a_socket_beyond_the_budget_is_closed() -> None:
    async with world(environment(), **SMALL, **TASKS) as here:
        async with here.client(under=f"/k/{ALICE}") as client, here.client(under=f"/k/{ALICE}") as other:
            await client.reset(index=0)
            assert held(here) == 0
            half = client.connection.protocol
            half.send_text(b"x" * 900_000, fin=False)  # a message whose end never comes
            client.connection.transport.writelines(half.data_to_send())
            await eventually_held(here, 800_000, MIB)

            await other.connection.send(json.dumps({"type": "reset", "data": {"index": 0, "note": "x" * 500_000}}))
            with pytest.raises(ConnectionClosed) as closed:
                await other.hear()
            client.vanish()
        await eventually_held(here, 0, 0)

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1013
    assert "hold" in closed.value.rcvd.reason


def _headers(key: str, sid: str = "one") -> dict[str, str]:
    return {"X-API-Key": key, "X-Session-ID": sid, "Content-Type": "application/json"}


def _inline(**more: Any) -> dict[str, Any]:
    return {"env_name": "math", "task_spec": {"question": "1+1"}, **more}
