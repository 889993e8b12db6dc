"""Groups: members of one sample that start concurrently have the same state, share nothing, and leave nothing."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.fakes.eventually import eventually
from tests.wire import os_containers
from tests.wire.areal_client import ArealClient
from tests.wire.catalog import STACK
from tests.wire.gateways import Gateway
from tests.wire.os_catalog import counting, serving_os
from tests.wire.os_episodes import TREE, Play, tasks_of

pytestmark = [pytest.mark.wire, pytest.mark.docker, pytest.mark.redis, pytest.mark.needs("image:os")]

MEMBERS = 8
SLOTS = 16
"""The slots of one worker, as in environment.toml."""
CONTENTS = "find /etc /home /opt /root /srv /var -xdev -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum"
RANDOM = {"init": ["mkdir /srv/data; for i in 1 2 3; do echo $RANDOM > /srv/data/$RANDOM; done"]}
CHANCE = {"init": ["mkdir /srv/data; for i in 1 2 3; do od -An -tx8 -N8 /dev/urandom > /srv/data/$i; done"]}
LIVE = {
    "init": [
        "mkdir /srv/data; touch -d 2020-01-01 /srv/data/{a,b,c} /srv/data; cp /usr/bin/sleep /usr/bin/lamp",
        "lamp 3600 &",
    ],
    "live_init": True,
}
OWN = ("train-001-count-suffix-00000", "train-001-owner-files-00000", "train-001-archive-count-00000")
PREPARED = (*OWN, "random", "chance")
CLOCKED = ("train-001-archive-count-00000",)
"""Samples whose files hold the time at which a worker prepared them: an archive has the times of its members."""


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    tasks = [task for task in tasks_of("train") if task["id"] in OWN]
    tasks += [counting("random", **RANDOM), counting("random-too", **RANDOM), counting("chance", **CHANCE)]
    with serving_os(STACK, tasks=[*tasks, counting("live", **LIVE)]) as gateway:
        yield gateway


@contextlib.asynccontextmanager
async def group(gateway: Gateway, *samples: str) -> AsyncIterator[list[Play]]:
    """Start *samples* concurrently. At the end, cancel all episodes and assert that nothing is left of them."""
    client = ArealClient(gateway.url)
    plays = [Play(client, started) for started in await asyncio.gather(*(client.start(sample) for sample in samples))]
    try:
        yield plays
    finally:
        await asyncio.gather(*(play.cancel() for play in plays))
    await eventually(lambda: os_containers.nothing_is_left(gateway))


async def ran(plays: list[Play], script: str) -> list[str]:
    return await asyncio.gather(*(play.run(script) for play in plays))


@pytest.mark.parametrize("sample", PREPARED)
async def test_the_members_of_a_group_start_in_the_same_state_and_share_nothing(gateway: Gateway, sample: str) -> None:
    async with group(gateway, *[sample] * MEMBERS) as plays:
        first = await ran(plays, f"{TREE}; {CONTENTS}")
        workers = {session["name"]: session["worker"] for session in await gateway.sessions()}
        await asyncio.gather(
            *(play.run(f"echo {play.id} | tee /root/mine /srv/mine /tmp/mine /dev/shm/mine") for play in plays)
        )
        kept = await ran(
            plays, "sort -u /root/mine /srv/mine /tmp/mine /dev/shm/mine; ls /root /tmp /dev/shm | grep -c mine"
        )

    assert len({play.id for play in plays}) == MEMBERS
    assert len({play.prompt for play in plays}) == 1
    kinds = {(workers[play.id] if sample in CLOCKED else "", state) for play, state in zip(plays, first, strict=True)}
    assert len(kinds) == len({worker for worker, _ in kinds})
    assert kept == [f"{play.id}\n3" for play in plays]


async def test_the_members_of_a_group_whose_init_starts_processes_have_the_same_files_and_processes(
    gateway: Gateway,
) -> None:
    async with group(gateway, *["live"] * MEMBERS) as plays:
        first = await ran(plays, f"{CONTENTS}; ls -l --full-time /srv/data; pgrep -c lamp")
        await plays[0].run("pkill lamp")
        after = await ran(plays, "ps -C lamp -o stat= | grep -vc Z")

    assert Counter(first).most_common() == [(first[0], MEMBERS)]
    assert first[0].endswith("\n1")
    assert after == ["0", *["1"] * (MEMBERS - 1)]


async def test_five_concurrent_groups_use_no_more_workers_than_they_need(gateway: Gateway) -> None:
    samples = [sample for sample in PREPARED for _ in range(MEMBERS)]

    async with group(gateway, *samples) as plays:
        held = Counter(session["worker"] for session in await gateway.sessions())
        first = await ran(plays, "ls -R /srv /home /opt | sha256sum")
        beginnings = {
            sample: {first[place] for place, name in enumerate(samples) if name == sample} for sample in PREPARED
        }

    assert sum(held.values()) == len(samples)
    assert len(held) <= -(-len(samples) // SLOTS)
    assert max(held.values()) <= SLOTS
    assert [sample for sample, found in beginnings.items() if len(found) != 1] == []


async def test_two_random_samples_start_in_different_states_and_each_in_the_same_state_again(gateway: Gateway) -> None:
    async with group(gateway, "random", "random-too") as plays:
        first = await ran(plays, "grep -r . /srv/data | sort")
    async with group(gateway, "random", "random-too") as plays:
        again = await ran(plays, "grep -r . /srv/data | sort")

    assert first[0] != first[1]
    assert again == first
