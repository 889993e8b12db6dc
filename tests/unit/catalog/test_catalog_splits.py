"""Splits with their own resources, and lookups by name in a catalog that changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.catalog.catalog import Catalog, describe
from gateway.catalog.toml import read_environment
from gateway.cli.main import app
from gateway.core.environment import ALL_GPUS, CustomTasks, Environment, Limits, PoolPolicy
from gateway.core.errors import ConfigError, UnknownEnvironment
from gateway.core.ids import EnvironmentName

HEAD = 'name = "math"\nimage = "env-math"\n'
BASE = HEAD + "[pool]\nslots = 8\nmin_workers = 1\nmax_workers = 3\nwarm = 5\npause_idle_s = 2\n[limits]\ncpus = 1\n"
HARD = BASE + "[splits.hard]\ncpus = 2\nmemory_mib = 1024\nmax_workers = 2\n"


def read(tmp_path: Path, text: str) -> Environment:
    path = tmp_path / "env_images" / "math" / "environment.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return read_environment(path)


def complaint(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, text)
    return refusal.value.detail.partition("environment.toml:")[2]


# -- the file -------------------------------------------------------------------------------------------------------


def test_a_split_has_its_own_pool_and_limits_and_inherits_the_rest(tmp_path: Path) -> None:
    environment = read(tmp_path, HARD + '[variables]\nMODE = "strict"\n')

    hard = environment.splits["hard"]

    assert hard == replace(
        environment,
        name=EnvironmentName("math.hard"),
        base=EnvironmentName("math"),
        pool=PoolPolicy(slots=8, min_workers=0, max_workers=2, warm=0, pause_idle_s=2),
        limits=Limits(cpus=2, memory_bytes=2**30),
        splits={},
    )
    assert (hard.worker_name, hard.variables) == ("math", {"MODE": "strict"})
    assert hard.digest() != environment.digest()
    assert "train" not in environment.splits


def test_a_split_without_keys_has_the_same_resources_in_its_own_workers(tmp_path: Path) -> None:
    environment = read(tmp_path, BASE + "[splits.hard]\n")

    hard = environment.splits["hard"]

    assert hard.limits == environment.limits
    assert (hard.pool.max_workers, hard.pool.min_workers, hard.pool.warm) == (3, 0, 0)


@pytest.mark.parametrize(
    ("limits", "split", "gpus", "gpu_ids"),
    [
        pytest.param("gpus = 1", "", 1, (), id="the environment's"),
        pytest.param("gpus = 1", "gpus = 0", 0, (), id="no GPUs"),
        pytest.param("gpus = 1", 'gpus = "all"', ALL_GPUS, (), id="all GPUs"),
        pytest.param("gpus = 1", 'gpu_ids = ["0", "1"]', 0, ("0", "1"), id="GPU ids instead of a number"),
        pytest.param('gpu_ids = ["0"]', "gpus = 2", 2, (), id="a number instead of GPU ids"),
        pytest.param('gpu_ids = ["0"]', "gpu_ids = []", 0, (), id="an empty list of GPU ids"),
    ],
)
def test_the_gpus_of_a_split_replace_those_of_its_environment(
    tmp_path: Path, limits: str, split: str, gpus: int, gpu_ids: tuple[str, ...]
) -> None:
    found = read(tmp_path, f"{HEAD}[limits]\n{limits}\n[splits.hard]\n{split}\n").splits["hard"].limits

    assert (found.gpus, found.gpu_ids) == (gpus, gpu_ids)


@pytest.mark.parametrize(
    ("split", "where", "reason"),
    [
        pytest.param("[splits.Hard]\n", "3: splits.Hard", "[a-z0-9]", id="a capital"),
        pytest.param('[splits."a.b"]\n', "splits.a.b", "[a-z0-9]", id="a dot"),
        pytest.param("[splits.-a]\n", "3: splits.-a", "[a-z0-9]", id="a dash first"),
        pytest.param(f"[splits.{'a' * 64}]\n", "3: splits.a", "63 characters", id="too long"),
        pytest.param(
            "[splits.hard]\nslots = 3\n",
            "4: splits.hard.slots",
            "there is no such key",
            id="a key that splits do not have",
        ),
        pytest.param("[splits.hard]\ncpus = 0\n", "4: splits.hard.cpus", "greater than 0", id="no CPU"),
        pytest.param("[splits.hard]\ngpus = -1\n", "4: splits.hard.gpus: ", "at least", id="a negative number of GPUs"),
        pytest.param('[splits.hard]\ngpus = "x"\n', "4: splits.hard.gpus: ", "an integer", id="GPUs by a word"),
        pytest.param(
            '[splits.hard]\ngpus = 1\ngpu_ids = ["0"]\n', "5: splits.hard.gpu_ids", "either", id="GPUs in two ways"
        ),
        pytest.param(
            "[splits.hard]\nmin_workers = 5\n",
            "4: splits.hard.min_workers",
            "at most max_workers = 4, not 5",
            id="min over max",
        ),
        pytest.param("[splits.hard]\nwarm = 65\n", "4: splits.hard.warm", "at most 64: max_workers = 4", id="too warm"),
    ],
)
def test_an_error_in_a_split_is_reported_with_its_line(tmp_path: Path, split: str, where: str, reason: str) -> None:
    said = complaint(tmp_path, HEAD + split)

    assert where in said
    assert reason in said
    assert len(said.splitlines()) == 1


def test_a_check_remarks_a_split_that_has_no_tasks(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "hard.jsonl").touch()
    tasks = '[tasks]\ndirectory = "tasks"\n'
    splits = "[splits.hard]\n[splits.hrad]\n"

    remarks = describe(read(tmp_path, HEAD + splits + tasks))["remarks"]

    assert remarks == [f"splits.hrad: {tmp_path.resolve()}/tasks/hrad.jsonl: no such file"]
    assert describe(read(tmp_path, HEAD + splits))["remarks"] == []


def test_the_command_check_shows_splits_with_their_resources(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "train.jsonl").write_text('{"question":"?"}\n')
    read(tmp_path, HARD + 'gpus = 1\n[tasks]\ndirectory = "tasks"\n')

    done = CliRunner().invoke(app, ["check"], env={"GATEWAY_CATALOG_DIR": f"{tmp_path}/env_images", "COLUMNS": "120"})

    assert done.exit_code == 0, done.output
    lines = [" ".join(line.replace("│", " ").split()) for line in done.output.splitlines()]
    of_split = lines[lines.index("math.hard 0-2 x 8 slots hard") :]
    assert of_split[1:5] == ["paused after 2 s", "2 CPUs", "1024 MiB", "1 GPU"]
    assert f"math: splits.hard: {tmp_path.resolve()}/tasks/hard.jsonl: no such file" in lines


# -- the catalog ----------------------------------------------------------------------------------------------------

GAME = Environment(name=EnvironmentName("game"), image="env-game", directory=Path("/b"), command=("x",))


def test_sessions_find_a_splits_environment_by_name_and_trainers_do_not(tmp_path: Path) -> None:
    math = read(tmp_path, HARD)
    catalog = Catalog([math, GAME])

    assert catalog.known.get("math.hard") == catalog.named("math.hard") == math.splits["hard"]
    assert (catalog.offered.get("math.hard"), catalog.offered.get("math")) == (None, math)
    with pytest.raises(UnknownEnvironment, match=r"^unknown environment 'math\.hard'; there are "):
        catalog.wanted("math.hard")
    assert ([one.name for one in catalog], len(catalog), catalog.default) == (["math", "game"], 2, math)
    assert [one.name for one in catalog.all()] == ["math", "math.hard", "game"]


def test_a_split_cannot_be_the_default_environment(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'math\.hard' is not available"):
        Catalog([read(tmp_path, HARD)], "math.hard")


def test_a_split_changes_along_with_its_environment(tmp_path: Path) -> None:
    math = read(tmp_path, HARD)
    catalog = Catalog([math])
    before = catalog.named("math.hard")

    catalog.replace(
        replace(
            math,
            image="env-math:2",
            image_id="sha256:2",
            variables={"A": "1"},
            custom_tasks=CustomTasks(module="m", folder="f", content="c"),
            pool=replace(math.pool, idle_worker_s=5, max_workers=9),
        )
    )

    hard = catalog.named("math.hard")
    assert hard == replace(
        before,
        image="env-math:2",
        image_id="sha256:2",
        variables={"A": "1"},
        custom_tasks=CustomTasks(module="m", folder="f", content="c"),
        pool=replace(before.pool, idle_worker_s=5),
    )
    assert catalog.named("math").splits["hard"] is hard
    assert hard.digest() != before.digest()


def test_pool_policy_and_timeouts_change_without_new_workers(tmp_path: Path) -> None:
    math = read(tmp_path, HARD)
    catalog = Catalog([math])
    before = [one.digest() for one in catalog.all()]

    catalog.replace(
        replace(math, pool=replace(math.pool, warm=1, min_workers=0), timeouts=replace(math.timeouts, idle_s=7))
    )

    assert [one.digest() for one in catalog.all()] == before
    assert [(one.pool.warm, one.timeouts.idle_s) for one in catalog.all()] == [(1, 7), (0, 7)]


def test_a_split_that_loses_its_own_resources_is_known_while_its_sessions_may_live(tmp_path: Path) -> None:
    math = read(tmp_path, HARD)
    catalog = Catalog([math])
    digest = catalog.named("math.hard").digest()

    catalog.replace(replace(math, splits={}))
    ending = catalog.named("math.hard")

    assert "hard" not in catalog.named("math").splits
    assert ending.digest() == digest  # An unchanged digest keeps its workers from being drained.
    assert (ending.pool.min_workers, ending.pool.warm, ending.pool.idle_worker_s) == (0, 0, 0)
    assert [one.name for one in catalog.all()] == ["math", "math.hard"]

    catalog.replace(math)
    assert catalog.named("math.hard") == math.splits["hard"]
    assert [one.name for one in catalog.all()] == ["math", "math.hard"]


def test_a_withdrawn_environment_is_not_offered_and_its_sessions_continue(tmp_path: Path) -> None:
    math = read(tmp_path, HARD)
    catalog = Catalog([GAME, math])

    catalog.withdraw("Math")

    assert [one.name for one in catalog] == ["game"]
    assert catalog.offered.get("math") is None
    with pytest.raises(UnknownEnvironment):
        catalog.wanted("math")
    with pytest.raises(UnknownEnvironment):
        catalog.replace(math)
    with pytest.raises(UnknownEnvironment):
        catalog.withdraw("math")
    assert [one.name for one in catalog.all()] == ["game", "math", "math.hard"]
    assert catalog.named("math").digest() == math.digest()
    assert catalog.named("math").pool.min_workers == 0


def test_a_withdrawn_environment_is_offered_again_in_its_new_form(tmp_path: Path) -> None:
    math = read(tmp_path, HARD)
    catalog = Catalog([GAME, math])
    catalog.withdraw("math")

    catalog.offer(math)

    assert [one.name for one in catalog.all()] == ["game", "math", "math.hard"]
    assert catalog.named("math") == math
    with pytest.raises(ConfigError, match="two environments"):
        catalog.offer(math)


def test_the_default_environment_is_not_withdrawn() -> None:
    catalog = Catalog([GAME])

    with pytest.raises(ConfigError, match="the default environment"):
        catalog.withdraw("game")

    assert catalog.default is GAME


def test_a_change_during_an_iteration_does_not_disturb_the_iteration(tmp_path: Path) -> None:
    math = read(tmp_path, HARD)
    catalog = Catalog([GAME, math])
    seen = []

    for environment in catalog:
        seen.append(environment.name)
        if environment is GAME:
            catalog.withdraw("math")
    for environment in catalog.all():
        seen.append(environment.name)
        if environment is GAME:
            catalog.offer(math)

    assert seen == ["game", "math", "game", "math", "math.hard"]
