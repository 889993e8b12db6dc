"""The stack of compose.yaml, as `docker compose up` starts it: episodes, the engine gate, and walls between its parts.

It has its own project name, so that it may run next to an operator's stack and next to other tests.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from gateway.backends.docker import calls
from gateway.settings import Settings
from tests.deadlines import COMMAND_S, HANG_S
from tests.envs.browser_solutions import written
from tests.envs.bundled import math_answer, tasks_of
from tests.fakes.eventually import eventually, eventually_now
from tests.fakes.ports import reserved_port
from tests.pages import blocks
from tests.wire.openenv.clients import NEWEST, ClientError, Driver, connected
from tests.wire.sdks import OPENREWARD, ORS, SDKS, Sdk

PROJECT_DIR = Path(__file__).resolve().parents[2]
INSTANCE_LABEL, ENVIRONMENT_LABEL = "env-gateway.instance", "env-gateway.environment"

IMAGES = ("browser", "chat", "coding", "game", "gateway", "math", "os", "reasoning_gym", "redis", "textarena")
pytestmark = [
    pytest.mark.docker,
    pytest.mark.wire,
    pytest.mark.needs("openenv-clients", *(f"image:{name}" for name in IMAGES)),
]

LOOK_ROUND = """
import json, os, socket, sys
found = {}
for name, host, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((host, port), 2).close()
        found[name] = "reached"
    except OSError as error:
        found[name] = type(error).__name__
found["interfaces"] = [name for _, name in socket.if_nameindex()]
found["sockets"] = sorted(
    os.path.join(folder, name)
    for top in ("/run", "/var", "/tmp", "/srv")
    for folder, _, names in os.walk(top)
    for name in names
    if name.endswith(".sock")
)
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Stack:
    """A running stack."""

    folder: Path
    """The folder that replaces the checkout in which the operator types `docker compose up`."""
    project: str
    url: str
    trainer: str
    operator: str
    engine: docker.APIClient

    def compose(self, *arguments: str) -> str:
        """Run `docker compose` on the stack and return its output."""
        where = ["--file", str(PROJECT_DIR / "compose.yaml"), "--project-directory", str(self.folder)]
        command = ["docker", "compose", *where, "--project-name", self.project, *arguments]
        done = subprocess.run(
            command, cwd=PROJECT_DIR, env=self._environ(), capture_output=True, text=True, timeout=COMMAND_S
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def workers(self, environment: str = "") -> list[dict[str, Any]]:
        """The workers' containers, running or not, of one environment or of all."""
        labels = [f"{INSTANCE_LABEL}={self.project}"]
        if environment:
            labels.append(f"{ENVIRONMENT_LABEL}={environment}")
        found: list[dict[str, Any]] = self.engine.containers(all=True, filters={"label": labels})
        return found

    def targets(self) -> list[tuple[str, str, int]]:
        """Targets that nothing in a worker may reach: name, address and port."""
        found = [
            ("engine on tcp", "172.17.0.1", 2375),
            ("published port", "172.17.0.1", int(self.url.rpartition(":")[2])),
        ]
        for name, port in (("redis", 6379), ("gateway", 8080)):
            networks = self.service(name)["NetworkSettings"]["Networks"].values()
            found += [(f"{name} {network['IPAddress']}", network["IPAddress"], port) for network in networks]
            found.append((f"{name} by name", name, port))
        return found

    def service(self, name: str) -> dict[str, Any]:
        """Inspect the container of a service."""
        (container,) = self.compose("ps", "--all", "--quiet", name).split()
        found: dict[str, Any] = self.engine.inspect_container(container)
        return found

    def admin(self, what: str) -> list[dict[str, Any]]:
        """Return rows of the operator's API."""
        answer = httpx.get(
            f"{self.url}/admin/v1/{what}", headers={"X-API-Key": self.operator}, verify=False, timeout=HANG_S
        )
        rows: list[dict[str, Any]] = answer.raise_for_status().json()[what]
        return rows

    def _environ(self) -> dict[str, str]:
        return os.environ | {
            "COMPOSE_PROJECT_NAME": self.project,
            "GATEWAY_PORT": self.url.rpartition(":")[2],
            "GATEWAY_TRAINER_KEYS": f"trainer:{self.trainer}",
            "GATEWAY_OPERATOR_KEYS": f"operator:{self.operator}",
            "GATEWAY_INSECURE": "0",
            "GATEWAY_DRAIN_NOTICE_S": "0",  # no load balancer needs it, and each end waits for it
        }


def in_seconds(period: str) -> int:
    """Return the seconds of a period as compose writes it: ``45s``, ``1m5s``."""
    found = re.fullmatch(r"(?:(\d+)m)?(?:(\d+)s)?", period)
    assert found is not None, period
    return 60 * int(found[1] or 0) + int(found[2] or 0)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    port = reserved_port()
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(PROJECT_DIR / "tasks", folder / "tasks")  # a test adds tasks
    engine = docker.APIClient(version="auto")
    stack = Stack(
        folder=folder,
        project=f"eg-test-{secrets.token_hex(4)}",
        url=f"http://127.0.0.1:{port}",
        trainer=secrets.token_hex(16),
        operator=secrets.token_hex(16),
        engine=engine,
    )
    images = [f"env-gateway/{name}" for name in (*IMAGES, "base", "base-sandbox")]
    try:
        for image in images:  # as if they were built for this stack
            engine.tag(f"{image}:latest", image, stack.project)
        stack.compose("up", "--detach", "--wait", "--wait-timeout", "120", "--no-build")
        yield stack
    finally:
        stack.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")
        for worker in stack.workers():
            engine.remove_container(worker["Id"], force=True)
        for image in images:
            engine.remove_image(f"{image}:{stack.project}", noprune=True)
        engine.close()


def task_of(environment: str, id: str) -> dict[str, Any]:
    """Return a task with its answer, which a trainer does not see. The added task is a copy of the first one."""
    tasks = {task["id"]: task for task in tasks_of(environment)}
    return tasks.get(id, next(iter(tasks.values())))


async def play(stack: Stack, sdk: Sdk, index: int = 0) -> float:
    """Play an episode of math with the right answer. Return its reward."""
    async with sdk.connect(stack.url, stack.trainer) as client:
        math = client.environment("math")
        task = await math.get_task("train", index)
        async with math.session(task=task) as session:
            await session.get_prompt()
            output = await session.call_tool("submit", {"answer": math_answer(task_of("math", task.task_spec["id"]))})
    assert output.finished
    assert output.reward is not None
    return output.reward


@pytest.mark.parametrize("sdk", SDKS)
async def test_an_episode_is_played_and_rewarded(stack: Stack, sdk: str) -> None:
    assert await play(stack, SDKS[sdk]) == 1.0
    assert stack.admin("sessions") == []


async def test_an_episode_in_a_sandbox_is_played_and_rewarded(stack: Stack) -> None:
    async with ORS.connect(stack.url, stack.trainer) as client:
        puzzles = client.environment("os")
        task = await puzzles.get_task("train", 0)
        reference = task_of("os", task.task_spec["id"])["reference"]
        async with puzzles.session(task=task) as session:
            await session.get_prompt()
            for command in reference["commands"]:
                await session.call_tool("bash_action", {"script": command})
            output = await session.call_tool("answer_action", {"answer": reference["answer"]})

    assert output.finished
    assert output.reward == 1.0


def composed() -> dict[str, Any]:
    """Return the services that `docker compose up` would start in the checkout, from the unchanged file."""
    command = ["docker", "compose", "--env-file", "/dev/null", "config", "--format", "json"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GATEWAY_")}
    printed = subprocess.run(command, cwd=PROJECT_DIR, env=environ, capture_output=True, check=True, timeout=COMMAND_S)
    found: dict[str, Any] = json.loads(printed.stdout)["services"]
    return found


def test_the_gateway_reads_the_tasks_of_the_checkout_and_cannot_change_them() -> None:
    """If the engine does not see the folder, the start fails. An empty folder in its place would have no tasks."""
    (mount,) = [mount for mount in composed()["gateway"]["volumes"] if mount["type"] == "bind"]

    assert (mount["source"], mount["target"], mount["read_only"]) == (str(PROJECT_DIR / "tasks"), "/app/tasks", True)
    assert not mount["bind"].get("create_host_path")


async def test_a_line_added_to_the_checkout_is_played_without_a_rebuild_or_a_restart(stack: Stack) -> None:
    file = stack.folder / "tasks" / "math" / "train.jsonl"
    lines = file.read_text("utf-8").splitlines()
    before = stack.service("gateway")["State"]["StartedAt"]

    with file.open("a", encoding="utf-8") as more:
        more.write(json.dumps(json.loads(lines[0]) | {"id": "train-added"}) + "\n")

    async def is_there() -> None:
        async with ORS.connect(stack.url, stack.trainer) as client:
            assert await client.environment("math").num_tasks("train") == len(lines) + 1

    await eventually(is_there)
    assert await play(stack, ORS, len(lines)) == 1.0
    assert stack.service("gateway")["State"]["StartedAt"] == before


def test_a_gateway_that_is_stopped_gives_notice_and_gets_the_time_that_it_needs() -> None:
    gateway = composed()["gateway"]

    notice_s = float(gateway["environment"]["GATEWAY_DRAIN_NOTICE_S"])

    assert notice_s > 0
    assert in_seconds(gateway["stop_grace_period"]) > notice_s + 2 * Settings.model_fields["drain_s"].default


def test_a_build_for_another_stack_does_not_change_the_images_of_a_stack(stack: Stack) -> None:
    composed = json.loads(stack.compose("config", "--format", "json"))["services"]
    built_on = {service.get("build", {}).get("args", {}).get("BASE", "") for service in composed.values()} - {""}
    workers = {worker["Image"] for worker in stack.workers()}

    assert {image.rpartition(":")[2] for image in {one["image"] for one in composed.values()} | built_on} == {
        stack.project
    }
    assert workers <= {f"env-gateway/{name}:{stack.project}" for name in IMAGES}
    assert {stack.service(name)["Config"]["Image"] for name in ("gateway", "node")} == {
        f"env-gateway/gateway:{stack.project}"
    }


async def test_without_a_key_nothing_is_served(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url) as client:
        refused = await client.get("/list_environments")
        in_path = await client.get(f"/k/{stack.trainer}/list_environments")

    assert refused.status_code == 401
    assert sorted(in_path.json()) == ["browser", "chat", "coding", "game", "math", "os", "reasoning_gym", "textarena"]


async def test_only_the_engine_gate_has_the_engines_socket_and_it_has_no_network(stack: Stack) -> None:
    holders = [
        name
        for name in ("redis", "node", "gateway")
        if any(mount["Destination"].endswith("docker.sock") for mount in stack.service(name)["Mounts"])
    ]

    assert holders == ["node"]
    assert stack.service("node")["HostConfig"]["NetworkMode"] == "none"


async def test_the_gateway_cannot_write_where_workers_sockets_are(stack: Stack) -> None:
    (mount,) = [m for m in stack.service("gateway")["Mounts"] if m["Destination"] == "/run/gateway/workers"]

    assert mount["RW"] is False


async def test_a_worker_reaches_no_part_of_the_stack(stack: Stack) -> None:
    await play(stack, ORS)
    targets = stack.targets()
    worker = stack.workers("math")[0]["Id"]

    argv = ["python3", "-c", LOOK_ROUND, json.dumps(targets)]
    found = json.loads(calls.run(stack.engine, container=worker, argv=argv)[1])

    assert found.pop("interfaces") == ["lo"]
    assert found.pop("sockets") == ["/run/envserver/worker.sock"]  # not another worker's, the gate's, the engine's
    assert len(found) == len(targets)
    assert [name for name, outcome in found.items() if outcome == "reached"] == []


async def test_an_agent_in_a_sandbox_reaches_no_part_of_the_stack(stack: Stack) -> None:
    targets = stack.targets()
    command = shlex.join(["python3", "-c", LOOK_ROUND, json.dumps(targets)])

    async with OPENREWARD.connect(stack.url, stack.trainer) as client:
        coding = client.environment("coding")
        async with coding.session(task=await coding.get_task("train", 0)) as session:
            await session.get_prompt()
            output = await session.call_tool("execute", {"command": command})
    found = json.loads(output.blocks[0].text)

    assert found.pop("interfaces") == ["lo"]
    assert found.pop("sockets") == []
    assert len(found) == len(targets)
    assert [name for name, outcome in found.items() if outcome == "reached"] == []


async def test_the_targets_that_a_worker_cannot_reach_exist(stack: Stack) -> None:
    """Without this, wrong addresses would let the test above pass."""
    networks = stack.service("redis")["NetworkSettings"]["Networks"].values()
    address = next(iter(networks))["IPAddress"]
    gateway = stack.service("gateway")["Id"]
    look = json.dumps([("redis", address, 6379), ("itself", "127.0.0.1", 8080)])

    argv = ["python3", "-c", LOOK_ROUND, look]
    found = json.loads(calls.run(stack.engine, container=gateway, argv=argv)[1])

    assert (found["redis"], found["itself"]) == ("reached", "reached")


async def test_a_gateway_that_is_restarted_after_a_kill_continues_its_sessions(stack: Stack) -> None:
    async with OPENREWARD.connect(stack.url, stack.trainer) as client:
        math = client.environment("math")
        task = await math.get_task("train", 1)
        async with math.session(task=task) as session:
            await session.get_prompt()
            before = {worker["Id"] for worker in stack.workers("math")}
            stack.engine.kill(stack.service("gateway")["Id"], "SIGKILL")
            stack.compose("up", "--detach", "--wait", "--wait-timeout", "60", "--no-build", "gateway")

            output = await session.call_tool("submit", {"answer": math_answer(task_of("math", task.task_spec["id"]))})

            assert output.reward == 1.0
            assert {worker["Id"] for worker in stack.workers("math")} == before

    async def is_over() -> None:
        assert stack.admin("sessions") == []

    await eventually(is_over)


async def test_a_key_added_to_the_running_stack_plays_within_its_limits_until_it_is_revoked(stack: Stack) -> None:
    keys = ("exec", "-T", "gateway", "gateway", "keys")
    key = stack.compose(*keys, "add", "alice", "--environments", "math").strip()
    alice = replace(stack, trainer=key)

    async def answers(status: int) -> Any:
        async with httpx.AsyncClient(base_url=stack.url, headers={"X-API-Key": key}) as client:
            answer = await client.get("/list_environments")
        assert answer.status_code == status, answer.text
        return answer.json()

    assert await eventually(lambda: answers(200)) == ["math"]
    assert await play(alice, ORS) == 1.0
    listed = json.loads(stack.compose(*keys, "list", "--json"))
    assert ("alice", {"environments": ["math"]}) in [(one["name"], one["limits"]) for one in listed]

    stack.compose(*keys, "revoke", "alice")
    await eventually(lambda: answers(401))


def test_the_commands_of_the_page_back_up_and_restore_redis(stack: Stack, tmp_path: Path) -> None:
    backup, restore = (block.text for block in blocks("docs/operations.md") if "test_compose" in block.note)
    environ = os.environ | {"COMPOSE_PROJECT_NAME": stack.project, "COMPOSE_FILE": str(PROJECT_DIR / "compose.yaml")}

    def type_in(commands: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=tmp_path,
            env=environ,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        assert done.returncode == 0, done.stderr

    def store(command: str) -> str:
        return stack.compose("exec", "-T", "redis", "redis-cli", *command.split()).strip()

    store("set kept 1")
    type_in(backup)
    store("set kept 2")
    type_in(restore)

    def is_restored() -> None:
        assert store("get kept") == "1"

    eventually_now(is_restored)
    assert store("config get auto-aof-rewrite-percentage").split()[-1] == "100"
    store("del kept")


def shown_module() -> str:
    """Return the task module that docs/tasks.md shows."""
    readme = (PROJECT_DIR / "docs" / "tasks.md").read_text("utf-8")
    found = re.search(r"<!-- task module:.*?-->\s*```python\n(.*?)```\s*<!-- end of task module -->", readme, re.S)
    assert found is not None
    return found[1]


async def test_custom_tasks_are_played_once_their_module_is_put_into_the_running_stack(
    stack: Stack, tmp_path: Path
) -> None:
    """Follow the steps of docs/tasks.md: a file, `docker compose cp`, a reset."""
    folder = tmp_path / "browser"
    folder.mkdir(mode=0o755)
    (folder / "my_tasks.py").write_text(shown_module(), "utf-8")
    (folder / "my_tasks.py").chmod(0o644)
    url = f"{stack.url}/k/{stack.trainer}/openenv/browser"
    with contextlib.closing(Driver(NEWEST)) as driver:
        async with connected(driver, url) as client:
            with pytest.raises(ClientError, match="Unknown task: custom/say-hello"):
                await client.reset(task="custom/say-hello")

            stack.compose("cp", str(folder), "node:/run/gateway/custom_tasks/")

            async def found() -> dict[str, Any]:
                try:
                    result: dict[str, Any] = (await client.reset(task="custom/say-hello"))["observation"]
                except ClientError as error:
                    raise AssertionError(str(error)) from None
                return result

            seen = await eventually(found)
            said = await client.step({"action_str": written("click({button 'Say hello'})", seen["axtree_txt"])})
            seen = (await client.reset(task="custom/say-hello-twice"))["observation"]
            click = written("click({button 'Say hello'})", seen["axtree_txt"])
            once, twice = await client.step({"action_str": click}), await client.step({"action_str": click})

    assert (said["reward"], said["done"]) == (1.0, True)
    assert (once["reward"], once["done"]) == (0.0, False)
    assert (twice["reward"], twice["done"]) == (1.0, True)
