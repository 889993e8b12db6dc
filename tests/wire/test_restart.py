"""The embedded gateway ends, with or without warning, and starts again. Each test has its own gateway.

``tests/docker`` tests the state that the full stack keeps across a restart.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.eventually import eventually
from tests.wire.gateways import Gateway, short_folder
from tests.wire.raw import RawEpisode, create, episode, new_sid
from tests.wire.targets import Target, gateway_target, runs_once, token

pytestmark = pytest.mark.wire


@pytest.fixture
def embedded() -> Iterator[Target]:
    folder = short_folder()
    gateway = Gateway(folder, {})
    try:
        gateway.start()
        yield gateway_target("embedded", gateway)
    finally:
        gateway.stop()
        shutil.rmtree(folder)


@pytest.fixture
async def http(embedded: Target) -> AsyncIterator[httpx.AsyncClient]:
    async with embedded.http() as http:
        yield http


def alive(pid: int) -> bool:
    """Return True if the process runs. A zombie process does not run."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):  # ended before or during the read
        return False


async def gone(pids: set[int]) -> None:
    assert not [pid for pid in pids if alive(pid)]


async def pids_of(http: httpx.AsyncClient, *environments: str) -> set[int]:
    """Return the processes that serve these environments, which are the probe under several names."""
    pids = set()
    for name in environments:
        async with episode(http, environment=name) as opened:
            pids.add(int((await opened.call("pid")).text))
    return pids


@pytest.mark.usefixtures("narrow_worker")
async def test_the_workers_of_a_killed_gateway_end_with_it(embedded: Target, http: httpx.AsyncClient) -> None:
    assert embedded.gateway is not None
    pids = await pids_of(http, "probe", "narrow")
    assert len(pids) == 2

    embedded.gateway.kill()

    await eventually(lambda: gone(pids))


async def test_a_killed_embedded_gateway_starts_again_without_its_sessions(
    embedded: Target, http: httpx.AsyncClient
) -> None:
    gateway = embedded.gateway
    assert gateway is not None
    before = RawEpisode(http, new_sid(), "probe")
    await create(http, before.sid, env_name="probe", task_spec={})

    gateway.kill()
    gateway.restart()
    lost = await before.get("prompt")
    async with episode(http, sid=before.sid) as again:
        echo = await again.call("echo", {"text": "afresh"})

    assert lost.status_code in (404, 410)
    assert echo.text == "afresh"
    assert await gateway.sessions() == []


@pytest.mark.usefixtures("narrow_worker")
async def test_a_gateway_that_is_stopped_leaves_no_processes_or_sockets(
    embedded: Target, http: httpx.AsyncClient
) -> None:
    gateway = embedded.gateway
    assert gateway is not None
    pids = await pids_of(http, "probe", "narrow")
    await create(http, new_sid(), env_name="probe", task_spec={})

    status = gateway.stop()

    assert status == 0
    await gone(pids)
    sockets = list(gateway.socket_dir.rglob("*.sock")) if gateway.socket_dir.exists() else []
    assert sockets == []
    assert "\nTraceback" not in gateway.log


async def test_a_running_call_finishes_before_a_stopping_gateway_ends(
    embedded: Target, http: httpx.AsyncClient, tmp_path: Path
) -> None:
    gateway = embedded.gateway
    assert gateway is not None
    folder, word = embedded.folder(tmp_path), token()
    opened = RawEpisode(http, new_sid(), "probe")
    await create(http, opened.sid, env_name="probe", task_spec={"folder": folder.inside})

    call = asyncio.create_task(opened.call("hold", {"token": word}))
    await eventually(lambda: runs_once(folder, word))
    stopping = asyncio.create_task(asyncio.to_thread(gateway.stop))
    await eventually(lambda: draining(embedded))
    folder.open_gate(word)
    outcome = await call

    assert outcome.text == "1"
    assert await stopping == 0


async def draining(target: Target) -> None:
    """Assert that the gateway reports that it accepts no more requests, or that it does not listen."""
    async with target.http(key="") as http:
        try:
            response = await http.get("/readyz")
        except httpx.TransportError:
            return
    assert response.status_code == 503


def test_alive_distinguishes_running_processes_from_ended_ones(tmp_path: Path) -> None:
    assert alive(os.getpid())
    assert not alive(2**22 + 1)
