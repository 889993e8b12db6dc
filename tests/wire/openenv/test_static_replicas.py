"""Two replicas in front of third-party OpenEnv servers: ``gateway serve --static`` with Redis.

The replica that opened an episode holds its socket. A load balancer sends requests to either replica.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.wire.any.places import Pair
from tests.wire.gateways import TRAINER_KEYS, Gateway
from tests.wire.openenv.clients import NEWEST
from tests.wire.openenv.upstream_worlds import OLDEST, image
from tests.wire.targets import token

pytestmark = [pytest.mark.wire, pytest.mark.redis]

RELEASES = {"newest": NEWEST, "oldest": OLDEST}
"""The release of each environment's server. Episodes of the newest outlive their sockets, those of the oldest do not.
"""


@dataclass(frozen=True)
class Episode:
    """An episode for one test, in a server that has room for one session."""

    pair: Pair
    environment: str
    sid: str = field(default_factory=token)

    def post(self, gateway: Gateway, path: str, body: Any = None) -> httpx.Response:
        with self._client(gateway) as http:
            return http.post(path, json=body) if body is not None else http.post(path)

    def create(self, gateway: Gateway, *, index: int = 0) -> None:
        body = {"env_name": self.environment, "split": "train", "index": index}
        response = self.post(gateway, "/create", body)
        assert response.status_code == 200, response.text

    def call(self, gateway: Gateway) -> httpx.Response:
        """Increase the counter by one."""
        return self.post(gateway, f"/{self.environment}/call", {"name": "step", "input": {"op": "inc"}})

    def step(self, gateway: Gateway) -> dict[str, Any]:
        response = self.call(gateway)
        assert response.status_code == 200, response.text
        said: dict[str, Any] = response.json()
        assert said["ok"] is True, said
        output: dict[str, Any] = said["output"]
        return output

    def prompt(self, gateway: Gateway) -> Any:
        with self._client(gateway) as http:
            return http.get(f"/{self.environment}/prompt").json()

    def delete(self, gateway: Gateway) -> int:
        return self.post(gateway, "/delete").status_code

    def _client(self, gateway: Gateway) -> httpx.Client:
        headers = {"X-Session-ID": self.sid, "X-API-Key": TRAINER_KEYS["alice"], "Accept": "application/json"}
        return httpx.Client(base_url=gateway.url, headers=headers, verify=False, trust_env=False, timeout=HANG_S)


@pytest.fixture(scope="module")
def started() -> Iterator[Pair]:
    """One pair of replicas for all tests, in front of one server of each release."""
    with contextlib.ExitStack() as undo:
        servers = {
            name: undo.enter_context(image(version=version, capacity=1)).url for name, version in RELEASES.items()
        }
        pair = undo.enter_context(contextlib.closing(Pair(servers)))
        yield pair


@pytest.fixture
def pair(started: Pair) -> Pair:
    """The pair of replicas, both running."""
    started.revive()
    return started


@pytest.mark.parametrize("environment", list(RELEASES))
def test_an_episode_is_played_through_either_replica(pair: Pair, environment: str) -> None:
    episode, following = Episode(pair, environment), Episode(pair, environment)
    episode.create(pair.a)

    seen = [episode.step(gateway) for gateway in (pair.a, pair.b, pair.b)]
    prompts = [episode.prompt(gateway) for gateway in (pair.a, pair.b)]
    deleted = episode.delete(pair.b)
    following.create(pair.b)  # the server has room for one session

    assert following.delete(pair.a) == 200
    assert [one["data"]["value"] for one in seen] == [1, 2, 3]
    assert [one["reward"] for one in seen] == [0.0, 0.0, 1.0]
    assert prompts[0] == prompts[1]
    assert deleted == 200


def test_the_death_of_a_replica_ends_only_those_of_its_episodes_that_need_their_socket(pair: Pair) -> None:
    newest, oldest = (Episode(pair, environment) for environment in RELEASES)
    for episode in (newest, oldest):
        episode.create(pair.a, index=2)
        assert episode.step(pair.a)["data"]["value"] == 1
        assert episode.step(pair.b)["data"]["value"] == 2

    pair.a.kill()

    assert newest.step(pair.b)["data"]["value"] == 3
    assert newest.step(pair.b)["data"]["value"] == 4
    assert newest.delete(pair.b) == 200
    lost = oldest.call(pair.b)
    assert lost.status_code == 410
    assert "worker_lost" in lost.text
    for environment in RELEASES:
        following = Episode(pair, environment)
        eventually_now(partial(following.create, pair.b))
        assert following.step(pair.b)["data"]["value"] == 1
        assert following.delete(pair.b) == 200


def test_a_replica_that_stops_gracefully_leaves_its_episodes_to_the_other_replica(pair: Pair) -> None:
    episode = Episode(pair, "newest")
    episode.create(pair.a, index=2)
    assert episode.step(pair.a)["data"]["value"] == 1

    assert pair.a.stop() == 0

    assert episode.step(pair.b)["data"]["value"] == 2
    assert episode.delete(pair.b) == 200
