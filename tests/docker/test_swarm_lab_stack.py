"""The stack of `deploy/swarm` on three machines: sessions on all of them, a machine that dies, an update under load."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import docker
import pytest

from tests.docker.chromium import browse
from tests.docker.swarm_balancer import Balancer
from tests.docker.swarm_lab import NODES, expect_namespaces, own_lab
from tests.docker.swarm_players import Players, playing
from tests.docker.swarm_stack import GATEWAY_IMAGE, SLOTS, STACK, SwarmStack, deployed
from tests.fakes.eventually import eventually, eventually_now, until

pytestmark = [
    pytest.mark.docker,
    pytest.mark.cluster,
    pytest.mark.needs("image:browser", "image:game", "image:gateway", "image:redis"),
]
pytest_plugins = ["tests.contract.backend_fixtures"]

SESSIONS = 30
UPDATED = ("gateway", "node")
ENDED = ("completed", "paused", "rollback_completed", "rollback_paused")
"""What Swarm says of an update that has ended."""
VICTIM = NODES[2]
"""A machine without a gateway and without the store."""


@pytest.fixture(scope="module")
def stack(docker_engine: docker.APIClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmStack]:
    expect_namespaces()
    folder: Path = tmp_path_factory.mktemp("stack")
    with own_lab() as lab:
        lab.run("up")
        with deployed(lab, folder) as stack:
            yield stack


@pytest.fixture
async def players(stack: SwarmStack) -> AsyncIterator[Players]:
    """Sessions that step, through a load balancer before both gateways."""
    async with Balancer(stack.gateways()).running() as balancer, playing(balancer.url, stack.trainer) as players:
        # The previous test may have replaced a gateway just now.
        await until(lambda: len(balancer.ready) == len(balancer.targets))
        await players.open(SESSIONS)
        await players.go_on()
        yield players

    def no_session() -> None:
        assert stack.admin("sessions") == []

    await asyncio.to_thread(eventually_now, no_session)


@pytest.fixture
def workers_end_afterwards(stack: SwarmStack) -> Iterator[None]:
    """Wait until all workers end: a machine that was away gets none while the workers of the others suffice."""
    yield

    def no_worker() -> None:
        assert [worker for node in NODES for worker in stack.workers_on(node)] == []

    eventually_now(no_worker)


async def test_sessions_spread_over_all_machines_in_hardened_workers_of_one_image(
    stack: SwarmStack, players: Players
) -> None:
    counts = {node: len(stack.workers_on(node)) for node in NODES}

    assert (players.broken(), players.lost) == ([], [])
    assert sum(counts.values()) >= SESSIONS // SLOTS
    # A failed start is repeated on another machine, so the counts may differ; unit/core/test_scaling.py has the rule.
    assert min(counts.values()) >= SESSIONS // SLOTS // len(NODES) - 1, counts
    assert len(stack.image_ids()) == 1
    for node in NODES:
        for worker in stack.workers_on(node):
            with stack.lab.engine(node) as engine:
                found = engine.inspect_container(worker["Id"])
            host = found["HostConfig"]
            assert found["Config"]["Labels"]["env-gateway.instance"] == STACK
            assert [mount["Source"] for mount in found["Mounts"] if f"/{STACK}_workers/_data/" in mount["Source"]]
            assert host["ReadonlyRootfs"] is True
            assert host["CapDrop"] == ["ALL"]
            assert host["NetworkMode"] == "none"
            assert "no-new-privileges" in " ".join(host["SecurityOpt"])
            assert host["PidsLimit"] > 0
            assert host["Memory"] > 0
    first, second = [await asyncio.to_thread(stack.episodes, gateway) for gateway in stack.gateways()]
    assert first == second, "each gateway shows what the gateways of all machines recorded"
    assert len(first) >= SESSIONS
    assert players.broken() == []


async def test_an_operator_drains_a_machine_in_the_dashboard(stack: SwarmStack, tmp_path: Path) -> None:
    host, port = stack.gateways()[0]
    found = await asyncio.to_thread(browse, f"http://{host}:{port}", stack.operator, tmp_path, {"drains": NODES[1]})

    assert found["problems"] == []
    assert found["states"] == ["live", "live, draining", "live"]
    assert [question.partition("?")[0] for question in found["questions"]] == [
        f"Drain {NODES[1]}",
        f"Give workers and sessions to {NODES[1]} again",
    ]


@pytest.mark.usefixtures("workers_end_afterwards")
async def test_a_machine_that_dies_loses_its_own_sessions_only(stack: SwarmStack, players: Players) -> None:
    doomed = len(stack.workers_on(VICTIM)) * SLOTS
    assert doomed > 0
    try:
        await asyncio.to_thread(stack.lab.run, "kill", VICTIM)
        await until(lambda: len(players.lost) > 0)
        await players.go_on(steps=10)
        lost = len(players.lost)
        more = await players.open(lost)  # the other machines provide new capacity
        await players.go_on()

        assert players.broken() == []
        assert 0 < lost <= doomed
        assert {player.failure for player in players.lost if "worker_lost" not in player.failure} == set()
        assert [player.failure for player in more if player.failure] == []
        assert len(players.alive) == SESSIONS
        assert (await asyncio.to_thread(stack.node_states))[VICTIM] == "lost"
    finally:
        await asyncio.to_thread(stack.lab.run, "start", VICTIM)
        await asyncio.to_thread(stack.await_ready)


async def test_an_update_by_the_readme_fails_no_step(stack: SwarmStack, players: Players) -> None:
    """`docker stack deploy` with a new tag replaces gateways and nodes concurrently."""
    before = {service: await asyncio.to_thread(tasks_of, stack, service) for service in UPDATED}
    newer = f"{GATEWAY_IMAGE.rpartition(':')[0]}:newer"
    for node in NODES:
        await asyncio.to_thread(stack.lab.on, node, "tag", GATEWAY_IMAGE, newer)

    await asyncio.to_thread(stack.deploy, GATEWAY_IMAGE=newer)
    for service in UPDATED:
        await updated(stack, service)
    await players.go_on()

    for service in UPDATED:
        assert not before[service] & await asyncio.to_thread(tasks_of, stack, service), service
    assert (players.broken(), [player.failure for player in players.lost]) == ([], [])
    assert len(players.alive) == SESSIONS


async def updated(stack: SwarmStack, service: str) -> None:
    """Wait for the end of the service's update. Of an update that rolled back, the failure shows tasks and logs."""

    seen: list[str] = []

    async def ended() -> str:
        state = await asyncio.to_thread(stack.update_state, service)
        if state not in seen:
            seen.append(state)
        assert state.startswith(ENDED), state
        return state

    state = await eventually(ended)
    assert state.startswith("completed"), await asyncio.to_thread(stack.describe, "; ".join(seen), service)


def tasks_of(stack: SwarmStack, service: str) -> set[str]:
    """Return the service's running tasks."""
    listed = stack.lab.on(NODES[0], "service", "ps", "--quiet", "--filter=desired-state=running", f"{STACK}_{service}")
    return set(listed.split())
