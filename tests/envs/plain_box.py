"""A small sandbox for the os environment's tests: bubblewrap with a writable root that shares the host's /usr.

It provides the interface of `os_box.Sandbox` with real processes, terminals and files. It does not isolate hostile
code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import os
import pty
import shutil
import signal
import stat
import struct
import sys
import tempfile
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.fakes.user import need_other_users

HOME = Path(__file__).resolve().parents[2] / "env_images" / "os"

LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FOLDERS = ("dev", "home", "mnt", "opt", "proc", "root", "run", "srv", "tmp", "usr", "var/log", "var/mail", "var/tmp")
ETC = (
    *("alternatives", "bash.bashrc", "default", "ld.so.cache", "localtime", "login.defs", "nsswitch.conf", "pam.conf"),
    *("pam.d", "profile", "security", "shells", "skel"),
)
"""The files of /etc that login, su and useradd read. No account of the host is among them."""
PASSWD = "root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
GROUP = "root:x:0:\nnogroup:x:65534:\n"
SHADOW = "root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n"
KILL_S = scaled(10.0)


def os_module(name: str) -> ModuleType:
    """Import a module of the os environment, whose folder is not a package."""
    if str(HOME) not in sys.path:
        sys.path.append(str(HOME))
    return importlib.import_module(name)


def require_bubblewrap() -> None:
    """Skip the test where bubblewrap cannot be used; in CI, fail it."""
    reason = ""
    if shutil.which("bwrap") is None or shutil.which("nsenter") is None:
        reason = "bwrap and nsenter are needed: apt-get install bubblewrap util-linux"
    elif os.geteuid() != 0:
        reason = "the plain box needs root: it enters namespaces with several users in them"
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@dataclass(frozen=True)
class Done:
    status: int
    stdout: bytes
    stderr: bytes
    timed_out: bool = False
    truncated: bool = False


class PlainTerminal:
    """A process on a pty of the test's own."""

    def __init__(self, process: asyncio.subprocess.Process, master: int, foreground: Callable[[int], None]) -> None:
        self._process = process
        self._master = master
        self._foreground = foreground
        self.is_closed = False

    async def write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._master, data) :]
            except BlockingIOError:
                await _ready(asyncio.get_running_loop().add_writer, self._master, KILL_S)

    async def read(self, max_bytes: int, timeout_s: float) -> bytes:
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        while not self.is_closed:
            try:
                data = os.read(self._master, max_bytes)
            except BlockingIOError:
                if (left_s := deadline - clock()) <= 0:
                    raise TimeoutError from None
                await _ready(asyncio.get_running_loop().add_reader, self._master, left_s)
                continue
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                data = b""
            self.is_closed = not data
            return data
        return b""

    def silence(self) -> None:
        if not self.is_closed:
            with contextlib.suppress(termios.error):
                settings = termios.tcgetattr(self._master)
                settings[1] &= ~termios.ONLCR
                settings[3] &= ~termios.ECHO
                termios.tcsetattr(self._master, termios.TCSANOW, settings)

    async def interrupt(self) -> None:
        self._foreground(signal.SIGINT)

    async def kill_foreground(self) -> None:
        self._foreground(signal.SIGKILL)

    async def close(self) -> None:
        self.is_closed = True
        if self._master >= 0:
            os.close(self._master)
            self._master = -1
        await _end(self._process)


class PlainSandbox:
    """A root directory of its own and an init process whose namespaces all other processes enter."""

    oom_kills = 0
    judged: Any = None
    """Ignored: a plain box has no priorities."""

    def __init__(self, root: Path, init: asyncio.subprocess.Process, init_pid: int) -> None:
        self.root = root
        self.killed: str | None = None
        self._init = init
        self._init_pid = init_pid
        self._enter = ["nsenter", f"--target={init_pid}", "--mount", "--pid", "--net", "--ipc", "--uts", "--root"]
        self._terminals: list[PlainTerminal] = []

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        cwd: str = "/root",
        env: Mapping[str, str] = {},
        user: str = "root",
        timeout_s: float = 30.0,
        output_bytes: int | None = None,
    ) -> Done:
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin)
            given.seek(0)
            # Files, not pipes: a background child may hold pipes open after the process has ended.
            process = await asyncio.create_subprocess_exec(
                *self._inside(argv, cwd, env), stdin=given, stdout=out, stderr=err, start_new_session=True
            )
            waiting = asyncio.ensure_future(process.wait())
            done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
            if not done:
                os.killpg(process.pid, signal.SIGKILL)
                await waiting
            out.seek(0)
            err.seek(0)
            return Done(process.returncode or 0, out.read(output_bytes or 65_536), err.read(65_536), not done)

    async def terminal(
        self, argv: Sequence[str], *, cwd: str = "/root", env: Mapping[str, str] = {}, rows: int = 24, cols: int = 80
    ) -> PlainTerminal:
        master, slave = pty.openpty()
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
        os.set_blocking(master, False)
        line = ["setsid", "--ctty", "--wait", *argv]
        process = await asyncio.create_subprocess_exec(
            *self._inside(line, cwd, env), stdin=slave, stdout=slave, stderr=slave
        )

        def foreground(number: int) -> None:
            group = struct.unpack("i", fcntl.ioctl(master, termios.TIOCGPGRP, b"\0" * 4))[0]
            with contextlib.suppress(ProcessLookupError):
                if group > 1:  # 0 is not a group of the box and would be the test's own group
                    os.killpg(group, number)

        os.close(slave)
        terminal = PlainTerminal(process, master, foreground)
        self._terminals.append(terminal)
        return terminal

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        target = self._inner(path)
        target.write_bytes(data)
        target.chmod(mode)

    async def open_folder(self, path: str) -> int:
        return os.open(self._inner(path), os.O_RDONLY | os.O_DIRECTORY)

    async def freeze(self) -> None:
        await self.run(["bash", "-c", "kill -STOP -1"])  # fails if there is no other process

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        target = self._inner(path)
        if not stat.S_ISREG(target.lstat().st_mode):
            raise OSError(errno.EINVAL, "no plain file", path)
        return target.read_bytes()[:max_bytes]

    async def close(self) -> None:
        for terminal in self._terminals:
            await terminal.close()
        await _end(self._init)
        shutil.rmtree(self.root, ignore_errors=True)

    def _inner(self, path: str) -> Path:
        # Through the init process, so that /proc is the box's own.
        return Path(f"/proc/{self._init_pid}/root", path.lstrip("/"))

    def _inside(self, argv: Sequence[str], cwd: str, env: Mapping[str, str]) -> list[str]:
        return [*self._enter, f"--wdns={cwd}", "--", "env", "-i", *(f"{k}={v}" for k, v in env.items()), *argv]


class PlainSandboxes:
    """Opens sandboxes. A layer is a finished root directory that is copied."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layers: dict[str, Path] = {}
        self._opened: list[PlainSandbox] = []
        self.builds = 0

    async def open(self, layer: Path | None = None) -> PlainSandbox:
        root = Path(tempfile.mkdtemp(prefix="box-", dir=self._folder))
        if layer is None:
            _furnish(root)
        else:
            await _copied(layer, root)
        sandbox = await _started(root)
        self._opened.append(sandbox)
        return sandbox

    async def layer(self, key: str, build: Callable[[PlainSandbox], Awaitable[None]], **dates: Any) -> Path:
        if key not in self._layers:
            sandbox = await self.open()
            try:
                await build(sandbox)
                kept = Path(tempfile.mkdtemp(prefix="layer-", dir=self._folder))
                await _copied(sandbox.root, kept)
            finally:
                await sandbox.close()
            self._layers[key] = kept
            self.builds += 1
        return self._layers[key]

    async def close(self) -> None:
        for sandbox in self._opened:
            await sandbox.close()


@contextlib.asynccontextmanager
async def plain_sandboxes(folder: Path) -> AsyncIterator[PlainSandboxes]:
    """Yield sandboxes under *folder* and close all of them at the end."""
    require_bubblewrap()
    sandboxes = PlainSandboxes(folder)
    try:
        yield sandboxes
    finally:
        await sandboxes.close()


def host_box() -> Any:
    """Return the library's box of this machine's programs, kept under a name that changes with its recipe."""
    recipe = Path(importlib.import_module("envserver.sandbox.hostbox").__file__ or "").read_bytes()
    name = f"env-gateway-box-{os.geteuid()}-{hashlib.sha256(recipe).hexdigest()[:12]}"
    return importlib.import_module("envserver.sandbox.hostbox").box_of_host(Path(tempfile.gettempdir(), name))


def library_limits() -> Any:
    """Return the limits of each of the library's sandboxes."""
    limits = importlib.import_module("envserver.sandbox").Limits
    return limits(memory_bytes=256 * 2**20, pids=128, disk_bytes=64 * 2**20, cpu_s=60)


@contextlib.asynccontextmanager
async def library_sandboxes() -> AsyncIterator[Any]:
    """Yield sandboxes of `envserver.sandbox` in a kept box that consists of this machine's programs."""
    library = importlib.import_module("envserver.sandbox")
    # Not below pytest's own folder, which only this user may enter: the sandboxes' root is another user.
    work = Path(tempfile.mkdtemp(prefix="env-gateway-os-"))
    work.chmod(0o755)  # noqa: ASYNC240 - a test's set-up
    try:
        async with library.Sandboxes(host_box(), work, library_limits()) as sandboxes:
            yield sandboxes
    finally:
        work.rmdir()  # noqa: ASYNC240 - as above


@contextlib.asynccontextmanager
async def sandboxes_of(kind: str, folder: Path) -> AsyncIterator[Any]:
    """Yield sandboxes of *kind*: `plain` or `library`."""
    await require_sandboxes(kind)
    async with library_sandboxes() if kind == "library" else plain_sandboxes(folder) as sandboxes:
        yield sandboxes


async def require_sandboxes(kind: str) -> None:
    """Skip the test where sandboxes of *kind* cannot be opened; in CI, fail it."""
    require_bubblewrap()
    if kind == "library":
        need_other_users()
    reason = await library_refusal() if kind == "library" else ""
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


async def library_refusal() -> str:
    """Return why the library's sandboxes cannot be used here, or an empty text. The process tries only once."""
    if not _refusals:
        library = importlib.import_module("envserver.sandbox")
        try:
            async with library_sandboxes() as sandboxes:
                await sandboxes.check()
        except library.SandboxError as error:
            _refusals.append(f"no sandboxes here: {error}")
        else:
            _refusals.append("")
    return _refusals[0]


_refusals: list[str] = []


def _furnish(root: Path) -> None:
    root.chmod(0o755)
    for name, target in LINKS.items():
        if Path("/", name).is_symlink():
            (root / name).symlink_to(target)
    for name in (*FOLDERS, "etc"):
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "root").chmod(0o700)
    for name in ETC:
        if (source := Path("/etc", name)).is_dir():
            shutil.copytree(source, root / "etc" / name, symlinks=True)
        elif source.exists():
            shutil.copy(source, root / "etc" / name)
    for name, text in {"passwd": PASSWD, "group": GROUP, "shadow": SHADOW, "gshadow": "root:*::\n"}.items():
        (root / "etc" / name).write_text(text)


async def _started(root: Path) -> PlainSandbox:
    read_end, write_end = os.pipe()
    try:
        init = await asyncio.create_subprocess_exec(
            *("bwrap", "--bind", str(root), "/", "--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"),
            *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "box", "--clearenv"),
            *("--die-with-parent", "--info-fd", str(write_end), "/bin/bash", "-c", "echo ready; exec sleep infinity"),
            pass_fds=(write_end,),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
        )
    finally:
        os.close(write_end)
    assert init.stdout is not None
    async with asyncio.timeout(KILL_S):
        ready = await init.stdout.readline()
    with os.fdopen(read_end) as info:
        said = json.load(info)
    assert ready == b"ready\n", "bubblewrap did not start"
    return PlainSandbox(root, init, int(said["child-pid"]))


async def _copied(source: Path, target: Path) -> None:
    # cp, because shutil keeps neither owners nor hard links.
    process = await asyncio.create_subprocess_exec("cp", "-a", f"{source}/.", str(target))
    assert await process.wait() == 0


async def _ready(add: Callable[..., object], descriptor: int, timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    add(descriptor, ready.set)
    waiting = asyncio.ensure_future(ready.wait())
    try:
        await asyncio.wait({waiting}, timeout=timeout_s)
    finally:
        waiting.cancel()
        loop.remove_reader(descriptor)
        loop.remove_writer(descriptor)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    async with asyncio.timeout(KILL_S):
        await process.wait()
