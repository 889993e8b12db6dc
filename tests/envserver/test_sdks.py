"""Both official clients, unmodified, use a server of a custom environment."""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.deadlines import HANG_S
from tests.wire.sdks import SDKS, Client, Sdk, names, text

SERVER = '''
import asyncio
from envserver import Environment, ImageBlock, Prompt, Split, StepResult, Task, TextBlock, serve, tool

class MathEnv(Environment):
    @classmethod
    def splits(cls):
        return ["train", Split("hard", "test")]

    @classmethod
    def tasks(cls, split):
        return [{"question": f"{split}{i}"} for i in range(3)]

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        return [TextBlock(task["question"]), ImageBlock("AAAA", "image/png")]

    def task_tools(self, task: Task):
        return [self.hint]

    @tool
    async def answer(self, value: float) -> StepResult:
        """Answer."""
        return StepResult("noted", reward=value, finished=True, metadata={"k": [1]})

    @tool
    def text(self, size: int, character: str = " ") -> StepResult:
        return StepResult(character * size, reward=0.0)

    @tool
    async def fail(self) -> StepResult:
        raise RuntimeError("first line\\nsecond line")

    @tool
    async def secret(self, name: str) -> StepResult:
        return StepResult(self.secrets.get(name, "none"))

    def hint(self) -> StepResult:
        """Hint."""
        return StepResult("look")

class Other(Environment):
    def reset(self, task: Task, *, seed: int) -> str:
        return "other"

    @tool
    def wave(self) -> StepResult:
        return StepResult("waved")

serve(MathEnv, Other)
'''


@pytest.fixture
async def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setenv("OPENREWARD_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("ORS_API_KEY", "OPENREWARD_API_KEY", "OPENREWARD_SESSION_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "server.py").write_text(SERVER)
    env = {"PATH": os.environ["PATH"], "ENVSERVER_HOST": "127.0.0.1", "ENVSERVER_PORT": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "server.py", cwd=tmp_path, env=env, stdin=PIPE, stderr=PIPE
    )
    assert process.stderr is not None
    async with asyncio.timeout(HANG_S):
        while b"server_ready" not in (line := await process.stderr.readline()):
            assert line, "the server ended"
    yield "http://" + line.split(b"address=")[1].split()[0].decode()
    process.terminate()
    await process.communicate()


@pytest.fixture(params=list(SDKS))
async def client(request: pytest.FixtureRequest, url: str) -> AsyncIterator[tuple[Sdk, Client]]:
    sdk = SDKS[request.param]
    async with sdk.connect(url, None) as connected:
        yield sdk, connected


async def test_splits_tasks_and_tools_are_discovered(client: tuple[Sdk, Client]) -> None:
    environment = client[1].environment("mathenv")

    tasks = await environment.list_tasks("train")

    assert await environment.list_splits() == ["train", "hard"]
    assert await environment.num_tasks("hard") == 3
    assert [task.task_spec["question"] for task in tasks] == ["train0", "train1", "train2"]
    assert (await environment.get_task("train", -1)).task_spec == {"question": "train2"}
    assert len(await environment.get_task_range("train", -2, 99)) == 2
    assert names(await environment.list_tools()) == ["answer", "fail", "secret", "text"]
    assert len(await environment.list_tools(format="openai")) == 4


async def test_an_episode_by_task_and_by_index(client: tuple[Sdk, Client]) -> None:
    environment = client[1].environment("mathenv")
    (task, *_) = await environment.list_tasks("train")

    async with environment.session(task) as by_task, environment.session(split="train", index=0) as by_index:
        prompts = [await by_task.get_prompt(), await by_index.get_prompt()]
        tools = names(await by_task.list_tools())
        hinted = await by_task.call_tool("hint")
        scored = await by_task.call_tool("text", {"size": 1, "character": "x"})
        output = await by_task.call_tool("answer", {"value": 0.5})

    assert prompts[0] == prompts[1]
    assert [block.type for block in prompts[0]] == ["text", "image"]
    assert tools[-1] == "hint"
    assert (text(hinted), hinted.reward) == ("look", None)
    assert scored.reward == 0.0
    assert (output.reward, output.finished, output.metadata) == (0.5, True, {"k": [1]})


@pytest.mark.parametrize(("character", "size"), [(" ", 20_000), ("é", 4_097), ("😀", 100_000), ("\u2003", 9_000)])
async def test_results_arrive_whole(client: tuple[Sdk, Client], character: str, size: int) -> None:
    sdk, connected = client

    async with connected.environment("mathenv").session(sdk.task("mathenv", {"question": "q"})) as session:
        output = await session.call_tool("text", {"size": size, "character": character})

    assert text(output) == character * size


async def test_clients_distinguish_refusals_from_failures(client: tuple[Sdk, Client]) -> None:
    sdk, connected = client
    environment = connected.environment("mathenv")
    task = sdk.task("mathenv", {"question": "q"})

    async with environment.session(task) as session:
        with pytest.raises(sdk.refused, match="'nothing' is not a valid tool"):
            await session.call_tool("nothing", {})
        with pytest.raises(sdk.refused, match="Tool input validation error"):
            await session.call_tool("answer", {})
        with pytest.raises(sdk.failed, match="first line\nsecond line"):
            await session.call_tool("fail", {})


async def test_a_second_environment_and_secrets(client: tuple[Sdk, Client]) -> None:
    sdk, connected = client

    async with connected.environment("other").session(sdk.task("other", {})) as session:
        assert text(await session.call_tool("wave")) == "waved"
    secrets = sdk.secrets({"MY_KEY": "hidden"})
    async with connected.environment("mathenv").session(sdk.task("mathenv", {"question": "q"}), secrets) as session:
        assert text(await session.call_tool("secret", {"name": "MY_KEY"})) == "hidden"
