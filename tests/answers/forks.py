"""Plain processes in which the coding environment's judge runs the suite's own code, in place of sandboxes.

A server process loads the judge's driver once and forks for each case, which takes a tenth of a new interpreter's time.
"""

from __future__ import annotations

import atexit
import base64
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

MEMORY_BYTES: Final = 2**29
OUTPUT_BYTES: Final = 2**20
SERVER: Final = r"""
import base64, json, os, resource, sys
space = {"__name__": "driver"}
exec(compile(json.loads(sys.stdin.readline()), "driver.py", "exec", dont_inherit=True), space)
for line in sys.stdin:
    request = json.loads(line)
    given, printed = os.memfd_create("given"), os.memfd_create("printed")
    os.write(given, base64.b64decode(request["stdin"]))
    os.lseek(given, 0, os.SEEK_SET)
    if (child := os.fork()) == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"]))
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["output"], request["output"]))
        os.dup2(given, 0), os.dup2(printed, 1), os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        if request["program"] is not None:
            os.execv(sys.executable, [sys.executable, "-I", "-c", request["program"]])
        sys.stdin = open(0)
        space["main"]()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    size = os.lseek(printed, 0, os.SEEK_END)
    stdout = base64.b64encode(os.pread(printed, size, 0)).decode()
    os.close(given), os.close(printed)
    print(json.dumps({"status": status, "stdout": stdout}), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """The end of a process, as the judge reads it."""

    status: int
    stdout: bytes
    stderr: bytes = b""
    timed_out: bool = False
    truncated: bool = False


class Processes:
    """Opens processes in place of sandboxes for one solution, whose cases fail once one of them used up its time."""

    killed: str | None = None
    oom_kills = 0
    judged: Any = None

    def __init__(self, driver: str) -> None:
        self._driver = driver
        self._program: str | None = None
        self._is_out_of_time = False

    async def open(self, layer: object = None) -> Processes:
        return self

    async def close(self) -> None:
        self._program = None

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self._program = data.decode()

    async def run(self, argv: Sequence[str], *, stdin: bytes, **_: object) -> Ended:
        """Run the driver, or the program that was written, with the CPU seconds that the judge sets."""
        if self._is_out_of_time:
            return Ended(-24, b"")
        cpu_s = int(argv[argv.index("-c") + 2])
        ended = _asked(
            self._driver,
            {
                "stdin": base64.b64encode(stdin).decode(),
                "program": self._program,
                "cpu_s": cpu_s,
                "memory": MEMORY_BYTES,
                "output": OUTPUT_BYTES,
            },
        )
        self._is_out_of_time = ended.status in (-9, -24)
        return ended


def _asked(driver: str, request: Mapping[str, object]) -> Ended:
    server = _server(driver)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    ended = json.loads(server.stdout.readline())
    return Ended(ended["status"], base64.b64decode(ended["stdout"]))


@cache
def _server(driver: str) -> subprocess.Popen[str]:
    """Start the server process of this process, which ends with it."""
    server = subprocess.Popen(
        [sys.executable, "-I", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert server.stdin is not None
    server.stdin.write(json.dumps(driver) + "\n")
    atexit.register(server.communicate)
    return server
