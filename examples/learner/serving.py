"""The run's own gateway: a child process with local workers, whose records come from this run alone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROJECT: Final = Path(__file__).resolve().parents[2]
READY: Final = "gateway_ready url="
START_S: Final = 60.0
STOP_S: Final = 30.0
LOOK_S: Final = 0.02
"""Seconds between two checks of the child's output."""


@contextlib.contextmanager
def a_gateway(environment: str) -> Iterator[str]:
    """Start a gateway that offers *environment*, and yield its address. Remove it and its files on leaving.

    Raises:
        RuntimeError: It was not ready in time. The message ends with its output.
    """
    with tempfile.TemporaryDirectory(prefix="gw") as folder:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
        environ = ours | {
            "GATEWAY_PORT": "0",
            "GATEWAY_ENVIRONMENTS": environment,
            "XDG_RUNTIME_DIR": folder,
            "XDG_STATE_HOME": folder,
        }
        log = Path(folder) / "gateway.log"
        with log.open("wb") as said:
            command = [str(Path(sys.executable).with_name("gateway")), "serve"]
            process = subprocess.Popen(command, cwd=PROJECT, env=environ, stderr=said)
            try:
                yield _address(process, log)
            finally:
                _stop(process)


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        said = log.read_text(errors="replace")
        for line in said.splitlines(keepends=True):
            if READY in line and line.endswith("\n"):
                return line.split(READY)[1].split()[0]
        if process.poll() is not None:
            break
        time.sleep(LOOK_S)
    raise RuntimeError("the gateway did not start:\n" + log.read_text(errors="replace")[-4000:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
