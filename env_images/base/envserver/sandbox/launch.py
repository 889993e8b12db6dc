"""Starts the spawner, a small separate interpreter without the server's modules.

Where the server has given up the right to map users, a launcher starts it and maps them (``rights``). It is not a fork
of the server: the fork would keep the server's memory, and an agent's processes start as forks of it.
"""

import asyncio
import os
import shutil
import socket
import stat
import subprocess
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from envserver.sandbox import boot, rights, seccomp
from envserver.sandbox import protocol as wire
from envserver.sandbox.channel import Channel
from envserver.sandbox.values import UIDS, Box, Limits, SandboxError

START_S = 20.0
"""Seconds for an interpreter's start and two mounts, which take about 50 ms on an idle machine."""


def _closed_folder(path: Path) -> Path | None:
    """Return the first folder on the path to *path*, inclusive, that other users cannot pass, or None."""
    whole = path.absolute()
    return next((one for one in (*reversed(whole.parents), whole) if not one.stat().st_mode & stat.S_IXOTH), None)


def _configuration(box: Box, work: Path, limits: Limits, *, ranged: bool) -> dict[str, object]:
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise SandboxError(
            "bubblewrap is missing: install the package `bubblewrap`, 0.8 or later, with bwrap on PATH",
            code="unsupported",
        )
    for path, name in ((Path(box.path), "the box"), (work, "the work folder")):
        if not path.is_dir():
            raise SandboxError(f"{name} {path} is not a directory", code="unsupported")
        if ranged and (closed := _closed_folder(path)) is not None:
            raise SandboxError(
                f"{name} {path} has to be in folders that any user can pass through: `chmod o+x {closed}`",
                code="unsupported",
            )
    try:
        calls = seccomp.program()
    except ValueError as error:
        raise SandboxError(str(error), code="unsupported") from error
    return {
        "box": str(Path(box.path).absolute()),
        "work": str(work.absolute()),
        "limits": asdict(limits),
        "calls": calls.hex(),
        "ranged": ranged,
        "bubblewrap": os.path.realpath(bubblewrap),  # the spawner has another root, and no PATH
    }


def _spawn(theirs: socket.socket) -> "subprocess.Popen[bytes] | rights.Spawned":
    if (launcher := rights.launcher()) is not None:
        return launcher.start(theirs)
    argv = boot.command("spawner", theirs.fileno())
    return subprocess.Popen(
        argv, pass_fds=[theirs.fileno()], env={}, cwd="/", stdin=subprocess.DEVNULL, start_new_session=True
    )


class SpawnerProcess:
    """The running spawner and the channel to it."""

    def __init__(self, process: "subprocess.Popen[bytes] | rights.Spawned", channel: Channel) -> None:
        self.process = process
        self.channel = channel

    def stop(self) -> None:
        """End the spawner and all sandboxes."""
        self.channel.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()  # it was killed, so this takes only the kernel's time


async def launch(box: Box, work: Path, limits: Limits) -> SpawnerProcess:
    """Start a spawner and map its users.

    Raises:
        SandboxError: ``unsupported``, with the remedy.
    """
    ranged = rights.launcher() is not None or rights.may_map_range()
    configuration = _configuration(box, work, limits, ranged=ranged)
    ours, theirs = wire.pair()
    with theirs:
        process = _spawn(theirs)
    running = SpawnerProcess(process, Channel(ours))
    try:
        async with asyncio.timeout(START_S):
            await _settle(running, configuration, first_uid=box.first_uid, ranged=ranged)
    except TimeoutError:
        running.stop()
        raise SandboxError("the spawner did not start in time", code="unsupported") from None
    except BaseException:
        running.stop()
        raise
    return running


async def _settle(running: SpawnerProcess, configuration: dict[str, object], *, first_uid: int, ranged: bool) -> None:
    channel, pid = running.channel, running.process.pid
    await channel.send(configuration)
    _told(await channel.next_event())
    try:
        _map_users(pid, first_uid=first_uid, ranged=ranged)
    except OSError as error:
        raise SandboxError(
            f"users could not be mapped: {error}; see SANDBOX.md, 'Machines'", code="unsupported"
        ) from error
    await channel.send({"mapped": True})
    _told(await channel.next_event())


def _told(event: dict[str, object]) -> None:
    if "unshared" in event or "settled" in event:
        return
    reason = event.get("failed", "the spawner ended")
    raise SandboxError(
        f"this machine opens no sandboxes: {reason}. In a container: the seccomp profile for sandboxes, unmasked /proc "
        "paths and CAP_SETUID and CAP_SETGID are needed; elsewhere: user namespaces, and folders for the box and the "
        "work that any user can pass through; see SANDBOX.md, 'Machines'",
        code="unsupported",
    )


def _map_users(pid: int, *, first_uid: int, ranged: bool) -> None:
    if (launcher := rights.launcher()) is not None:
        launcher.map_users(pid)
        return
    process = Path(f"/proc/{pid}")
    if not ranged:
        (process / "setgroups").write_text("deny")
    (process / "uid_map").write_text(f"0 {first_uid} {UIDS}" if ranged else f"0 {os.geteuid()} 1")
    (process / "gid_map").write_text(f"0 {first_uid} {UIDS}" if ranged else f"0 {os.getegid()} 1")
