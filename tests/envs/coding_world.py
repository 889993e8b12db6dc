"""Modules, tasks and sandboxes of both kinds that the coding environment's tests share."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.envs.plain_sandbox import PlainError, PlainSandboxes, need_bubblewrap
from tests.sandbox.conftest import made_box, work_folder

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "env_images" / "coding"
BASE = ROOT / "env_images" / "base"
TASKS = ROOT / "tasks" / "coding"

for folder in (HOME, BASE):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))

tasks: Any = importlib.import_module("coding_tasks")
judging: Any = importlib.import_module("coding_judge")
comparing: Any = importlib.import_module("coding_compare")
commands: Any = importlib.import_module("coding_commands")
workspace: Any = importlib.import_module("coding_workspace")
texts: Any = importlib.import_module("coding_texts")
faults: Any = importlib.import_module("coding_sandbox")

KINDS = ("plain", "library")


def read(split: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{split}.jsonl").read_text("utf-8").split("\n") if line]


@dataclass(frozen=True)
class World:
    """Sandboxes and the exception that they raise."""

    sandboxes: Any
    error: type[Exception]

    async def judge(self, task: dict[str, Any], source: str, *, public: bool = False, total_s: float = 300.0) -> Any:
        judge = judging.Judge(sandboxes=self.sandboxes, error=self.error, total_s=total_s)
        return await judge.judge(tasks.read_evaluation(task), source, public=public)

    async def submit_tree(self, task: dict[str, Any], *steps: str) -> Any:
        """Open the task's workspace, run the shell *steps* in it as an agent, and judge the resulting tree."""
        start = workspace.read_start(task.get("config"))
        layer = await self.sandboxes.layer(start.key, start.build())
        sandbox = await self.sandboxes.open(layer)
        try:
            for step in steps:
                done = await sandbox.run(["bash", "-c", step], cwd=workspace.WORKSPACE, env=faults.ENVIRONMENT)
                assert done.status == 0, done.stderr
            tree = await workspace.collect(sandbox)
        finally:
            await sandbox.close()
        judge = commands.CommandJudge(sandboxes=self.sandboxes, error=self.error)
        return await judge.judge(tasks.read_evaluation(task), tree, layer=layer)


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[World]:
    """Yield sandboxes of *kind*; the stand-in's sandboxes are below *folder*."""
    need_bubblewrap()
    if kind == "plain":
        plain = PlainSandboxes(folder)
        yield World(plain, PlainError)
        assert plain.open_now == 0
        return
    library: Any = importlib.import_module("envserver.sandbox")
    with work_folder() as work:
        async with library.Sandboxes(box=made_box(), work=work, limits=library.Limits()) as sandboxes:
            yield World(sandboxes, library.SandboxError)
