"""Sandboxes without a server: the library's own cost, in this process. It is the lower bound for sessions."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from envserver.sandbox import Limits, Sandboxes
from envserver.sandbox.hostbox import box_of_host

from bench.load.boxes import Taken
from bench.load.episodes import WrongAnswer

LIMITS = Limits(memory_bytes=512 * 2**20, pids=256, disk_bytes=128 * 2**20, cpu_s=120)
"""The limits of the os environment."""


@contextmanager
def sandbox_folder() -> Iterator[Path]:
    """Yield a folder for a box and for work. Every user can traverse it, because a sandbox's root is another user."""
    folder = Path(tempfile.mkdtemp(prefix="bench-sandboxes-"))
    folder.chmod(0o755)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@asynccontextmanager
async def sandboxes(folder: Path) -> AsyncIterator[Sandboxes]:
    """Yield sandboxes on a box in *folder*. The box is made of this machine's programs unless it exists.

    Raises:
        SandboxError: This machine does not support them. The message says what to change.
    """
    box = await asyncio.to_thread(box_of_host, folder / "box")
    work = folder / "work" / f"library-{os.getpid()}"
    for place in (work.parent, work):
        place.mkdir(exist_ok=True)
        place.chmod(0o755)
    async with Sandboxes(box, work, LIMITS) as made:
        await made.check()
        yield made


async def session(made: Sandboxes, token: str) -> Taken:
    """Open a sandbox, print *token* with a program in it, and close it."""
    times = [time.perf_counter()]
    sandbox = await made.open()
    times.append(time.perf_counter())
    try:
        done = await sandbox.run(["/bin/echo", token], cwd="/")
        times.append(time.perf_counter())
    finally:
        await sandbox.close()
    if done.stdout.decode().strip() != token:
        raise WrongAnswer(f"echo: {done!r}"[:200])
    began_at, ready_at, said_at = times
    return Taken(ready_at - began_at, said_at - ready_at, time.perf_counter() - said_at)
