"""An operator's task modules on the real engine: mounted read-only, loaded by new workers, and behind the gate."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest

from gateway.backends.docker.backend import DockerBackend
from gateway.backends.docker.container import container_body, container_name
from gateway.backends.docker.mounts import HostPaths
from gateway.core.environment import CustomTasks, Environment, Relaxations
from gateway.core.ids import EnvironmentName
from gateway.node.gate import Gate
from gateway.node.policy import Rules
from gateway.node.serve import mountpoint, serving_gate
from tests.contract.backend_world import ENGINE_URL, healthy, labelled, new_id, remove_labelled, run_inside, worker_of
from tests.deadlines import COMMAND_S, HANG_S
from tests.fakes.eventually import eventually
from tests.fakes.images import built_once
from tests.wire.gateways import Gateway, short_folder
from tests.wire.raw import RawEpisode, create, episode, new_sid

pytestmark = [pytest.mark.docker]
pytest_plugins = ["tests.contract.backend_fixtures"]

PROJECT_DIR = Path(__file__).parents[2]
TARGET = "/opt/openenv/custom_tasks"
BASE_IMAGE = "env-gateway/base:latest"

# -- the mount, inside a container -------------------------------------------------------------------------------------


@pytest.fixture
def tunable(environment: Environment) -> Environment:
    """The smallest worker with a folder of task modules. It owns the folder, so file modes do not protect it."""
    tasks = CustomTasks(module="custom_tasks.mine", folder="tunable", content="some")
    loosened = Relaxations(user=f"{os.getuid()}:{os.getgid()}")
    return replace(environment, name=EnvironmentName("tunable"), custom_tasks=tasks, loosened=loosened)


@pytest.fixture
def tasks_root(tasks_dir: Path) -> Path:
    """Folders of two environments, one module in each."""
    for name in ("tunable", "other"):
        (tasks_dir / name).mkdir()
        (tasks_dir / name).chmod(0o755)
        (tasks_dir / name / "mine.py").write_text(f"NAME = {name!r}\n")
        (tasks_dir / name / "mine.py").chmod(0o644)
    return tasks_dir


@pytest.fixture
async def gate_and_backend(
    docker_engine: docker.APIClient,
    environment: Environment,
    tunable: Environment,
    tasks_root: Path,
    shared_dir: Path,
    instance: str,
) -> AsyncIterator[tuple[httpx.AsyncClient, DockerBackend]]:
    """A client of a gate that sees the folders, and a backend behind it."""
    sockets, url = shared_dir / "sockets", f"unix://{shared_dir}/gate.sock"
    sockets.mkdir(mode=0o711)
    other = replace(
        tunable, name=EnvironmentName("other"), custom_tasks=CustomTasks(module="custom_tasks.mine", folder="other")
    )
    rules = Rules.of(
        [environment, tunable, other], instance=instance, socket_root=str(sockets), custom_tasks_root=str(tasks_root)
    )
    gate = Gate(engine=ENGINE_URL, rules=rules, custom_tasks_view=tasks_root)
    backend = DockerBackend(
        url=url, instance=instance, paths=HostPaths(socket_dir=sockets, custom_tasks_dir=tasks_root)
    )
    transport = httpx.AsyncHTTPTransport(uds=str(shared_dir / "gate.sock"), verify=False)
    async with (
        serving_gate(gate, shared_dir / "gate.sock"),
        httpx.AsyncClient(transport=transport, base_url="http://gate", timeout=HANG_S, trust_env=False) as client,
    ):
        yield client, backend
        await backend.aclose()
    remove_labelled(docker_engine, instance)


GateAndBackend = tuple[httpx.AsyncClient, DockerBackend]


async def test_a_worker_reads_its_own_environments_modules_and_cannot_change_them(
    gate_and_backend: GateAndBackend, tunable: Environment, tasks_root: Path
) -> None:
    _, backend = gate_and_backend
    address = await backend.start(worker_of(tunable), tunable)
    await healthy(address)

    program = f"""
import json, os
def fails(act, *arguments):
    try:
        act(*arguments)
    except OSError as error:
        return error.strerror
tried = [
    fails(open, "{TARGET}/new.py", "w"),
    fails(open, "{TARGET}/mine.py", "a"),
    fails(os.unlink, "{TARGET}/mine.py"),
    fails(os.rename, "{TARGET}/mine.py", "{TARGET}/yours.py"),
    fails(os.chmod, "{TARGET}/mine.py", 0o777),
    fails(os.mkdir, "{TARGET}/__pycache__"),
]
print(json.dumps([os.listdir("{TARGET}"), open("{TARGET}/mine.py").read(), tried, os.environ["OPENENV_TASK_MODULE"]]))
"""
    listed, source, tried, module = json.loads(await run_inside(address, program))

    assert (listed, source, module) == (["mine.py"], "NAME = 'tunable'\n", "custom_tasks.mine")
    assert tried == ["Read-only file system"] * len(tried)
    assert os.listdir(tasks_root / "tunable") == ["mine.py"]


async def test_an_edit_is_seen_in_a_folder_that_is_already_mounted(
    gate_and_backend: GateAndBackend, tunable: Environment, tasks_root: Path
) -> None:
    _, backend = gate_and_backend
    address = await backend.start(worker_of(tunable), tunable)
    await healthy(address)

    (tasks_root / "tunable" / "more.py").write_text("MORE = True\n")

    seen = await run_inside(address, f"import os; print(sorted(os.listdir('{TARGET}')))")
    assert seen == "['mine.py', 'more.py']\n"


def attack_body(environment: Environment, instance: str, sockets: Path, source: str, **changes: Any) -> dict[str, Any]:
    worker = worker_of(environment)
    body = container_body(
        worker, environment, instance=instance, source=f"{sockets}/{worker.id}", custom_tasks_source=source
    )
    body["HostConfig"]["Mounts"][1] |= changes
    return body


ATTACKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "writable": ("tunable", "tunable", {"ReadOnly": False}),
    "another place": ("tunable", "tunable", {"Target": "/srv"}),
    "another environment's": ("tunable", "other", {}),
    "all of them": ("tunable", "", {}),
    "dots": ("tunable", "tunable/../other", {}),
    "an environment without any": ("fake", "tunable", {}),
    "mounts that leak out": ("tunable", "tunable", {"BindOptions": {"Propagation": "rshared"}}),
    "a volume": ("tunable", "tunable", {"Type": "volume"}),
}


@pytest.mark.parametrize(("name", "folder", "changes"), ATTACKS.values(), ids=ATTACKS.keys())
async def test_the_gate_refuses_every_other_mount_of_task_modules(
    gate_and_backend: GateAndBackend,
    docker_engine: docker.APIClient,
    environment: Environment,
    tunable: Environment,
    tasks_root: Path,
    shared_dir: Path,
    instance: str,
    name: str,
    folder: str,
    changes: dict[str, Any],
) -> None:
    gate, _ = gate_and_backend
    asked_for = replace(tunable if name == "tunable" else environment, name=EnvironmentName(name))
    body = attack_body(asked_for, instance, shared_dir / "sockets", f"{tasks_root}/{folder}".rstrip("/"), **changes)

    response = await gate.post(
        "/v1.41/containers/create", params={"name": container_name(instance, name, new_id())}, json=body
    )

    assert response.status_code == 403, response.text
    assert "HostConfig.Mounts" in response.json()["message"]
    assert labelled(docker_engine, instance) == []


@pytest.mark.parametrize("spoil", ["link", "file", "missing", "open to others"])
async def test_the_gate_refuses_a_link_a_file_a_missing_folder_and_one_that_others_can_write_to(
    gate_and_backend: GateAndBackend,
    docker_engine: docker.APIClient,
    tunable: Environment,
    tasks_root: Path,
    shared_dir: Path,
    instance: str,
    spoil: str,
) -> None:
    gate, _ = gate_and_backend
    folder = tasks_root / "tunable"
    if spoil == "open to others":
        os.chmod(folder, 0o777)
    else:
        shutil.rmtree(folder)
    if spoil == "link":
        os.symlink("/etc", folder)
    elif spoil == "file":
        os.mknod(folder)
    body = attack_body(tunable, instance, shared_dir / "sockets", str(folder))

    response = await gate.post(
        "/v1.41/containers/create", params={"name": container_name(instance, "tunable", new_id())}, json=body
    )

    assert response.status_code == 403, response.text
    assert f"custom tasks: {folder}" in response.json()["message"]
    assert labelled(docker_engine, instance) == []


@pytest.fixture
def volume(docker_engine: docker.APIClient, worker_image: str, tasks_root: Path, instance: str) -> Iterator[str]:
    """A volume in use. The test sees it at ``tasks_root``, as a gateway in a container sees its mount."""
    name, labels = f"{instance}-tasks", {"env-gateway.instance": f"{instance}-2"}
    options = {"type": "none", "o": "bind,ro", "device": str(tasks_root)}
    docker_engine.create_volume(name, driver_opts=options, labels=labels)
    holder = docker_engine.create_container(
        worker_image,
        command=["python3", "-c", "import signal; signal.pause()"],
        labels=labels,
        host_config=docker_engine.create_host_config(binds=[f"{name}:/tasks:ro"], network_mode="none"),
    )
    docker_engine.start(holder["Id"])
    yield name
    docker_engine.remove_container(holder["Id"], force=True)
    docker_engine.remove_volume(name)


async def test_a_worker_gets_only_its_environments_folder_of_a_volume(
    docker_engine: docker.APIClient,
    tunable: Environment,
    tasks_root: Path,
    shared_dir: Path,
    instance: str,
    volume: str,
) -> None:
    root = await mountpoint(ENGINE_URL, volume)
    rules = Rules.of([tunable], instance=instance, socket_root=str(shared_dir), custom_tasks_root=root)
    gate = Gate(engine=ENGINE_URL, rules=rules, custom_tasks_volume=volume, custom_tasks_view=tasks_root)
    async with serving_gate(gate, shared_dir / "gate.sock"):
        backend = DockerBackend(
            url=f"unix://{shared_dir}/gate.sock",
            instance=instance,
            paths=HostPaths(socket_dir=shared_dir, custom_tasks_dir=tasks_root, custom_tasks_volume=volume),
        )
        worker = worker_of(tunable)
        address = await backend.start(worker, tunable)
        await healthy(address)

        source = await run_inside(address, f"print(open('{TARGET}/mine.py').read(), end='')")
        written = await run_inside(address, f"import os; print(os.access('{TARGET}', os.W_OK))")

        (entry,) = labelled(docker_engine, instance)
        await backend.stop(worker.id)
        await backend.aclose()
    assert (source, written) == ("NAME = 'tunable'\n", "False\n")
    mounts = {mount["Destination"]: (mount["Source"], mount["RW"]) for mount in entry["Mounts"]}
    assert mounts[TARGET] == (f"{root}/tunable", False)


# -- compose.yaml ------------------------------------------------------------------------------------------------------


def composed(**variables: str) -> dict[str, Any]:
    """Return the configuration that `docker compose up` would use."""
    kept = {name: value for name, value in os.environ.items() if name != "CUSTOM_TASKS"}
    done = subprocess.run(
        ["docker", "compose", "--env-file", "/dev/null", "config", "--format", "json"],
        cwd=PROJECT_DIR,
        env=kept | {"COMPOSE_PROJECT_NAME": "eg-test", **variables},
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_compose_mounts_one_volume_in_gateway_and_node_and_both_have_its_path_and_name() -> None:
    found = composed()

    for service, is_read_only in (("gateway", True), ("node", False)):
        described = found["services"][service]
        (mount,) = [mount for mount in described["volumes"] if mount.get("source") == "custom-tasks"]
        assert described["environment"]["GATEWAY_CUSTOM_TASKS_DIR"] == mount["target"]
        assert described["environment"]["GATEWAY_CUSTOM_TASKS_VOLUME"] == found["volumes"]["custom-tasks"]["name"]
        assert mount.get("read_only", False) is is_read_only
    assert found["volumes"]["custom-tasks"]["name"] == "eg-test_custom-tasks"


@pytest.mark.parametrize("given", ["", "a folder"])
def test_the_volume_of_compose_is_an_engine_volume_or_the_operators_folder(
    docker_engine: docker.APIClient, worker_image: str, tasks_root: Path, instance: str, given: str
) -> None:
    (tasks_root / "tunable" / "mine.py").write_text("SEEN = 1\n")
    folder = str(tasks_root) if given else ""
    options = composed(CUSTOM_TASKS=folder)["volumes"]["custom-tasks"]["driver_opts"]
    docker_engine.create_volume(f"{instance}-tasks", driver_opts=options)
    try:
        container = docker_engine.create_container(
            worker_image,
            command=["sh", "-c", "cat /tasks/tunable/mine.py; touch /tasks/x"],
            labels={"env-gateway.instance": instance},
            host_config=docker_engine.create_host_config(binds=[f"{instance}-tasks:/tasks"], network_mode="none"),
        )
        docker_engine.start(container["Id"])
        status = docker_engine.wait(container["Id"], timeout=HANG_S)["StatusCode"]
        said = docker_engine.logs(container["Id"]).decode()
    finally:
        remove_labelled(docker_engine, instance)
        docker_engine.remove_volume(f"{instance}-tasks")

    if given:
        assert "SEEN = 1" in said
        assert "Read-only file system" in said
    else:
        assert "No such file" in said
        assert status == 0  # an engine's own volume is writable, so that a container can fill it


# -- end to end: a gateway, an environment image, and an operator who edits -------------------------------------------

SERVER = '''
from envserver import Environment, Prompt, StepResult, Task, TextBlock, serve, tool
from envserver.generic import read_reward


class Riddles(Environment):
    """Asks what its task asks, and rewards as its task says."""

    name = "riddles"

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        return [TextBlock(str(task["instruction"]))]

    @tool
    async def answer(self, text: str) -> StepResult:
        """Answer the riddle."""
        return StepResult("seen", reward=read_reward(self.task["evaluation"])(text), finished=True)


serve(Riddles)
'''
ENVIRONMENT = """
name = "riddles"
image = "{image}"
command = ["python3", "server.py"]

[pool]
slots = 8
max_workers = 3

[limits]
memory_mib = 128

[tasks]
module = "custom_tasks.my_task"
"""
MY_TASK = """
from openenv.core.tasks import registry

registry.register("riddles/mine", "riddles", {{"goal": "Say {word}.", "reward_fn": "exact_match('{word}')"}})
"""
BROKEN = "import no_such_module_anywhere\n"
INLINE = {"instruction": "Say inline.", "evaluation": {"reward_function": "exact_match('inline')"}}
BY_ID = {"id": "riddles/mine"}


@pytest.fixture(scope="module")
def riddles_image(docker_engine: docker.APIClient) -> str:
    """An image of the project's base with the environment server of this checkout."""
    lines = (f"FROM {BASE_IMAGE}", "COPY . ./", 'CMD ["python3", "server.py"]')
    package = PROJECT_DIR / "env_images" / "base"
    sources = (path for suffix in ("py", "json") for path in package.glob(f"envserver/**/*.{suffix}"))
    modules = {str(path.relative_to(package)): path.read_bytes() for path in sources}
    files = {"Dockerfile": "\n".join(lines).encode(), "server.py": SERVER.encode(), **modules}
    return built_once(docker_engine, "env-gateway-tests/riddles:1", files)


class Operator:
    """An operator's actions: puts a module into the environment's folder, edits it, removes it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, source: str) -> None:
        self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._folder.chmod(0o755)
        draft = self._folder / ".my_task.py.new"
        draft.write_text(source)
        draft.chmod(0o644)
        draft.rename(self._folder / "my_task.py")

    def remove(self) -> None:
        shutil.rmtree(self._folder)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    made = short_folder("/dev/shm")
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def operator(folder: Path) -> Iterator[Operator]:
    made = Operator(folder / "custom_tasks" / "riddles")
    yield made
    shutil.rmtree(folder / "custom_tasks" / "riddles", ignore_errors=True)


@pytest.fixture(scope="module", params=["docker", "process"])
def gateway(
    request: pytest.FixtureRequest, docker_engine: docker.APIClient, riddles_image: str, folder: Path
) -> Iterator[Gateway]:
    """A gateway in its own process, started before any folder of tasks exists, on either backend."""
    catalog = folder / "catalog" / "riddles"
    catalog.mkdir(parents=True, exist_ok=True)
    (catalog / "environment.toml").write_text(ENVIRONMENT.format(image=riddles_image))
    (catalog / "server.py").write_text(SERVER)
    instance = f"eg-test-{folder.name[3:]}"
    made = Gateway(
        folder,
        {
            "GATEWAY_BACKEND": request.param,
            "GATEWAY_SOCKET_DIR": str(folder / "s"),
            "GATEWAY_INSTANCE": instance,
            "GATEWAY_CATALOG_DIR": str(folder / "catalog"),
            "GATEWAY_ENVIRONMENTS": "riddles",
            "GATEWAY_DEFAULT_ENVIRONMENT": "riddles",
            "GATEWAY_TRAINER_KEYS": "",
            "GATEWAY_CUSTOM_TASKS_DIR": str(folder / "custom_tasks"),
        },
    )
    try:
        made.start()
        yield made
    finally:
        made.stop()
        remove_labelled(docker_engine, instance)


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    already_logged = len(gateway.log)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=HANG_S, trust_env=False) as client:
        yield client
    assert await gateway.sessions() == []
    assert "\nTraceback" not in gateway.log[already_logged:]


async def prompt(opened: RawEpisode) -> str:
    response = await opened.get("prompt")
    assert response.status_code == 200, response.text
    return str(response.json()[0]["text"])


async def reward(opened: RawEpisode, text: str) -> float:
    return float((await opened.call("answer", {"text": text})).result["output"]["reward"])


async def asks_for(http: httpx.AsyncClient, word: str) -> None:
    """Assert that the task's prompt asks for *word* in a new session."""
    async with episode(http, BY_ID, environment="riddles") as opened:
        assert await prompt(opened) == f"Say {word}."


async def refused_with(http: httpx.AsyncClient, *words: str) -> None:
    """Assert that opening the task by its id is refused with *words*, by ``/create`` or by the request after it."""
    opened = RawEpisode(http, new_sid(), "riddles")
    response = await create(http, opened.sid, env_name="riddles", task_spec=BY_ID)
    if response.status_code == 200:
        response = await opened.get("prompt")
        await opened.delete()
    assert response.status_code != 200
    assert all(word in response.text for word in words), response.text


async def test_a_running_gateway_notices_a_new_an_edited_and_a_removed_task_module(
    gateway: Gateway, http: httpx.AsyncClient, operator: Operator
) -> None:
    await eventually(lambda: refused_with(http, "Unknown task: riddles/mine"))
    earlier = {each["id"] for each in await gateway.workers("riddles")}

    operator.write(MY_TASK.format(word="one"))
    await eventually(lambda: asks_for(http, "one"))
    async with episode(http, BY_ID, environment="riddles") as opened_before:
        (before,) = [each["id"] for each in await gateway.workers("riddles") if each["state"] == "ready"]

        operator.write(MY_TASK.format(word="two"))
        await eventually(lambda: asks_for(http, "two"))
        workers = [each for each in await gateway.workers("riddles") if each["id"] not in earlier]
        during = {each["id"]: each["state"] for each in workers}
        async with episode(http, BY_ID, environment="riddles") as opened_after:
            rewards = (await reward(opened_before, "one"), await reward(opened_after, "two"))

    async def only_the_new_worker_is_left() -> None:
        assert before not in [each["id"] for each in await gateway.workers("riddles")]

    await eventually(only_the_new_worker_is_left)
    assert rewards == (1.0, 1.0)
    assert during[before] == "draining"
    assert sorted(during.values()) == ["draining", "ready"]

    operator.remove()
    await eventually(lambda: refused_with(http, "Unknown task: riddles/mine"))


async def test_no_session_fails_while_modules_are_edited(http: httpx.AsyncClient, operator: Operator) -> None:
    operator.write(MY_TASK.format(word="first"))
    await eventually(lambda: asks_for(http, "first"))
    is_over = asyncio.Event()

    async def play() -> list[float]:
        earned = []
        while not is_over.is_set():
            async with episode(http, INLINE, environment="riddles") as opened:
                earned.append(await reward(opened, await word_of(opened)))
        return earned

    async with asyncio.TaskGroup() as group:
        players = [group.create_task(play()) for _ in range(4)]
        for word in ("second", "third"):
            operator.write(MY_TASK.format(word=word))
            await eventually(functools.partial(asks_for, http, word))
        is_over.set()

    assert {reward for player in players for reward in player.result()} == {1.0}
    assert all(player.result() for player in players)


async def word_of(opened: RawEpisode) -> str:
    return (await prompt(opened)).removeprefix("Say ").removesuffix(".")


async def test_a_module_that_does_not_import_is_reported_by_name_and_affects_no_other_task(
    http: httpx.AsyncClient, operator: Operator
) -> None:
    operator.write(MY_TASK.format(word="well"))
    await eventually(lambda: asks_for(http, "well"))

    operator.write(BROKEN)
    await eventually(lambda: refused_with(http, "custom_tasks.my_task", "no_such_module_anywhere"))
    async with episode(http, INLINE, environment="riddles") as opened:
        asked, earned = await prompt(opened), await reward(opened, "inline")
    operator.write(MY_TASK.format(word="again"))
    await eventually(lambda: asks_for(http, "again"))

    assert (asked, earned) == ("Say inline.", 1.0)
