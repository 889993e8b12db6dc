"""A sandbox with the operations that an environment uses."""

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress

from envserver.sandbox.channel import Channel, Expectation
from envserver.sandbox.streams import Input, Output, Terminal
from envserver.sandbox.values import Completed, Judged, Limits, SandboxError

_START_S = 20.0
"""Seconds for a fork and an exec on a machine under full load."""
_KILL_S = 10.0
_CHUNK_BYTES = 1024 * 1024
_REASONS = {
    "memory": "it used more memory than its limit",
    "pids": "it stayed at its limit of processes",
    "init": "its first process ended",
    "oom": "the kernel killed its first process, because the worker was out of memory",
    "stuck": "a process inside kept a new program from starting",
}


class Sandbox:
    """A sandbox, opened and ended by ``Sandboxes``. *release* waits until the spawner has freed it.

    *oom_kills* counts the kernel's kills for lack of memory in the control group of all sandboxes.

    Attributes:
        number: The spawner's number of the sandbox.
        killed: Reason of an end from outside: ``memory``, ``pids``, ``init`` (its init died), ``stuck`` (something
            inside kept a program from starting), ``oom`` (its init died after kills by the kernel) or ``lost`` (its
            supervisor died). None while it runs and after a plain ``close``.
        judged: The judge's claim for the next ``run``. None, the default, for an agent's sandbox.
    """

    def __init__(
        self,
        number: int,
        channel: Channel,
        *,
        limits: Limits,
        release: Callable[[], Awaitable[None]],
        oom_kills: Callable[[], int],
    ) -> None:
        self.number = number
        self.killed: str | None = None
        self.judged: Judged | None = None
        self._channel = channel
        self._limits = limits
        self._release = release
        self._oom_kills = oom_kills
        self._oom_kills_before = oom_kills()
        self._requests = itertools.count(1)
        self._terminals: dict[int, Terminal] = {}
        self._closing: asyncio.Task[None] | None = None
        channel.listen(self._on_event, self._on_end)

    def __repr__(self) -> str:
        return f"<Sandbox {self.number} {self.killed or ('closed' if self.is_closed else 'open')}>"

    @property
    def is_closed(self) -> bool:
        return self._channel.is_closed

    @property
    def oom_kills(self) -> int:
        """Number of programs that the kernel has killed because the worker was out of memory, in any sandbox.

        If it changes during a judgement, the judgement proves nothing.
        """
        return self._oom_kills()

    def _on_event(self, event: dict[str, object]) -> None:
        if event.get("event") == "killed":
            self.killed = str(event["reason"])
            if self.killed == "init" and self.oom_kills != self._oom_kills_before:
                self.killed = "oom"

    def _on_end(self) -> None:
        if self.killed is None and self._closing is None:
            self.killed = "lost"

    def _ended(self) -> SandboxError:
        if self.killed is None:
            return SandboxError("the sandbox is closed", code="ended")
        return SandboxError(f"the sandbox was ended: {_REASONS.get(self.killed, self.killed)}", code="ended")

    async def _ask(self, expectation: Expectation, message: Mapping[str, object]) -> list[int]:
        """Send *message* and return the files of its first answer."""
        try:
            await self._channel.send(message)
            async with asyncio.timeout(_START_S):
                _, files = await expectation.get()
        except TimeoutError:
            raise SandboxError("the sandbox does not answer", code="ended") from None
        except SandboxError as error:
            raise self._ended() if error.code == "ended" else error from None
        return files

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
    ) -> Completed:
        """Run *argv* to its end. Its background processes may continue, without these pipes.

        Args:
            env: Variables besides PATH, HOME, USER, LOGNAME and LANG. No other variables are set.
            output_bytes: Bytes kept of each stream, instead of the limit's number.

        Raises:
            SandboxError: ``refused``: a program, folder or user is missing. ``full``: no process can start. ``ended``:
                the sandbox is gone or ends meanwhile, with the watchdog's reason.
        """
        number = next(self._requests)
        judged = self.judged
        request = {
            "op": "run", "id": number, "argv": list(argv), "cwd": cwd, "env": dict(env or {}), "user": user,
            "judged_s": None if judged is None else judged.cpu_s,
        }  # fmt: skip
        most_bytes = self._limits.output_bytes if output_bytes is None else output_bytes
        status: int | None = None
        streams: list[Input | Output] = []
        with self._channel.expect(number) as expectation:
            try:
                files = await self._ask(expectation, request)
                source, out, err = Input(files[0], stdin), Output(files[1], most_bytes), Output(files[2], most_bytes)
                streams += [source, out, err]
                status, timed_out = await self._ended_by(expectation, timeout_s, judged)
                out.finish()
                err.finish()
                return Completed(status, out.kept, err.kept, timed_out, out.truncated or err.truncated)
            finally:
                for stream in streams:
                    stream.close()
                if status is None:
                    self._channel.post({"op": "kill", "target": number})

    async def freeze(self) -> None:
        """Stop all processes inside for good, so that only programs started from now on run.

        A judge calls this, because a process that waits for its scripts could read their command lines, and write what
        they look for into files that they read.

        Raises:
            SandboxError: ``full``: something inside prevents it, or there is no room for the search. ``ended``: as in
                ``run``.
        """
        number = next(self._requests)
        with self._channel.expect(number) as expectation:
            await self._ask(expectation, {"op": "freeze", "id": number})

    async def _ended_by(self, expectation: Expectation, timeout_s: float, judged: Judged | None) -> tuple[int, bool]:
        """Return a process's status, and whether it was killed because of its deadline."""
        if (status := await self._exit(expectation, timeout_s, judged)) is not None:
            return status, False
        await self._channel.send({"op": "kill", "target": expectation.number})
        if (status := await self._exit(expectation, _KILL_S, judged)) is None:
            raise SandboxError("a killed process does not end", code="ended")
        return status, True

    async def _exit(self, expectation: Expectation, timeout_s: float, judged: Judged | None) -> int | None:
        """Wait for a process's status, and store its CPU times in *judged*. Return None after *timeout_s*."""
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    message, _ = await expectation.get()
            except TimeoutError:
                if (late := expectation.now()) is None:
                    return None
                message, _ = late  # it came in time, but this event loop was late
        except SandboxError as error:
            raise self._ended() if error.code == "ended" else error from None
        if judged is not None:
            judged.used_s = float(str(message["used_s"]))
            judged.waited_s = float(str(message["waited_s"]))
            judged.unseen_s = float(str(message["unseen_s"]))
        return int(str(message["status"]))

    async def terminal(
        self,
        argv: Sequence[str],
        *,
        cwd: str = "/root",
        env: Mapping[str, str] | None = None,
        rows: int = 24,
        cols: int = 80,
        user: str = "root",
    ) -> Terminal:
        """Start *argv* on a pty as the leader of a new session. ``TERM`` is ``dumb`` unless *env* sets it.

        Raises:
            SandboxError: See ``run``.
        """
        number = next(self._requests)
        expectation = self._channel.expect(number)
        request = {
            "op": "terminal", "id": number, "argv": list(argv), "cwd": cwd, "user": user,
            "env": {"TERM": "dumb", **(env or {})}, "rows": rows, "cols": cols,
        }  # fmt: skip
        try:
            files = await self._ask(expectation, request)
        except BaseException:
            self._channel.forget(number)
            self._channel.post({"op": "kill", "target": number})
            raise

        def forget() -> None:
            self._channel.forget(number)
            self._terminals.pop(number, None)

        terminal = Terminal(files[0], number=number, send=self._tell, forget=forget)
        self._terminals[number] = terminal
        return terminal

    async def _tell(self, message: dict[str, object]) -> None:
        with suppress(SandboxError):  # a sandbox that is gone needs no kill
            await self._channel.send(message)

    async def _open_file(self, path: str, *, is_write: bool, mode: int = 0, is_folder: bool = False) -> int:
        if not path.startswith("/") or "\0" in path:
            raise SandboxError(f"not an absolute path: {path!r}")
        with self._channel.expect(next(self._requests)) as expectation:
            request = {"op": "open", "id": expectation.number, "path": path, "write": is_write, "mode": mode}
            request["folder"] = is_folder
            return (await self._ask(expectation, request))[0]

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write *data* to the regular file *path*. Missing folders and files are created and belong to root.

        Links are followed as the sandbox's own root would follow them, and never lead out of it.

        Raises:
            SandboxError: ``refused``: with the kernel's reason. ``full``: the disk is full.
        """
        fd = await self._open_file(path, is_write=True, mode=mode)
        try:
            for start in range(0, len(data), _CHUNK_BYTES):
                _write_all(fd, data[start : start + _CHUNK_BYTES])
                await asyncio.sleep(0)
        except OSError as error:
            raise SandboxError(f"{path}: {os.strerror(error.errno or 28)}", code="full") from error
        finally:
            os.close(fd)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Return the first *max_bytes* of the regular file *path*.

        Raises:
            SandboxError: ``refused``: with the kernel's reason.
        """
        fd = await self._open_file(path, is_write=False)
        try:
            data = bytearray()
            while len(data) < max_bytes and (part := os.read(fd, min(_CHUNK_BYTES, max_bytes - len(data)))):
                data += part
                await asyncio.sleep(0)
            return bytes(data)
        except OSError as error:
            raise SandboxError(f"{path}: {os.strerror(error.errno or 5)}") from error
        finally:
            os.close(fd)

    async def open_folder(self, path: str) -> int:
        """Open the folder *path* and return its file descriptor, for looking around without a program of the box.

        The caller closes it, and opens what is below it without following links, which belong to the agent.

        Raises:
            SandboxError: ``refused``: with the kernel's reason.
        """
        return await self._open_file(path, is_write=False, is_folder=True)

    async def close(self) -> None:
        """Kill all processes inside and free the disk. Return when both are done. Idempotent.

        If the caller is cancelled here, the closing continues.
        """
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for terminal in list(self._terminals.values()):
            terminal.abandon()
        self._terminals.clear()
        self._channel.close()  # the supervisor ends the sandbox when the connection ends
        await self._release()


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]
