"""Groups of a curriculum's draws: the openings of a group start together, or wait together."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.core.environment import Environment, SeedRule, ServerProtocol
from gateway.core.ids import EnvironmentName
from gateway.core.session import Group
from gateway.core.worker import EnvironmentLoad
from gateway.stores.memory.curricula import MemoryCurriculumStore
from gateway.tasks.curricula.model import Component, Curriculum, Sampler, SamplerKind
from gateway.tasks.resolver import session_setup
from gateway.tasks.task_ref import TaskRef, seed_of
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.service.foreign_world import image
from tests.service.stack import Replica, Stack, environment, running, stack, tasks
from tests.service.wire import delete

MATH = EnvironmentName("math")
TASKS = tasks(train=[{"id": f"t{n}", "question": f"question {n}"} for n in range(40)])


def offered(group_size: int, **more: Any) -> dict[str, Any]:
    """Return settings with a curriculum whose handles are for groups of *group_size*."""
    mine = Curriculum(
        name="mine",
        components=(Component(environment=MATH),),
        sampler=Sampler(kind=SamplerKind.UNIFORM),
        group_size=group_size,
    )
    return {"tasks_math": TASKS, "curricula": {"mine": mine}, **more}


async def create(client: httpx.AsyncClient, sid: str, handle: int) -> None:
    body = {"env_name": "math", "split": "train:mine", "index": handle}
    answer = await client.post("/create", json=body, headers={"X-Session-ID": sid}, timeout=HANG_S)
    assert answer.status_code == 200, answer.text


async def load_of(replica: Replica) -> EnvironmentLoad:
    return (await replica.store.load()).get(MATH, EnvironmentLoad())


async def begun(client: httpx.AsyncClient, sid: str, handle: int) -> asyncio.Task[None]:
    return asyncio.create_task(create(client, sid, handle))


@contextlib.asynccontextmanager
async def waits(replica: Replica, count: int) -> AsyncIterator[None]:
    """At the end of the block, wait until *count* openings wait."""

    async def check() -> None:
        assert (await load_of(replica)).waiting == count

    yield
    await eventually(check)


async def test_a_group_that_has_started_is_completed_before_another_group_starts() -> None:
    async with running(environment(slots=4, max_workers=1), **offered(3)) as (_, replica, client):
        await create(client, "a0", 0)
        async with waits(replica, 3):
            then = [await begun(client, f"b{n}", 1) for n in range(3)]
        await asyncio.gather(*(create(client, f"a{n}", 0) for n in (1, 2)))
        assert not any(task.done() for task in then), "one slot is free, and the group needs three"
        await delete(client, "a0")
        assert (await load_of(replica)).waiting == 3
        await delete(client, "a1")
        await asyncio.gather(*then)


async def test_workers_for_a_whole_group_start_when_its_first_member_opens() -> None:
    async with running(environment(slots=1, max_workers=8), **offered(4)) as (built, replica, client):
        first = await begun(client, "a0", 0)
        await first
        assert len(built.backend.workers) == 4
        assert (await load_of(replica)).to_come == 3
        await asyncio.gather(*(create(client, f"a{n}", 0) for n in (1, 2, 3)))
        assert len(built.backend.workers) == 4


async def test_a_group_larger_than_its_environment_takes_all_slots_of_the_environment() -> None:
    async with running(environment(slots=2, max_workers=1), **offered(8)) as (_, replica, client):
        await create(client, "a0", 0)
        await create(client, "a1", 0)
        async with waits(replica, 1):
            last = await begun(client, "a2", 0)
        await delete(client, "a0")
        await last


async def test_slots_for_absent_group_members_are_reserved_for_a_limited_time() -> None:
    async with running(environment(slots=3, max_workers=1, together_s=0.2), **offered(3)) as (_, replica, client):
        await create(client, "a0", 0)
        await asyncio.gather(*(create(client, f"b{n}", 1) for n in range(2)))
        assert (await load_of(replica)).workers[0].used == 3


async def test_group_members_start_separately_if_together_s_is_0() -> None:
    async with running(environment(slots=2, max_workers=2, together_s=0), **offered(4)) as (built, replica, client):
        await create(client, "a0", 0)
        assert len(built.backend.workers) == 1
        assert (await load_of(replica)).to_come == 0


async def test_a_group_spans_all_replicas() -> None:
    shared = {"curriculum_store": MemoryCurriculumStore()}
    async with stack(environment(slots=4, max_workers=1), **offered(4, **shared)) as built:
        other = built.another()
        async with (
            built.first.looping(),
            other.looping(),
            built.first.serving() as one,
            other.serving() as two,
        ):
            await create(one, "a0", 0)
            async with waits(other, 4):
                then = [await begun(client, f"b{n}", 1) for n, client in enumerate((one, two) * 2)]
            await asyncio.gather(*(create(client, f"a{n}", 0) for n, client in ((1, one), (2, two), (3, two))))
            for n in range(4):
                assert not any(task.done() for task in then)
                await delete(one, f"a{n}")
            await asyncio.gather(*then)


async def test_a_trainer_that_hangs_up_does_not_keep_its_group_waiting() -> None:
    async with running(environment(slots=2, max_workers=1), **offered(2)) as (_, replica, client):
        await create(client, "a0", 0)
        gone = await begun(client, "b0", 1)
        async with waits(replica, 1):
            pass
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await create(client, "a1", 0)
        async with waits(replica, 0):
            pass
        await delete(client, "a0")
        await delete(client, "a1")
        await asyncio.gather(create(client, "b1", 1), create(client, "b2", 1))


async def test_group_members_whose_worker_died_start_in_another_worker() -> None:
    async with running(environment(slots=4, max_workers=2), **offered(4)) as (built, replica, client):
        await create(client, "a0", 0)
        (worker,) = built.backend.workers
        built.backend.announce(worker)
        await asyncio.gather(*(create(client, f"a{n}", 0) for n in (1, 2, 3)))
        load = await load_of(replica)
        assert sum(entry.used for entry in load.workers) == 3
        assert load.to_come == 0


# -- groups that the trainer names ------------------------------------------------------------------------------------


def grouped(name: str, size: int | str) -> dict[str, str]:
    return {"X-Group-ID": name, "X-Group-Size": str(size)}


async def test_a_group_that_an_ors_trainer_names_starts_together() -> None:
    async with running(environment(slots=1, max_workers=8), **offered(1)) as (built, replica, client):

        async def opened(sid: str) -> None:
            body = {"env_name": "math", "split": "train", "index": 7}
            answer = await client.post("/create", json=body, headers={"X-Session-ID": sid, **grouped("g", 4)})
            assert answer.status_code == 200, answer.text

        await opened("a")
        load = await load_of(replica)
        assert (len(built.backend.workers), load.to_come) == (4, 3)
        await asyncio.gather(*(opened(sid) for sid in "bcd"))
        assert (await load_of(replica)).to_come == 0


async def test_a_group_that_an_areal_trainer_names_starts_together() -> None:
    async with running(environment(slots=1, max_workers=8), **offered(1)) as (built, replica, client):
        answer = await client.post("/areal/math/api/episode/start", json={"sample_id": "t3"}, headers=grouped("g", 4))
        assert answer.status_code == 200, answer.text
        assert (len(built.backend.workers), (await load_of(replica)).to_come) == (4, 3)


async def test_each_draw_of_a_sample_names_the_group_that_its_sessions_form() -> None:
    async with running(environment(slots=1, max_workers=8), **offered(1)) as (built, replica, client):
        wish = {"count": 2, "group_size": 3}
        drawn = (await client.post("/admin/v1/curriculum/mine/sample", json=wish)).json()

        async def opened(draw: dict[str, Any], member: int) -> None:
            headers = {"X-Session-ID": f"{draw['number']}-{member}", **grouped(draw["group"], drawn["group_size"])}
            body = {"env_name": "math", "split": draw["split"], "index": draw["index"]}
            answer = await client.post("/create", json=body, headers=headers, timeout=HANG_S)
            assert answer.status_code == 200, answer.text

        first, second = drawn["draws"]
        await opened(first, 0)
        await opened(second, 0)
        load = await load_of(replica)
        assert (len(built.backend.workers), load.to_come) == (6, 4)
        await asyncio.gather(*(opened(draw, member) for draw in (first, second) for member in (1, 2)))
        assert (await load_of(replica)).to_come == 0


# -- seeds -----------------------------------------------------------------------------------------------------------


def seeds(built: Stack) -> list[int | None]:
    """Return the seeds that workers received, in the order of the openings."""
    requests = [one for worker in built.backend.workers.values() for one in worker.requests]
    return [json.loads(one.body).get("seed") for one in requests if one.target == "/create"]


async def test_members_of_a_group_that_a_trainer_names_share_a_seed_and_groups_have_different_seeds() -> None:
    drawing = replace(environment(slots=8, max_workers=1), seed_rule=SeedRule.DRAWN)
    async with running(drawing, **offered(1)) as (built, _, client):

        async def opened(sid: str, group: Mapping[str, str], **more: Any) -> None:
            body = {"env_name": "math", "split": "train", "index": 7, **more}
            answer = await client.post("/create", json=body, headers={"X-Session-ID": sid, **group})
            assert answer.status_code == 200, answer.text

        for sid, name in (("a", "one"), ("b", "one"), ("c", "another")):
            await opened(sid, grouped(name, 1))
        await opened("d", grouped("one", 1), seed=5)
        await opened("e", {})

        first, second, other, given, alone = seeds(built)

    assert first is not None
    assert first == second != other
    assert other is not None
    assert given == 5
    assert alone not in (None, first, other)


async def test_sessions_of_one_handle_share_a_seed_over_ors_and_openenv() -> None:
    drawing = replace(environment(slots=8, max_workers=1), seed_rule=SeedRule.DRAWN)
    async with running(drawing, **offered(3)) as (built, _, client):
        await create(client, "a0", 0)
        await create(client, "a1", 0)
        reset = {"split": "train:mine", "index": 0}
        answers = [
            await client.post("/openenv/math/reset", json=reset),
            await client.post("/openenv/math/reset", json={"split": "train:mine", "index": 1}),
            await client.post("/openenv/math/reset", json={"split": "train:mine", "index": 1, "seed": 5}),
        ]
        assert {answer.status_code for answer in answers} == {200}

        first, second, third, other, given = seeds(built)

    assert first is not None
    assert first == second == third != other
    assert other is not None
    assert given == 5


@pytest.mark.parametrize(
    ("kind", "spec", "config", "seed"),
    [
        (environment(), {"seed": 1}, {"seed": 1}, seed_of("g")),
        (image(ServerProtocol.OPENENV), {}, None, seed_of("g")),
        (image(ServerProtocol.OPENENV), {"seed": 1}, None, 1),
        (image(ServerProtocol.OPENENV), {"environment_config": {"seed": 1}}, None, 1),
        (image(ServerProtocol.AREAL), {"config": {"seed": 1}}, None, 1),
        (image(ServerProtocol.AREAL), {}, {"seed": 1}, 1),
        (image(ServerProtocol.AREAL), {"config": "no object"}, {"other": 1}, seed_of("g")),
    ],
)
def test_a_groups_seed_replaces_no_seed_that_a_third_party_server_reads_from_task_or_configuration(
    kind: Environment, spec: dict[str, Any], config: dict[str, Any] | None, seed: int
) -> None:
    setup = session_setup(kind, TaskRef(spec=spec), config=config, group=Group("g", 4))

    assert setup.seed == seed


# -- headers that are wrong -------------------------------------------------------------------------------------------


async def test_a_start_with_wrong_headers_takes_no_place_in_the_group_of_its_handle() -> None:
    start = {"sample_id": "train:mine/0"}
    async with running(environment(), **offered(2)) as (_, replica, client):
        refused = await client.post("/areal/math/api/episode/start", json=start, headers={"X-Group-ID": "g"})
        answers = [await client.post("/areal/math/api/episode/start", json=start) for _ in range(2)]
        played = {session.task for session in await replica.store.sessions()}

    assert [answer.status_code for answer in (refused, *answers)] == [400, 200, 200]
    assert len(played) == 1, "both are members of one group"


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({"X-Group-ID": "g"}, "X-Group-Size"),
        ({"X-Group-Size": "3"}, "X-Group-ID"),
        (grouped("g" * 201, 3), "X-Group-ID"),
        (grouped("g", 0), "X-Group-Size"),
        (grouped("g", 4097), "X-Group-Size"),
        (grouped("g", "1" * 5000), "X-Group-Size"),
        (grouped("g", "-1"), "X-Group-Size"),
        (grouped("g", "3.0"), "X-Group-Size"),
    ],
)
async def test_an_invalid_group_is_refused_and_leaves_no_session(headers: dict[str, str], named: str) -> None:
    async with running(environment(), **offered(1)) as (_, replica, client):
        body = {"env_name": "math", "split": "train", "index": 7}
        answer = await client.post("/create", json=body, headers={"X-Session-ID": "s", **headers})
        assert answer.status_code == 400, answer.text
        assert named in answer.json()["detail"]
        started = await client.post("/areal/math/api/episode/start", json={"sample_id": "t3"}, headers=headers)
        assert started.status_code == 400, started.text
        assert named in started.text
        assert not await replica.store.sessions()
