"""Environments with sandboxes in the server: started with it, refused with the cause, ended with it."""

import asyncio
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from envserver import Environment, StepResult, Task, tool
from envserver.sandbox import Limits, Sandbox, Sandboxes
from envserver.sandboxing import bounded
from envserver.settings import SandboxSettings

from tests.envserver.conftest import Start
from tests.envserver.eventually import eventually
from tests.fakes.user import need_other_users
from tests.sandbox.conftest import made_box
from tests.sandbox.outside import are_dead, descendants

pytestmark = pytest.mark.sandbox

MIB = 1024 * 1024


class Boxer(Environment):
    """One sandbox a session, on a layer that all share."""

    sandbox_limits = Limits(memory_bytes=256 * MIB, pids=64, disk_bytes=32 * MIB, cpu_s=60)
    builds: ClassVar[list[str]] = []
    sandbox: Sandbox | None = None

    async def reset(self, task: Task, *, seed: int) -> str:
        async def build(sandbox: Sandbox) -> None:
            self.builds.append("built")
            done = await sandbox.run(["bash", "-c", task.get("init", "true")], timeout_s=60)
            if done.status != 0:
                raise RuntimeError(f"init ended with {done.status}")

        self.sandbox = await self.sandboxes.open(await self.sandboxes.layer(task.get("init", ""), build))
        return "Box."

    async def close(self) -> None:
        if self.sandbox is not None:
            await self.sandbox.close()

    @tool
    async def run(self, command: str) -> StepResult:
        assert self.sandbox is not None
        done = await self.sandbox.run(["bash", "-c", command])
        return StepResult(done.stdout.decode(), data={"loop": id(asyncio.get_running_loop())})


class Plain(Environment):
    """Has no sandbox."""

    async def reset(self, task: Task, *, seed: int) -> str:
        return "Plain."

    @tool
    async def loop(self) -> StepResult:
        return StepResult(str(id(asyncio.get_running_loop())))


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a folder that other users reach, with a link to the box in it; the test must leave nothing else in it."""
    need_other_users()
    folder = Path(tempfile.mkdtemp(prefix="env-gateway-server-"))
    folder.chmod(0o755)
    (folder / "box").symlink_to(made_box().path)
    Boxer.builds.clear()
    yield folder
    (folder / "box").unlink(missing_ok=True)
    folder.rmdir()  # fails if a work folder was left


@pytest.fixture
def begin(place: Path, start: Start) -> Callable[..., Awaitable[Any]]:
    async def begin(*classes: type[Environment], **sandbox: Any) -> Any:
        given = {"box": str(place / "box"), "work": str(place / "work"), "host": True, **sandbox}
        return await start(*(classes or (Boxer,)), sandbox=SandboxSettings(**given))

    return begin


Begin = Callable[..., Awaitable[Any]]


async def test_sessions_of_a_class_fork_from_one_layer_on_one_loop_that_outlives_them(begin: Begin) -> None:
    server = await begin(Boxer, Plain)
    loops = set()

    for sid in ("s1", "s2"):
        await server.open(sid, {"init": "echo made > /root/made"})
        answer = await server.call("run", {"command": "cat /root/made; rm /root/made"}, sid=sid)
        assert answer.result["output"]["blocks"][0]["text"] == "made\n"
        loops.add(answer.result["output"]["data"]["loop"])
        await server.ask("POST", "/delete", sid=sid)

    assert Boxer.builds == ["built"]
    assert len(loops) == 1


async def test_a_class_without_sandboxes_has_other_loops(begin: Begin) -> None:
    server = await begin(Boxer, Plain)
    await server.open("s1")
    await server.open("s2", env_name="plain")

    boxer = (await server.call("run", {"command": "true"}, sid="s1")).result["output"]["data"]["loop"]
    plain = (await server.call("loop", sid="s2")).result["output"]["blocks"][0]["text"]

    assert str(boxer) != plain


@pytest.mark.parametrize("setting", ["box", "work"])
async def test_without_a_box_or_work_folder_creates_are_refused_with_the_cause_and_tried_again(
    begin: Begin, place: Path, caplog: pytest.LogCaptureFixture, setting: str
) -> None:
    (place / "work").mkdir()
    missing = place / "not yet"
    server = await begin(host=False, **{setting: str(missing)})

    refused = [await server.ask("POST", "/create", sid="s1", body={"task_spec": {}}) for _ in range(2)]
    health = await server.ask("GET", "/health")
    listed = await server.ask("GET", "/list_environments")
    missing.symlink_to(place / setting)
    relisted = await server.ask("GET", "/list_environments")
    created = await server.ask("POST", "/create", sid="s1", body={"task_spec": {}})
    prompt = await server.ask("GET", "/prompt", sid="s1")
    await server.close()
    missing.unlink()
    (place / "work").rmdir()

    assert [answer.status for answer in refused] == [500, 500]
    assert all(str(missing) in answer.json["detail"] for answer in refused)
    assert all(f"ENVSERVER_SANDBOX_{setting.upper()}" in answer.json["detail"] for answer in refused)
    assert health.status == 200
    assert (listed.status, relisted.status) == (503, 200)
    assert str(missing) in listed.json["detail"]
    assert (created.status, prompt.status) == (200, 200)
    assert [record.levelname for record in caplog.records if "sandboxes_refused" in record.message] == ["WARNING"]


async def test_a_refused_create_holds_no_slot(start: Start, place: Path) -> None:
    server = await start(Boxer, slots=1, sandbox=SandboxSettings(box=str(place / "none"), work=str(place)))

    statuses = [
        (await server.ask("POST", "/create", sid=f"s{number}", body={"task_spec": {}})).status for number in range(3)
    ]

    assert statuses == [500, 500, 500]
    assert (await server.ask("GET", "/sessions")).json["sessions"] == []


async def test_the_work_folder_is_made_for_each_server_and_removed_at_its_end(begin: Begin, place: Path) -> None:
    class Other(Boxer):
        """Sandboxes belong to a class, and this process has two servers."""

    first = await begin()
    await first.open("s1")  # ready, so this server made the folder
    second = await begin(Other)
    await second.open("s1")

    during = len(os.listdir(place / "work"))
    await first.close()
    there = await second.call("run", {"command": "echo here"})
    await second.open("s2", {"init": "echo x > /root/x"})
    await second.close()

    assert during == 2
    assert there.result["output"]["blocks"][0]["text"] == "here\n"
    assert os.listdir(place / "work") == []  # the first server would have removed it, but the second server used it
    (place / "work").rmdir()


async def test_a_work_folder_that_a_server_made_is_removed_with_the_last_server(begin: Begin, place: Path) -> None:
    server = await begin()
    await server.open("s1")

    await server.close()

    assert not (place / "work").exists()


async def test_stopping_ends_all_sandboxes_layers_and_the_spawner(begin: Begin) -> None:
    server = await begin()
    before = set(descendants())
    await server.open("s1", {"init": "echo x > /root/x"})
    below = sorted(set(descendants()) - before)
    assert len(below) >= 3

    await server.close()

    await eventually(lambda: are_dead(below))


async def test_a_server_that_is_stopped_while_it_prepares_a_sandbox_leaves_nothing(begin: Begin, place: Path) -> None:
    before = set(descendants())  # of this process, including other tests' servers
    server = await begin()
    created = await server.ask("POST", "/create", sid="s1", body={"task_spec": {"init": "sleep 300"}})
    assert created.status == 200, created.body

    async def is_preparing() -> bool:
        row = await server.row("s1")
        assert row is not None
        assert row["state"] == "starting", (await server.ask("GET", "/prompt", sid="s1")).body
        return bool(Boxer.builds)

    await eventually(is_preparing)
    below = sorted(set(descendants()) - before)
    assert len(below) >= 2

    await server.close()

    await eventually(lambda: are_dead(below))


async def test_a_server_that_is_stopped_during_its_check_leaves_its_class_without_sandboxes(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Boxer):
        """Another server of this process may serve it by then."""

    trying, stopped, check = threading.Event(), threading.Event(), Sandboxes.check

    async def slow_check(self: Sandboxes) -> None:
        await check(self)
        trying.set()
        await asyncio.to_thread(stopped.wait, 10)

    monkeypatch.setattr(Sandboxes, "check", slow_check)
    server = await begin(Late)
    assert await asyncio.to_thread(trying.wait, 30)

    closing = asyncio.create_task(server.close())
    await asyncio.sleep(0)  # the stop starts
    stopped.set()
    await closing

    assert "sandboxes" not in vars(Late)


async def test_a_server_that_is_stopped_immediately_leaves_nothing(begin: Begin) -> None:
    for turns in (0, 1, 5, 20, 100):
        before = set(descendants())
        server = await begin()
        creating = asyncio.create_task(server.ask("POST", "/create", sid="s1", body={"task_spec": {}}))
        for _ in range(turns):
            await asyncio.sleep(0)

        await server.close()
        await asyncio.wait({creating})
        creating.exception()  # the request was answered, or its connection was closed

        async def is_as_before(before: set[int] = before) -> bool:
            return set(descendants()) <= before

        await eventually(is_as_before)


async def test_a_lost_spawner_is_replaced_for_the_next_session(begin: Begin) -> None:
    server = await begin()
    await server.open("s1")
    spawner = Boxer.sandboxes._spawner
    assert spawner is not None
    spawner.process.kill()

    lost = await server.call("run", {"command": "sleep 60"})
    await server.open("s2")
    there = await server.call("run", {"command": "echo here"}, sid="s2")

    assert lost.events[-1][0] == "error"
    assert there.result["output"]["blocks"][0]["text"] == "here\n"


async def test_a_setting_bounds_the_resources_of_a_session(begin: Begin) -> None:
    server = await begin(disk_mib=4)
    await server.open()

    wrote = await server.call("run", {"command": "head -c 8M /dev/zero > /root/x; stat -c %s /root/x"})

    assert 3 * MIB < int(wrote.result["output"]["blocks"][0]["text"]) <= 4 * MIB


def test_limits_from_settings_replace_the_limits_of_the_class() -> None:
    limits = Limits(memory_bytes=1, pids=2, disk_bytes=3, cpu_s=4, output_bytes=5)

    assert bounded(limits, SandboxSettings()) == limits
    assert bounded(limits, SandboxSettings(memory_mib=16, cpu_s=9)) == Limits(
        memory_bytes=16 * MIB, pids=2, disk_bytes=3, cpu_s=9, output_bytes=5
    )
    assert bounded(limits, SandboxSettings(pids=8, disk_mib=1)) == Limits(
        memory_bytes=1, pids=8, disk_bytes=MIB, cpu_s=4, output_bytes=5
    )
