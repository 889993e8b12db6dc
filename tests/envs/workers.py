"""An environment's server as a worker: a separate process on a Unix socket, with sandboxes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.deadlines import COMMAND_S, HANG_S
from tests.fakes.eventually import until_now
from tests.runner import logs
from tests.sandbox.conftest import made_box
from tests.sandbox.outside import descendants

ROOT = Path(__file__).resolve().parents[2]
SANDBOXED = ("coding", "os")
"""The environments with sandboxes. Tests of the others must not make a box, which holds this machine's bubblewrap."""


class Worker:
    """A running server of the environment *name*, and a client of it.

    Args:
        name: The environment's name.
        box: The box of its sandboxes; by default the box that all tests share.
        prefix: A command line that precedes the server's own.
        settings: Further `ENVSERVER_` variables, without that prefix.
    """

    def __init__(
        self, name: str, *, box: Path | None = None, prefix: Sequence[str] = (), settings: Mapping[str, str] = {}
    ) -> None:
        self.name = name
        # Not below pytest's own folder, which only this user may enter: the sandboxes' root is another user.
        self.folder = Path(tempfile.mkdtemp(prefix=f"env-gateway-{name}-"))
        self.folder.chmod(0o755)
        home, socket = ROOT / "env_images" / name, self.folder / "worker.sock"
        given = {
            "SOCKET": str(socket),
            "TASKS": str(ROOT / "tasks" / name),
            "EXIT_ON_EOF": "1",
            "SANDBOX_HOST": "1",
            **({"SANDBOX_BOX": str(box or made_box().path)} if name in SANDBOXED else {}),
            "SANDBOX_WORK": str(self.folder / "work"),
            **settings,
        }
        log = tempfile.NamedTemporaryFile(prefix=f"env-gateway-{name}-", suffix=".log")  # noqa: SIM115  # until `stop`
        logs.follow(Path(log.name))
        self._log = log
        self.process = process = subprocess.Popen(
            [*prefix, sys.executable, str(home / f"{name}_server.py")],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "env_images" / "base"),
                **{f"ENVSERVER_{key}": value for key, value in given.items()},
            },
            stdin=subprocess.PIPE,
            stderr=log,
        )
        until_now(lambda: process.poll() is not None or "server_ready" in self._written())
        assert process.poll() is None, f"the server did not start: {self._written()}"
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://worker", timeout=HANG_S
        )

    def stop(self) -> str:
        """End the server by closing its standard input, and return its log. Fail if it left a folder."""
        self.http.close()
        self.process.communicate(timeout=COMMAND_S)  # closes its input, as the gateway's death does
        written = self._written()
        self._log.close()
        assert self.process.returncode == 0, written
        self.folder.rmdir()
        return written

    def _written(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def create(self, task: Mapping[str, Any] | None = None, **more: Any) -> tuple[Session, httpx.Response]:
        session = Session(self.http, self.name, str(uuid.uuid4()))
        body = {"env_name": self.name, **({"task_spec": task} if task is not None else {}), **more}
        return session, session.post("/create", body)

    def open(self, task: Mapping[str, Any] | None = None, **more: Any) -> Session:
        session, created = self.create(task, **more)
        assert created.status_code == 200, created.text
        return session

    def _spawner(self) -> int:
        children = [pid for pid in descendants(self.process.pid) if _parent_of(pid) == self.process.pid]
        # The spawner's own children have its name too until they have started another program.
        (spawner,) = [pid for pid in children if _name_of(pid) == "spawner"]
        return spawner

    def supervisors(self) -> list[int]:
        """List the supervisor processes, one for each open sandbox."""
        spawner = self._spawner()
        return [pid for pid in descendants(spawner) if _parent_of(pid) == spawner]

    def kept_layers(self) -> list[str]:
        """List the spawner's folders, while no sandbox is open."""
        return sorted(os.listdir(f"/proc/{self._spawner()}/cwd"))

    def runs(self, name: str) -> bool:
        """Return True if a program of this name runs in a sandbox."""
        return any(_name_of(pid) == name for pid in descendants(self._spawner()))


class Session:
    """One session, used over the wire."""

    def __init__(self, http: httpx.Client, name: str, sid: str) -> None:
        self._http = http
        self._name = name
        self.sid = sid
        self._headers = {"X-Session-ID": sid, "Accept": "application/json"}

    def get(self, path: str) -> httpx.Response:
        return self._http.get(path, headers=self._headers)

    def post(self, path: str, body: Mapping[str, Any], **headers: str) -> httpx.Response:
        return self._http.post(path, json=body, headers={**self._headers, **headers})

    def prompt(self) -> str:
        return str(self.get(f"/{self._name}/prompt").json()[0]["text"])

    def call(self, **action: Any) -> dict[str, Any]:
        answer = self.post(f"/{self._name}/call", action)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def tool(self, name: str, **arguments: Any) -> dict[str, Any]:
        answer = self.call(name=name, input=arguments)
        return dict(answer["output"] if answer["ok"] else answer)

    def text(self, name: str, **arguments: Any) -> str:
        return str(self.tool(name, **arguments)["blocks"][0]["text"])

    def say(self, text: str) -> dict[str, Any]:
        return self.call(text=text)

    def close(self) -> None:
        assert self.post("/delete", {}).status_code == 200


def _name_of(pid: int) -> str:
    """Return a process's name, or an empty text if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _parent_of(pid: int) -> int:
    """Return a process's parent, or 0 if the process has ended meanwhile."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until *holds* returns True, for at most half a minute."""
    deadline = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)
