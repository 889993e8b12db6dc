"""Stock OpenEnv clients play a curriculum: by its split, by a handle, or by the environment's default split."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.wire.gateways import OPERATOR_KEY, Gateway, short_folder
from tests.wire.openenv.clients import (
    FIRST_ASYNC,
    HERE,
    NEWEST,
    OLDEST,
    ClientError,
    Driver,
    DriverOf,
    OpenEnv,
    connected,
)
from tests.wire.openenv.servers import BOTH_GATEWAYS, EMBEDDED, Place, on, settings

pytestmark = pytest.mark.wire

GROUP = 3
TASKS = 20
DOCUMENT: dict[str, Any] = {"environment": "counting", "group_size": GROUP, "sampler": {"kind": "sequential"}}
"""Draws the tasks in order, so that a test knows which task a group must get."""

every_client = pytest.mark.parametrize(
    ("version", "kind", "mode"),
    [
        (NEWEST, "generic", "async"),
        (NEWEST, "generic", "sync"),
        (FIRST_ASYNC, "generic", "async"),
        (OLDEST, "typed", "direct"),
    ],
)


def target_of(number: int) -> int:
    """Return the number that a task of ``train`` counts to."""
    return number % 5 + 3


def target(result: dict[str, Any]) -> int:
    found: int = result["observation"]["target"]
    return found


@contextlib.asynccontextmanager
async def operating(url: str) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, verify=False, trust_env=False, timeout=HANG_S) as http:
        yield http


@pytest.fixture
async def operator(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    """A client for the operators' routes, with a curriculum that each test starts from its beginning."""
    async with operating(place.root) as http:
        defined = await http.put("/admin/v1/curriculum/mine", json=DOCUMENT)
        assert defined.status_code == 200, defined.text
        yield http
        assert (await http.delete("/admin/v1/curriculum/mine")).status_code == 204


@on(EMBEDDED)
@every_client
async def test_a_reset_names_the_split_or_the_handle(
    place: Place, operator: httpx.AsyncClient, driver_of: DriverOf, version: str, kind: str, mode: str
) -> None:
    async with connected(driver_of(version), place.url(), kind=kind, mode=mode) as client:
        group = [
            target(await client.reset(**wish))
            for wish in (
                {"split": "train:mine", "index": 3},
                {"task": "train:mine/3"},
                {"task": {"id": "train:mine/3"}},
            )
        ]
        seeded = [target(await client.reset(split="train:mine", seed=seed)) for seed in (4, 4 + TASKS, 4)]
        plain = [target(await client.reset(split="train:mine")) for _ in range(GROUP)]

    assert group == [target_of(0)] * GROUP
    assert seeded == [target_of(1)] * GROUP
    assert plain == [target_of(2), target_of(3), target_of(4)]


@on(*BOTH_GATEWAYS)
async def test_a_reset_names_the_drawn_task_and_the_tasks_record_keeps_its_reward(
    place: Place, operator: httpx.AsyncClient, newest: Driver
) -> None:
    async with connected(newest, place.url()) as client:
        for _ in range(GROUP):
            first = await client.reset(split="train:mine", index=0)
            last = await client.act("inc", target_of(0))

            assert first["metadata"].items() >= {"task_id": "train-0", "split": "train", "index": 0}.items()
            assert (last["reward"], last["done"]) == (1.0, True)
    lines = (await operator.get("/admin/v1/records", params={"environment": "counting"})).text

    assert '"task":"train-0"' in lines


@on(EMBEDDED)
async def test_an_unknown_handle_is_refused_and_the_episode_goes_on(
    place: Place, operator: httpx.AsyncClient, newest: Driver
) -> None:
    async with connected(newest, place.url()) as client:
        await client.reset(split="test", index=0, episode_id="e")
        await client.act("inc")
        for wish in (
            {"split": "train:mine", "index": TASKS},
            {"task": f"train:mine/{TASKS}"},
            {"split": "train:none", "index": 0},
            {"task": "train:none/0"},
        ):
            with pytest.raises(ClientError, match=r"EXECUTION_ERROR"):
                await client.reset(**wish)
        last = await client.act("inc")
        after = target(await client.reset(split="train:mine", index=0))

    assert (last["reward"], last["done"]) == (1.0, True)
    assert after == target_of(0)


# -- a curriculum that the environment's file names -------------------------------------------------------------------


@pytest.fixture(scope="module")
def told() -> Iterator[Gateway]:
    """A gateway whose counting environment plays a curriculum when a reset names no split."""
    folder = short_folder()
    environments = folder / "environments" / "counting"
    environments.mkdir(parents=True)
    original = HERE / "environments" / "counting"
    (environments / "server.py").symlink_to(original / "server.py")
    configured = (original / "environment.toml").read_text("utf-8")
    for old, new in (
        ("[openenv]\n", '[openenv]\nsplit = "train:file"\n'),
        ('directory = "tasks/counting"', f'directory = "{HERE / "tasks" / "counting"}"'),
    ):
        assert configured.count(old) == 1
        configured = configured.replace(old, new)
    (environments / "environment.toml").write_text(configured, "utf-8")
    curricula = folder / "curricula"
    curricula.mkdir()
    (curricula / "file.toml").write_text(
        f'environment = "counting"\ngroup_size = {GROUP}\nsampler = {{kind = "sequential"}}\n', "utf-8"
    )
    own = {"GATEWAY_CATALOG_DIR": str(folder / "environments"), "GATEWAY_CURRICULA_DIR": str(curricula)}
    gateway = Gateway(folder, settings("counting") | own)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()
        shutil.rmtree(folder, ignore_errors=True)


def url_of(gateway: Gateway) -> str:
    return Place("told", gateway.url, gateway).url()


async def numbers(client: OpenEnv, *wishes: dict[str, Any]) -> list[int]:
    """Return the index of the task that each reset got."""
    return [int((await client.reset(**wish))["metadata"]["index"]) for wish in wishes]


async def test_a_plain_reset_and_one_with_a_seed_follow_the_curriculum_of_the_environment_s_file(
    told: Gateway, newest: Driver
) -> None:
    async with operating(told.url) as http, connected(newest, url_of(told)) as client:
        await http.post("/admin/v1/curriculum/file/reset")
        plain = await numbers(client, {}, {}, {"task": None})
        seeded = await numbers(client, *({"seed": 7},) * (GROUP + 1))
        other = await numbers(client, {"index": 1}, {"split": "train", "index": 9})

    assert plain == [0, 1, 2]
    assert seeded == [3] * GROUP + [4]
    assert other == [5, 9]


async def test_clients_of_a_group_that_reset_with_one_seed_get_one_task(told: Gateway, driver_of: DriverOf) -> None:
    async with operating(told.url) as http, contextlib.AsyncExitStack() as stack:
        await http.post("/admin/v1/curriculum/file/reset")
        clients = [
            await stack.enter_async_context(connected(driver_of(version), url_of(told)))
            for version in (NEWEST, FIRST_ASYNC, NEWEST)
        ]
        first = [target(await client.reset(seed=2)) for client in clients]
        second = [target(await client.reset(seed=2)) for client in clients]

    assert first == [target_of(0)] * GROUP
    assert second == [target_of(1)] * GROUP


def test_the_train_split_has_the_number_of_tasks_that_these_tests_expect() -> None:
    lines = (Path(HERE) / "tasks" / "counting" / "train.jsonl").read_text("utf-8").splitlines()

    assert len(lines) == TASKS
