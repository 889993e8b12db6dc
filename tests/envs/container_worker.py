"""An environment's image in a container, exactly as the gateway describes it to the engine."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker
import httpx

from gateway.backends.docker import calls
from gateway.backends.docker.container import container_body
from gateway.catalog.toml import read_environment
from gateway.core.ids import WorkerId
from gateway.core.worker import Worker
from tests.contract.backend_world import remove_labelled
from tests.deadlines import HANG_S
from tests.envs.workers import Session

ROOT = Path(__file__).resolve().parents[2]
Change = Callable[[dict[str, Any]], None]


class ContainerWorker:
    """A running container and a client of its server."""

    def __init__(self, engine: docker.APIClient, name: str, *, change: Change | None = None) -> None:
        """Start the container of environment *name*; *change* may alter the container's description."""
        self.engine = engine
        self.name = name
        self.instance = f"eg-test-{secrets.token_hex(4)}"
        self.folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="eg-"))  # the engine sees the same path
        self.folder.chmod(0o777)  # as the gateway's own folders for workers that run as another user
        environment = read_environment(ROOT / "env_images" / name / "environment.toml")
        worker = Worker(
            id=WorkerId(secrets.token_hex(8)),
            environment=environment.name,
            digest=environment.digest(),
            slots=environment.pool.slots,
        )
        body = container_body(worker, environment, instance=self.instance, source=str(self.folder))
        if change is not None:
            change(body)
        make = engine.create_container_from_config
        self.container: str = make(body)["Id"]  # type: ignore[no-untyped-call]  # no stubs
        began = time.monotonic()
        engine.start(self.container)
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self.folder / "worker.sock")),
            base_url="http://worker",
            timeout=HANG_S,
        )
        try:
            self._wait_ready()
        except BaseException:
            self.close()
            raise
        self.ready_s = time.monotonic() - began

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + HANG_S
        while "server_ready" not in self.log():
            assert self.engine.inspect_container(self.container)["State"]["Running"], f"it ended: {self.log()}"
            assert time.monotonic() < deadline, f"it is not ready: {self.log()}"
            time.sleep(0.05)

    def log(self) -> str:
        said: bytes = self.engine.logs(self.container)
        return said.decode()

    def run(self, *argv: str, user: str = "0") -> tuple[int | None, str]:
        """Run a command in the container and return its status and output."""
        status, printed = calls.run(self.engine, container=self.container, argv=list(argv), user=user)
        return status, printed.decode(errors="replace")

    @contextmanager
    def session(self, task: Mapping[str, Any] | None = None, **more: Any) -> Iterator[Session]:
        """Open a session on *task* or with the fields of *more*, and end it afterwards."""
        opened = Session(self.http, self.name, str(uuid.uuid4()))
        body = {"env_name": self.name, **({"task_spec": task} if task is not None else {}), **more}
        created = opened.post("/create", body)
        assert created.status_code == 200, created.text
        try:
            yield opened
        finally:
            opened.close()

    def close(self) -> None:
        self.http.close()
        remove_labelled(self.engine, self.instance)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def container_worker(engine: docker.APIClient, name: str, *, change: Change | None = None) -> Iterator[ContainerWorker]:
    """Start a container of environment *name*'s image and remove it at the end."""
    worker = ContainerWorker(engine, name, change=change)
    try:
        yield worker
    finally:
        worker.close()
