"""Ids that the gateway does not hold: its environments' workers are asked for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from gateway.catalog.catalog import Catalog
from gateway.core.environment import Environment, OpenEnv, Split, TaskSpec
from gateway.core.errors import EnvironmentUnavailable, GatewayError, PoolExhausted, UnknownTask, WrongEnvironment
from gateway.core.worker import WorkerTasks
from gateway.frontends.openenv import tasks as openenv_tasks
from gateway.frontends.openenv.frames import Code, FrameError, ResetWish
from gateway.frontends.openenv.tasks import TaskChooser
from gateway.sessions.worker_queries import BeingReplaced
from gateway.stores.memory.tasks import MemoryTaskStore
from gateway.tasks.registry import TaskRegistry
from gateway.tasks.runtime import RuntimeTasks
from gateway.tasks.task_ref import TaskRef
from tests.service.stack import environment, lookup_of, tasks

MATH = environment()


class Workers:
    """What an environment's workers answer: the next of *answers*, the last one again and again."""

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


def chooser(workers: Workers, **splits: Any) -> TaskChooser:
    return chooser_of(workers, TaskRegistry({MATH.name: splits}))


def chooser_of(workers: Workers, registry: TaskRegistry) -> TaskChooser:
    lookup = lookup_of(registry, workers)
    return TaskChooser(lookup=lookup, queries=workers, catalog=Catalog([MATH, environment("chess")]))


def known(*ids: str, failed: Mapping[str, str] | None = None) -> WorkerTasks:
    return WorkerTasks(tasks={id: {} for id in ids}, failed=failed or {})


async def test_an_id_that_only_workers_know_goes_to_them_as_it_is() -> None:
    workers = Workers(known("custom/login"))

    chosen = await chooser(workers).choose(MATH, ResetWish(task="custom/login"))

    assert chosen == TaskRef(spec={"id": "custom/login"})
    assert chosen.label == "custom/login"


async def test_the_environments_name_may_stand_before_it() -> None:
    chosen = await chooser(Workers(known("login"))).choose(MATH, ResetWish(task="math/login"))

    assert chosen.spec == {"id": "login"}


async def test_workers_are_not_asked_for_what_the_gateway_holds_or_what_names_another_environment() -> None:
    workers = Workers(known("a"))
    held = chooser(workers, train=[b'{"id":"a"}'])

    chosen = await held.choose(MATH, ResetWish(task="a"))
    assert (chosen.label, chosen.split, chosen.index) == ("a", "train", 0)
    with pytest.raises(WrongEnvironment, match="'chess', not of 'math'"):
        await held.choose(MATH, ResetWish(task="chess/a"))
    assert not workers.asked


async def test_an_id_that_another_environment_has_names_that_one() -> None:
    registry = TaskRegistry({MATH.name: {}, environment("chess").name: tasks(train=[{"id": "opening"}])})
    wrong = chooser_of(Workers(known()), registry)

    with pytest.raises(WrongEnvironment, match="'chess', not of 'math'"):
        await wrong.choose(MATH, ResetWish(task="opening"))


async def test_an_unknown_id_names_the_modules_that_did_not_load() -> None:
    workers = Workers(known("a", failed={"custom_tasks.mine": "SyntaxError: line 3"}))

    with pytest.raises(UnknownTask) as refused:
        await chooser(workers).choose(MATH, ResetWish(task="b"))

    assert refused.value.detail == "Unknown task: b (modules that did not load: custom_tasks.mine: SyntaxError: line 3)"


async def test_workers_that_are_just_being_replaced_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openenv_tasks, "ASK_PAUSE_S", 0.0)
    replaced = BeingReplaced("the workers of math are just being replaced")
    workers = Workers(replaced, replaced, known("a"))

    assert (await chooser(workers).choose(MATH, ResetWish(task="a"))).id == "a"
    assert len(workers.asked) == 3


@pytest.mark.parametrize(
    "error",
    [
        PoolExhausted("no slot within 10 s", retry_after_s=7.0),
        EnvironmentUnavailable("no image", retry_after_s=7.0),
    ],
)
async def test_an_id_that_no_worker_could_be_asked_for_may_be_asked_for_again(
    error: PoolExhausted | EnvironmentUnavailable,
) -> None:
    workers = Workers(error)

    with pytest.raises((PoolExhausted, EnvironmentUnavailable)) as refused:
        await chooser(workers).choose(MATH, ResetWish(task="a"))

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
    asked = chooser(workers, **tasks(**PAGES))

    chosen = [await asked.choose(BROWSER, ResetWish(**wish)) for _ in range(10)]

    assert {f"{one.split}/{one.index}" for one in chosen} <= places
    assert not workers.asked
    assert asked.config(BROWSER, ResetWish(**wish)) == {}


async def test_a_task_that_only_workers_know_is_selected_by_its_values_too() -> None:
    listed = WorkerTasks(tasks={"miniwob/book": page("miniwob", "book"), "custom/book": page("custom", "book")})
    asked = chooser(Workers(listed), **tasks(**PAGES))

    chosen = await asked.choose(BROWSER, ResetWish.model_validate({"benchmark": "miniwob", "task_name": "book"}))

    assert chosen == TaskRef(spec={"id": "miniwob/book"})


async def test_tasks_that_come_later_are_selected_too() -> None:
    registry = TaskRegistry({MATH.name: {}})
    asked = chooser_of(Workers(known()), registry)
    wish = ResetWish.model_validate({"task_name": "click-test"})
    with pytest.raises(UnknownTask, match="no task of 'math' has task_name 'click-test'"):
        await asked.choose(BROWSER, wish)

    run_time = RuntimeTasks(registry=registry, store=MemoryTaskStore(), catalog=Catalog([MATH]))
    await run_time.register(run_time.check([("task", page("miniwob", "click-test"))], environment="math"))

    assert (await asked.choose(BROWSER, wish)).id == "miniwob/click-test"


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
async def test_a_key_that_nobody_looks_at_or_a_second_choice_is_refused(wish: dict[str, Any], told: str) -> None:
    asked = chooser(Workers(WorkerTasks(config_keys=("level",))), **tasks(**PAGES))

    with pytest.raises(FrameError, match=told) as refused:
        await asked.choose(BROWSER, ResetWish(**wish))

    assert refused.value.code is Code.VALIDATION_ERROR
    assert refused.value.entries[0]["loc"][0] == "data"


@pytest.mark.parametrize("keys", [("level",), None])
async def test_keys_that_the_environment_takes_and_those_of_a_worker_that_does_not_say_are_passed_on(
    keys: tuple[str, ...] | None,
) -> None:
    asked = chooser(Workers(WorkerTasks(config_keys=keys)), **tasks(**PAGES))
    wish = ResetWish.model_validate({"index": 0, "level": 2})

    assert (await asked.choose(BROWSER, wish)).id == "custom/login"
    assert asked.config(BROWSER, wish) == {"level": 2}


async def test_an_environment_whose_usual_split_is_not_there_has_its_first_one() -> None:
    chosen = await chooser(Workers(known()), **tasks(test=[{"id": "only"}])).choose(MATH, ResetWish(seed=9))

    assert (chosen.split, chosen.index, chosen.id) == ("test", 0, "only")
    with pytest.raises(UnknownTask):
        await chooser(Workers(known()), test=[]).choose(MATH, ResetWish())
