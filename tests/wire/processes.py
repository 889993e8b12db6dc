"""A server in a process of its own, with its output in a file that tests can read."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.deadlines import scaled
from tests.fakes.eventually import eventually_now

START_S = 60.0
"""Generous: an official server takes 3 s to import on an idle core, and cores are shared."""
STOP_S = scaled(30.0)


class ServerProcess:
    """One command that is started, killed and started again; all lives write to one log file.

    Args:
        ready: A pattern in the output that says "ready", whose first group is the address.
    """

    def __init__(
        self, command: Sequence[str], *, variables: Mapping[str, str], ready: str, log: Path, cwd: Path | None = None
    ) -> None:
        self._command = list(command)
        self._variables = dict(variables)
        self._ready = re.compile(ready)
        self._log = log
        self._cwd = cwd
        self._process: subprocess.Popen[bytes] | None = None
        self._read_from = 0
        self.address = ""

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """All that was written to stdout and stderr, by every life."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the command and wait until it says that it is ready."""
        self._variables.update(variables or {})
        self._read_from = len(self.log)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=_inherited() | self._variables,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.address = eventually_now(self._address, within_s=START_S)

    def kill(self) -> None:
        """End it without a chance to clean up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_S)

    def stop(self) -> int:
        """Ask it to end, and wait for it. Returns its exit status; -9 when it had to be killed."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def _address(self) -> str:
        assert self._process is not None
        written = self.log[self._read_from :]
        if self._process.poll() is not None:
            # Not an AssertionError: that would be waited for.
            raise RuntimeError(f"{self._command[:3]} ended with {self._process.returncode}:\n{written[-4000:]}")
        found = self._ready.search(written)
        assert found is not None, f"{self._command[:3]} is not ready:\n{written[-4000:]}"
        return found.group(1)


def _inherited() -> dict[str, str]:
    """The parent's environment without what would configure a server behind the test's back."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GATEWAY_", "ENVSERVER_", "ORS_", "OPENREWARD_"))
    }
