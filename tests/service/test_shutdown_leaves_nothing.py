"""After the end of a gateway none of its tasks continues, and the log reports no forgotten task."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from gateway.core.ids import WorkerId
from gateway.core.worker import Worker
from gateway.stores.memory.sessions import MemoryStore
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until
from tests.service.stack import Replica, Stack, environment, stack
from tests.wire.gateways import short_folder
from tests.wire.processes import ServerProcess

SERVE = """
import asyncio, gc
from gateway.cli.serve import serve_until_ended
from gateway.logs import configure
from gateway.settings import Settings

async def main():
    await serve_until_ended(Settings())
    left = asyncio.all_tasks() - {asyncio.current_task()}
    print("tasks left:", len(left), *left, flush=True)

configure("info")
asyncio.run(main())
gc.collect()
print("the end", flush=True)
"""
"""Program that runs ``gateway serve`` and then prints the tasks that are left."""
BAD_SIGNS = ("never retrieved", "was destroyed", "never awaited", "ResourceWarning", "_failed", "_broken")
SERVER = """
import asyncio
from envserver import Environment, StepResult, serve, tool

class Plain(Environment):
    name = "plain"

    async def reset(self, task, *, seed):
        self.mark = task.get("mark") or task.get("config", {}).get("mark")
        return "go on"

    @tool
    async def go_on(self) -> StepResult:
        return StepResult("went on")

    @tool
    async def never(self) -> StepResult:
        open(self.mark, "x").close()
        await asyncio.Event().wait()

serve(Plain)
"""
FILE = """
name = "{name}"
image = "none/{name}"
protocol = "ors"
isolation = "shared"
command = ["python3", "{script}"]

[pool]
slots = 1
max_workers = 1

[timeouts]
open_s = 60
start_s = 60
"""


@pytest.fixture
def gateway() -> Iterator[ServerProcess]:
    """Run a gateway with local processes: ``plain`` serves one session, ``dull`` never becomes ready."""
    folder = short_folder()
    catalog = folder / "catalog"
    for name, script in (("plain", SERVER), ("dull", "import signal; signal.pause()")):
        (catalog / name).mkdir(parents=True)
        (catalog / name / "environment.toml").write_text(FILE.format(name=name, script="main.py"))
        (catalog / name / "main.py").write_text(script)
    process = ServerProcess(
        [sys.executable, "-X", "dev", "-c", SERVE],
        variables={
            "GATEWAY_PORT": "0",
            "GATEWAY_SOCKET_DIR": str(folder / "sockets"),
            "GATEWAY_STATE_DIR": str(folder / "state"),
            "GATEWAY_CATALOG_DIR": str(catalog),
            "GATEWAY_DEFAULT_ENVIRONMENT": "plain",
            "GATEWAY_DRAIN_S": "1",
        },
        ready=r"gateway_ready url=(http://[^\s]+)",
        log=folder / "log",
    )
    process.start()
    yield process
    process.kill()
    shutil.rmtree(folder)


@contextlib.asynccontextmanager
async def client(gateway: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.address, timeout=HANG_S, trust_env=False, verify=False) as http:
        yield http


async def create(http: httpx.AsyncClient, sid: str, name: str = "plain", **spec: str) -> httpx.Response:
    body = {"env_name": name, "task_spec": {"n": 1, **spec}}
    return await http.post("/create", json=body, headers={"X-Session-ID": sid})


async def waiting(http: httpx.AsyncClient, name: str) -> None:
    """Wait until an opening waits for a slot of an environment and exactly one worker runs or starts."""

    async def check() -> None:
        metrics = (await http.get("/metrics")).text.splitlines()
        assert f'gateway_openings_waiting{{environment="{name}"}} 1.0' in metrics
        assert len((await http.get("/admin/v1/workers")).json()["workers"]) == 1

    await eventually(check)


async def ended_well(gateway: ServerProcess, *, told: str = "\0") -> None:
    """Stop the gateway. Assert that no task is left and that only lines with *told* show signs of an error."""
    assert await asyncio.to_thread(gateway.stop) == 0, gateway.log
    assert "tasks left: 0\n" in gateway.log, gateway.log
    assert gateway.log.endswith("the end\n"), gateway.log
    lines = [line for line in gateway.log.splitlines() if told not in line]
    assert [line for line in lines if any(sign in line for sign in BAD_SIGNS)] == [], gateway.log
    assert "\nTraceback" not in gateway.log, gateway.log


async def test_a_stop_after_sessions_leaves_no_task(gateway: ServerProcess) -> None:
    async with client(gateway) as http:
        for sid in ("one", "two", "three"):
            assert (await create(http, sid)).status_code == 200
            step = {"name": "go_on", "input": {}}
            assert "went on" in (await http.post("/plain/call", json=step, headers={"X-Session-ID": sid})).text
            if sid != "three":
                assert (await http.post("/delete", headers={"X-Session-ID": sid})).status_code == 200

        await ended_well(gateway)


async def test_a_stop_refuses_an_opening_that_waits_for_a_slot_and_leaves_no_task(gateway: ServerProcess) -> None:
    async with client(gateway) as http:
        assert (await create(http, "one")).status_code == 200
        second = asyncio.create_task(create(http, "two"))
        await waiting(http, "plain")

        await ended_well(gateway)
        refused = await second

    assert (refused.status_code, refused.json()["code"]) == (429, "pool_exhausted"), refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert "about to stop" in refused.json()["detail"]


async def test_a_stop_while_a_worker_starts_leaves_no_task(gateway: ServerProcess) -> None:
    async with client(gateway) as http:
        first = asyncio.create_task(create(http, "one", "dull"))
        await waiting(http, "dull")

        await ended_well(gateway)
        refused = await first

    assert (refused.status_code, refused.json()["code"]) == (429, "pool_exhausted"), refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert "about to stop" in refused.json()["detail"]


async def test_a_stop_while_a_query_waits_for_a_worker_leaves_no_task(gateway: ServerProcess) -> None:
    async with client(gateway) as http:
        asked = asyncio.create_task(http.get("/dull/tools"))
        await waiting(http, "dull")

        await ended_well(gateway)
        refused = await asked

    assert (refused.status_code, refused.json()["code"]) == (429, "pool_exhausted"), refused.text
    assert "about to stop" in refused.json()["detail"]


async def test_a_stop_while_a_call_runs_leaves_no_task(gateway: ServerProcess, tmp_path: Path) -> None:
    mark = tmp_path / "began"
    async with client(gateway) as http:
        assert (await create(http, "one", mark=str(mark))).status_code == 200
        step = {"name": "never", "input": {}}
        headers = {"X-Session-ID": "one", "Accept": "application/json"}
        call = asyncio.create_task(http.post("/plain/call", json=step, headers=headers))
        await until(mark.exists)

        await ended_well(gateway)
        answer = await call

    assert answer.status_code == 410, "an SDK would repeat a status >= 500, and the step would run twice"
    assert (answer.json()["code"], answer.json()["reason"]) == ("shutdown", "shutdown")
    assert "may have run" in answer.json()["detail"]


async def test_a_stop_while_an_areal_step_runs_leaves_no_task(gateway: ServerProcess, tmp_path: Path) -> None:
    mark = tmp_path / "began"
    async with client(gateway) as http:
        task = {"id": "marked", "env_type": "plain", "instruction": "go on", "config": {"mark": str(mark)}}
        added = await http.post("/admin/v1/tasks", json=task)
        assert added.is_success, added.text
        started = await http.post("/areal/plain/api/episode/start", json={"sample_id": "marked", "config": {}})
        assert started.status_code == 200, started.text
        wish = {
            "episode_id": started.json()["episode_id"],
            "action": {"type": "structured", "content": {"name": "never", "arguments": {}}},
        }
        step = asyncio.create_task(http.post("/areal/plain/api/episode/step", json=wish))
        await until(mark.exists)

        await ended_well(gateway, told="areal_failed path=/areal/plain/api/episode/step status=500")
        answer = await step

    assert (answer.status_code, answer.json()["reason"]) == (500, "shutdown"), answer.text
    assert "reward" not in answer.json()


async def test_a_stop_after_the_death_of_a_worker_leaves_no_task(gateway: ServerProcess) -> None:
    async with client(gateway) as http:
        assert (await create(http, "one")).status_code == 200
        (pid,) = await asyncio.to_thread(children, gateway.pid)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: "worker_lost environment=plain" in gateway.log)

        await ended_well(gateway)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, as the kernel lists them."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


# -- during a rebuild


def ours() -> list[str]:
    """Return the gateway's tasks in this process that have not ended."""
    tasks = {task: inspect.getfile(task.get_coro().cr_code) for task in asyncio.all_tasks() if not task.done()}  # type: ignore[union-attr]  # all are coroutines
    return [repr(task) for task, file in tasks.items() if "/gateway/" in file]


@contextlib.asynccontextmanager
async def being_rebuilt() -> AsyncIterator[tuple[Stack, Replica]]:
    """Yield a replica on a store that lost its data. The only worker that it finds does not list its sessions."""
    async with stack() as built:
        kind = built.environments[0]
        left = Worker(id=WorkerId("left"), environment=kind.name, digest=kind.digest(), slots=1)
        await built.backend.start(left, kind)
        built.backend.only.listing.clear()
        store = MemoryStore(is_whole=False)
        replica = Replica(store=store, backend=built.backend, environments=built.environments, name="new")
        yield built, replica
        await replica.aclose()
        await store.aclose()


async def asked(built: Stack) -> None:
    """Wait until the gateway queries the worker for its sessions."""
    await until(lambda: built.backend.workers[WorkerId("left")].lists_asked == 1)


async def test_a_start_that_is_cancelled_during_a_rebuild_leaves_no_task() -> None:
    async with being_rebuilt() as (built, replica):
        starting = asyncio.create_task(replica.leadership.until_complete())
        await asked(built)

        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

        assert ours() == []


async def test_a_loop_that_ends_during_a_rebuild_leaves_no_task() -> None:
    async with being_rebuilt() as (built, replica):
        async with replica.looping():
            await asked(built)

        assert ours() == []


async def test_a_pool_that_closes_without_having_run_leaves_no_task_and_no_worker() -> None:
    async with stack(environment(min_workers=1)) as built:
        built.backend.may_start.clear()
        await built.first.pool.tick()
        await until(lambda: built.backend.asked == 1)

        await built.first.pool.aclose()

        assert ours() == []
        assert await built.first.workers() == []
