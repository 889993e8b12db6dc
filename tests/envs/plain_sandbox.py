"""A stand-in for the sandbox library: bubblewrap as root, with a private writable root over the host's own `/usr`.

Every process has its own namespaces, so a `run` leaves no process behind. Files stay until `close`. The stand-in limits
neither memory nor disk, because the library's own tests cover those limits.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

OUTPUT_BYTES = 65_536
LINKS = ("bin", "sbin", "lib", "lib64")
FROM_HOST = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/passwd", "/etc/group")


class PlainError(Exception):
    """The stand-in's error, in place of the library's own error."""


@dataclass(frozen=True)
class Ended:
    """The end of a process: its status and output."""

    status: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool


class PlainSandbox:
    """A directory that is the root of the programs that run in it."""

    killed: str | None = None
    oom_kills = 0

    def __init__(self, root: Path, *, on_close: Callable[[], None]) -> None:
        self.root = root
        self._on_close: Callable[[], None] | None = on_close

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/root",
        env: Mapping[str, str] | None = None,
        user: str = "root",
        timeout_s: float = 30.0,
        output_bytes: int | None = None,
    ) -> Ended:
        if self._on_close is None:
            raise PlainError("the sandbox is closed")
        assert user == "root"
        process = await asyncio.create_subprocess_exec(
            *bubblewrap(self.root, cwd=cwd, env=env or {}),
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"]},  # bubblewrap's own; a process inside can read it as PID 1's
        )
        try:
            return await finish(process, stdin, timeout_s=timeout_s, most_bytes=output_bytes or OUTPUT_BYTES)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        done = await self.run(["sh", "-c", 'cat > "$1" && chmod "$0" "$1"', f"{mode:o}", path], stdin=data, cwd="/")
        if done.status != 0:
            raise PlainError(done.stderr.decode("utf-8", "replace"))

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        done = await self.run(["head", "-c", str(max_bytes), "--", path], cwd="/", output_bytes=max_bytes)
        if done.status != 0:
            raise PlainError(done.stderr.decode("utf-8", "replace"))
        return done.stdout

    async def close(self) -> None:
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            await asyncio.to_thread(shutil.rmtree, self.root, ignore_errors=True)
            on_close()


class PlainSandboxes:
    """Opens sandboxes below a directory; `open_now` counts the sandboxes that are not closed yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._layers: dict[str, Path] = {}
        self.open_now = 0
        self.opened: list[Path] = []

    async def open(self, layer: Path | None = None) -> PlainSandbox:
        root = Path(tempfile.mkdtemp(dir=self._directory))
        if layer is not None:
            await asyncio.to_thread(shutil.copytree, layer, root, symlinks=True, dirs_exist_ok=True)
        for name in ("root", "tmp", "etc", "usr", "proc", "dev", "var/tmp"):
            (root / name).mkdir(parents=True, exist_ok=True)
        for name in LINKS:
            if not (root / name).is_symlink():
                (root / name).symlink_to(f"usr/{name}")
        self.open_now += 1
        self.opened.append(root)
        return PlainSandbox(root, on_close=self._closed)

    async def layer(self, key: str, build: Callable[[Any], Awaitable[None]], *, moment: int | None = None) -> Path:
        if key not in self._layers:
            sandbox = await self.open()
            try:
                await build(sandbox)
                frozen = self._directory / f"layer-{len(self._layers)}"
                await asyncio.to_thread(shutil.copytree, sandbox.root, frozen, symlinks=True)
            finally:
                await sandbox.close()
            self._layers[key] = frozen
        return self._layers[key]

    def _closed(self) -> None:
        self.open_now -= 1


def bubblewrap(root: Path, *, cwd: str, env: Mapping[str, str]) -> list[str]:
    options = ["--bind", str(root), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
    for path in FROM_HOST:
        options += ["--ro-bind-try", path, path]
    for name, value in env.items():
        options += ["--setenv", name, value]
    return [
        "bwrap",
        "--unshare-all",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        *options,
        "--chdir",
        cwd,
        "--",
    ]


async def finish(process: asyncio.subprocess.Process, stdin: bytes, *, timeout_s: float, most_bytes: int) -> Ended:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    feeding = asyncio.create_task(feed(process.stdin, stdin))
    reading = [asyncio.create_task(drain(stream, most_bytes)) for stream in (process.stdout, process.stderr)]
    try:
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                await process.wait()
        except TimeoutError:
            timed_out = True
            process.kill()
            await process.wait()
        (stdout, more), (stderr, even_more) = await asyncio.gather(*reading)
        return Ended(process.returncode or 0, stdout, stderr, timed_out, more or even_more)
    finally:
        for task in (feeding, *reading):
            task.cancel()
        await asyncio.gather(feeding, *reading, return_exceptions=True)


async def feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # the process ended without reading


async def drain(stream: asyncio.StreamReader, most_bytes: int) -> tuple[bytes, bool]:
    """Read to the end; return the first *most_bytes* and whether there were more."""
    kept, size = bytearray(), 0
    while chunk := await stream.read(65_536):
        kept += chunk[: max(0, most_bytes - size)]
        size += len(chunk)
    return bytes(kept), size > most_bytes


def need_bubblewrap() -> None:
    """Skip the test without bubblewrap or root; in CI, fail it."""
    if shutil.which("bwrap") and os.geteuid() == 0:
        return
    reason = "the coding environment's tests need bubblewrap (`apt-get install bubblewrap`) and root"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
