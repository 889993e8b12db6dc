"""``gateway serve`` on a terminal: a few lines for a person, and one line for each episode."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Thread

import httpx
import pytest

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.wire.gateways import WIRE, short_folder

ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


class Terminal:
    """``gateway serve`` with a pty as its standard streams."""

    def __init__(self, folder: Path) -> None:
        other = ("GATEWAY_", "NO_COLOR", "FORCE_COLOR")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(other)}
        settings = {
            "GATEWAY_PORT": "0",
            "GATEWAY_CATALOG_DIR": str(WIRE / "environments"),
            "GATEWAY_ENVIRONMENTS": "counter,probe",
            "GATEWAY_SOCKET_DIR": str(folder / "s"),
            "GATEWAY_STATE_DIR": str(folder / "state"),
            "TERM": "xterm-256color",
            "COLUMNS": "160",
        }
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [str(Path(sys.executable).with_name("gateway")), "serve"],
            env=inherited | settings,
            stdin=slave,
            stdout=slave,
            stderr=slave,
        )
        os.close(slave)
        self._raw = b""
        self._reader = Thread(target=self._read)
        self._reader.start()

    @property
    def raw(self) -> str:
        return self._raw.decode(errors="replace")

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait until the terminal shows *pattern*, and return the match."""

        def shown() -> re.Match[str]:
            text = ESCAPES.sub("", self.raw)
            found = re.search(pattern, text)
            assert found is not None, text
            return found

        return eventually_now(shown)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._master)

    def _read(self) -> None:
        with suppress(OSError):  # the end of a pty: the process closed its side
            while block := os.read(self._master, 4096):
                self._raw += block


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """Yield a gateway on a terminal; end it after the test."""
    with ExitStack() as undo:
        folder = short_folder()
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        served = Terminal(folder)
        undo.callback(served.close)
        yield served


def test_a_terminal_shows_the_address_the_environments_a_next_command_and_one_line_for_each_episode(
    terminal: Terminal,
) -> None:
    url = terminal.expect(r"The gateway is at (http://[^\s]+)\. Stop it with Ctrl-C\.")[1]
    terminal.expect(r"Environments: counter, probe\.")
    command = terminal.expect(r"Try: curl (\S+)\s")[1]

    with httpx.Client(trust_env=False, timeout=HANG_S, headers={"X-Session-ID": "one"}) as http:
        assert http.get(command).status_code == 200
        assert http.post(f"{url}/create", json={"env_name": "counter", "task_spec": {}}).status_code == 200
        assert http.post(f"{url}/delete").status_code == 200

    terminal.expect(r"counter  .*  reward -  0 steps  ")
    assert "\x1b[" in terminal.raw, "no colors"
    assert "session_opened" not in terminal.raw

    terminal.process.terminate()
    assert terminal.process.wait(HANG_S) == 0
