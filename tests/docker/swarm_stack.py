"""The stack of `deploy/swarm/stack.yaml` on the machines of a lab, deployed as `deploy/README.md` says.

What a test changes of it stands in a second file: environments with few slots, so that there are several workers, and
gateways on two of the machines, so that the third may die without taking one along.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import httpx

from gateway.node.tls import make_certificates
from tests.deadlines import scaled
from tests.docker.swarm_lab import NODES, PROJECT_DIR, Lab
from tests.docker.swarm_players import ENVIRONMENT
from tests.fakes.eventually import eventually_now

STACK = "eg-test-stack"
"""Not the name that the README uses: labels and volumes follow the name that is given to ``docker stack deploy``."""
GATEWAY_IMAGE = "env-gateway/gateway:latest"
REDIS_IMAGE = "env-gateway/redis:latest"
WORKER_IMAGE = f"env-gateway/{ENVIRONMENT}:latest"
GATEWAYS_ON = NODES[:2]
PORT = 8080
SLOTS = 5
MAX_WORKERS = 15
IDLE_S = 2
"""Short, so that each test begins without workers."""
READY_S = 120.0
UPDATE_S = 240.0

CHANGES = f"""
version: "3.9"
services:
  gateway:
    configs: [&game {{ source: game, target: /app/env_images/{ENVIRONMENT}/environment.toml }}]
    deploy:
      placement:
        constraints: ["node.hostname != {NODES[2]}"]
  node:
    configs: [*game]
configs:
  game: {{ file: FOLDER/environment.toml }}
"""
VARIABLES = {
    "GATEWAY_IMAGE": GATEWAY_IMAGE,
    "GATEWAY_REDIS_IMAGE": REDIS_IMAGE,
    "GATEWAY_PORT": str(PORT),
    "GATEWAY_ENVIRONMENTS": ENVIRONMENT,
    "GATEWAY_DEFAULT_ENVIRONMENT": ENVIRONMENT,
    "GATEWAY_NODES_LOST_S": "5",
    "GATEWAY_NODE_NOTICE_S": "30",
    "GATEWAY_NODE_DRAIN_S": "5",
    # More than the balancer needs to notice, and than the players' client keeps an idle connection.
    "GATEWAY_DRAIN_NOTICE_S": "6",
    # No ip_vs: see scripts/swarm-lab.
    "GATEWAY_PUBLISH_MODE": "host",
    "GATEWAY_ENDPOINT_MODE": "dnsrr",
    "GATEWAY_UPDATE_ORDER": "stop-first",
}


@dataclass(frozen=True)
class SwarmStack:
    """A stack that runs."""

    lab: Lab
    folder: Path
    """What it was deployed from besides the project's own file."""
    trainer: str
    operator: str

    def deploy(self, **variables: str) -> None:
        """Deploy it, or its changes."""
        files = ["--compose-file", str(PROJECT_DIR / "deploy" / "swarm" / "stack.yaml")]
        files += ["--compose-file", str(self.folder / "changes.yaml")]
        self.lab.on(
            NODES[0],
            *("stack", "deploy", "--resolve-image", "never", *files, STACK),
            environ={**VARIABLES, **variables},
        )

    def gateways(self) -> list[tuple[str, int]]:
        """Where gateways may be."""
        return [(self.lab.address(node), PORT) for node in GATEWAYS_ON]

    def admin(self, what: str) -> list[dict[str, Any]]:
        """What an operator sees, of whichever gateway answers."""
        said = []
        for host, port in self.gateways():
            try:
                answer = httpx.get(
                    f"http://{host}:{port}/admin/v1/{what}",
                    headers={"X-API-Key": self.operator},
                    verify=False,
                    timeout=scaled(5),
                )
            except httpx.HTTPError as error:
                said.append(str(error))
                continue
            if answer.status_code == 200:
                rows: list[dict[str, Any]] = answer.json()[what]
                return rows
            said.append(answer.text)
        raise AssertionError(said)

    def node_states(self) -> dict[str, str]:
        """The machines, as gateways see them."""
        return {node["name"]: node["state"] for node in self.admin("nodes")}

    def workers_on(self, node: str) -> list[dict[str, Any]]:
        """Containers of workers that run on a machine."""
        label = f"env-gateway.instance={STACK}"
        with self.lab.engine(node) as engine:
            found: list[dict[str, Any]] = engine.containers(filters={"label": label})
        return found

    def replicas(self) -> dict[str, str]:
        """Of each service: how many tasks run of how many."""
        listed = self.lab.on(NODES[0], "service", "ls", "--format", "{{.Name}} {{.Replicas}}")
        return {name.removeprefix(f"{STACK}_"): count for name, count, *_ in map(str.split, listed.splitlines())}

    def update_state(self, service: str) -> str:
        """What became of the last update of a service."""
        words = "{{if .UpdateStatus}}{{.UpdateStatus.State}}{{end}}"
        return self.lab.on(NODES[0], "service", "inspect", "--format", words, f"{STACK}_{service}")

    def await_ready(self) -> None:
        """Return when every gateway is ready and sees every machine."""

        def check() -> None:
            for host, port in self.gateways():
                try:
                    answer = httpx.get(f"http://{host}:{port}/readyz", verify=False, timeout=scaled(5))
                except httpx.HTTPError as error:
                    raise AssertionError(f"{host}: {error}") from error
                assert answer.status_code == 200, answer.text
            assert self.node_states() == dict.fromkeys(NODES, "live")

        eventually_now(check, within_s=READY_S)

    def await_images(self) -> None:
        """Return when every gateway knows the workers' image on every machine: until then one is chosen that has it."""

        def check() -> None:
            for host, port in self.gateways():
                headers = {"X-API-Key": self.operator}
                try:
                    answer = httpx.get(
                        f"http://{host}:{port}/admin/v1/nodes", headers=headers, verify=False, timeout=scaled(5)
                    )
                except httpx.HTTPError as error:
                    raise AssertionError(f"{host}: {error}") from error
                name = WORKER_IMAGE.removesuffix(":latest")  # as the catalog calls it
                images = {node["name"]: node.get("images", {}).get(name) for node in answer.json()["nodes"]}
                assert images.keys() == set(NODES), images
                assert None not in images.values(), images
                assert len(set(images.values())) == 1, images

        eventually_now(check, within_s=READY_S)

    def image_ids(self) -> set[str]:
        """The workers' image, as it is on each machine: one id once it is on all."""
        inspect = ["image", "inspect", "--format={{.Id}}", WORKER_IMAGE]
        return {self.lab.on(node, *inspect) for node in NODES}


@contextmanager
def deployed(lab: Lab, folder: Path) -> Iterator[SwarmStack]:
    """The stack on a lab that is up; ended with the lab, and by nothing else. *folder* is empty."""
    lab.run("load", GATEWAY_IMAGE, REDIS_IMAGE)
    # On one machine only: the gateways bring it to the others.
    with docker_archive(WORKER_IMAGE, folder / "worker.tar") as archive:
        lab.on(NODES[0], "load", "--input", str(archive))
    stack = SwarmStack(lab, folder, trainer=secrets.token_hex(16), operator=secrets.token_hex(16))
    (folder / "changes.yaml").write_text(CHANGES.replace("FOLDER", str(folder)))
    (folder / "environment.toml").write_text(_with_few_slots())
    _make_secrets(stack)
    lab.on(NODES[0], "node", "update", "--label-add", "env-gateway.store=yes", NODES[0])
    try:
        stack.deploy()
        stack.await_ready()
        stack.await_images()
        yield stack
    except BaseException:
        print(_told(lab))
        raise


def _told(lab: Lab) -> str:
    """What the services have to say of a stack that did not come up, or of a test that failed."""
    said = []
    for service in ("gateway", "node", "redis"):
        for command in (["ps", "--no-trunc"], ["logs", "--tail", "60"]):
            with suppress(AssertionError):
                said.append(lab.on(NODES[0], "service", *command, f"{STACK}_{service}"))
    return "\n".join(said)


@contextmanager
def docker_archive(image: str, path: Path) -> Iterator[Path]:
    """An image of this machine's engine as a file."""
    engine = docker.APIClient(version="auto", timeout=int(scaled(120)))
    try:
        with path.open("wb") as file:
            for piece in engine.get_image(image):
                file.write(piece)
        yield path
    finally:
        path.unlink(missing_ok=True)
        engine.close()


def _with_few_slots() -> str:
    text = (PROJECT_DIR / "env_images" / ENVIRONMENT / "environment.toml").read_text()
    for name, value in (("slots", SLOTS), ("max_workers", MAX_WORKERS), ("idle_worker_s", IDLE_S)):
        text, count = re.subn(rf"^{name} = \d+$", f"{name} = {value}", text, flags=re.M)
        assert count == 1, name
    return text


def _make_secrets(stack: SwarmStack) -> None:
    certificates = stack.folder / "certificates"
    make_certificates(certificates, days=2)
    values = {
        "secret": secrets.token_hex(32),
        "trainer-keys": f"trainer:{stack.trainer}",
        "operator-keys": f"operator:{stack.operator}",
        "ca": (certificates / "ca.pem").read_text(),
        "gateway-cert": (certificates / "gateway.pem").read_text(),
        "gateway-key": (certificates / "gateway-key.pem").read_text(),
        "node-cert": (certificates / "node.pem").read_text(),
        "node-key": (certificates / "node-key.pem").read_text(),
    }
    with stack.lab.engine(NODES[0]) as engine:
        for name, value in values.items():
            engine.create_secret(f"env-gateway-{name}-1", value.encode())
