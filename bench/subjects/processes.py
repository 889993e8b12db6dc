"""Servers as separate processes: started, observed through /proc, ended."""

from __future__ import annotations

import asyncio
import os
import re
import time
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.load.http1 import Address, ask_once, request_bytes

START_S = 150.0
"""Timeout in seconds. An official server takes 3 s to import on an idle core, and cores may be shared."""
STOP_S = 20.0
LOOK_S = 0.002
"""Seconds between two checks of a starting server's output. "Ready" is not measured more precisely."""
_OTHERS = ("GATEWAY_", "ENVSERVER_", "ORS_", "OPENREWARD_")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_HEALTH = request_bytes("GET", "/health", {})


class StartError(Exception):
    """A server did not become ready."""


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds and resident memory of a process."""

    cpu_s: float
    rss_bytes: int


class ServerProcess:
    """One server process.

    Args:
        command: The command to run. Its output goes to *log*.
        variables: Added to this process's own variables, without variables that would configure a server.
        ready: A pattern in the output, whose first group is the port on 127.0.0.1.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        variables: Mapping[str, str],
        ready: str,
        log: Path,
        cwd: Path | None = None,
    ) -> None:
        self._command = list(command)
        self._variables = dict(variables)
        self._ready = re.compile(ready)
        self._log = log
        self._cwd = cwd
        self._process: Process | None = None
        self.address = Address()
        self.start_s = 0.0
        """Seconds from just before the process is created to the first 200 of ``/health``."""

    @property
    def pid(self) -> int:
        """The process's number, or 0 before the start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            StartError: It ended, or was not ready within ``START_S``.
        """
        began_at = time.perf_counter()
        with self._log.open("ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                env=_inherited() | self._variables,
                cwd=self._cwd,
                stdin=DEVNULL,
                stdout=output,
                stderr=STDOUT,
                start_new_session=True,  # Ctrl-C must reach only the benchmark, which then ends its servers in order
            )
        try:
            self.address = await self._until_ready(began_at + START_S)
            await _check_health(self.address)
        except BaseException:
            await self.stop()
            raise
        self.start_s = time.perf_counter() - began_at

    async def stop(self) -> None:
        """Send SIGTERM, and SIGKILL after ``STOP_S``. A second call does nothing."""
        for ask in ("terminate", "kill"):
            if self._process is None or self._process.returncode is not None:
                return
            getattr(self._process, ask)()
            with suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self._process.wait()

    async def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of its output."""
        return "\n".join(self._output().splitlines()[-lines:])

    @property
    def output(self) -> str:
        """The whole output."""
        return self._output()

    def usage(self) -> Usage:
        """Return the usage of the process itself."""
        return usage(self.pid)

    def children(self) -> list[int]:
        """Return the numbers of its running child processes."""
        return list(children(self.pid))

    def _output(self) -> str:
        return self._log.read_text(errors="replace")

    async def _until_ready(self, until: float) -> Address:
        assert self._process is not None
        while (found := self._ready.search(self._output())) is None:
            if self._process.returncode is not None:
                raise StartError(f"{self._command} ended with {self._process.returncode}:\n{self.tail()}")
            if time.perf_counter() > until:
                raise StartError(f"{self._command} is not ready after {START_S:.0f} s:\n{self.tail()}")
            await asyncio.sleep(LOOK_S)
        return Address(port=int(found[1]))


async def _check_health(address: Address) -> None:
    async with asyncio.timeout(START_S):
        response = await ask_once(address, _HEALTH)
    if response.status != 200:
        raise StartError(f"/health answers {response.status}")


def usage(pid: int) -> Usage:
    """Return the CPU time (user and system, in ticks of 10 ms) and the resident memory of *pid* from /proc.

    Raises:
        FileNotFoundError, ProcessLookupError: The process has ended.
    """
    # The name, in parentheses, may contain spaces. utime, stime and rss are fields 14, 15 and 24 (proc(5)).
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Usage(
        cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
        rss_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
    )


def children(pid: int) -> Iterator[int]:
    """Yield the direct children of *pid*."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and fields[0] != "Z":
                yield int(entry.name)


def descendants(pid: int) -> Iterator[int]:
    """Yield all descendants of *pid*."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def pss_bytes(pid: int) -> int:
    """Return the proportional memory of *pid*: a page that n processes share counts as 1/n. 0 if it has ended.

    Raises:
        PermissionError: This process may not read it.
    """
    with suppress(FileNotFoundError, ProcessLookupError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _inherited() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
