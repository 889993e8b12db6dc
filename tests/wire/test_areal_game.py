"""A game over AReaL's API with observations as objects: an agent that reads only the object sees the board."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.areal_client import ArealClient
from tests.wire.catalog import EMBEDDED, edited, serving

pytestmark = pytest.mark.wire


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ArealClient]:
    catalog = edited(tmp_path, "game", lambda text: text.replace("[areal]\n", '[areal]\nobservation_type = "json"\n'))
    with serving(EMBEDDED, "game", GATEWAY_CATALOG_DIR=str(catalog)) as gateway:
        yield ArealClient(gateway.url)


async def test_a_step_with_an_object_as_observation_shows_the_board(client: ArealClient) -> None:
    episode = (await client.start("train-grid-1-01"))["episode_id"]

    observation = (await client.tool(episode, "act", message="[right]"))["observation"]
    await client.cancel(episode)

    assert observation["type"] == "json"
    assert observation["content"]["turn"] == 1
    assert "#..@.\n..#..\n.#...\n..G..\n" in observation["content"]["text"]
