"""The server as a process, as a container runs it: start, signals, a dying parent, memory."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.envserver.raw import Wire

SERVER = """
import asyncio, pathlib, time
from envserver import Environment, Prompt, StepResult, Task, serve, tool

class ReverseString(Environment):
    async def reset(self, task: Task, *, seed: int) -> Prompt:
        return task.get("text", "")

    @tool
    async def submit(self, text: str) -> StepResult:
        return StepResult(text, reward=1.0, finished=True)

    @tool
    def block(self) -> StepResult:
        pathlib.Path(self.task["folder"], "blocking").touch()
        time.sleep(3600)

    def close(self) -> None:
        if folder := self.task.get("folder"):
            pathlib.Path(folder, "closed").touch()

if __name__ == "__main__":
    serve(ReverseString)
"""
Launch = Callable[..., Awaitable[Process]]


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    """Return a function that starts ``server.py`` with ``ENVSERVER_*`` settings, by default on a Unix socket."""
    (tmp_path / "server.py").write_text(SERVER)
    processes: list[Process] = []

    async def begin(*, modules: str = "", **settings: str) -> Process:
        given = settings or {"SOCKET": str(tmp_path / "s.sock")}
        env = {"PATH": os.environ["PATH"], "OPENENV_TASK_MODULE": modules}
        env |= {f"ENVSERVER_{name}": value for name, value in given.items()}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "server.py", cwd=tmp_path, env=env, stdin=PIPE, stderr=PIPE
        )
        processes.append(process)
        return process

    yield begin
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ready(process: Process) -> str:
    """Wait for the log line of readiness and return its address."""
    assert process.stderr is not None
    async with asyncio.timeout(HANG_S):
        while b"server_ready" not in (line := await process.stderr.readline()):
            assert line, "the server ended"
    return line.split(b"address=")[1].split()[0].decode()


async def ended(process: Process) -> int:
    async with asyncio.timeout(HANG_S):
        return await process.wait()


async def test_sigterm_tears_sessions_down_and_ends_with_0(launch: Launch, tmp_path: Path) -> None:
    process = await launch()
    wire = await Wire.open(await ready(process))
    await wire.ask("POST", "/create", sid="s1", body={"task_spec": {"folder": str(tmp_path)}})

    process.send_signal(signal.SIGTERM)

    assert await ended(process) == 0
    assert (tmp_path / "closed").exists()
    assert not (tmp_path / "s.sock").exists()
    await wire.close()


async def test_blocking_code_does_not_keep_the_process_alive(launch: Launch, tmp_path: Path) -> None:
    process = await launch(SOCKET=str(tmp_path / "s.sock"), SLOTS="2")
    address = await ready(process)
    wire = await Wire.open(address)
    await wire.ask("POST", "/create", sid="s1", body={"task_spec": {"folder": str(tmp_path)}})
    calling = asyncio.create_task(wire.ask("POST", "/call", sid="s1", body={"name": "block", "input": {}}))
    async with asyncio.timeout(HANG_S):
        while not (tmp_path / "blocking").exists():  # noqa: ASYNC110  # another process creates the file
            await asyncio.sleep(0.01)

    process.terminate()

    assert await ended(process) == 0
    assert (await calling).events[-1] == ("error", "session_failed: the server is shutting down")
    await wire.close()


async def test_the_server_ends_with_its_parent(launch: Launch, tmp_path: Path) -> None:
    process = await launch(SOCKET=str(tmp_path / "s.sock"), EXIT_ON_EOF="1")
    await ready(process)
    assert process.stdin is not None

    process.stdin.write(b"what the parent says is not listened to")
    await process.stdin.drain()
    assert process.returncode is None
    process.stdin.close()

    assert await ended(process) == 0


async def test_on_tcp_the_server_serves_on_the_given_port(launch: Launch) -> None:
    process = await launch(HOST="127.0.0.1", PORT="0")

    wire = await Wire.open(await ready(process))

    assert (await wire.ask("GET", "/list_environments")).json == ["reversestring"]
    await wire.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PORT": "many"}, b"envserver: ENVSERVER_PORT='many'"),
        ({"TASKS": "/nowhere"}, b"tasks: /nowhere is not a directory"),
        ({"SOCKET": "/nowhere/s.sock"}, b"envserver: cannot listen"),
    ],
)
async def test_an_error_at_start_is_reported_and_ends_the_process(
    launch: Launch, settings: dict[str, str], message: bytes
) -> None:
    process = await launch(**settings)
    async with asyncio.timeout(HANG_S):
        _, errors = await process.communicate()

    assert process.returncode == 1
    assert message in errors
    assert b"Traceback" not in errors


async def test_a_task_module_is_imported_before_the_server_is_ready(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "custom_tasks").mkdir()
    (tmp_path / "custom_tasks" / "mine.py").write_text(
        "from openenv.core.tasks import registry\n"
        "registry.register('custom/mine', 'reversestring', {'instruction': '', 'text': 'a task of mine'})\n"
    )
    settings = {"SOCKET": str(tmp_path / "s.sock"), "CUSTOM_TASKS_DIR": str(tmp_path)}
    process = await launch(modules="custom_tasks.mine,custom_tasks.other", **settings)
    wire = await Wire.open(await ready(process))

    created = await wire.ask("POST", "/create", sid="s1", body={"task_spec": {"id": "custom/mine"}})
    prompt = await wire.ask("GET", "/prompt", sid="s1")
    listed = await wire.ask("GET", "/registered")
    await wire.close()

    assert created.status == 200
    assert prompt.json[0]["text"] == "a task of mine"
    assert [task["id"] for task in listed.json["tasks"]] == ["custom/mine"]
    assert [row["error"] is None for row in listed.json["modules"]] == [True, False]


async def test_a_server_reports_the_version_of_what_it_runs(launch: Launch, tmp_path: Path) -> None:
    modules = tmp_path / "custom_tasks"
    modules.mkdir()
    seen = {}
    for name, content, files in [
        ("first", "a = 1\n", ["envserver/answers.py"]),
        ("again", "a = 1\n", ["envserver/answers.py"]),
        ("another module", "a = 2\n", ["envserver/answers.py"]),
        ("all modules", "a = 1\n", []),
    ]:
        (modules / "mine.py").write_text(content)
        settings = {"SOCKET": str(tmp_path / "s.sock"), "CUSTOM_TASKS_DIR": str(tmp_path)}
        process = await launch(
            modules="custom_tasks.mine", **settings, SCORER=json.dumps({"files": files, "packages": []})
        )
        wire = await Wire.open(await ready(process))
        created = await wire.ask("POST", "/create", sid="s1", body={"task_spec": {"text": "a"}})
        listed = await wire.ask("GET", "/sessions")
        await wire.close()
        process.terminate()
        await ended(process)
        assert created.headers["x-scorer-version"] == listed.json["scorer"]
        seen[name] = listed.json["scorer"]

    assert seen["first"] == seen["again"]
    assert len({seen["first"], seen["another module"], seen["all modules"]}) == 3


async def test_a_server_with_a_missing_file_of_its_scorer_does_not_start(launch: Launch) -> None:
    process = await launch(SCORER='{"files": ["nosuch.py"]}')

    assert await ended(process) == 1


async def test_a_bare_server_uses_little_memory(launch: Launch) -> None:
    process = await launch()
    wire = await Wire.open(await ready(process))
    await wire.ask("GET", "/health")

    status = Path(f"/proc/{process.pid}/status").read_text()  # noqa: ASYNC240  # /proc needs no disk
    resident_kib = int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
    maps = Path(f"/proc/{process.pid}/maps").read_text()  # noqa: ASYNC240  # /proc needs no disk
    await wire.close()

    # 25 MiB is the goal on the image's Python; other versions differ slightly.
    assert resident_kib <= 27 * 1024
    assert "pydantic" not in maps


async def test_a_bare_server_does_not_import_unneeded_modules() -> None:
    code = "import sys, envserver.server\nprint(*sys.modules)"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2] / "env_images" / "base")}
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, env=env, stdout=PIPE)

    modules = (await process.communicate())[0].decode().split()

    assert "envserver.tasks.registered" in modules
    assert [name for name in modules if name.startswith(("envserver.generic", "envserver.sandbox.", "openenv"))] == []
