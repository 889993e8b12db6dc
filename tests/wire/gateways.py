"""The gateway as a process, as its users run it, and its operators' view."""

import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.deadlines import HANG_S
from tests.fakes.ports import reserved_port
from tests.runner import logs
from tests.wire.processes import ServerProcess

WIRE = Path(__file__).parent
ENVIRONMENTS = ("probe", "counter", "slowsetup", "judge", "brief", "narrow")
TRAINER_KEYS = {"alice": "alice-key-5f1c", "bob": "bob-key-77aa"}
OPERATOR_KEY = "operator-key-91d2"


class Gateway:
    """``gateway serve`` in its own process.

    Args:
        folder: The folder for the gateway's log, sockets and state.
        variables: Settings in addition to the settings that all test gateways share.
    """

    def __init__(self, folder: Path, variables: Mapping[str, str]) -> None:
        self.socket_dir = Path(variables.get("GATEWAY_SOCKET_DIR", folder / "sockets"))
        self.variables = _settings(folder, self.socket_dir) | dict(variables)
        """The settings. Another gateway with these settings is a replica of this gateway, if both use Redis."""
        self._process = ServerProcess(
            [str(Path(sys.executable).parent / "gateway"), "serve"],
            variables={"GATEWAY_PORT": str(reserved_port())} | self.variables,
            ready=r"gateway_ready url=(http://[^\s]+)",
            log=folder / "gateway.log",
        )

    @property
    def url(self) -> str:
        return self._process.address

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._process.log

    def start(self) -> None:
        self._process.start()
        logs.ask(f"workers of {self.url}", self._worker_logs)

    def restart(self) -> None:
        """Start the gateway again at its previous address, so that clients find it."""
        self._process.start()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> int:
        logs.forget(f"workers of {self.url}")
        return self._process.stop()

    async def sessions(self) -> list[dict[str, Any]]:
        """Return the sessions that hold a slot."""
        return await self._admin("sessions")

    async def workers(self, environment: str | None = None) -> list[dict[str, Any]]:
        """Return the known workers of one environment, or of all environments."""
        workers = await self._admin("workers")
        return [worker for worker in workers if environment in (None, worker["environment"])]

    async def kill_worker_of(self, environment: str) -> None:
        """Kill the processes of the local worker that holds the only session of *environment*."""
        (worker,) = {one["worker"] for one in await self.sessions() if one["environment"] == environment}
        kill_worker(worker)

    def _worker_logs(self) -> str:
        """Return the end of each worker's log, for the report of a failed test."""
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        with httpx.Client(
            base_url=self.url, headers=headers, verify=False, trust_env=False, timeout=logs.ANSWER_S
        ) as http:
            workers = [worker["id"] for worker in http.get("/admin/v1/workers").json()["workers"]]
            told = {id: http.get(f"/admin/v1/workers/{id}/log").json()["log"] for id in workers}
        return "\n".join(f"{id}:\n{text}" for id, text in told.items() if text)

    async def _admin(self, what: str) -> list[dict[str, Any]]:
        entries: list[dict[str, Any]] = (await self.ask(what))[what]
        return entries

    async def ask(self, what: str, method: str = "GET", **query: str) -> dict[str, Any]:
        """Return the answer of an operator's route below ``/admin/v1``."""
        answer: dict[str, Any] = json.loads(await self.fetch(what, method, **query))
        return answer

    async def fetch(self, what: str, method: str = "GET", **query: str) -> bytes:
        """Return the body of the answer of an operator's route below ``/admin/v1``."""
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        # `verify=False`: reading the certificates, which plain HTTP does not use, takes 25 ms of CPU for each client.
        async with httpx.AsyncClient(
            base_url=self.url, headers=headers, verify=False, trust_env=False, timeout=HANG_S
        ) as http:
            response = await http.request(method, f"/admin/v1/{what}", params=query)
        assert response.status_code == 200, response.text
        return response.content


def kill_worker(id: str) -> None:
    """Kill all processes of a local worker. Its id is in the path of its home."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if id.encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def _settings(folder: Path, socket_dir: Path) -> dict[str, str]:
    return {
        "GATEWAY_HOST": "127.0.0.1",
        "GATEWAY_STORE": "memory",
        "GATEWAY_BACKEND": "process",
        "GATEWAY_SOCKET_DIR": str(socket_dir),
        "GATEWAY_STATE_DIR": str(folder / "state"),
        "GATEWAY_CATALOG_DIR": str(WIRE / "environments"),
        "GATEWAY_ENVIRONMENTS": ",".join(ENVIRONMENTS),
        "GATEWAY_DEFAULT_ENVIRONMENT": "probe",
        "GATEWAY_TRAINER_KEYS": ",".join(f"{name}:{key}" for name, key in TRAINER_KEYS.items()),
        "GATEWAY_OPERATOR_KEYS": f"operator:{OPERATOR_KEY}",
        "GATEWAY_MAX_BODY_BYTES": str(8 * 2**20),
    }


def short_folder(parent: str | None = None) -> Path:
    """Create a folder with a short name: the path of a Unix socket in it is limited to 107 bytes."""
    return Path(tempfile.mkdtemp(prefix="gw-", dir=parent))
