"""The backend seam with third-party servers: one suite, on containers, local processes and static servers."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.core.environment import Environment
from gateway.core.errors import StartFailed, UpstreamGone, UpstreamTimeout
from gateway.core.ids import WorkerId
from gateway.core.ports.transport import Request
from gateway.core.session import CloseReason
from tests.contract.backend_foreign_world import ForeignWorld, ask, healthy, run_inside
from tests.contract.backend_world import eventually, new_id, worker_of
from tests.deadlines import HANG_S

pytest_plugins = ["tests.contract.backend_foreign_fixtures"]


async def started(world: ForeignWorld, environment: Environment | None = None) -> tuple[WorkerId, str]:
    environment = environment or world.environment
    worker = worker_of(environment)
    address = await world.backend.start(worker, environment)
    await healthy(address)
    return worker.id, address


async def test_a_server_without_the_gateways_conventions_answers_at_its_address(foreign_world: ForeignWorld) -> None:
    _, address = await started(foreign_world)

    assert await healthy(address) == {"status": "ok"}


async def test_two_third_party_workers_run_next_to_each_other_and_are_separate(run_world: ForeignWorld) -> None:
    (one, first), (two, second) = await started(run_world), await started(run_world)
    await run_inside(first, "import server; server.mark = 1")

    assert first != second
    assert {entry.address for entry in await run_world.backend.found()} == {first, second}
    marks = [await run_inside(address, "import server; print(hasattr(server, 'mark'))") for address in (first, second)]
    assert marks == ["True\n", "False\n"]
    await run_world.backend.stop(one)
    assert await healthy(second) == {"status": "ok"}
    assert [entry.id for entry in await run_world.backend.found()] == [two]


async def test_a_third_party_worker_gets_the_environments_variables_and_none_of_the_gateways(
    run_world: ForeignWorld,
) -> None:
    _, address = await started(run_world, run_world.variant(variables={"COLOUR": "green"}))

    told = json.loads(await run_inside(address, "import json, os; print(json.dumps(dict(os.environ)))"))

    assert told["COLOUR"] == "green"
    assert [name for name in told if name.startswith(("ENVSERVER_", "OPENENV_", "GATEWAY_"))] == []


async def test_a_third_party_worker_can_write_to_its_home_unless_a_variable_names_another(
    run_world: ForeignWorld,
) -> None:
    _, address = await started(run_world)
    _, other = await started(run_world, run_world.variant(variables={"HOME": "/elsewhere"}))

    write = "import os; p = os.path.expanduser('~/written'); open(p, 'w').write('it is'); print(open(p).read())"

    assert await run_inside(address, write) == "it is\n"
    assert await run_inside(other, "import os; print(os.path.expanduser('~'))") == "/elsewhere\n"


async def test_the_log_of_a_third_party_worker_can_be_read(run_world: ForeignWorld) -> None:
    id, _ = await started(run_world)

    async def logged() -> str:
        text = await run_world.backend.logs(id)
        return text if "request GET /health" in text else ""

    assert (await eventually(logged)).splitlines()[0] == "the worker starts"


async def test_the_log_of_a_static_server_is_empty(static_world: ForeignWorld) -> None:
    id, _ = await started(static_world)

    assert await static_world.backend.logs(id) == ""


async def test_stopping_leaves_nothing(foreign_world: ForeignWorld) -> None:
    id, _ = await started(foreign_world)

    await foreign_world.backend.stop(id)

    assert foreign_world.left() == []
    assert await foreign_world.backend.found() == []
    assert await foreign_world.backend.logs(id) == ""


async def test_stopping_twice_concurrently_or_an_unknown_worker_is_no_error(foreign_world: ForeignWorld) -> None:
    id, _ = await started(foreign_world)

    await asyncio.gather(foreign_world.backend.stop(id), foreign_world.backend.stop(id))
    await foreign_world.backend.stop(WorkerId("never-started"))

    assert foreign_world.left() == []


async def test_a_third_party_worker_that_ignores_sigterm_is_killed(run_world: ForeignWorld) -> None:
    id, _ = await started(run_world, run_world.variant(variables={"FAKE_WORKER": "stubborn"}))

    await run_world.backend.stop(id)

    assert run_world.left() == []


async def test_a_killed_third_party_worker_is_among_the_deaths(run_world: ForeignWorld) -> None:
    deaths = run_world.backend.deaths()
    (id, address), (other, _) = await started(run_world), await started(run_world)

    assert run_world.kill is not None
    await run_world.kill(id, address)

    async with asyncio.timeout(HANG_S):
        assert (await anext(deaths)).id == id

    async def seen() -> bool:
        return {one.id: one.running for one in await run_world.backend.found()} == {id: False, other: True}

    await eventually(seen)
    await run_world.backend.stop(id)
    assert [entry.id for entry in await run_world.backend.found()] == [other]


@pytest.mark.docker
async def test_a_third_party_worker_that_takes_too_much_memory_is_one_death_with_that_reason(
    foreign_docker_world: ForeignWorld,
) -> None:
    deaths = foreign_docker_world.backend.deaths()
    (id, address), (other, other_address) = await started(foreign_docker_world), await started(foreign_docker_world)

    eating = asyncio.create_task(run_inside(address, "x = bytearray(2**30); x[::4096] = b'x' * len(x[::4096])"))

    async with asyncio.timeout(HANG_S):
        death = await anext(deaths)
    await asyncio.wait({eating})
    assert (death.id, death.reason) == (id, CloseReason.OUT_OF_MEMORY)
    assert eating.exception() is not None
    await foreign_docker_world.backend.stop(id)  # which ends the forwarder
    assert foreign_docker_world.kill is not None
    await foreign_docker_world.kill(other, other_address)
    async with asyncio.timeout(HANG_S):
        death = await anext(deaths)
    assert (death.id, death.reason) == (other, CloseReason.WORKER_LOST)


async def test_a_third_party_worker_that_dies_immediately_is_reported_with_its_last_log_lines(
    run_world: ForeignWorld,
) -> None:
    environment = run_world.variant(variables={"FAKE_WORKER": "die"})
    worker = worker_of(environment)
    deaths = run_world.backend.deaths()

    try:
        await run_world.backend.start(worker, environment)
    except StartFailed as error:
        last_words = str(error)
        async with asyncio.timeout(HANG_S):
            assert (await anext(deaths)).id == worker.id
        assert run_world.left() == []
    else:
        async with asyncio.timeout(HANG_S):
            assert (await anext(deaths)).id == worker.id
        last_words = await run_world.backend.logs(worker.id)

    assert "the worker cannot go on" in last_words


async def test_a_paused_third_party_worker_does_not_answer_until_it_is_resumed(run_world: ForeignWorld) -> None:
    id, address = await started(run_world)

    await run_world.backend.pause(id)
    paused = [entry.running for entry in await run_world.backend.found()]
    with pytest.raises((UpstreamGone, UpstreamTimeout)):
        await ask(address, Request(b"GET", b"/health"), silence_s=0.5)
    await run_world.backend.resume(id)

    assert paused == [True]
    assert await healthy(address) == {"status": "ok"}
    await run_world.backend.pause(id)
    await run_world.backend.stop(id)
    assert run_world.left() == []


async def test_pausing_a_static_server_does_not_stop_it(
    static_world: ForeignWorld,
) -> None:
    id, address = await started(static_world)

    await static_world.backend.pause(id)

    assert await healthy(address) == {"status": "ok"}
    await static_world.backend.resume(id)


async def test_prepare_returns_the_id_of_the_image_if_there_is_one(foreign_world: ForeignWorld) -> None:
    id = await foreign_world.backend.prepare(foreign_world.environment)

    assert id == foreign_world.image_id


async def test_found_describes_the_started_worker(foreign_world: ForeignWorld) -> None:
    id, address = await started(foreign_world)

    (found,) = await foreign_world.backend.found()

    environment = foreign_world.environment
    assert (found.id, found.environment, found.digest) == (id, environment.name, environment.digest())
    assert (found.address, found.running) == (address, True)


@pytest.mark.parametrize("after_s", [0, 0.002, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.4])
async def test_a_cancelled_start_leaves_nothing(foreign_world: ForeignWorld, after_s: float) -> None:
    worker = worker_of(foreign_world.environment)
    starting = asyncio.create_task(foreign_world.backend.start(worker, foreign_world.environment))
    await asyncio.wait({starting}, timeout=after_s)  # the outcome is the same at any point of the start

    if not starting.cancel():
        await foreign_world.backend.stop(worker.id)
    await asyncio.wait({starting})

    assert foreign_world.left() == []
    assert await foreign_world.backend.found() == []


async def test_the_check_passes_where_third_party_workers_can_be_started(foreign_world: ForeignWorld) -> None:
    await foreign_world.backend.check()

    assert foreign_world.left() == []


async def test_following_deaths_ends_when_the_backend_closes(foreign_world: ForeignWorld) -> None:
    deaths = foreign_world.backend.deaths()

    async def followed() -> list[WorkerId]:
        return [death.id async for death in deaths]

    following = asyncio.create_task(followed())
    await asyncio.sleep(0)

    await foreign_world.backend.aclose()

    async with asyncio.timeout(HANG_S):
        assert await following == []


async def test_a_closed_backend_starts_nothing(foreign_world: ForeignWorld) -> None:
    await foreign_world.backend.aclose()
    await foreign_world.backend.aclose()

    with pytest.raises(StartFailed):
        await foreign_world.backend.start(worker_of(foreign_world.environment, new_id()), foreign_world.environment)

    assert foreign_world.left() == []
