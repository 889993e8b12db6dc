"""The images of environments with sandboxes, in containers exactly as the gateway describes them to the engine."""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import httpx
import pytest
from envserver.sandbox import hostbox

from gateway.backends.docker import calls
from gateway.backends.docker.container import CUSTOM_TASKS_TARGET, container_body
from gateway.catalog.toml import read_environment
from gateway.core.ids import WorkerId
from gateway.core.worker import Worker
from tests.contract.backend_world import door, healthy, remove_labelled
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.wire.raw import RawEpisode, create, episode, new_sid

pytestmark = [
    pytest.mark.docker,
    pytest.mark.needs("image:coding", "image:os"),
]
pytest_plugins = ["tests.contract.backend_fixtures"]

PROJECT_DIR = Path(__file__).parents[2]
CATALOG, TASKS = PROJECT_DIR / "env_images", PROJECT_DIR / "tasks"
SETUID_AND_SETGID = 1 << 7 | 1 << 6
"""Bits of the capabilities, as in /proc/PID/status."""
SANDBOX_UID = 100_000
SECRET = "token-0123456789"
MANY = 25
"""Number of sessions, one after the other."""

Change = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Running:
    """A worker's container with a ready server."""

    engine: docker.APIClient
    container: str
    http: httpx.AsyncClient
    environment: str

    def as_root(self, *argv: str) -> str:
        """Run a command in the container, outside all sandboxes. Return its output."""
        status, printed = calls.run(self.engine, container=self.container, argv=list(argv), user="0")
        assert status == 0, printed
        return printed.decode()

    def log(self) -> str:
        said: bytes = self.engine.logs(self.container)
        return said.decode()


@dataclass(frozen=True)
class Images:
    """Containers of the gateway's own images."""

    engine: docker.APIClient
    folder: Path
    instance: str
    shared_ones: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The container and the address of each image's shared worker."""

    @asynccontextmanager
    async def start(self, name: str, change: Change | None = None) -> AsyncIterator[Running]:
        """Start a container for one test. *change* breaks its description."""
        container, address = self._started(name, change)
        try:
            async with self._reached(name, container, address) as running:
                yield running
        finally:
            self.engine.remove_container(container, force=True)

    @asynccontextmanager
    async def shared(self, name: str) -> AsyncIterator[Running]:
        """Return the shared container of *name*, for tests that only open sessions and read."""
        if name not in self.shared_ones:
            self.shared_ones[name] = self._started(name)
        async with self._reached(name, *self.shared_ones[name]) as running:
            yield running

    def _started(self, name: str, change: Change | None = None) -> tuple[str, str]:
        """Start *name* as its environment.toml says."""
        environment = read_environment(CATALOG / name / "environment.toml")
        worker = Worker(
            id=WorkerId(secrets.token_hex(8)),
            environment=environment.name,
            digest=environment.digest(),
            slots=environment.pool.slots,
        )
        sockets = self.folder / worker.id
        sockets.mkdir()
        sockets.chmod(0o777)  # like the gateway's folders of workers that run as another user
        body = container_body(worker, environment, instance=self.instance, source=str(sockets))
        if change is not None:
            change(body)
        make = self.engine.create_container_from_config
        container = make(body)["Id"]  # type: ignore[no-untyped-call]  # no stubs
        self.engine.start(container)
        return container, f"unix:{sockets}/worker.sock"

    @asynccontextmanager
    async def _reached(self, name: str, container: str, address: str) -> AsyncIterator[Running]:
        await healthy(address)
        async with door(address) as http:
            http.timeout = httpx.Timeout(60)
            yield Running(self.engine, container, http, name)


@pytest.fixture(scope="module")
def images(docker_engine: docker.APIClient) -> Iterator[Images]:
    instance = f"eg-test-{secrets.token_hex(4)}"
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eg-") as name:
        Path(name).chmod(0o711)
        yield Images(docker_engine, Path(name), instance)
        remove_labelled(docker_engine, instance)


async def shell(opened: RawEpisode, command: str) -> str:
    """Run *command* in the session's sandbox. Return the agent's view of the result."""
    if opened.environment == "os":
        return (await opened.call("bash_action", {"script": command})).text
    return (await opened.call("execute", {"command": command})).text


PLAIN = {
    "os": {"id": "plain", "instruction": "Answer with 7.", "evaluation": {"match": "7"}},
    "coding": {
        "id": "plain",
        "instruction": "Write the function `def one() -> int`.",
        "config": {"files": {"notes.txt": "read me\n"}},
        "evaluation": {
            "reward_function": "test_cases",
            "function": "one",
            "test_cases": [{"arguments": [], "output": 1}],
        },
    },
}
BOTH = pytest.mark.parametrize("name", sorted(PLAIN))

PROCESSES = """
import json, pathlib
found = []
for file in pathlib.Path("/proc").glob("[0-9]*/status"):
    try:
        found.append(dict(line.split(":", 1) for line in file.read_text().splitlines()))
    except OSError:
        pass  # it ended while it was looked at
print(json.dumps([{name: value.strip() for name, value in process.items()} for process in found]))
"""


def processes(running: Running) -> list[dict[str, str]]:
    """Return the kernel's status of each process in the container that does not run as root."""
    found: list[dict[str, str]] = json.loads(running.as_root("python3", "-c", PROCESSES))
    return [process for process in found if process["Uid"].split()[0] != "0"]


@BOTH
async def test_an_agents_command_runs_as_root_of_a_sandbox(images: Images, name: str) -> None:
    async with images.shared(name) as running, episode(running.http, PLAIN[name], environment=name) as opened:
        seen = await shell(opened, "id -un; hostname; su nobody -s /bin/sh -c 'id -un'")

    assert seen.splitlines()[-3:] == ["root", "box", "nobody"]


@BOTH
async def test_the_server_has_no_capability_and_only_its_launcher_may_map_users(images: Images, name: str) -> None:
    async with images.shared(name) as running, episode(running.http, PLAIN[name], environment=name):
        found = processes(running)

    first = next(process for process in found if process["Pid"] == "1")
    servers = [process for process in found if process["PPid"] == "1" and process["Name"].startswith("python3")]
    launchers = [process for process in found if process["Name"] == "launcher"]
    assert [process["PPid"] for process in launchers] == [server["Pid"] for server in servers]
    assert len(servers) == 1
    for process, rights in ((first, SETUID_AND_SETGID), (launchers[0], SETUID_AND_SETGID), (servers[0], 0)):
        assert process["Uid"].split() == process["Gid"].split() == [str(SANDBOX_UID)] * 4
        assert process["Groups"] == ""
        sets = [int(process[name], 16) for name in ("CapPrm", "CapEff", "CapInh", "CapAmb")]
        assert sets == [rights] * 4
    assert {process["NoNewPrivs"] for process in found} == {"1"}
    assert {process["Seccomp"] for process in found} == {"2"}
    assert all(int(process["Uid"].split()[0]) >= SANDBOX_UID for process in found)


ATTACK = """
import os
for attempt in (
    lambda: os.setuid(0),
    lambda: os.setresgid(0, 0, 0),
    lambda: os.close(os.open("/proc/sys/kernel/core_pattern", os.O_RDWR)),
    lambda: os.close(os.open("/proc/sys/vm/overcommit_memory", os.O_RDWR)),
):
    try:
        attempt()
        print("ESCAPED", flush=True)
    except OSError as error:
        print("held", flush=True)
"""


@BOTH
async def test_a_task_module_cannot_become_root_or_change_the_machines_kernel(images: Images, name: str) -> None:
    modules = images.folder / f"modules-{name}"
    modules.mkdir()
    (modules / "attack.py").write_text(ATTACK)

    def mount(body: dict[str, Any]) -> None:
        body["Env"].append("OPENENV_TASK_MODULE=custom_tasks.attack")
        bind = {"Type": "bind", "Source": str(modules), "Target": CUSTOM_TASKS_TARGET, "ReadOnly": True}
        body["HostConfig"]["Mounts"].append(bind)

    async with images.start(name, mount) as running, episode(running.http, PLAIN[name], environment=name) as opened:
        inside = await shell(opened, "id -un")
        said = running.log()

    assert inside.splitlines()[-1] == "root"
    assert (said.count("held"), said.count("ESCAPED")) == (4, 0), said


@BOTH
async def test_a_sandbox_sees_no_file_and_no_variable_of_the_server(images: Images, name: str) -> None:
    def tell(body: dict[str, Any]) -> None:
        body["Env"].append(f"PROBE={SECRET}")

    find = r"find {} -xdev \( -name '*.jsonl' -o -name '*.sock' -o -name 'envserver*' -o -name '*_judge.py' \) | wc -l"
    grep = "cat /proc/*/environ /proc/*/cmdline | grep -ac 'token-[0]123456789'"
    async with images.start(name, tell) as running, episode(running.http, PLAIN[name], environment=name) as opened:
        seen = await shell(opened, f"{find.format('/')}; {grep}; ls -A /srv | wc -l")
        there = running.as_root("sh", "-c", find.format("/srv/env /run/envserver"))

    assert [line for line in seen.splitlines() if line.isdigit()] == ["0", "0", "0"]
    assert int(there) >= 4  # two files of tasks, its judge and its socket: the files to hide exist


@BOTH
async def test_an_agents_changes_to_its_sandbox_are_gone_with_its_session(images: Images, name: str) -> None:
    async with images.shared(name) as running:
        async with episode(running.http, PLAIN[name], environment=name) as opened:
            spoiled = await shell(opened, "rm -rf /usr/lib/git-core /etc/passwd; touch /etc/mine; ls /etc/mine")
        async with episode(running.http, PLAIN[name], environment=name) as opened:
            seen = await shell(opened, "git --version; id -un; ls /etc/mine 2>&1 | wc -w")
        image = running.as_root("sh", "-c", "touch /srv/box/etc/mine 2>&1 || true")

    assert "/etc/mine" in spoiled
    assert "git version 2." in seen
    assert "root" in seen.splitlines()
    assert "Read-only file system" in image


@BOTH
async def test_a_sandbox_contains_nothing_of_the_machine_that_built_it(images: Images, name: str) -> None:
    looks = (
        "cat /etc/hostname",
        "cat /etc/resolv.conf /etc/machine-id | wc -c",
        "ls -d /etc/apt/sources.list* /etc/pip.conf /etc/ssl/certs /var/lib/apt/lists/?* 2>/dev/null | wc -l",
        "date +%Z",
    )
    async with images.shared(name) as running, episode(running.http, PLAIN[name], environment=name) as opened:
        seen = await shell(opened, "; ".join(looks))

    assert seen.splitlines()[-4:] == ["box", "0", "0", "UTC"]


async def test_a_sandbox_in_the_image_has_the_programs_logs_and_groups_of_one_on_the_host(images: Images) -> None:
    wanted = {*hostbox.PROGRAMS.split(), "cc", "make", "pytest", "killall", "jq", "xz", "unzip"} - {"bwrap"}

    async with (
        images.shared("coding") as running,
        episode(running.http, PLAIN["coding"], environment="coding") as opened,
    ):
        seen = await shell(opened, f"for each in {' '.join(sorted(wanted))}; do type -t $each || echo no $each; done")
        logs = await shell(opened, "cat /var/log/*.log | grep -c .")
        groups = await shell(opened, "cut -d: -f1 /etc/group")

    assert [line for line in seen.splitlines() if line.startswith("no ")] == []
    assert len(seen.splitlines()) == len(wanted)
    assert int(logs) > 0
    assert set(groups.split()) >= {line.partition(":")[0] for line in hostbox.GROUPS.split()}


async def test_sessions_that_end_leave_no_process_behind(images: Images) -> None:
    async with images.start("coding") as running:

        async def play() -> None:
            async with episode(running.http, PLAIN["coding"], environment="coding") as opened:
                assert "there" in await shell(opened, "echo there | cat")

        async def no_more_than(count: int) -> None:
            found = processes(running)
            assert [process for process in found if process["State"].startswith("Z")] == []
            assert len(found) <= count, found

        await play()  # the first session starts the processes that the others share
        await eventually(lambda: no_more_than(MANY))
        count = len(processes(running))
        for _ in range(MANY):
            await play()

        await eventually(lambda: no_more_than(count))


@BOTH
async def test_a_container_ends_itself_on_sigterm(images: Images, name: str) -> None:
    async with images.start(name) as running:
        opened = RawEpisode(running.http, new_sid(), name)
        await create(running.http, opened.sid, env_name=name, task_spec=PLAIN[name])
        await shell(opened, "sleep 1000 & echo")
        running.engine.kill(running.container, "SIGTERM")
        ended = running.engine.wait(running.container, timeout=HANG_S)
        assert ended["StatusCode"] == 0, running.log()


def without_profile(body: dict[str, Any]) -> None:
    options = body["HostConfig"]["SecurityOpt"]
    body["HostConfig"]["SecurityOpt"] = [option for option in options if not option.startswith("seccomp=")]


def with_masked_paths(body: dict[str, Any]) -> None:
    del body["HostConfig"]["MaskedPaths"], body["HostConfig"]["ReadonlyPaths"]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        pytest.param(without_profile, "seccomp profile for sandboxes", id="with the engine's own seccomp profile"),
        pytest.param(with_masked_paths, "Read-only file system: '/proc/sys/", id="with the engine's masked paths"),
    ],
)
async def test_a_create_is_refused_with_the_reason_where_sandboxes_cannot_start(
    images: Images, change: Change, cause: str
) -> None:
    async with images.start("os", change) as running:
        answers = [await create(running.http, new_sid(), env_name="os", task_spec=PLAIN["os"]) for _ in range(2)]

    assert [answer.status_code for answer in answers] == [500, 500]
    for answer in answers:
        assert cause in answer.json()["detail"]
        assert "SANDBOX.md" in answer.json()["detail"]


def one_of_each_template() -> dict[str, Any]:
    """Return one task of each kind in tasks/os: `train-001-count-suffix-00000` is of the kind `count-suffix`."""
    tasks = [json.loads(line) for line in (TASKS / "os" / "train.jsonl").read_text().splitlines()]
    return {task["id"].split("-", 2)[2].rpartition("-")[0]: task for task in tasks}


async def test_each_kind_of_os_task_is_solved_by_its_reference_in_the_image(images: Images) -> None:
    """The image has the programs that each kind needs. ``tests/envs`` checks that a wrong answer loses."""
    found: dict[str, Any] = {}
    async with images.shared("os") as running:
        for kind, task in one_of_each_template().items():
            found[kind] = await played(running, task, task["reference"])

    assert len(found) > 10
    assert {kind for kind, reward in found.items() if reward != 1.0} == set()


async def played(running: Running, task: dict[str, Any], solution: dict[str, Any]) -> Any:
    """Play *task* with the commands and the answer of *solution*. Return the reward."""
    async with episode(running.http, task, environment="os") as opened:
        for command in solution["commands"]:
            await opened.call("bash_action", {"script": command})
        if solution.get("answer") is None:
            last = await opened.call("finish_action", {"thought": ""})
        else:
            last = await opened.call("answer_action", {"answer": solution["answer"]})
    return last.result["output"]["reward"]


PRINTS_SEVEN = {
    "bash": "echo 7",
    "python": "print(7)",
    "c": '#include <stdio.h>\nint main(void) { puts("7"); return 0; }',
}


COMPARES = '#include <string.h>\nint main(int n, char **a) { return n == 2 && !strcmp(a[1], "7") ? 0 : 1; }'
EVALUATIONS = {
    **{
        f"an example in {language}": {
            "check": [None, {"matcher": "integer-match"}],
            "example": {"language": language, "code": code},
        }
        for language, code in PRINTS_SEVEN.items()
    },
    "a check in c": {"check": [{"language": "c", "code": COMPARES}]},
}


@pytest.mark.parametrize("script", EVALUATIONS)
async def test_scripts_of_os_tasks_run_in_the_sandbox(images: Images, script: str) -> None:
    task = PLAIN["os"] | {"evaluation": EVALUATIONS[script]}

    async with images.shared("os") as running:
        rewards = [await played(running, task, {"commands": [], "answer": answer}) for answer in ("7", "8")]

    assert rewards == [1.0, 0.0]


async def test_a_compiled_script_leaves_nothing_in_the_sandbox(images: Images) -> None:
    async with images.shared("os") as running:  # the example is compiled before the agent's first command
        task = PLAIN["os"] | {"evaluation": EVALUATIONS["an example in c"]}
        async with episode(running.http, task, environment="os") as opened:
            left = await shell(opened, "ls -A /run")

    assert left == "The output of the OS:\ncommand", "only the file of the shell's present command"


async def test_coding_has_pytest_in_its_sandbox_and_judges_in_separate_sandboxes(images: Images) -> None:
    source = "def one():\n    return 1\n"
    test = "from solution import one\n\n\ndef test_one():\n    assert one() == 1\n"

    async with images.shared("coding") as running:
        async with episode(running.http, PLAIN["coding"], environment="coding") as opened:
            await opened.call("write_file", {"path": "solution.py", "content": source})
            await opened.call("write_file", {"path": "test_solution.py", "content": test})
            tested = await shell(opened, "pytest -q; python3 -m unittest --help | head -n 1; cat notes.txt")
            right = (await opened.call("submit")).result["output"]
        async with episode(running.http, PLAIN["coding"], environment="coding") as opened:
            wrong = (await opened.call("submit", {"code": "def one():\n    return 2\n"})).result["output"]

    assert "1 passed" in tested
    assert "read me" in tested
    assert (right["reward"], wrong["reward"]) == (1.0, 0.0)
