"""Tasks by id, task modules and the list of registered tasks, over the wire."""

import json
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from envserver import Environment, StepResult, Task, tool
from envserver.generic import REWARDS, registry
from envserver.tasks.registered import TaskModules

from tests.deadlines import HANG_S
from tests.envserver.conftest import Start
from tests.envserver.eventually import eventually
from tests.envserver.worlds import CounterEnv, MathEnv


class Reader(Environment):
    """Shows its task."""

    name = "reader"
    env_types = ("readerlike",)
    config_keys = ("level",)

    async def reset(self, task: Task, *, seed: int) -> str:
        return json.dumps(task.spec, sort_keys=True)

    @tool
    async def act(self) -> StepResult:
        return StepResult()


class Lister(Reader):
    """Has tasks of its own in code."""

    name = "lister"

    @classmethod
    def tasks(cls, split: str) -> Sequence[Mapping[str, Any]]:
        return [{"id": "mine", "n": 1}]


LOGIN = """
from openenv.core.tasks import registry

registry.register("custom/login-test", "readerlike", {"start_url": "http://localhost:8000/login", "goal": "log in"})
registry.register("custom/other", "chat", {"goal": "talk"})
"""
ASKED = {"task_spec": {"id": "custom/login-test"}}
PACKAGES = ("custom_tasks", "openenv")
"""The packages that the modules of these tests import or belong to."""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder that is mounted at /opt/openenv; restore the registry, import path and modules at the end.

    The browser's environment has a package of the same name, which its tests may have imported in this process. The
    fixture hides that package and its folder during the test.
    """
    tasks, rewards, path = registry.snapshot(), dict(REWARDS), list(sys.path)
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES}
    for name in modules:
        del sys.modules[name]
    sys.path[:] = [entry for entry in path if not (Path(entry) / "custom_tasks").exists()]
    (tmp_path / "custom_tasks").mkdir()
    yield tmp_path
    registry.restore(tasks)
    REWARDS.clear()
    REWARDS.update(rewards)
    for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.modules.update(modules)
    sys.path[:] = path


def write(folder: Path, name: str, text: str) -> None:
    (folder / "custom_tasks" / f"{name}.py").write_text(text)


async def test_a_task_of_a_named_module_is_played_by_its_id(start: Start, folder: Path) -> None:
    write(folder, "login", LOGIN)
    server = await start(Reader, task_modules=("custom_tasks.login",), custom_tasks_dir=str(folder))

    created = await server.ask("POST", "/create", sid="s1", body=ASKED)
    prompt = await server.ask("GET", "/prompt", sid="s1")
    row = await server.row("s1")

    assert created.status == 200
    assert json.loads(prompt.json[0]["text"]) == {
        "id": "custom/login-test",
        "env_type": "readerlike",
        "instruction": "log in",
        "config": {"start_url": "http://localhost:8000/login"},
        "evaluation": {},
    }
    assert row is not None
    assert row["task_id"] == "custom/login-test"


async def test_the_registered_tasks_of_an_environment_are_listed(start: Start, folder: Path) -> None:
    write(folder, "login", LOGIN)
    server = await start(Reader, MathEnv, task_modules=("custom_tasks.login",), custom_tasks_dir=str(folder))
    config = {"size": 4, "page": "p" * 101, "parts": []}
    whole = {
        "name": "Third",
        "description": "d" * 600,
        "version": 3,
        "tags": ["x"],
        "instruction": "!",
        "config": config,
    }
    registry.register("custom/third", "reader", whole)

    listed = (await server.ask("GET", "/reader/registered")).json
    others = (await server.ask("GET", "/mathenv/registered")).json

    login, third = listed["tasks"]
    empty = {"name": "", "description": "", "tags": [], "version": ""}
    assert login == {
        "id": "custom/login-test",
        "env_type": "readerlike",
        **empty,
        "config": {"start_url": "http://localhost:8000/login"},
    }
    assert third == {
        "id": "custom/third",
        "env_type": "reader",
        "name": "Third",
        "description": "d" * 500,
        "tags": ["x"],
        "version": "3",
        "config": {"size": 4},
    }
    assert listed["modules"] == others["modules"] == [{"module": "custom_tasks.login", "error": None}]
    assert others["tasks"] == []


async def test_the_list_needs_the_workers_token(start: Start) -> None:
    server = await start(Reader, unix=True)
    token = {"X-Worker-Token": "ab" * 32}

    claimed = await server.ask("GET", "/registered", headers=token)
    without = await server.ask("GET", "/registered")

    assert (claimed.status, claimed.json) == (
        200,
        {"tasks": [], "modules": [], "config_keys": ["level"], "default_tool": "act"},
    )
    assert without.status == 401


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"id": "custom/none"}, "Unknown task: custom/none"),
        ({"id": "custom/none", "env_type": "reader"}, "Unknown task: custom/none"),
        ({"id": "custom/other"}, "the task custom/other is for the environment 'chat', not for 'reader'"),
        (
            {"id": "custom/login-test", "env_type": "chat"},
            "the task custom/login-test is for the environment 'chat', not for 'reader'",
        ),
        ({"id": "x" * 1_000}, "Unknown task: " + "x" * 200),
        ({"id": "\ud800"}, "Unknown task: \ud800"),
    ],
)
async def test_an_id_that_cannot_be_played_is_refused_and_holds_no_slot(
    start: Start, folder: Path, spec: dict[str, Any], said: str
) -> None:
    write(folder, "login", LOGIN)
    settings = {"task_modules": ("custom_tasks.login",), "custom_tasks_dir": str(folder), "slots": 1}
    (folder / "train.jsonl").write_text('{"id": "a"}\n')
    server = await start(Reader, tasks=str(folder), **settings)

    refused = await server.ask("POST", "/create", sid="s1", body={"task_spec": spec})
    created = await server.ask("POST", "/create", sid="s2", body=ASKED)

    assert (refused.status, refused.json) == (400, {"detail": said})
    assert created.status == 200


async def test_a_whole_task_may_consist_of_an_id(start: Start, folder: Path) -> None:
    (folder / "train.jsonl").write_text('{"id": "a", "n": 1}\n')
    server = await start(Reader, tasks=str(folder))

    for sid, id in (("s1", "custom/none"), ("s2", "a")):
        created = await server.ask(
            "POST", "/create", sid=sid, body={"task_spec": {"id": id}}, headers={"X-Task-Is-Whole": "1"}
        )
        assert created.status == 200, created.json
    sessions = (await server.ask("GET", "/sessions")).json["sessions"]
    assert sorted(one["task_id"] for one in sessions) == ["a", "custom/none"]


async def test_an_environments_own_task_is_found_by_its_id_before_a_registered_task(start: Start, folder: Path) -> None:
    (folder / "test.jsonl").write_text('{"id": "a/1", "n": 1}\n\n{"other": "elsewhere", "id": "\\u00e9", "n": 2}\n')
    registry.register("a/1", "reader", {"n": 3})
    registry.register("mine", "lister", {"n": 4})
    server = await start(Reader, Lister, tasks=str(folder))
    shown = {}

    for sid, env_name, task_id in (("s1", "reader", "a/1"), ("s2", "reader", "é"), ("s3", "lister", "mine")):
        await server.open(sid, {"id": task_id}, env_name=env_name)
        shown[sid] = json.loads((await server.ask("GET", "/prompt", sid=sid)).json[0]["text"])["n"]
    not_an_id = await server.ask("POST", "/create", sid="s4", body={"task_spec": {"id": "elsewhere"}})

    assert shown == {"s1": 1, "s2": 2, "s3": 1}
    assert (not_an_id.status, not_an_id.json) == (400, {"detail": "Unknown task: elsewhere"})


async def test_a_task_with_more_than_an_id_is_used_unchanged(start: Start, folder: Path) -> None:
    registry.register("known", "reader", {"n": 1})
    server = await start(Reader)

    for sid, spec in (("s1", {"id": "known", "n": 2}), ("s2", {"id": 7}), ("s3", {})):
        await server.open(sid, spec)
        assert json.loads((await server.ask("GET", "/prompt", sid=sid)).json[0]["text"]) == spec


async def test_a_class_that_resolves_ids_itself_gets_unknown_ids(start: Start) -> None:
    server = await start(MathEnv, CounterEnv)

    await server.open("s1", {"id": "anything"})
    created = await server.ask("POST", "/create", sid="s2", body={"task_spec": {"id": "9"}, "env_name": "counterenv"})

    assert (await server.row("s1") or {})["task_id"] == "anything"
    assert created.status == 200  # its tasks are known by index only, so the server cannot know that the id is wrong


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero (broken.py, line 1)"),
        ("def f(:\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package' (broken.py, line 1)"),
        ("\nraise SystemExit(3)", "SystemExit: 3 (broken.py, line 2)"),
        (
            LOGIN.replace("custom/", "custom/broken-") + "registry.register('../x', 'reader', {})",
            "TaskError: id: must be a text of at most 200 letters, digits and ._/~- that begins with a letter or "
            "digit, "
            "not '../x' (broken.py, line 6)",
        ),
    ],
)
async def test_a_module_that_cannot_be_imported_is_reported_and_the_other_tasks_are_served(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture, text: str, error: str
) -> None:
    write(folder, "broken", text)
    write(folder, "login", LOGIN)
    names = ("custom_tasks.broken", "custom_tasks.login")
    server = await start(Reader, task_modules=names, custom_tasks_dir=str(folder))

    played = await server.ask("POST", "/create", sid="s1", body=ASKED)
    unknown = await server.ask("POST", "/create", sid="s2", body={"task_spec": {"id": "custom/broken-login-test"}})
    modules = (await server.ask("GET", "/registered")).json["modules"]

    assert played.status == 200
    assert unknown.status == 400
    assert unknown.json["detail"].startswith(f"Unknown task: custom/broken-login-test (task module {names[0]} failed: ")
    assert modules[0]["module"] == names[0]
    assert modules[0]["error"].startswith(error)
    assert modules[1] == {"module": names[1], "error": None}
    assert [record.message for record in caplog.records if "task_module_failed" in record.message] == [
        f"task_module_failed module={names[0]} error={modules[0]['error']}"
    ]


@pytest.mark.parametrize("name", ["custom_tasks.none", "../login", "custom_tasks.", "a b", "-c"])
async def test_an_invalid_module_name_is_reported(folder: Path, name: str) -> None:
    modules = TaskModules([name], folder=str(folder))

    await modules.load()

    assert [row["module"] for row in modules.rows()] == [name]
    assert modules.rows()[0]["error"] is not None
    assert name in modules.complaint()


async def test_only_named_modules_are_imported(folder: Path) -> None:
    write(folder, "named", "")
    write(folder, "other", "raise RuntimeError('nobody asked for it')")

    await TaskModules(["custom_tasks.named"], folder=str(folder)).load()

    assert "custom_tasks.named" in sys.modules
    assert "custom_tasks.other" not in sys.modules


async def test_without_modules_the_import_path_stays_unchanged(folder: Path) -> None:
    before = list(sys.path)

    await TaskModules([], folder=str(folder)).load()

    assert sys.path == before


async def test_a_folder_is_found_next_to_a_module_of_the_same_name(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = tmp_path_factory.mktemp("image")
    (image / "custom_tasks.py").write_text("KNOWN = 'of the image'\n")
    monkeypatch.syspath_prepend(image)
    write(folder, "mine", "from custom_tasks import KNOWN\n")
    modules = TaskModules(["custom_tasks.mine"], folder=str(folder))

    await modules.load()

    assert modules.rows() == [{"module": "custom_tasks.mine", "error": None}]
    assert sys.modules["custom_tasks.mine"].KNOWN == "of the image"


async def test_a_hanging_module_blocks_neither_the_start_nor_tasks_of_other_modules(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    door, inside = threading.Event(), threading.Event()
    monkeypatch.setattr(sys, "test_door", (door, inside), raising=False)
    write(folder, "hanging", "import sys\nsys.test_door[1].set()\nassert sys.test_door[0].wait(30)\n")
    write(folder, "login", LOGIN)
    modules = TaskModules(["custom_tasks.hanging", "custom_tasks.login"], folder=str(folder), import_s=0.2)

    await modules.load()
    told = modules.rows()
    assert inside.wait(HANG_S)
    door.set()

    async def is_loaded() -> bool:
        return [row["error"] for row in modules.rows()] == [None, None]

    await eventually(is_loaded)
    assert told == [
        {"module": "custom_tasks.hanging", "error": "it was not imported within 0.2 s"},
        {
            "module": "custom_tasks.login",
            "error": "it was not imported: the time was up with the modules before it",
        },
    ]
    assert "custom/login-test" in registry  # late, but registered
