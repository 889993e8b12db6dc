"""Selection of tasks by resets; the gateway queries an environment's workers for ids that it does not hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, OpenEnv, Split, TaskSpec
from gateway.core.errors import (
    EnvironmentUnavailable,
    GatewayError,
    PoolExhausted,
    UnknownTask,
    WrongEnvironment,
)
from gateway.core.ports.tasks import BeingReplaced
from gateway.core.worker import WorkerTasks
from gateway.frontends.openenv.episodes import config_of, refuse_unknown_keys, task_request
from gateway.frontends.openenv.frames import Code, FrameError, ResetRequest
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks import resolver
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.resolver import TaskResolver
from gateway.tasks.runtime import RuntimeTasks
from gateway.tasks.task_ref import TaskRef
from tests.service.stack import environment, lookup_of, tasks

MATH = environment()


class Workers:
    """Workers that return *answers* in turn and repeat the last answer."""

    def __init__(self, *answers: WorkerTasks | GatewayError) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []

    async def splits(self, environment: Environment) -> list[Split]:
        raise AssertionError("our own workers have no tasks")

    async def count(self, environment: Environment, split: str) -> int:
        raise AssertionError("our own workers have no tasks")

    async def tasks(self, environment: Environment, split: str, start: int, stop: int) -> list[TaskSpec]:
        raise AssertionError("our own workers have no tasks")

    async def registered(self, environment: Environment) -> WorkerTasks:
        self.asked.append(environment.timeouts.open_s)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, GatewayError):
            raise answer
        return answer


class Resets:
    """Finds the tasks of resets as the OpenEnv frontend does."""

    def __init__(self, workers: Workers, registry: TaskRegistry) -> None:
        self._workers = workers
        lookup = lookup_of(registry, workers)
        catalog = Catalog([MATH, environment("chess")])
        self._resolver = TaskResolver(lookup=lookup, queries=workers, catalog=catalog)

    async def task(self, environment: Environment, wish: ResetRequest) -> TaskRef:
        request = task_request(environment, wish)
        await refuse_unknown_keys(environment, wish, self._workers)
        return await self._resolver.resolve(environment, request)


def resets(workers: Workers, **splits: Any) -> Resets:
    return Resets(workers, TaskRegistry({MATH.name: splits}))


def known(*ids: str, failed: Mapping[str, str] | None = None) -> WorkerTasks:
    return WorkerTasks(tasks={id: {} for id in ids}, failed=failed or {})


async def test_an_id_that_only_workers_know_is_passed_to_them_unchanged() -> None:
    workers = Workers(known("custom/login"))

    chosen = await resets(workers).task(MATH, ResetRequest(task="custom/login"))

    assert chosen == TaskRef(spec={"id": "custom/login"})
    assert chosen.spec["id"] == "custom/login"


async def test_an_id_may_have_the_environments_name_as_prefix() -> None:
    chosen = await resets(Workers(known("login"))).task(MATH, ResetRequest(task="math/login"))

    assert chosen.spec == {"id": "login"}


async def test_workers_are_not_queried_for_ids_that_the_gateway_holds_or_that_name_another_environment() -> None:
    workers = Workers(known("a"))
    held = resets(workers, train=[b'{"id":"a"}'])

    chosen = await held.task(MATH, ResetRequest(task="a"))
    assert (chosen.spec["id"], chosen.split, chosen.index) == ("a", "train", 0)
    with pytest.raises(WrongEnvironment, match="'chess', not to 'math'"):
        await held.task(MATH, ResetRequest(task="chess/a"))
    assert not workers.asked


async def test_the_error_for_an_id_of_another_environment_names_that_environment() -> None:
    registry = TaskRegistry({MATH.name: {}, environment("chess").name: tasks(train=[{"id": "opening"}])})
    wrong = Resets(Workers(known()), registry)

    with pytest.raises(WrongEnvironment, match="'chess', not to 'math'"):
        await wrong.task(MATH, ResetRequest(task="opening"))


async def test_the_error_for_an_unknown_id_names_the_modules_that_failed_to_load() -> None:
    workers = Workers(known("a", failed={"custom_tasks.mine": "SyntaxError: line 3"}))

    with pytest.raises(UnknownTask) as refused:
        await resets(workers).task(MATH, ResetRequest(task="b"))

    assert refused.value.detail == "Unknown task: b (modules that did not load: custom_tasks.mine: SyntaxError: line 3)"


async def test_the_query_waits_for_workers_that_are_being_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "QUERY_PAUSE_S", 0.0)
    replaced = BeingReplaced("the workers of math are being replaced")
    workers = Workers(replaced, replaced, known("a"))

    assert (await resets(workers).task(MATH, ResetRequest(task="a"))).spec["id"] == "a"
    assert len(workers.asked) == 3


@pytest.mark.parametrize(
    "error",
    [
        PoolExhausted("no slot within 10 s", retry_after_s=7.0),
        EnvironmentUnavailable("no image", retry_after_s=7.0),
    ],
)
async def test_an_id_that_no_worker_could_be_queried_for_is_a_retryable_error(
    error: PoolExhausted | EnvironmentUnavailable,
) -> None:
    workers = Workers(error)

    with pytest.raises((PoolExhausted, EnvironmentUnavailable)) as refused:
        await resets(workers).task(MATH, ResetRequest(task="a"))

    assert type(refused.value) is type(error)
    assert refused.value.detail == f"task 'a' is in no file, and no worker could be asked for it: {error.detail}"
    assert (refused.value.retryable, refused.value.retry_after_s) == (True, 7.0)
    assert workers.asked == [MATH.timeouts.open_s], "a worker may take that long to start"


BROWSER = replace(MATH, openenv=OpenEnv(task_keys={"benchmark": "config.benchmark", "task_name": "config.task_name"}))


def page(benchmark: str, name: str) -> dict[str, Any]:
    return {"id": f"{benchmark}/{name}", "config": {"benchmark": benchmark, "task_name": name}}


PAGES = {
    "train": [page("custom", "login"), page("miniwob", "click-test"), page("miniwob", "login")],
    "test": [page("miniwob", "drag"), page("custom", "login"), page("custom", "login")],
}


@pytest.mark.parametrize(
    ("wish", "places"),
    [
        ({"benchmark": "miniwob", "task_name": "click-test"}, {"train/1"}),
        ({"task_name": "click-test"}, {"train/1"}),
        ({"task_name": "click-test", "benchmark": None}, {"train/1"}),
        ({"benchmark": "miniwob", "task_name": "drag", "seed": 7}, {"test/0"}),
        ({"task_name": "login", "seed": 3}, {"train/2"}),
        ({"task_name": "login", "split": "test", "seed": 3}, {"test/2"}),
        ({"task_name": "login", "split": "test"}, {"test/1", "test/2"}),
    ],
)
async def test_keys_of_a_reset_select_a_task_by_its_values(wish: dict[str, Any], places: set[str]) -> None:
    workers = Workers(known())
    asked = resets(workers, **tasks(**PAGES))

    chosen = [await asked.task(BROWSER, ResetRequest(**wish)) for _ in range(10)]

    assert {f"{one.split}/{one.index}" for one in chosen} <= places
    assert not workers.asked
    assert config_of(BROWSER, ResetRequest(**wish)) == {}


async def test_a_task_that_only_workers_know_is_selected_by_its_values_too() -> None:
    listed = WorkerTasks(tasks={"miniwob/book": page("miniwob", "book"), "custom/book": page("custom", "book")})
    asked = resets(Workers(listed), **tasks(**PAGES))

    chosen = await asked.task(BROWSER, ResetRequest.model_validate({"benchmark": "miniwob", "task_name": "book"}))

    assert chosen == TaskRef(spec={"id": "miniwob/book"})


async def test_tasks_that_are_registered_later_are_selected_too() -> None:
    registry = TaskRegistry({MATH.name: {}})
    asked = Resets(Workers(known()), registry)
    wish = ResetRequest.model_validate({"task_name": "click-test"})
    with pytest.raises(UnknownTask, match="no task of 'math' has task_name 'click-test'"):
        await asked.task(BROWSER, wish)

    run_time = RuntimeTasks(registry=registry, store=MemoryTaskStore(), catalog=Catalog([MATH]))
    await run_time.register(run_time.check([("task", page("miniwob", "click-test"))], environment="math"))

    assert (await asked.task(BROWSER, wish)).spec["id"] == "miniwob/click-test"


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        (
            {"colour": "red"},
            r"'math' has no 'colour'; it takes task, split, index, seed, episode_id, benchmark, task_name, level",
        ),
        ({"colour": "red", "level": 2, "shape": 1, "size": None}, r"has no 'colour', 'shape'; it takes"),
        ({"task_name": "login", "index": 0}, r"only one of index and task_name may be given"),
        ({"task_name": "login", "task": "custom/login"}, r"only one of task and task_name may be given"),
    ],
)
async def test_an_unused_key_or_a_second_selector_is_refused(wish: dict[str, Any], told: str) -> None:
    asked = resets(Workers(WorkerTasks(config_keys=("level",))), **tasks(**PAGES))

    with pytest.raises(FrameError, match=told) as refused:
        await asked.task(BROWSER, ResetRequest(**wish))

    assert refused.value.code is Code.VALIDATION_ERROR
    assert refused.value.entries[0]["loc"][0] == "data"


@pytest.mark.parametrize("keys", [("level",), None])
async def test_keys_are_passed_on_if_the_worker_declares_them_or_declares_no_keys(
    keys: tuple[str, ...] | None,
) -> None:
    asked = resets(Workers(WorkerTasks(config_keys=keys)), **tasks(**PAGES))
    wish = ResetRequest.model_validate({"index": 0, "level": 2})

    assert (await asked.task(BROWSER, wish)).spec["id"] == "custom/login"
    assert config_of(BROWSER, wish) == {"level": 2}


async def test_an_environment_without_its_usual_split_uses_its_first_split() -> None:
    chosen = await resets(Workers(known()), **tasks(test=[{"id": "only"}])).task(MATH, ResetRequest(seed=9))

    assert (chosen.split, chosen.index, chosen.spec["id"]) == ("test", 0, "only")
    with pytest.raises(UnknownTask):
        await resets(Workers(known()), test=[]).task(MATH, ResetRequest())
