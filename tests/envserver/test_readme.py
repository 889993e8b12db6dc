"""The README is true: its example runs, and it names every setting and log event."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
from envserver.generic import REWARDS, parse_task, read_reward, texts
from envserver.settings import _READERS
from envserver.version import VERSION

from tests.deadlines import COMMAND_S, HANG_S
from tests.envserver.raw import Wire
from tests.fakes.user import need_other_users
from tests.sandbox.conftest import made_box

BASE = Path(__file__).parents[2] / "env_images" / "base"
README = (BASE / "README.md").read_text()
SECTION = README[README.index("## Generic tasks") : README.index("## Settings")]


def example(language: str, *, of: str = README, number: int = 0) -> str:
    """Return the code of the example with this *number*, from 0, in a language."""
    return str(re.findall(rf"```{language}\n(.*?)```", of, re.DOTALL)[number])


async def test_the_first_environment_plays_its_first_task_with_the_commands_of_the_readme(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(example("python"))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "train.jsonl").write_text(example("json"))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {"PATH": path, "ENVSERVER_HOST": "127.0.0.1", "ENVSERVER_PORT": "0"}
    server = await asyncio.create_subprocess_shell(
        f"{example('sh').replace(' python ', ' exec python ')}", cwd=tmp_path, env=variables, stderr=PIPE
    )
    assert server.stderr is not None
    async with asyncio.timeout(HANG_S):
        while not (found := re.search(rb"server_ready address=(\S+)", line := await server.stderr.readline())):
            assert line, "the server ended"
    client = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        example("python", number=1).replace("localhost:8080", found[1].decode()),
        env={"PATH": path},
        stdout=PIPE,
        stderr=PIPE,
    )
    async with asyncio.timeout(HANG_S):
        told, errors = await client.communicate()
    server.terminate()
    await server.communicate()

    assert (client.returncode, told.decode()) == (0, "Reverse this text and submit it: hello\n1.0\n"), errors.decode()


def test_the_task_module_registers_its_task_and_its_reward(tmp_path: Path) -> None:
    (tmp_path / "my_tasks.py").write_text(example("python", of=SECTION))
    use = "from openenv.core.tasks import registry\nfrom envserver.generic import read_reward\nimport my_tasks\n"
    use += (
        "reward = read_reward(registry.get('custom/capital').evaluation)\nprint(reward('in Rome'), reward('in Paris'))"
    )
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path}{os.pathsep}{BASE}"}

    done = subprocess.run(
        [sys.executable, "-c", f"import envserver\n{use}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )

    assert (done.stdout, done.stderr) == ("0.5 0.0\n", "")


def test_the_task_of_the_example_is_a_generic_task_that_can_be_judged() -> None:
    task = parse_task(json.loads(example("json", of=SECTION)))

    assert read_reward(task.evaluation)("rome") == 1.0


def test_the_readme_names_every_reward_function_for_texts() -> None:
    named = set(re.findall(r"`(\w+)\(", SECTION))

    assert [
        name for name, one in REWARDS.items() if one.function.__module__ == texts.__name__ and name not in named
    ] == []


def test_the_readme_names_every_setting() -> None:
    assert "| `OPENENV_TASK_MODULE` |" in README
    assert sorted(set(re.findall(r"ENVSERVER_([A-Z_]+)", README))) == sorted(_READERS)


def test_the_readme_names_every_log_event() -> None:
    code = "".join(path.read_text() for path in (BASE / "envserver").rglob("*.py"))
    events = set(re.findall(r'logger\.\w+\(\s*"(\w+)', code))

    assert len(events) > 10
    assert [event for event in sorted(events) if f"`{event}`" not in README] == []


def test_the_version_equals_the_packages() -> None:
    assert f'\nversion = "{VERSION}"\n' in (BASE / "pyproject.toml").read_text()


@pytest.mark.sandbox
async def test_the_environment_with_a_sandbox_runs_a_command(tmp_path: Path) -> None:
    need_other_users()
    (tmp_path / "server.py").write_text(example("python", of=(BASE / "SANDBOX.md").read_text()) + "\n\nserve(Shell)\n")
    (tmp_path / "train.jsonl").write_text('{"text": "Say hello."}\n')
    with tempfile.TemporaryDirectory(prefix="env-gateway-readme-") as work:
        Path(work).chmod(0o755)  # noqa: ASYNC240  # setup of a test
        settings = {"TASKS": ".", "SOCKET": "s.sock", "SANDBOX_HOST": "1", "SANDBOX_BOX": str(made_box().path)}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "server.py",
            cwd=tmp_path,
            env={
                "PATH": os.environ["PATH"],
                **{f"ENVSERVER_{name}": value for name, value in {**settings, "SANDBOX_WORK": work}.items()},
            },
            stderr=PIPE,
        )
        assert process.stderr is not None
        async with asyncio.timeout(HANG_S):
            while b"server_ready" not in (line := await process.stderr.readline()):
                assert line, "the server ended"
        wire = await Wire.open(str(tmp_path / "s.sock"))

        await wire.ask("POST", "/create", sid="s1", body={"split": "train", "index": 0})
        answer = await wire.ask("POST", "/call", sid="s1", body={"text": "echo hello from $(id -un)"})
        await wire.close()
        process.terminate()
        await process.communicate()

    assert answer.result["output"]["blocks"][0]["text"] == "hello from root\n"
