"""A catalog folder from its author's view: the README's first environment, and changes while a gateway serves it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.app import Gateway
from gateway.backends import process
from gateway.content import load_content
from gateway.settings import Settings
from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually, until

README = (Path(__file__).parents[2] / "env_images" / "base" / "README.md").read_text()
OWN_TASKS = '''
from envserver import Environment, Prompt, Split, StepResult, Task, serve, tool


class Reversed(Environment):
    """Has its tasks by itself."""

    name = "reversestring"
    default_tool = "submit"

    @classmethod
    def splits(cls):
        return [Split.of("train"), Split.of("hidden")]

    @classmethod
    def num_tasks(cls, split):
        return 3 if split == "train" else 1

    @classmethod
    def get_task(cls, split, index):
        return {"id": f"{split}-{index}", "text": "ab" * (index + 1)}

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        return task["text"]

    @tool
    async def submit(self, answer: str) -> StepResult:
        """Submit the reversed text."""
        return StepResult("done", reward=float(answer == self.task["text"][::-1]), finished=True)

    @tool
    async def letter(self, position: int) -> StepResult:
        """Show one letter."""
        return StepResult(self.task["text"][position])


serve(Reversed)
'''

SHOWS_A_WORD = """
from envserver import Environment, Prompt, StepResult, Task, serve, tool


class Shown(Environment):
    name = "reversestring"

    async def reset(self, task: Task, *, seed: int) -> Prompt:
        return "?"

    @tool
    async def submit(self, answer: str) -> StepResult:
        return StepResult(self.task["config"]["word"], reward=1.0, finished=True)


serve(Shown)
"""
OF_MODULES = """
name = "reversestring"

[tasks]
directory = "env_images/reversestring/tasks"
folder = "mine"
module = "custom_tasks.one,custom_tasks.two,custom_tasks.broken"
"""
"""An environment file with several modules, in a folder that is not named like the environment."""
REGISTERS = """
from openenv.core.tasks import registry
from . import others

others.leave_a_trace(__name__)
registry.register("custom/NAME", "reversestring", {"word": "NAME " + others.WORD})
"""


def example(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


@dataclass
class World:
    """A gateway in this process, with local processes as workers, and a trainer."""

    root: Path
    gateway: Gateway
    http: httpx.AsyncClient

    @property
    def folder(self) -> Path:
        return self.root / "env_images" / "reversestring"

    async def post(self, path: str, body: object = None, *, sid: str = "s") -> Any:
        answer = await self.http.post(path, json=body, headers={"X-Session-ID": sid, "Accept": "application/json"})
        assert answer.is_success, answer.text
        return answer.json()

    async def get(self, path: str) -> Any:
        answer = await self.http.get(path)
        assert answer.is_success, answer.text
        return answer.json()

    async def opened(self, sid: str, **task: Any) -> None:
        await self.post("/create", {"env_name": "reversestring", **task}, sid=sid)

    async def submitted(self, sid: str, answer: str) -> Any:
        """Submit *answer*, and return the worker's text and the reward."""
        call = {"name": "submit", "input": {"answer": answer}}
        output = (await self.post("/reversestring/call", call, sid=sid))["output"]
        return output["blocks"][0]["text"], output["reward"]

    async def looked_at_files(self) -> None:
        for _ in range(2):  # the first scan skips a file that may still be written
            await self.gateway.task_files.look()


@pytest.fixture
def root() -> Iterator[Path]:
    """Make a folder with a short name: the path of a Unix socket in it must fit into 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="gw-") as name:
        yield Path(name)


def put(root: Path, *, server: str = "", file: str = "") -> None:
    """Make the environment's folder as the README shows it, or with another *server* or *file*."""
    folder = root / "env_images" / "reversestring"
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks" / "train.jsonl").write_text(example("json"))
    (folder / "server.py").write_text(server or example("python"))
    (folder / "environment.toml").write_text(file or example("toml"))


@contextlib.asynccontextmanager
async def world(root: Path) -> AsyncIterator[World]:
    settings = Settings(
        socket_dir=root / "s",
        state_dir=root,
        catalog_dir=root / "env_images",
        custom_tasks_dir=root / "custom_tasks",
    ).checked()
    content = await load_content(settings)
    gateway = Gateway(settings, content)
    transport = httpx.ASGITransport(app=gateway.app)
    async with (
        gateway.running(),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=HANG_S) as http,
    ):
        yield World(root, gateway, http)


async def test_the_readmes_environment_is_played_and_gets_new_tasks_without_a_restart(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    put(root)
    file = root / "env_images" / "reversestring" / "tasks" / "train.jsonl"
    async with world(root) as here:
        await here.opened("first", split="train", index=0)
        with file.open("a") as lines:
            lines.write('{"id": "new", "text": "abc"}\n')
        await here.looked_at_files()

        assert await here.post("/reversestring/num_tasks", {"split": "train"}) == {"num_tasks": 2}
        await here.opened("second", task_spec={"id": "new"})
        assert await here.submitted("first", "olleh") == ("right", 1.0)
        assert await here.submitted("second", "cba") == ("right", 1.0)

        with file.open("a") as lines:
            lines.write("no json\n")
        for _ in range(3):
            await here.looked_at_files()
        assert await here.post("/reversestring/num_tasks", {"split": "train"}) == {"num_tasks": 2}
        (file.parent / "dev.jsonl").write_text('{"text": "x"}\n')
        shutil.copyfile(file, root / "copy")
        file.write_text("".join((root / "copy").read_text().splitlines(keepends=True)[:1]))
        await here.looked_at_files()
        assert [one["name"] for one in await here.get("/reversestring/splits")] == ["train", "dev"]
        assert await here.post("/reversestring/num_tasks", {"split": "train"}) == {"num_tasks": 1}

    told = [record.message for record in caplog.records if record.message.startswith("task_files_")]
    assert [line.split(" ")[0] for line in told] == ["task_files_changed", "task_files_refused", "task_files_changed"]
    assert told[0] == "task_files_changed environment=reversestring tasks=train:1→2"
    assert f"{file}:3: not JSON" in told[1]
    assert set(told[2].rpartition("=")[2].split(",")) == {"train:2→1", "dev:0→1"}


async def test_a_class_with_tasks_of_its_own_offers_them_in_every_protocol(root: Path) -> None:
    put(root, server=OWN_TASKS, file='name = "reversestring"\n')
    async with world(root) as here:
        splits = await here.get("/reversestring/splits")
        count = await here.post("/reversestring/num_tasks", {"split": "train"})
        task = await here.post("/reversestring/task", {"split": "hidden", "index": -1})
        some = await here.post("/reversestring/task_range", {"split": "train", "start": 1})
        info = await here.get("/areal/reversestring/api/task/info")
        openenv = await here.get("/openenv/reversestring/reversestring/splits")
        unknown = await here.http.post("/reversestring/num_tasks", json={"split": "test"})
        await here.opened("s", split="train", index=1)
        played = await here.submitted("s", "baba")
        begun = await here.post("/areal/reversestring/api/episode/start", {"sample_id": 2})
        schema = (await here.get("/openenv/reversestring/schema"))["action"]
        reset = await here.post("/openenv/reversestring/reset", {"split": "hidden", "index": 0})

    assert [one["name"] for one in splits] == [one["name"] for one in openenv] == ["train", "hidden"]
    assert (count["num_tasks"], info["num_samples"]) == (3, 3)
    assert task["task"] == {"id": "hidden-0", "text": "ab"}
    assert [one["id"] for one in some["tasks"]] == ["train-1", "train-2"]
    assert unknown.json() == {"detail": "Invalid split: there is no 'test'; there are train, hidden"}
    assert played == ("done", 1.0)
    assert begun["observation"]["content"] == "ababab"
    assert reset["observation"]["text"] == "ab"
    assert list(schema["properties"]) == ["answer"]
    assert [option["title"] for option in schema["anyOf"] if "title" in option] == [
        "Call letter",
        "Call submit",
        "List tools",
    ]
    assert [list(option["properties"]) for option in schema["anyOf"] if "title" not in option] == [["answer"]]


async def test_tasks_are_added_to_an_environment_that_appeared_while_the_gateway_ran(root: Path) -> None:
    put(root)
    async with world(root) as here:
        new = here.folder.with_name("later")
        shutil.copytree(here.folder, new)
        (new / "environment.toml").write_text('name = "later"\nupstream_name = "reversestring"\n')
        await here.gateway.reload.look()

        added = await here.post("/admin/v1/tasks", {"id": "custom/x", "env_type": "later", "instruction": "?"})
        await here.post("/create", {"env_name": "later", "split": "custom", "index": 0}, sid="s")

    assert [(one["environment"], one["index"]) for one in added["tasks"]] == [("later", 0)]


async def test_edited_code_is_logged_once_and_a_restart_lets_open_sessions_end_on_the_old_code(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "EDITS_S", 0.02)
    put(root)
    async with world(root) as here:
        await here.opened("old", split="train", index=0)
        (here.folder / "server.py").write_text(example("python").replace('"right"', '"quite right"'))

        def lines() -> list[str]:
            return [one.message for one in caplog.records if one.message.startswith("environment_code_changed")]

        await until(lines)
        await here.opened("before", split="train", index=0)
        restarted = await here.post("/admin/v1/environments/reversestring/restart")
        await here.opened("new", split="train", index=0)
        said = [(await here.submitted(sid, "olleh"))[0] for sid in ("old", "before", "new")]
        unknown = await here.http.post("/admin/v1/environments/nope/restart")
        await asyncio.sleep(0)

        assert said == ["right", "right", "quite right"]
        assert len(restarted["draining"]) == 1
        assert "files=server.py" in lines()[0]
        assert "gateway restart reversestring" in lines()[0]
        assert len(lines()) == 1
        assert unknown.status_code == 404


async def test_a_restart_replaces_a_worker_that_is_starting_with_code_from_before_an_edit(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    begun = root / "begun"
    put(root, server=f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(3600)\n")
    async with world(root) as here:
        opening = asyncio.ensure_future(here.opened("s", split="train", index=0))
        await until(begun.exists)
        (here.folder / "server.py").write_text(example("python"))

        restarted = await here.post("/admin/v1/environments/reversestring/restart")
        await opening

        assert await here.submitted("s", "olleh") == ("right", 1.0)
        assert len(restarted["draining"]) == 1
    assert "worker_start_failed" not in caplog.text


async def test_modules_of_a_folder_are_imported_by_workers_and_never_by_the_gateway(root: Path) -> None:
    """Workers import the modules that the environment's file names. An edit of a module that these import counts."""
    put(root, server=SHOWS_A_WORD, file=OF_MODULES)
    folder, traces = root / "custom_tasks" / "mine", root / "traces"
    folder.mkdir(parents=True)
    traces.mkdir()

    def write(name: str, text: str) -> None:
        file = folder / f"{name}.py"
        file.write_text(text)
        file.chmod(0o644)

    def others(word: str) -> str:
        trace = f"open(f'{traces}/{{os.getpid()}} {{name}}', 'w').close()"
        return f"import os\nWORD = {word!r}\ndef leave_a_trace(name):\n    {trace}\n"

    write("others", others("first"))
    for name in ("one", "two"):
        write(name, REGISTERS.replace("NAME", name))
    write("broken", "from . import others\nothers.leave_a_trace(__name__)\nraise SystemExit('broken')\n")
    for entry in (folder, folder.parent):
        entry.chmod(0o755)

    async with world(root) as here:
        catalog = here.gateway.catalog
        before = catalog.default.digest
        for name in ("one", "two"):
            await here.opened(name, task_spec={"id": f"custom/{name}"})
        write("others", others("second"))
        await here.gateway.custom_tasks.look()
        after = catalog.default.digest
        sids = (f"again-{number}" for number in itertools.count())

        async def of_a_new_worker() -> None:
            await here.opened(sid := next(sids), task_spec={"id": "custom/one"})
            assert await here.submitted(sid, "x") == ("one second", 1.0)

        await eventually(of_a_new_worker)
        words = [(await here.submitted(sid, "x"))[0] for sid in ("one", "two")]

    assert words == ["one first", "two first"]
    assert before != after
    found = [path.name.split() for path in traces.iterdir()]
    assert {name for _, name in found} == {f"custom_tasks.{name}" for name in ("one", "two", "broken")}
    assert str(os.getpid()) not in {pid for pid, _ in found}
    assert {pid for pid, name in found if name.endswith("broken")} == {pid for pid, _ in found}
    assert [
        name for name in sys.modules if name in ("custom_tasks.one", "custom_tasks.two", "custom_tasks.others")
    ] == []
