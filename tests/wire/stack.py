"""The parts of the full stack next to the gateway: Docker, Redis, and images of the test environments."""

import shutil
import subprocess
import uuid
from pathlib import Path
from typing import Any

import docker
import redis

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually_now
from tests.fakes.images import built_once, files_of
from tests.runner import logs
from tests.wire.gateways import WIRE, Gateway, short_folder

INSTANCE_LABEL = "env-gateway.instance"
ENVIRONMENT_LABEL = "env-gateway.environment"
IMAGES = ("probe", "counter", "slowsetup", "judge")
SHARED_MEMORY = "/dev/shm"
"""A folder below this path has the same path for this machine, for a root filesystem on it, and for their engine."""


class Redis:
    """A separate Redis server on a Unix socket, without persistence."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        command += ["--hz", "1"]  # an idle server looks once a second, not ten times
        with (self._folder / "redis.log").open("ab") as log:
            logs.follow(self._folder / "redis.log")
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder)
        eventually_now(self._answers)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(HANG_S)

    def database(self) -> redis.Redis:
        """Return a client for the server's data, independent of the gateway."""
        return redis.Redis(unix_socket_path=str(self.socket), decode_responses=True)

    def _answers(self) -> None:
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            try:
                client.ping()
            except redis.ConnectionError as error:
                raise AssertionError("Redis does not answer yet") from error


class Containers:
    """The containers of one gateway, inspected without the gateway."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self._engine = docker.from_env(version="auto")

    def build_images(self) -> None:
        """Build the images of the test environments."""
        for name in IMAGES:
            built_once(self._engine.api, f"env-gateway/wire-{name}", files_of(WIRE / "environments" / name))

    def list(self) -> list[Any]:
        """Return all containers of this gateway, including dead containers."""
        own: dict[str, Any] = {"label": f"{INSTANCE_LABEL}={self.instance}"}
        return self._engine.containers.list(all=True, filters=own, ignore_removed=True)  # inspects each

    def count(self, environment: str) -> int:
        """Count the containers of this gateway's workers of *environment*."""
        labels = [f"{INSTANCE_LABEL}={self.instance}", f"{ENVIRONMENT_LABEL}={environment}"]
        return len(self._engine.api.containers(all=True, filters={"label": labels}))

    def kill(self, worker: str) -> None:
        """Kill the container of *worker*, as an out-of-memory kill would."""
        (container,) = [each for each in self.list() if worker in each.name]
        container.kill()

    def remove_all(self) -> None:
        for container in self.list():
            container.remove(force=True)

    def close(self) -> None:
        self._engine.close()


class Stack:
    """The gateway on Docker and Redis, for one test process. Several stacks can run concurrently."""

    def __init__(self) -> None:
        self.instance = f"wire-{uuid.uuid4().hex[:8]}"
        self.folder = short_folder(SHARED_MEMORY)
        self.redis = Redis(self.folder)
        self.containers = Containers(self.instance)
        self.gateway = Gateway(self.folder, self.settings())

    def replica(self, name: str) -> Gateway:
        """Create another gateway on the same store, engine, sockets and secret, without starting it."""
        folder = self.folder / name
        folder.mkdir()
        return Gateway(folder, self.settings() | {"GATEWAY_STATE_DIR": str(self.folder / "state")})

    def settings(self) -> dict[str, str]:
        return {
            "GATEWAY_STORE": self.redis.url,
            "GATEWAY_BACKEND": "docker",
            "GATEWAY_DOCKER_URL": "unix:///var/run/docker.sock",
            "GATEWAY_SOCKET_DIR": str(self.folder / "s"),
            "GATEWAY_INSTANCE": self.instance,
        }

    def start(self) -> None:
        self.containers.build_images()
        self.redis.start()
        self.gateway.start()

    def close(self) -> None:
        self.gateway.stop()
        self.redis.stop()
        # Workers outlive a gateway on purpose, because the next gateway adopts them.
        self.containers.remove_all()
        self.containers.close()
        shutil.rmtree(self.folder, ignore_errors=True)
