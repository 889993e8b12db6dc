"""Gateways with curricula, and a few arithmetic tasks whose prompts show which task was drawn."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.deadlines import HANG_S
from tests.fakes.eventually import eventually
from tests.wire.catalog import PROJECT, serving
from tests.wire.gateways import OPERATOR_KEY, Gateway

SPLIT = "train:mine"
SIMPLE = ("chain_sum", "products", "basic_arithmetic", "gcd")
"""Families of tasks whose answers are a single number."""
NUMBER = 12
IN_TURN = 'environment = "math"\ngroup_size = 4\nsampler = {kind = "sequential"}\n'
"""A curriculum that draws the tasks in order, so that a test knows which task a group must get."""


def _simple_tasks() -> list[dict[str, Any]]:
    lines = (PROJECT / "tasks" / "math" / "train.jsonl").read_text("utf-8").splitlines()
    some = [json.loads(line) for line in lines]
    return [task for task in some if task["tags"][0] in SIMPLE][:NUMBER]


TASKS = _simple_tasks()


def asked(prompt: str) -> int:
    """Return the number of the task in `TASKS` that a prompt asks."""
    (number,) = [number for number, task in enumerate(TASKS) if task["instruction"] in prompt]
    return number


def answer_of(number: int) -> str:
    """Return the right answer to a task of `TASKS`."""
    return str(TASKS[number]["evaluation"]["entry"]["answer"])


def write_catalog(
    folder: Path, environments: Mapping[str, Mapping[str, Sequence[Any]]], sections: Mapping[str, str]
) -> Path:
    """Write files for the project's *environments*, each with its splits of tasks, and return the catalog's folder.

    Args:
        sections: Further lines for an environment's file, by environment.
    """
    images = folder / "environments"
    for name, splits in environments.items():
        tasks = folder / "tasks" / name
        tasks.mkdir(parents=True)
        for split, some in splits.items():
            (tasks / f"{split}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in some), "utf-8")
        (images / name).mkdir(parents=True)  # a local worker runs in this folder; a container has its own
        for path in (PROJECT / "env_images" / name).iterdir():
            if path.name != "environment.toml":
                (images / name / path.name).symlink_to(path)
        configured = (PROJECT / "env_images" / name / "environment.toml").read_text("utf-8")
        line = f'\ndirectory = "tasks/{name}"\n'
        assert configured.count(line) == 1, name
        configured = configured.replace(line, f'\ndirectory = "{tasks}"\n') + sections.get(name, "")
        (images / name / "environment.toml").write_text(configured, "utf-8")
    return images


@contextlib.contextmanager
def curricula_gateway(
    kind: str,
    *,
    files: Mapping[str, str] | None = None,
    sections: Mapping[str, str] | None = None,
    environments: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
) -> Iterator[Gateway]:
    """Run a gateway of *kind* (see `tests.wire.catalog.serving`) whose math environment has `TASKS`.

    Args:
        files: The curricula in the gateway's folder, by name.
        sections: Further lines for an environment's file, by environment.
        environments: Other environments, with their splits of tasks.
    """
    offered = environments if environments is not None else {"math": {"train": TASKS}}
    with tempfile.TemporaryDirectory(prefix="curricula-") as name:
        folder = Path(name)
        catalog = write_catalog(folder, offered, sections or {})
        curricula = folder / "curricula"
        curricula.mkdir()
        for curriculum, text in (files or {}).items():
            (curricula / f"{curriculum}.toml").write_text(text, "utf-8")
        with serving(kind, *offered, GATEWAY_CATALOG_DIR=str(catalog), GATEWAY_CURRICULA_DIR=str(curricula)) as gateway:
            yield gateway


class Operator:
    """An operator's view of curricula, and the operator's requests."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def define(self, name: str, **document: Any) -> None:
        """Define a curriculum over the API."""
        await self._ask("PUT", f"curriculum/{name}", json=document)

    async def state(self, name: str, **query: str) -> dict[str, Any]:
        """Return the state of a curriculum."""
        state: dict[str, Any] = (await self._ask("GET", f"curriculum/{name}", params=query)).json()
        return state

    async def sample(self, name: str, **wish: Any) -> list[dict[str, Any]]:
        """Draw tasks from a curriculum for this caller only."""
        draws: list[dict[str, Any]] = (await self._ask("POST", f"curriculum/{name}/sample", json=wish)).json()["draws"]
        return draws

    async def reset(self, name: str) -> None:
        """Reset a curriculum to its beginning."""
        await self._ask("POST", f"curriculum/{name}/reset")

    async def feedback(self, name: str, outcomes: Sequence[Mapping[str, Any]]) -> None:
        """Report outcomes of tasks."""
        await self._ask("POST", f"curriculum/{name}/feedback", json={"outcomes": list(outcomes)})

    async def records(self, environment: str = "math") -> dict[str, dict[str, Any]]:
        """Return the records of an environment's tasks, by id."""
        lines = (await self._ask("GET", "records", params={"environment": environment})).text.splitlines()
        return {record["task"]: record for record in map(json.loads, lines)}

    async def eventually_records(self, attempts: int, environment: str = "math") -> dict[str, dict[str, Any]]:
        """Return the records once they hold *attempts*: the gateway records the end of a session after its answer."""

        async def check() -> dict[str, dict[str, Any]]:
            records = await self.records(environment)
            assert sum(record["attempts"] for record in records.values()) == attempts, records
            return records

        return await eventually(check)

    async def _ask(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {OPERATOR_KEY}"}
        async with httpx.AsyncClient(
            base_url=self._gateway.url, headers=headers, verify=False, trust_env=False, timeout=HANG_S
        ) as http:
            answer = await http.request(method, f"/admin/v1/{path}", **more)
        assert answer.is_success, (answer.status_code, answer.text)
        return answer
