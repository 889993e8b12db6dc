"""The backend seam: one suite, run on containers and on local processes."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.backends.folders import SOCKET_NAME
from gateway.core.environment import CustomTasks, Environment
from gateway.core.errors import BackendError, NotLeading, StartFailed
from gateway.core.ids import WorkerId
from gateway.core.leader_lease import LEASE_S, Lead, LeaderLease
from gateway.core.session import CloseReason
from gateway.core.worker import Death
from tests.contract.backend_world import (
    World,
    answers,
    eventually,
    healthy,
    new_id,
    run_inside,
    socket_of,
    worker_of,
)
from tests.deadlines import HANG_S

pytest_plugins = ["tests.contract.backend_fixtures"]


async def started(world: World) -> tuple[WorkerId, str]:
    worker = worker_of(world.environment)
    return worker.id, await world.backend.start(worker, world.environment)


async def found_running(world: World, expected: dict[WorkerId, bool]) -> None:
    """Wait until the backend finds *expected*: the engine's list is a few milliseconds behind its events."""

    async def as_expected() -> bool:
        return {entry.id: entry.running for entry in await world.backend.found()} == expected

    await eventually(as_expected)


async def test_a_started_worker_answers_at_its_address(world: World) -> None:
    _, address = await started(world)

    assert await healthy(address) == {"status": "ok"}


async def test_a_worker_gets_its_number_of_slots_and_the_setting_to_end_no_session_itself(world: World) -> None:
    _, address = await started(world)
    await healthy(address)

    told = await run_inside(address, "import os; print(os.environ['ENVSERVER_SLOTS'], os.environ['ENVSERVER_IDLE_S'])")

    assert told.split() == ["16", "0"]


async def test_an_environments_variables_reach_its_worker_but_cannot_replace_the_gateways(world: World) -> None:
    environment = world.variant(variables={"COLOUR": "green", "ENVSERVER_SLOTS": "999"})
    address = await world.backend.start(worker_of(environment), environment)
    await healthy(address)

    told = await run_inside(address, "import os; print(os.environ['COLOUR'], os.environ['ENVSERVER_SLOTS'])")

    assert told.split() == ["green", "16"]


IMPORT = """
import importlib, os, sys
sys.path.append(os.environ.get("ENVSERVER_CUSTOM_TASKS_DIR", "/opt/openenv"))
print(importlib.import_module(os.environ["OPENENV_TASK_MODULE"]).ANSWER)
"""


def with_tasks(world: World, source: str) -> Environment:
    """Return the environment with a task module, ``custom_tasks.mine``, of this *source*."""
    folder = world.tasks_dir / "fake"
    folder.mkdir(mode=0o755)
    (folder / "mine.py").write_text(source)
    return world.variant(custom_tasks=CustomTasks(module="custom_tasks.mine", folder="fake", content="some"))


async def test_an_operators_task_modules_can_be_imported_in_a_worker(world: World) -> None:
    environment = with_tasks(world, "ANSWER = 42")
    address = await world.backend.start(worker_of(environment), environment)
    await healthy(address)

    assert await run_inside(address, IMPORT) == "42\n"
    assert os.listdir(world.tasks_dir / "fake") == ["mine.py"]  # the worker wrote nothing here


async def test_without_task_modules_a_worker_has_no_variables_of_them(world: World) -> None:
    _, address = await started(world)
    await healthy(address)

    told = await run_inside(address, "import os; print([name for name in os.environ if 'TASK' in name])")

    assert told == "[]\n"


async def test_a_worker_whose_task_modules_disappeared_does_not_start_and_leaves_nothing(world: World) -> None:
    environment = with_tasks(world, "")
    shutil.rmtree(world.tasks_dir / "fake")

    with pytest.raises(StartFailed, match="custom tasks"):
        await world.backend.start(worker_of(environment), environment)

    assert world.leftovers() == []


async def test_removing_a_worker_keeps_its_task_modules(world: World) -> None:
    environment = with_tasks(world, "ANSWER = 42")
    worker = worker_of(environment)
    await healthy(await world.backend.start(worker, environment))

    await world.backend.stop(worker.id)

    assert world.leftovers() == []
    assert (world.tasks_dir / "fake" / "mine.py").read_text() == "ANSWER = 42"


async def test_no_variable_of_the_gateway_reaches_a_worker(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_SECRET", "gateway-secret-0123")
    _, address = await started(world)
    await healthy(address)

    seen = await run_inside(address, "import os; print(dict(os.environ))")

    assert "gateway-secret-0123" not in seen
    assert "GATEWAY_" not in seen


async def test_the_log_of_a_worker_ends_with_its_last_lines(world: World) -> None:
    id, address = await started(world)
    await healthy(address)

    async def logged() -> str:
        text = await world.backend.logs(id)
        return text if "request GET /health" in text else ""

    text = await eventually(logged)

    assert text.splitlines()[0] == "the worker starts"
    assert (await world.backend.logs(id, lines=1)).count("\n") == 1


async def test_stopping_leaves_neither_worker_nor_folder_nor_log(world: World) -> None:
    id, address = await started(world)
    await healthy(address)

    await world.backend.stop(id)

    assert world.leftovers() == []
    assert await world.backend.found() == []
    assert await world.backend.logs(id) == ""


async def test_a_worker_that_ignores_sigterm_is_killed(world: World) -> None:
    environment = world.misbehaving("stubborn")
    worker = worker_of(environment)
    await healthy(await world.backend.start(worker, environment))

    await world.backend.stop(worker.id)

    assert world.leftovers() == []


@pytest.mark.parametrize("id", ["never-started", "../escape", "", "a/b"])
async def test_stopping_an_unknown_worker_is_no_error(world: World, id: str) -> None:
    await world.backend.stop(WorkerId(id))

    assert world.leftovers() == []


async def test_stopping_twice_concurrently_is_no_error(world: World) -> None:
    id, _ = await started(world)

    await asyncio.gather(world.backend.stop(id), world.backend.stop(id))

    assert world.leftovers() == []


async def test_a_worker_that_dies_immediately_is_reported_with_its_last_log_lines(world: World) -> None:
    environment = world.misbehaving("die")
    worker = worker_of(environment)
    deaths = world.backend.deaths()

    try:
        await world.backend.start(worker, environment)
    except StartFailed as error:
        last_words, left = str(error), False
    else:
        last_words, left = await world.backend.logs(worker.id), True

    async with asyncio.timeout(HANG_S):
        assert (await anext(deaths)).id == worker.id
    assert "the worker cannot go on" in (last_words or await world.backend.logs(worker.id))
    await found_running(world, {worker.id: False} if left else {})


async def test_a_killed_worker_is_among_the_deaths(world: World) -> None:
    deaths = world.backend.deaths()
    (id, address), (other, other_address) = await started(world), await started(world)
    await healthy(address)
    await healthy(other_address)

    await world.kill(id, address)

    async with asyncio.timeout(HANG_S):
        death = await anext(deaths)
    assert (death.id, death.reason) == (id, CloseReason.WORKER_LOST)
    assert "SIGKILL" in death.detail or "137" in death.detail
    await found_running(world, {id: False, other: True})


async def test_every_follower_is_notified_of_a_death(world: World) -> None:
    followers = [world.backend.deaths() for _ in range(3)]
    id, address = await started(world)
    await healthy(address)

    await world.kill(id, address)

    async with asyncio.timeout(HANG_S):
        assert [(await anext(follower)).id for follower in followers] == [id, id, id]


async def test_following_deaths_ends_when_the_backend_closes(world: World) -> None:
    deaths = world.backend.deaths()
    following = asyncio.create_task(_drained(deaths))
    await asyncio.sleep(0)

    await world.backend.aclose()

    async with asyncio.timeout(HANG_S):
        assert await following == []


async def _drained(deaths: AsyncIterator[Death]) -> list[WorkerId]:
    return [death.id async for death in deaths]


async def test_found_lists_the_started_workers_and_none_of_another_gateway(world: World) -> None:
    other = world.another()
    id, address = await started(world)
    foreign = worker_of(world.environment)
    await other.start(foreign, world.environment)

    (found,) = await world.backend.found()

    assert (found.id, found.environment, found.digest, found.address, found.running) == (
        id,
        world.environment.name,
        world.environment.digest(),
        address,
        True,
    )


async def test_one_gateway_cannot_stop_the_workers_of_another(world: World) -> None:
    other = world.another()
    foreign = worker_of(world.environment)
    await healthy(await other.start(foreign, world.environment))

    await world.backend.stop(foreign.id)

    assert [entry.running for entry in await other.found()] == [True]


async def test_a_paused_worker_does_not_answer_until_it_is_resumed_and_counts_as_running(world: World) -> None:
    id, address = await started(world)
    await healthy(address)

    await world.backend.pause(id)
    answered = await answers(address)
    found = {entry.id: entry.running for entry in await world.backend.found()}
    await world.backend.resume(id)

    assert (answered, found) == (False, {id: True})
    assert await healthy(address) == {"status": "ok"}


async def test_pausing_a_paused_worker_and_resuming_a_running_one_are_no_errors(world: World) -> None:
    id, address = await started(world)
    await healthy(address)

    await world.backend.resume(id)
    await world.backend.pause(id)
    await world.backend.pause(id)

    assert not await answers(address)
    await world.backend.resume(id)
    await world.backend.resume(id)
    assert await healthy(address) == {"status": "ok"}


async def test_a_paused_worker_is_stopped_like_any_other(world: World) -> None:
    id, address = await started(world)
    await healthy(address)
    await world.backend.pause(id)

    await world.backend.stop(id)

    assert world.leftovers() == []


async def test_a_killed_paused_worker_is_among_the_deaths_and_cannot_be_resumed(world: World) -> None:
    deaths = world.backend.deaths()
    id, address = await started(world)
    await healthy(address)
    kill = await world.killing(id, address)
    await world.backend.pause(id)

    await kill()

    async with asyncio.timeout(HANG_S):
        assert (await anext(deaths)).id == id
    with pytest.raises(BackendError):
        await world.backend.resume(id)
    with pytest.raises(BackendError):
        await world.backend.pause(id)


@pytest.mark.parametrize("id", ["never-started", "", "../escape"])
async def test_an_unknown_worker_cannot_be_paused_or_resumed(world: World, id: str) -> None:
    with pytest.raises(BackendError, match="there is no worker"):
        await world.backend.pause(WorkerId(id))
    with pytest.raises(BackendError, match="there is no worker"):
        await world.backend.resume(WorkerId(id))


@pytest.mark.parametrize("after_s", [0, 0.002, 0.01, 0.03, 0.1])
async def test_a_worker_whose_pause_is_cancelled_goes_on(world: World, after_s: float) -> None:
    id, address = await started(world)
    await healthy(address)

    pausing = asyncio.create_task(world.backend.pause(id))
    await asyncio.wait({pausing}, timeout=after_s)  # the outcome is the same at any point of the pause
    if not pausing.cancel():
        await world.backend.resume(id)
    await asyncio.wait({pausing})

    assert await healthy(address) == {"status": "ok"}


async def test_prepare_returns_the_id_of_the_image_if_there_is_one(world: World) -> None:
    id = await world.backend.prepare(world.environment)

    assert id == world.image_id
    assert world.leftovers() == []


@pytest.mark.parametrize("after_s", [0, 0.002, 0.02, 0.05, 0.1, 0.2, 0.4])
async def test_a_cancelled_start_leaves_nothing(world: World, after_s: float) -> None:
    worker = worker_of(world.environment)
    starting = asyncio.create_task(world.backend.start(worker, world.environment))
    await asyncio.wait({starting}, timeout=after_s)  # the outcome is the same at any point of the start

    if not starting.cancel():
        await world.backend.stop(worker.id)
    await asyncio.wait({starting})

    assert world.leftovers() == []
    assert await world.backend.found() == []


async def test_a_start_that_is_cancelled_twice_leaves_nothing_once_the_backend_is_closed(world: World) -> None:
    starting = asyncio.create_task(world.backend.start(worker_of(world.environment), world.environment))
    await asyncio.wait({starting}, timeout=0.05)
    starting.cancel()
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})

    await world.backend.aclose()

    assert world.leftovers() == []


async def test_an_id_cannot_be_started_twice_and_the_first_worker_lives(world: World) -> None:
    worker = worker_of(world.environment)
    address = await world.backend.start(worker, world.environment)
    await healthy(address)

    with pytest.raises(StartFailed, match="there is a worker"):
        await world.backend.start(worker, world.environment)

    assert await healthy(address) == {"status": "ok"}


@pytest.mark.parametrize("id", ["../escape", "a/b", "", ".", "-rf", "x" * 65, "new\nline"])
async def test_an_id_that_is_not_a_path_segment_is_refused(world: World, id: str) -> None:
    with pytest.raises(StartFailed, match="cannot be a worker's id"):
        await world.backend.start(worker_of(world.environment, WorkerId(id)), world.environment)

    assert world.leftovers() == []


async def test_a_hostile_workers_files_are_removed_and_the_targets_of_its_links_are_not(
    world: World, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("still here")
    id, address = await started(world)
    await healthy(address)
    folder = socket_of(address).parent
    await run_inside(address, HOSTILE.format(folder="os.path.dirname(os.environ['ENVSERVER_SOCKET'])", victim=victim))
    assert (folder / SOCKET_NAME).is_symlink()

    await world.backend.stop(id)

    assert world.leftovers() == []
    assert (victim / "precious").read_text() == "still here"
    assert victim.stat().st_mode & 0o777 == 0o755


HOSTILE = """
import os
os.chdir({folder})
os.unlink("worker.sock")
os.symlink("{victim}/precious", "worker.sock")
os.symlink("{victim}", "folder")
for name in ("plain", "locked"):
    os.mkdir(name)
    open(name + "/file", "w").close()
os.symlink("{victim}", "locked/link")
os.chmod("locked", 0)
os.mkfifo("fifo")
for depth in range(1500):
    os.mkdir("deep")
    os.chdir("deep")
"""


async def test_a_worker_that_floods_its_log_stays_usable_and_its_log_stays_small(world: World) -> None:
    environment = world.misbehaving("flood")
    worker = worker_of(environment)
    address = await world.backend.start(worker, environment)

    assert await healthy(address) == {"status": "ok"}
    text = await world.backend.logs(worker.id, lines=5)
    await world.backend.stop(worker.id)

    # The flood, a request and the start write at the same time: any of their lines may be the last one.
    assert text.splitlines()[-1].strip("x") in ("", "request GET /health", "the worker starts")
    assert len(text) < 2**16
    assert world.leftovers() == []


async def test_an_id_of_full_length_can_be_reached(world: World) -> None:
    worker = worker_of(world.environment, WorkerId("x" * 64))

    address = await world.backend.start(worker, world.environment)

    assert await healthy(address) == {"status": "ok"}


async def test_the_check_passes_where_workers_can_be_started(world: World) -> None:
    await world.backend.check()

    assert world.leftovers() == []


async def test_the_check_fails_for_a_socket_folder_that_every_user_can_write_to(world: World) -> None:
    world.shared_dir.chmod(0o777)

    with pytest.raises(BackendError, match="chmod 0711"):
        await (world.check_folders or world.backend.check)()


async def test_a_start_for_a_leader_without_a_lease_is_refused_and_leaves_nothing(world: World) -> None:
    lease = LeaderLease(Lead(1))
    lease.renew(Lead(1), asked_at=time.monotonic() - LEASE_S - 0.1)

    with pytest.raises(NotLeading):
        await world.backend.start(worker_of(world.environment), world.environment, lease)

    assert await world.backend.found() == []
    assert world.leftovers() == []


async def test_a_worker_is_not_paused_for_a_leader_without_a_lease(world: World) -> None:
    lease = LeaderLease(Lead(1))
    lease.renew(Lead(1), asked_at=time.monotonic() - LEASE_S - 0.1)
    id, address = await started(world)

    with pytest.raises(NotLeading):
        await world.backend.pause(id, lease)

    assert await healthy(address) == {"status": "ok"}


async def test_a_closed_backend_starts_nothing(world: World) -> None:
    await world.backend.aclose()
    await world.backend.aclose()

    with pytest.raises(StartFailed):
        await world.backend.start(worker_of(world.environment, new_id()), world.environment)

    assert world.leftovers() == []
