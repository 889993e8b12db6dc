"""``gateway env add IMAGE`` runs an image as the gateway would, inspects it, and leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import docker
import pytest

from gateway.backends.docker.backend import DockerBackend
from gateway.backends.docker.mounts import HostPaths
from gateway.catalog.inspect import trial
from gateway.catalog.inspect.findings import Capacity, Finding, Findings, Ran, TrialRequest
from gateway.catalog.inspect.image import ImageInspector
from gateway.catalog.inspect.trial import TrialRuns
from gateway.catalog.toml import read_environment
from gateway.core.environment import Relaxations, Server, ServerProtocol
from gateway.core.errors import ConfigError
from tests.contract.backend_world import ENGINE_URL, labelled
from tests.deadlines import COMMAND_S
from tests.fakes.eventually import until
from tests.fakes.images import built_once

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

PROJECT = Path(__file__).resolve().parents[2]
COMMAND = "from gateway.cli.__main__ import main; main()"
ENVSERVER = PROJECT / "env_images" / "base" / "envserver"
FORWARDER = "env-gateway-test/env-add-forwarder"
FUSSY = "env-gateway-test/env-add-fussy"
USUAL_USER = "env-gateway-test/env-add-usual-user"
"""The same server in an image that names a worker's default user. It is started twice at most, not four times."""
SERVER = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

if os.environ.get("DIES"):
    sys.exit("the licence has expired")
if os.environ.get("SLEEPS"):
    time.sleep(600)
if place := os.environ.get("WRITES"):
    open(place, "w").close()
if place := os.environ.get("READS"):
    open(place).close()
INFO = {"name": "fussy", "num_samples": 5, "max_episode_length": 3}


class Handler(BaseHTTPRequestHandler):
    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        is_info = self.path == "/api/task/info" and not os.environ.get("STRANGE")
        self.answer(200, INFO) if is_info else self.answer(404, {"error": "no such route"})

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if os.environ.get("STARTS_NOT") and self.path.endswith("start"):
            return self.answer(500, {"error": "no simulator", "detail": "it is at home"})
        self.answer(200, {"episode_id": "e", "observation": {"type": "text", "content": "?"}})


HTTPServer(("127.0.0.1", int(os.environ.get("LISTENS", "8000"))), Handler).serve_forever()
"""


@pytest.fixture(scope="module")
def images(docker_engine: docker.APIClient, worker_image: str) -> None:
    """A forwarder's image, and an image whose server has special needs if its variables say so."""
    base = worker_image
    envserver = {f"envserver/{path.relative_to(ENVSERVER)}": path.read_bytes() for path in ENVSERVER.rglob("*.py")}
    lines = (f"FROM {base}", "COPY envserver /usr/local/lib/envserver-parent/envserver")
    where = 'RUN python3 -c "import site; print(site.getsitepackages()[0])" > /tmp/site'
    link = "RUN mkdir -p $(cat /tmp/site) && ln -s /usr/local/lib/envserver-parent/envserver $(cat /tmp/site)/envserver"
    built_once(docker_engine, FORWARDER, {"Dockerfile": "\n".join([*lines, where, link]).encode(), **envserver})
    fussy = (
        f"FROM {base}",
        "COPY server.py /srv/fussy.py",
        "RUN echo secret > /srv/secret && chmod 600 /srv/secret && mkdir -m 700 /srv/mine && mkdir -m 777 /srv/all",
        "EXPOSE 8000",
        'CMD ["python3", "-u", "/srv/fussy.py"]',
    )
    usual = (*fussy, f"USER {Relaxations().user}")
    for name, lines_of_it in ((FUSSY, fussy), (USUAL_USER, usual)):
        built_once(docker_engine, name, {"Dockerfile": "\n".join(lines_of_it).encode(), "server.py": SERVER.encode()})


class Bench:
    """Runs images in these tests, and keeps their messages."""

    def __init__(self, backend: DockerBackend, looking: ImageInspector) -> None:
        self.said: list[str] = []
        self._trials = TrialRuns(backend=backend, looking=looking, tell=self.said.append)

    async def run(
        self, image: str, *, port: int = 0, timeout_s: float = 60.0, variables: Mapping[str, str] | None = None
    ) -> tuple[Findings, Ran]:
        return await self._trials.run(
            TrialRequest(image=image, port=port, variables=variables or {}, timeout_s=timeout_s)
        )


@pytest.fixture
async def bench(
    images: None,
    docker_engine: docker.APIClient,
    instance: str,
    shared_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Bench]:
    """A bench that leaves neither a container nor a folder behind."""
    monkeypatch.setattr(trial, "LOOK_EVERY_S", 0.2)
    async with running_bench(instance, shared_dir) as bench:
        yield bench
    assert labelled(docker_engine, instance) == []
    assert list((shared_dir / "inspection").glob("*")) == []


@asynccontextmanager
async def running_bench(instance: str, shared_dir: Path) -> AsyncIterator[Bench]:
    backend = DockerBackend(
        url=ENGINE_URL,
        instance=instance,
        paths=HostPaths(socket_dir=shared_dir / "inspection"),
        forwarder_image=FORWARDER,
    )
    looking = ImageInspector(ENGINE_URL)
    try:
        yield Bench(backend, looking)
    finally:
        await looking.aclose()
        await backend.aclose()


async def test_an_image_that_works_hardened_stays_hardened(bench: Bench) -> None:
    findings, ran = await bench.run(FUSSY)

    assert (findings.protocol, ran.port) == (ServerProtocol.AREAL, 8000)
    assert (ran.loosened, ran.reason, findings.trouble) == (Relaxations(), "", "")
    assert ran.memory_bytes
    assert ran.memory_bytes > 2**20
    assert ran.pids


@pytest.mark.parametrize(
    ("variables", "loosened", "reason"),
    [
        ({"WRITES": "/srv/all/x"}, Relaxations(writable_root=True), "Read-only file system"),
        ({"READS": "/srv/secret"}, Relaxations(user="0:0"), "Permission denied"),
        ({"WRITES": "/srv/mine/x"}, Relaxations(user="0:0", writable_root=True), "/srv/mine/x"),
    ],
)
async def test_an_image_that_fails_hardened_gets_as_few_relaxations_as_it_needs(
    bench: Bench, variables: dict[str, str], loosened: Relaxations, reason: str
) -> None:
    findings, ran = await bench.run(FUSSY, variables=variables)

    assert ran.loosened == loosened
    assert reason in ran.reason
    assert findings.trouble == ""


async def test_an_image_that_listens_at_another_port_than_it_declares_is_found(bench: Bench) -> None:
    _, ran = await bench.run(FUSSY, variables={"LISTENS": "9321"})

    assert (ran.port, ran.loosened) == (9321, Relaxations())
    assert any("nothing listens at port 8000, but at 9321" in line for line in bench.said)


async def test_only_the_given_port_is_tried(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="it listens at 8000"):
        await bench.run(USUAL_USER, port=8001, timeout_s=1.5)

    assert (await bench.run(FUSSY, port=9322, variables={"LISTENS": "9322"}))[1].port == 9322


async def test_an_image_that_dies_is_reported_with_the_end_of_its_log(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="the licence has expired"):
        await bench.run(FUSSY, variables={"DIES": "1"})

    assert sum(line.startswith("starting") for line in bench.said) == 4  # with each possible relaxation


async def test_an_image_that_listens_nowhere_is_not_tried_at_every_port(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="it listens at no port"):
        await bench.run(USUAL_USER, timeout_s=1.5, variables={"SLEEPS": "1"})

    assert sum(line.startswith("starting") for line in bench.said) == 2
    assert not any("8080" in line for line in bench.said)


async def test_an_image_whose_sessions_fail_with_every_relaxation_gets_none(bench: Bench) -> None:
    findings, ran = await bench.run(FUSSY, variables={"STARTS_NOT": "1"})

    assert ran.loosened == Relaxations()
    assert findings.trouble == "starting sample 0: 500 it is at home"


async def test_an_image_of_another_kind_is_refused_with_a_description(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="as no ORS, OpenEnv, AReaL or NeMo Gym server"):
        await bench.run(FUSSY, variables={"STRANGE": "1"})


async def test_a_missing_image_is_reported(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="there is no image env-gateway-test/none-such on this engine"):
        await bench.run("env-gateway-test/none-such")


async def test_a_cancelled_inspection_leaves_nothing(
    bench: Bench, docker_engine: docker.APIClient, instance: str
) -> None:
    running = asyncio.create_task(bench.run(FUSSY, port=8001))
    await until(lambda: labelled(docker_engine, instance))

    running.cancel()

    with pytest.raises(asyncio.CancelledError):
        await running


@pytest.mark.needs("third-party-images")
@pytest.mark.parametrize(
    ("name", "protocol", "port", "capacity"),
    [
        ("openenv-counter", ServerProtocol.OPENENV, 8000, Capacity(1, Finding.BY_SERVER)),
        ("openenv-counter-020", ServerProtocol.OPENENV, 8000, Capacity(1, Finding.BY_SERVER)),
        ("openenv-mcp", ServerProtocol.OPENENV, 8000, Capacity(1, Finding.BY_SERVER)),
        ("ors-sdk", ServerProtocol.ORS, 8080, Capacity(16, Finding.ASSUMED)),
        ("openreward", ServerProtocol.ORS, 8080, Capacity(16, Finding.ASSUMED)),
        ("areal", ServerProtocol.AREAL, 5000, Capacity(16, Finding.ASSUMED)),
    ],
)
async def test_an_image_of_an_unmodified_package_is_recognized(
    bench: Bench, name: str, protocol: ServerProtocol, port: int, capacity: Capacity
) -> None:
    findings, ran = await bench.run(f"env-gateway-test/{name}")

    assert (findings.protocol, ran.port, findings.capacity) == (protocol, port, capacity)
    assert (ran.loosened, findings.trouble) == (Relaxations(), "")


@pytest.mark.needs("third-party-images")
async def test_a_variable_changes_the_findings_of_an_image(bench: Bench) -> None:
    findings, _ = await bench.run("env-gateway-test/openenv-counter", variables={"MAX_CONCURRENT_ENVS": "5"})

    assert findings.capacity == Capacity(5, Finding.BY_SERVER)


Env = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def env(images: None, docker_engine: docker.APIClient, instance: str, shared_dir: Path) -> Iterator[Env]:
    """Starts ``gateway env …``, and checks that its containers are gone at the end."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")} | {
        "GATEWAY_CATALOG_DIR": str(shared_dir / "env_images"),
        "GATEWAY_SOCKET_DIR": str(shared_dir / "inspection"),
        "GATEWAY_STATE_DIR": str(shared_dir / "state"),
        "GATEWAY_DOCKER_URL": ENGINE_URL,
        "GATEWAY_INSTANCE": instance,
        "GATEWAY_FORWARDER_IMAGE": FORWARDER,
        "COLUMNS": "200",
    }

    def started(*arguments: str) -> subprocess.Popen[str]:
        # A shell that starts a test run in the background lets its processes ignore SIGINT.
        command = ["env", "--default-signal=INT", sys.executable, "-c", COMMAND, "env", *arguments]
        return subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    yield started
    assert instances(docker_engine, instance) == []
    assert list((shared_dir / "inspection").glob("*")) == []


def instances(engine: docker.APIClient, instance: str) -> list[str]:
    found = engine.containers(all=True, filters={"label": "env-gateway.instance"})
    return [entry["Id"] for entry in found if entry["Labels"]["env-gateway.instance"].startswith(f"{instance}-")]


def test_the_command_writes_its_findings_and_the_relaxations(env: Env, shared_dir: Path) -> None:
    process = env("add", FUSSY, "-n", "fussy", "--variable", "WRITES=/srv/all/x")
    out, err = process.communicate(timeout=COMMAND_S)

    assert process.returncode == 0, err
    assert "writable root" in out
    path = shared_dir / "env_images" / "fussy" / "environment.toml"
    environment = read_environment(path)
    assert environment.server == Server(port=8000, ready="/api/task/info")
    assert environment.loosened == Relaxations(writable_root=True)
    assert environment.variables == {"WRITES": "/srv/all/x"}
    words = path.read_text().replace("\n# ", " ")
    assert "Read-only file system: '/srv/all/x'" in words
    assert environment.limits.memory_bytes >= 256 * 2**20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_command_that_is_interrupted_removes_its_container(
    env: Env, docker_engine: docker.APIClient, instance: str, shared_dir: Path, number: int
) -> None:
    process = env("add", FUSSY, "--port", "8001", "-n", "fussy")
    await until(lambda: instances(docker_engine, instance))
    process.send_signal(number)

    process.communicate(timeout=COMMAND_S)
    assert process.returncode not in (0, -number)  # it exited, and did not die from the signal
    assert not (shared_dir / "env_images").exists()


def test_the_dockerfile_of_the_environment_servers_readme_makes_an_image_that_can_be_added(
    env: Env, docker_engine: docker.APIClient, shared_dir: Path
) -> None:
    shown = re.findall(r"```(\w+)\n(.*?)```", (ENVSERVER.parent / "README.md").read_text(), re.DOTALL)
    first = {language: text.encode() for language, text in reversed(shown)}
    files = {"Dockerfile": first["dockerfile"], "server.py": first["python"], "tasks/train.jsonl": first["json"]}
    image = built_once(docker_engine, "env-gateway-test/env-add-readme", files)

    process = env("add", image, "-n", "reversestring")
    out, err = process.communicate(timeout=COMMAND_S)

    assert process.returncode == 0, err
    environment = read_environment(shared_dir / "env_images" / "reversestring" / "environment.toml")
    assert (environment.image, environment.server, environment.upstream_name) == (image, Server(), "")
    assert "train 1" in out


def test_an_image_that_adds_nothing_to_the_base_image_is_refused_with_the_missing_part(
    env: Env, docker_engine: docker.APIClient
) -> None:
    files = {"Dockerfile": b"FROM env-gateway/base\n"}
    image = built_once(docker_engine, "env-gateway-test/env-add-bare", files)

    process = env("add", image, "-n", "bare")
    _, err = process.communicate(timeout=COMMAND_S)

    assert process.returncode == 2
    assert "can't open file '/srv/env/server.py'" in err
