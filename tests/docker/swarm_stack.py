"""The stack of `deploy/swarm/stack.yaml` on the machines of a lab, deployed as `deploy/README.md` says.

A second file holds the test's changes: environments with few slots, so that there are several workers, and gateways on
two of the machines, so that the third may die without a gateway.
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
from tests.deadlines import HANG_S
from tests.docker.swarm_lab import NODES, PROJECT_DIR, Lab
from tests.docker.swarm_players import ENVIRONMENT
from tests.fakes.eventually import eventually_now

STACK = "eg-test-stack"
"""A name other than the README's: labels and volumes follow the name that ``docker stack deploy`` gets."""
GATEWAY_IMAGE = "env-gateway/gateway:latest"
REDIS_IMAGE = "env-gateway/redis:latest"
WORKER_IMAGE = f"env-gateway/{ENVIRONMENT}:latest"
GATEWAYS_ON = NODES[:2]
PORT = 8080
SLOTS = 5
MAX_WORKERS = 15
IDLE_S = 2
"""Seconds, a short time, so that each test begins without workers."""

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
    # The gateway's default: an update replaces the nodes, and each is away while its container starts. A call to a
    # machine that is gone must learn of it before the call itself ends as a timeout, after 30 s of silence.
    "GATEWAY_NODES_LOST_S": "24",
    "GATEWAY_NODE_NOTICE_S": "30",
    "GATEWAY_NODE_DRAIN_S": "5",
    # More than the balancer needs to notice, and than the players' client keeps an idle connection (5 s).
    "GATEWAY_DRAIN_NOTICE_S": "15",
    # No ip_vs: see scripts/swarm-lab.
    "GATEWAY_PUBLISH_MODE": "host",
    "GATEWAY_ENDPOINT_MODE": "dnsrr",
    "GATEWAY_UPDATE_ORDER": "stop-first",
}

TASK_TOLD = (
    "{{.CreatedAt}} {{.ID}} on {{.NodeID}} as version {{.SpecVersion.Index}}: wanted {{.DesiredState}}, "
    "{{.Status.State}} since {{.Status.Timestamp}}: {{.Status.Message}} {{.Status.Err}}"
)


@dataclass(frozen=True)
class SwarmStack:
    """A running stack."""

    lab: Lab
    folder: Path
    """The folder with the files of the deployment that are not the project's own."""
    trainer: str
    operator: str

    def deploy(self, **variables: str) -> None:
        """Deploy the stack, or its changes."""
        files = ["--compose-file", str(PROJECT_DIR / "deploy" / "swarm" / "stack.yaml")]
        files += ["--compose-file", str(self.folder / "changes.yaml")]
        self.lab.on(
            NODES[0],
            *("stack", "deploy", "--resolve-image", "never", *files, STACK),
            environ={**VARIABLES, **variables},
        )

    def gateways(self) -> list[tuple[str, int]]:
        """The addresses at which gateways may be."""
        return [(self.lab.address(node), PORT) for node in GATEWAYS_ON]

    def episodes(self, gateway: tuple[str, int]) -> dict[str, Any]:
        """The recorded episodes that one gateway shows: their sessions' names by id."""
        host, port = gateway
        answer = httpx.get(
            f"http://{host}:{port}/admin/v1/episodes?limit=1000",
            headers={"X-API-Key": self.operator},
            verify=False,
            timeout=HANG_S,
        )
        return {episode["id"]: episode["name"] for episode in answer.raise_for_status().json()["episodes"]}

    def admin(self, what: str) -> list[dict[str, Any]]:
        """The operator's view, from the first gateway that answers."""
        said = []
        for host, port in self.gateways():
            try:
                answer = httpx.get(
                    f"http://{host}:{port}/admin/v1/{what}",
                    headers={"X-API-Key": self.operator},
                    verify=False,
                    timeout=HANG_S,
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
        """The state of each machine by name, as gateways report it."""
        return {node["name"]: node["state"] for node in self.admin("nodes")}

    def workers_on(self, node: str) -> list[dict[str, Any]]:
        """The containers of workers that run on a machine."""
        label = f"env-gateway.instance={STACK}"
        with self.lab.engine(node) as engine:
            found: list[dict[str, Any]] = engine.containers(filters={"label": label})
        return found

    def replicas(self) -> dict[str, str]:
        """Return the running and wanted number of tasks of each service."""
        listed = self.lab.on(NODES[0], "service", "ls", "--format", "{{.Name}} {{.Replicas}}")
        return {name.removeprefix(f"{STACK}_"): count for name, count, *_ in map(str.split, listed.splitlines())}

    def update_state(self, service: str) -> str:
        """The state of a service's last update, and what Swarm says of it."""
        words = "{{with .UpdateStatus}}{{.State}} {{.Message}}{{end}}"
        return self.lab.on(NODES[0], "service", "inspect", "--format", words, f"{STACK}_{service}")

    def describe(self, problem: str, *services: str) -> str:
        """Return the problem with the tasks and the last log lines of the services, for a failed test."""
        said = [problem]
        for service in services:
            with suppress(AssertionError):
                tasks = self.lab.on(NODES[0], "service", "ps", "--quiet", "--no-trunc", f"{STACK}_{service}").split()
                said.append(self.lab.on(NODES[0], "inspect", "--type=task", f"--format={TASK_TOLD}", *tasks))
            with suppress(AssertionError):
                said.append(self.lab.on(NODES[0], "service", "logs", "--tail=60", f"{STACK}_{service}"))
        for node in NODES:
            log = self.lab.directory / node / "dockerd.log"
            lines = log.read_text(errors="replace").splitlines() if log.exists() else []
            said += [f"{node}: {line}" for line in lines if "module=" in line and "pulling image" not in line][-30:]
        return "\n".join(said)

    def await_ready(self) -> None:
        """Return once every gateway is ready and sees every machine."""

        def check() -> None:
            for host, port in self.gateways():
                try:
                    answer = httpx.get(f"http://{host}:{port}/readyz", verify=False, timeout=HANG_S)
                except httpx.HTTPError as error:
                    raise AssertionError(f"{host}: {error}") from error
                assert answer.status_code == 200, answer.text
            assert self.node_states() == dict.fromkeys(NODES, "live")

        eventually_now(check)

    def await_images(self) -> None:
        """Return once every gateway sees the workers' image on all machines. Until then it chooses one that has it."""

        def check() -> None:
            for host, port in self.gateways():
                headers = {"X-API-Key": self.operator}
                try:
                    answer = httpx.get(
                        f"http://{host}:{port}/admin/v1/nodes", headers=headers, verify=False, timeout=HANG_S
                    )
                except httpx.HTTPError as error:
                    raise AssertionError(f"{host}: {error}") from error
                name = WORKER_IMAGE.removesuffix(":latest")  # the name in the catalog
                images = {node["name"]: node.get("images", {}).get(name) for node in answer.json()["nodes"]}
                assert images.keys() == set(NODES), images
                assert None not in images.values(), images
                assert len(set(images.values())) == 1, images

        eventually_now(check)

    def image_ids(self) -> set[str]:
        """The ids of the workers' image on all machines. There is one id once every machine has it."""
        inspect = ["image", "inspect", "--format={{.Id}}", WORKER_IMAGE]
        return {self.lab.on(node, *inspect) for node in NODES}


@contextmanager
def deployed(lab: Lab, folder: Path) -> Iterator[SwarmStack]:
    """Deploy the stack on a running lab. It ends only with the lab. *folder* is empty."""
    lab.run("load", GATEWAY_IMAGE, REDIS_IMAGE)
    # On one machine only: the gateways copy it to the other machines.
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
        print(stack.describe("The stack did not come up.", "gateway", "node", "redis"))
        raise


@contextmanager
def docker_archive(image: str, path: Path) -> Iterator[Path]:
    """Save an image of this machine's engine as a file."""
    engine = docker.APIClient(version="auto", timeout=HANG_S)
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
    for name, value in values.items():
        file = stack.folder / f"secret-{name}"
        file.write_text(value)
        stack.lab.on(NODES[0], "secret", "create", f"env-gateway-{name}-1", str(file))
