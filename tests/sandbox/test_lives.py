"""Many openings and closings, cancellations, and the death of the worker leave nothing behind."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import uvloop
from envserver.sandbox import Box, Sandbox, SandboxError, Sandboxes

from tests.envserver.eventually import eventually
from tests.sandbox.conftest import LIMITS
from tests.sandbox.inside import bash, has_no_process
from tests.sandbox.outside import are_dead, descendants, mounts, open_files

ENVSERVER = Path(__file__).parents[2] / "env_images" / "base"


async def test_two_hundred_cycles_leave_no_process_mount_or_file(sandboxes: Sandboxes) -> None:
    await sandboxes.check()
    assert sandboxes._spawner is not None
    spawner = sandboxes._spawner.process.pid
    before = (set(descendants()), mounts(), open_files(), spawner_state(spawner))

    async def cycle() -> None:
        sandbox = await sandboxes.open()
        await bash(sandbox, "sleep 300 & echo x > /root/x")
        terminal = await sandbox.terminal(["bash"])
        await terminal.write(b"sleep 300\n")
        await sandbox.close()

    for _ in range(50):
        await asyncio.gather(*(cycle() for _ in range(4)))

    assert (set(descendants()), mounts(), open_files(), spawner_state(spawner)) == before
    assert (before[1], before[3][1:]) == (0, (1, ["0"]))  # its work folder is the only mount, and only there


async def test_the_bubblewrap_on_the_path_is_used(box: Box, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = shutil.which("bwrap")
    assert installed is not None
    with tempfile.TemporaryDirectory(prefix="env-gateway-path-") as folder:
        bubblewrap = Path(shutil.copy(installed, folder))
        bubblewrap.parent.chmod(0o755)  # the sandboxes' root is another user
        monkeypatch.setenv("PATH", folder)
        async with Sandboxes(box, work, LIMITS) as sandboxes:
            await sandboxes.open()
            programs = set(programs_of(descendants()))

    assert str(bubblewrap) in programs


async def test_the_spawner_keeps_no_mount_that_its_sandboxes_do_not_need(sandboxes: Sandboxes) -> None:
    await sandboxes.check()
    assert sandboxes._spawner is not None
    points = mount_points(sandboxes._spawner.process.pid)

    programs = {"usr", "bin", "sbin", "lib", "lib32", "lib64", bubblewrap_folder()}
    assert {point.split("/")[1] for point in points} <= {"", "proc", "dev", "rooms", *programs}
    assert sorted(point for point in points if point.startswith("/dev")) == [
        f"/dev/{name}" for name in ("full", "null", "random", "tty", "urandom", "zero")
    ]


def mount_points(pid: int) -> list[str]:
    return [row.split()[4] for row in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]


def bubblewrap_folder() -> str:
    """Return the top folder that contains bubblewrap."""
    found = shutil.which("bwrap")
    assert found is not None
    return os.path.realpath(found).split("/")[1]


def programs_of(pids: list[int]) -> Iterator[str]:
    for pid in pids:
        with suppress(OSError):  # the process has just ended
            yield os.readlink(f"/proc/{pid}/exe")


async def test_an_open_sandbox_leaves_no_mount_that_the_next_sandbox_would_copy(sandboxes: Sandboxes) -> None:
    await sandboxes.check()
    assert sandboxes._spawner is not None
    spawner = sandboxes._spawner.process.pid
    before = mounts(spawner)

    layer = await sandboxes.layer("key", lambda sandbox: bash(sandbox, "echo x > /root/x"))
    opened = [await sandboxes.open(layer) for _ in range(3)]
    held = mounts(spawner)
    for sandbox in opened:
        await sandbox.close()

    assert held == before + 1  # the layer's mount


def spawner_state(pid: int) -> tuple[int, int, list[str]]:
    """Return the numbers of a spawner's open files and mounts, and the names of its folders."""
    process = Path(f"/proc/{pid}")
    return (
        len(os.listdir(process / "fd")),
        mounts(pid),
        sorted(os.listdir(process / "cwd")),
    )


async def test_an_opening_that_is_cancelled_at_any_turn_leaves_nothing(sandboxes: Sandboxes) -> None:
    await sandboxes.check()
    assert sandboxes._spawner is not None
    spawner = sandboxes._spawner.process.pid
    before = (set(descendants()), open_files(), spawner_state(spawner))

    finished = 0
    for turns in range(40):
        opening = asyncio.create_task(sandboxes.open())
        for _ in range(turns):
            if opening.done():
                break
            await asyncio.sleep(0 if turns < 10 else 0.0005)
        opening.cancel()
        await asyncio.wait({opening})
        if not opening.cancelled():
            finished += 1
            await opening.result().close()

    async def is_as_before() -> bool:
        return (set(descendants()), open_files(), spawner_state(spawner)) == before

    await eventually(is_as_before)

    await sandboxes.check()


async def test_a_run_that_is_cancelled_at_any_turn_leaves_nothing(sandbox: Sandbox) -> None:
    before = open_files()

    for turns in range(40):
        running = asyncio.create_task(bash(sandbox, "exec sleep 300"))
        for _ in range(turns):
            await asyncio.sleep(0 if turns < 10 else 0.0005)
        running.cancel()
        await asyncio.wait({running})
    await eventually(lambda: has_no_process(sandbox, "sleep"))

    assert open_files() == before


async def test_a_close_that_is_cancelled_continues(sandboxes: Sandboxes) -> None:
    for turns in range(10):
        sandbox = await sandboxes.open()
        closing = asyncio.create_task(sandbox.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait({closing})
        await sandbox.close()

    assert repr(sandboxes) == "<Sandboxes 0 open, 0 layers>"


async def test_closing_the_sandboxes_closes_each_sandbox(box: Box, work: Path) -> None:
    before = (set(descendants()), open_files())
    sandboxes = Sandboxes(box, work, LIMITS)
    sandbox = await sandboxes.open()
    await bash(sandbox, "sleep 300 &")

    await sandboxes.close()
    await sandboxes.close()

    assert sandbox.is_closed
    assert (set(descendants()), open_files()) == before


async def test_a_killed_spawner_ends_its_sandboxes_and_the_next_open_starts_a_new_spawner(sandboxes: Sandboxes) -> None:
    sandbox = await sandboxes.open()
    assert sandboxes._spawner is not None
    below = descendants(sandboxes._spawner.process.pid)
    running = asyncio.create_task(bash(sandbox, "sleep 300"))

    os.kill(sandboxes._spawner.process.pid, signal.SIGKILL)

    with pytest.raises(SandboxError) as raised:
        await running
    assert (raised.value.code, sandbox.killed) == ("ended", "lost")
    await eventually(lambda: are_dead(below))
    await sandboxes.check()


_SERVER = """
import asyncio, sys
from pathlib import Path
from envserver.sandbox import Box, Limits, Sandboxes

async def main():
    sandboxes = Sandboxes(Box(sys.argv[1]), sys.argv[2], Limits())
    for _ in range(3):
        sandbox = await sandboxes.open()
        await sandbox.run(["bash", "-c", "setsid sleep 300 & trap '' HUP TERM; sleep 300 &"])
        terminal = await sandbox.terminal(["bash", "-c", "trap '' HUP; while :; do sleep 1; done"])
    print("ready", flush=True)
    await asyncio.sleep(300)

asyncio.run(main())
"""


async def test_a_killed_server_takes_all_its_processes_with_it(box: Box, work: Path) -> None:
    server = subprocess.Popen(  # noqa: ASYNC220  # killed as a machine kills it, without asyncio
        [sys.executable, "-c", _SERVER, str(box.path), str(work)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ENVSERVER)},
    )
    with server:
        assert server.stdout is not None
        assert await asyncio.to_thread(server.stdout.readline) == b"ready\n"
        below = descendants(server.pid)
        assert len(below) >= 1 + 3 * 3

        server.kill()

        await eventually(lambda: are_dead(below))
    assert os.listdir(work) == []


async def test_the_error_for_a_missing_box_or_work_folder_names_it(box: Box, work: Path) -> None:
    for sandboxes, word in ((Sandboxes(Box("/no/box"), work), "/no/box"), (Sandboxes(box, "/no/work"), "/no/work")):
        with pytest.raises(SandboxError, match=word) as raised:
            await sandboxes.check()
        assert raised.value.code == "unsupported"


async def is_as(before: tuple[set[int], list[str]]) -> bool:
    return (set(descendants()), open_files()) == before


async def test_after_a_close_nothing_opens_and_pending_openings_fail(box: Box, work: Path) -> None:
    for turns in (0, 1, 3, 10, 30, 100):
        before = (set(descendants()), open_files())
        sandboxes = Sandboxes(box, work, LIMITS)
        opening = [asyncio.create_task(sandboxes.open()) for _ in range(2)]
        building = asyncio.create_task(sandboxes.layer("key", lambda sandbox: bash(sandbox, "sleep 300")))
        for _ in range(turns):
            await asyncio.sleep(0 if turns < 30 else 0.0005)

        await sandboxes.close()
        await asyncio.wait({*opening, building})

        assert isinstance(building.exception(), SandboxError)
        with pytest.raises(SandboxError, match="closed"):
            await sandboxes.open()
        # The loop closes an aborted socket a turn or two later.
        await eventually(partial(is_as, before))


async def test_sandboxes_work_on_uvloop(box: Box, work: Path) -> None:
    async def live() -> tuple[bytes, bytes, str | None]:
        async with Sandboxes(box, work, LIMITS) as sandboxes:
            layer = await sandboxes.layer("key", lambda sandbox: sandbox.write_file("/root/made", b"made\n"))
            first, second = await asyncio.gather(sandboxes.open(layer), sandboxes.open(layer))
            done = await first.run(["cat", "-", "/root/made"], stdin=b"said\n" * 50_000, output_bytes=1 << 20)
            terminal = await second.terminal(["bash"])
            await terminal.write(b"stty -echo\n")
            # One after the other: once a program has ended, the shell is in the foreground and would be killed.
            for stop in (terminal.interrupt, terminal.kill_foreground):
                await terminal.write(b"sleep 300\n")
                await eventually(lambda: has_process(second, "sleep"))
                await stop()
                await eventually(lambda: has_no_process(second, "sleep"))
            await terminal.write(b"echo al\\ive\n")
            text = b""
            while b"alive" not in text:
                data = await terminal.read(4096, 20.0)
                assert data, text  # a closed terminal returns empty data immediately and forever
                text += data
            with suppress(SandboxError):
                await first.run(["bash", "-c", "b() { b | b & }; b; sleep 60"], timeout_s=60)
            return done.stdout, text, first.killed

    await asyncio.to_thread(uvloop.run, asyncio.sleep(0))  # libuv keeps its own pipe from the first loop on
    before = (set(descendants()), open_files())

    out, text, killed = await asyncio.to_thread(uvloop.run, live())

    assert out == b"said\n" * 50_000 + b"made\n"
    assert b"alive" in text
    assert killed == "pids"
    assert (set(descendants()), open_files()) == before


async def has_process(sandbox: Sandbox, name: str) -> bool:
    return not await has_no_process(sandbox, name)


def test_a_bare_server_does_not_import_the_sandbox_library() -> None:
    code = "import sys, envserver; print([name for name in sys.modules if name.split('.')[1:2] == ['sandbox']])"

    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ENVSERVER)}
    )

    assert shown.stdout == "[]\n"
