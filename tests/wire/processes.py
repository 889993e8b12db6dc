"""A server in its own process, with its output in a file that tests can read."""

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.runner import logs


class ServerProcess:
    """One command that tests start, kill and start again. All its runs write to one log file.

    Args:
        ready: A pattern for the output that reports readiness. Its first group is the address.
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
        """Everything that all runs wrote to stdout and stderr."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self, variables: Mapping[str, str] | None = None) -> None:
        """Start the command and wait until it reports that it is ready."""
        self._variables.update(variables or {})
        self._read_from = len(self.log)
        with self._log.open("ab") as output:
            logs.follow(self._log)
            self._process = subprocess.Popen(
                self._command,
                env=_inherited() | self._variables,
                cwd=self._cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.address = eventually_now(self._address)

    def kill(self) -> None:
        """Kill the process without a chance to clean up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(HANG_S)

    def stop(self) -> int:
        """Terminate the process and return its exit status, or -9 if it had to be killed."""
        if self._process is None:
            return 0
        self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return -signal.SIGKILL

    def _address(self) -> str:
        assert self._process is not None
        written = self.log[self._read_from :]
        if self._process.poll() is not None:
            # Not an AssertionError, because `eventually_now` retries those.
            raise RuntimeError(f"{self._command[:3]} ended with {self._process.returncode}:\n{written[-4000:]}")
        found = self._ready.search(written)
        assert found is not None, f"{self._command[:3]} is not ready:\n{written[-4000:]}"
        return found.group(1)


def _inherited() -> dict[str, str]:
    """Return the parent's environment without variables that would configure a server unnoticed."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GATEWAY_", "ENVSERVER_", "ORS_", "OPENREWARD_"))
    }
