"""Two replicas before one OpenEnv server that somebody else runs: ``gateway serve --static`` with Redis.

An episode's socket is held by the replica that opened it; a load balancer sends requests to either.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.fakes.eventually import eventually_now
from tests.wire.gateways import TRAINER_KEYS, Gateway, short_folder
from tests.wire.openenv.clients import NEWEST
from tests.wire.openenv.upstream_worlds import FIRST_WITH, LAST_WITHOUT, OLDEST, image
from tests.wire.stack import Redis

pytestmark = pytest.mark.redis
SURVIVES = {NEWEST: True, FIRST_WITH: True, LAST_WITHOUT: False, OLDEST: False}
"""Whether an episode outlives its socket."""


@dataclass(frozen=True)
class Pair:
    """Two replicas, A and B."""

    a: Gateway
    b: Gateway

    def post(self, gateway: Gateway, path: str, body: Any = None, *, sid: str = "one") -> httpx.Response:
        headers = {"X-Session-ID": sid, "X-API-Key": TRAINER_KEYS["alice"], "Accept": "application/json"}
        with httpx.Client(base_url=gateway.url, headers=headers, trust_env=False, timeout=60) as http:
            return http.post(path, json=body) if body is not None else http.post(path)

    def create(self, gateway: Gateway, *, sid: str = "one", index: int = 0) -> httpx.Response:
        return self.post(gateway, "/create", {"env_name": "counted", "split": "train", "index": index}, sid=sid)

    def step(self, gateway: Gateway, *, sid: str = "one", op: str = "inc") -> httpx.Response:
        return self.post(gateway, "/counted/call", {"name": "step", "input": {"op": op}}, sid=sid)


@contextlib.contextmanager
def pair(version: str, *, capacity: int = 1) -> Iterator[Pair]:
    with contextlib.ExitStack() as undo:
        folder = short_folder()
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        redis = Redis(folder)
        undo.callback(redis.stop)
        redis.start()
        server = undo.enter_context(image(version=version, capacity=capacity))
        shared = {
            "GATEWAY_STORE": redis.url,
            "GATEWAY_STATIC": "counted=http://" + server.address.removeprefix("tcp:"),
            "GATEWAY_ENVIRONMENTS": "",
            "GATEWAY_DEFAULT_ENVIRONMENT": "counted",
            "GATEWAY_STATE_DIR": str(folder / "state"),
        }
        gateways = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            gateway = Gateway(folder / name, shared)
            undo.callback(gateway.stop)
            gateway.start()
            gateways.append(gateway)
        yield Pair(*gateways)


def output(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    said: dict[str, Any] = response.json()
    assert said["ok"] is True, said
    outcome: dict[str, Any] = said["output"]
    return outcome


@pytest.mark.parametrize("version", list(SURVIVES))
def test_an_episode_is_played_through_either_replica(version: str) -> None:
    with pair(version) as replicas:
        a, b = replicas.a, replicas.b
        assert replicas.create(a).status_code == 200

        seen = [output(replicas.step(gateway)) for gateway in (a, b, b)]
        prompts = [
            httpx.get(
                f"{gateway.url}/counted/prompt",
                headers={"X-Session-ID": "one", "X-API-Key": TRAINER_KEYS["alice"]},
                trust_env=False,
            ).json()
            for gateway in (a, b)
        ]
        deleted = replicas.post(b, "/delete")
        again = replicas.create(b, sid="two")  # the server has room for one

        assert [one["data"]["value"] for one in seen] == [1, 2, 3]
        assert [one["reward"] for one in seen] == [0.0, 0.0, 1.0]
        assert prompts[0] == prompts[1]
        assert (deleted.status_code, again.status_code) == (200, 200)


@pytest.mark.parametrize("version", list(SURVIVES))
def test_what_the_death_of_the_replica_costs_that_holds_an_episode(version: str) -> None:
    with pair(version) as replicas:
        a, b = replicas.a, replicas.b
        assert replicas.create(a, index=2).status_code == 200
        assert output(replicas.step(a))["data"]["value"] == 1
        assert output(replicas.step(b))["data"]["value"] == 2

        a.kill()
        after = replicas.step(b)

        if SURVIVES[version]:
            assert output(after)["data"]["value"] == 3
            assert output(replicas.step(b))["data"]["value"] == 4
            assert replicas.post(b, "/delete").status_code == 200
        else:
            assert after.status_code == 410
            assert "worker_lost" in after.text

        def room() -> None:
            assert replicas.create(b, sid="two").status_code == 200

        eventually_now(room)
        assert output(replicas.step(b, sid="two"))["data"]["value"] == 1


def test_a_replica_that_stops_in_good_order_leaves_its_episodes_to_the_other() -> None:
    with pair(NEWEST) as replicas:
        a, b = replicas.a, replicas.b
        assert replicas.create(a, index=2).status_code == 200
        assert output(replicas.step(a))["data"]["value"] == 1

        assert a.stop() == 0

        assert output(replicas.step(b))["data"]["value"] == 2
        assert replicas.post(b, "/delete").status_code == 200
