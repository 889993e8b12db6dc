"""Workers as local processes: neither their children nor their folders outlive them or the gateway."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.backends.process import ProcessBackend
from gateway.backends.process_io import KEPT_BYTES, Tail
from gateway.core.environment import Environment, Isolation, SandboxLimits
from gateway.core.errors import BackendError, StartFailed
from gateway.core.ids import EnvironmentName, WorkerId
from gateway.core.worker import Worker
from tests.deadlines import HANG_S


@pytest.fixture
def sockets() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="eg-") as name:
        yield Path(name)


@pytest.fixture
async def backend(sockets: Path) -> AsyncIterator[ProcessBackend]:
    made = ProcessBackend(socket_dir=sockets, sandbox_dir=sockets / "sandboxes", stop_grace_s=20)
    yield made
    await made.aclose()


def running(program: str, folder: Path, *, command: tuple[str, ...] | None = None) -> Environment:
    """Return an environment whose worker is a Python *program* that reports by creating files in *folder*."""
    return Environment(
        name=EnvironmentName("fake"),
        image="none",
        directory=folder,
        command=command or ("python3", "-c", textwrap.dedent(program)),
    )


def worker(environment: Environment, id: str = "w1") -> Worker:
    return Worker(id=WorkerId(id), environment=environment.name, digest=environment.digest(), slots=1)


async def content(path: Path) -> str:
    """Wait until the file at *path* has content, and return it; a deadline bounds the wait."""
    async with asyncio.timeout(HANG_S):
        while True:
            if path.exists() and (text := path.read_text()):  # noqa: ASYNC240  # a local file
                return text
            await asyncio.sleep(0.01)


async def gone(pid: int) -> None:
    """Wait until process *pid* has ended."""
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]  # noqa: ASYNC240
            except FileNotFoundError:
                return
            if state == "Z":
                return
            await asyncio.sleep(0.01)


SLEEPER = "import time\nwhile True: time.sleep(1)"
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {child!r}], start_new_session={session})
open("child.part", "w").write(str(child.pid))
os.rename("child.part", "child")
"""


async def test_a_missing_command_is_a_failed_start_that_leaves_nothing_behind(
    backend: ProcessBackend, sockets: Path, tmp_path: Path
) -> None:
    environment = running("", tmp_path, command=("no-such-program",))

    with pytest.raises(StartFailed, match="cannot run no-such-program"):
        await backend.start(worker(environment), environment)

    assert (os.listdir(sockets), await backend.found()) == ([], [])


async def test_the_check_keeps_folders_of_a_running_gateway_and_unclaimed_folders(
    backend: ProcessBackend, sockets: Path, tmp_path: Path
) -> None:
    environment = running(SLEEPER, tmp_path)
    await backend.start(worker(environment), environment)
    (sockets / "nobodys").mkdir()
    other = ProcessBackend(socket_dir=sockets, sandbox_dir=sockets / "sandboxes")

    await other.check()

    assert sorted(os.listdir(sockets)) == ["nobodys", "w1", "w1.lock"]
    await other.aclose()
    await backend.stop(WorkerId("w1"))
    assert os.listdir(sockets) == ["nobodys"]


async def test_a_missing_folder_is_a_failed_start(backend: ProcessBackend, tmp_path: Path) -> None:
    environment = running(SLEEPER, tmp_path / "missing")

    with pytest.raises(StartFailed, match="missing"):
        await backend.start(worker(environment), environment)


async def test_the_command_python3_runs_the_gateways_own_interpreter(backend: ProcessBackend, tmp_path: Path) -> None:
    environment = running("import sys; open('out', 'w').write(sys.executable)", tmp_path)

    await backend.start(worker(environment), environment)

    assert await content(tmp_path / "out") == sys.executable


async def test_a_worker_gets_few_variables_and_no_descriptors(sockets: Path, tmp_path: Path) -> None:
    backend = ProcessBackend(
        socket_dir=sockets,
        sandbox_dir=sockets / "sandboxes",
        environ={"PATH": "/bin", "GATEWAY_SECRET": "s3cret", "AWS_SECRET_ACCESS_KEY": "x", "LANG": "C"},
    )
    program = "import os; open('out', 'w').write(repr((sorted(os.environ), sorted(os.listdir('/proc/self/fd')))))"
    environment = running(program, tmp_path)
    with open(os.devnull) as ours:  # noqa: ASYNC230  # does not block
        os.set_inheritable(ours.fileno(), True)

        await backend.start(worker(environment), environment)
        names, descriptors = eval(await content(tmp_path / "out"))
    await backend.aclose()

    assert set(names) - {"LC_CTYPE"} == {
        "ENVSERVER_EXIT_ON_EOF",
        "ENVSERVER_IDLE_S",
        "ENVSERVER_SLOTS",
        "ENVSERVER_SOCKET",
        "HOME",
        "LANG",
        "PATH",
        "PYTHONUNBUFFERED",
    }
    assert len(descriptors) <= 5  # stdin, stdout, stderr, the file and the folder being listed


async def test_the_children_of_a_worker_die_with_it(backend: ProcessBackend, tmp_path: Path) -> None:
    environment = running(PARENT.format(child=SLEEPER, session=False), tmp_path)
    deaths = backend.deaths()

    await backend.start(worker(environment), environment)  # the worker starts a child and ends
    child = int(await content(tmp_path / "child"))

    async with asyncio.timeout(HANG_S):
        assert (await anext(deaths)).id == "w1"
    await gone(child)


async def test_a_grandchild_that_holds_the_log_open_does_not_hide_the_death(
    backend: ProcessBackend, tmp_path: Path
) -> None:
    environment = running(PARENT.format(child=SLEEPER, session=True), tmp_path)
    deaths = backend.deaths()
    await backend.start(worker(environment), environment)
    escaped = int(await content(tmp_path / "child"))

    try:
        async with asyncio.timeout(HANG_S):
            assert (await anext(deaths)).id == "w1"
        await backend.stop(WorkerId("w1"))
    finally:
        os.kill(
            escaped, signal.SIGKILL
        )  # the backend does not end processes outside the worker's group, see the module


async def test_the_log_of_a_dead_worker_stays_until_it_is_stopped(backend: ProcessBackend, tmp_path: Path) -> None:
    environment = running("print('out'); import sys; print('error', file=sys.stderr); sys.exit(7)", tmp_path)
    deaths = backend.deaths()
    await backend.start(worker(environment), environment)

    async with asyncio.timeout(HANG_S):
        await anext(deaths)
    dead = [entry.running for entry in await backend.found()]
    log = await backend.logs(WorkerId("w1"))
    await backend.stop(WorkerId("w1"))

    assert (dead, log) == ([False], "out\nerror\n")
    assert await backend.logs(WorkerId("w1")) == ""


async def test_closing_stops_the_workers(backend: ProcessBackend, sockets: Path, tmp_path: Path) -> None:
    environment = running("import os; open('out', 'w').write(str(os.getpid()))\n" + SLEEPER, tmp_path)
    await backend.start(worker(environment), environment)
    pid = int(await content(tmp_path / "out"))

    await backend.aclose()

    await gone(pid)
    assert os.listdir(sockets) == []


async def test_workers_of_a_killed_gateway_end_and_the_next_gateway_removes_their_folders(
    backend: ProcessBackend, sockets: Path, tmp_path: Path
) -> None:
    served = """
        import os, sys, threading
        def end_with_stdin():
            sys.stdin.buffer.read()
            os._exit(0)
        threading.Thread(target=end_with_stdin).start()
        open("out.part", "w").write(str(os.getpid()))
        os.rename("out.part", "out")
    """
    gateway = f"""
        import asyncio, pathlib
        from gateway.backends.process import ProcessBackend
        from gateway.core.environment import Environment
        from gateway.core.ids import EnvironmentName, WorkerId
        from gateway.core.worker import Worker
        async def main():
            folder = pathlib.Path({str(tmp_path)!r})
            command = ("python3", "-c", {textwrap.dedent(served)!r})
            environment = Environment(name=EnvironmentName("fake"), image="", directory=folder, command=command)
            worker = Worker(id=WorkerId("w1"), environment=environment.name, digest="", slots=1)
            sockets = pathlib.Path({str(sockets)!r})
            await ProcessBackend(socket_dir=sockets, sandbox_dir=sockets / "boxes").start(worker, environment)
            await asyncio.Event().wait()
        asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", textwrap.dedent(gateway))
    pid = int(await content(tmp_path / "out"))

    process.kill()
    await process.wait()

    await gone(pid)
    assert sorted(os.listdir(sockets)) == ["w1", "w1.lock"]
    await backend.check()
    assert os.listdir(sockets) == []


async def test_a_worker_with_sandboxes_gets_folders_of_its_own_that_all_users_may_traverse(
    backend: ProcessBackend, sockets: Path, tmp_path: Path
) -> None:
    environment = replace(
        running("import json, os; open('out', 'w').write(json.dumps(dict(os.environ)))\n" + SLEEPER, tmp_path),
        isolation=Isolation.SANDBOX,
        sandbox=SandboxLimits(disk_bytes=2**25),
    )

    await backend.start(worker(environment), environment)
    variables = json.loads(await content(tmp_path / "out"))
    work = Path(variables["ENVSERVER_SANDBOX_WORK"])
    (work / "worker-1").mkdir()  # a server creates such a folder and removes it unless it is killed
    modes = [stat.S_IMODE(folder.stat().st_mode) for folder in (work, work.parent, sockets / "sandboxes")]
    await backend.stop(WorkerId("w1"))

    assert {name: value for name, value in variables.items() if "SANDBOX" in name} == {
        "ENVSERVER_SANDBOX_HOST": "1",
        "ENVSERVER_SANDBOX_BOX": str(sockets / "sandboxes" / "box"),
        "ENVSERVER_SANDBOX_WORK": str(sockets / "sandboxes" / "work" / "w1"),
        "ENVSERVER_SANDBOX_DISK_MIB": "32",
    }
    assert modes == [0o755] * 3
    assert os.listdir(sockets / "sandboxes" / "work") == []


async def test_a_sandbox_folder_that_cannot_be_created_is_a_failed_start_that_leaves_nothing_behind(
    sockets: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    backend = ProcessBackend(socket_dir=sockets, sandbox_dir=tmp_path / "file" / "below")
    environment = replace(running(SLEEPER, tmp_path), isolation=Isolation.SANDBOX)

    with pytest.raises(StartFailed, match="GATEWAY_SANDBOX_DIR"):
        await backend.start(worker(environment), environment)

    assert (os.listdir(sockets), await backend.found()) == ([], [])
    await backend.aclose()


async def test_an_interpreter_that_cannot_be_run_fails_the_check(sockets: Path) -> None:
    backend = ProcessBackend(socket_dir=sockets, sandbox_dir=sockets / "sandboxes", python="/no/such/python")

    with pytest.raises(BackendError, match="/no/such/python"):
        await backend.check()


async def test_a_tail_keeps_the_end_of_the_output() -> None:
    tail = Tail()
    output, said = os.pipe()
    reading = asyncio.create_task(tail.read(output))

    def talk() -> None:
        with os.fdopen(said, "wb") as stream:
            for number in range(100_000):
                stream.write(b"line %d\n" % number)

    await asyncio.to_thread(talk)
    async with asyncio.timeout(HANG_S):
        await reading

    assert tail.lines(2) == "line 99998\nline 99999\n"
    assert len(tail.lines(10**9)) <= KEPT_BYTES
    assert tail.lines(0) == ""
