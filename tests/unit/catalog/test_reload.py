"""Changes while the gateway runs: which files and images the catalog takes up, and when."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from gateway.catalog import reload as reloading
from gateway.catalog import scan as environment_looks
from gateway.catalog.catalog import Catalog, load_catalog
from gateway.catalog.reload import RETRY_MAX_S, CatalogReload, retry_s
from gateway.catalog.scan import scan_catalog
from gateway.core.environment import CustomTasks, Environment, Server
from gateway.core.errors import BackendError, ConfigError, StartFailed
from gateway.core.ids import EnvironmentName
from gateway.core.ports.backend import Backend
from tests.fakes.eventually import until

MATH = 'name = "math"\nimage = "env-math"\n'
GAME = 'name = "game"\nimage = "env-game"\n'
SPLIT = "[splits.hard]\ncpus = 2\n"


@dataclass
class Engine:
    """An engine that returns the image ids in `ids`. For an image in `slow` it waits until the event is set."""

    ids: dict[str, str | Exception] = field(default_factory=lambda: {"env-math": "sha256:m1", "env-game": "sha256:g1"})
    slow: dict[str, asyncio.Event] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    cancelled: int = 0

    async def prepare(self, environment: Environment) -> str:
        self.asked.append(environment.image)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if environment.image in self.slow:
                await self.slow[environment.image].wait()
            found = self.ids.get(environment.image, StartFailed(f"no image {environment.image}"))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.at_once -= 1
        if isinstance(found, Exception):
            raise found
        return found


@dataclass
class Completing:
    """Completes environments with a function of the test."""

    completed: Callable[[Environment], Awaitable[Environment]]

    async def complete(self, environment: Environment) -> Environment:
        return await self.completed(environment)


class World:
    """A folder with the environments game (the default) and math, and the reload that watches it."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "env_images"
        self.engine = Engine()
        self.changes = 0
        self.write("math", MATH)
        self.write("game", GAME)
        self.begin()

    def begin(self, catalog: Catalog | None = None, *, asks: bool = True, complete: Any = None, **options: Any) -> None:
        """Read the catalog and watch it anew, as a gateway does at its start."""
        self.catalog = catalog or load_catalog(self.directory, names=options.get("names", ()))
        self.reload = CatalogReload(
            self.catalog,
            backend=cast(Backend, self.engine) if asks else None,
            directory=self.directory,
            completion=None if complete is None else Completing(complete),
            **options,
        )
        self.reload.changed(self._count)

    def _count(self) -> None:
        self.changes += 1

    def write(self, folder: str, text: str) -> Path:
        path = self.directory / folder / "environment.toml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def remove(self, folder: str) -> None:
        shutil.rmtree(self.directory / folder)

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.reload.look()

    async def look_images(self) -> None:
        await self.reload.look_images(timeout_s=5)

    @property
    def math(self) -> Environment:
        return self.catalog.named("math")


@pytest.fixture
async def world(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[World]:
    caplog.set_level(logging.INFO, "gateway.catalog.reload")
    made = World(tmp_path)
    yield made
    await made.reload.aclose()


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(event)]


# -- files ----------------------------------------------------------------------------------------------------------


async def test_unchanged_files_change_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    before = list(world.catalog)

    await world.look(times=3)

    assert [one is other for one, other in zip(before, world.catalog, strict=True)] == [True, True]
    assert (world.changes, caplog.records) == (0, [])


async def test_a_changed_limit_changes_the_digest_from_the_next_look_on(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    before = world.math
    world.write("math", MATH + "[limits]\ncpus = 2\n")

    await world.look(times=2)

    assert (world.math.limits.cpus, world.changes) == (2, 1)
    (line,) = logged(caplog, "environment_changed")
    digests = f"digest={before.digest()}→{world.math.digest()}"
    assert line == f"environment_changed environment=math what=configuration {digests}"
    assert before.digest() != world.math.digest()


@pytest.mark.parametrize(
    ("image", "told"),
    [
        ("env-gateway/math", "env-gateway/math:ours"),
        ("env-gateway/math:1.2", "env-gateway/math:1.2"),
        ("env-gateway/math@sha256:0123", "env-gateway/math@sha256:0123"),
        ("somebody/math", "somebody/math"),
    ],
)
async def test_the_gateways_own_images_have_the_tag_of_the_settings_before_and_after_an_edit(
    world: World, image: str, told: str
) -> None:
    text = f'name = "math"\nimage = "{image}"\n'
    world.write("math", text)
    world.begin(load_catalog(world.directory, image_tag="ours"), asks=False, image_tag="ours")
    before = world.math.image
    world.write("math", text + 'description = "edited"\n')

    await world.look(times=2)

    assert world.math.description == "edited"
    assert (before, world.math.image) == (told, told)


async def test_an_edit_made_between_the_start_and_the_first_look_is_taken_up(world: World) -> None:
    world.begin(Catalog([replace(one, description="as it was read") for one in world.catalog]))

    await world.look()

    assert world.math.description == ""


async def test_pool_policy_and_timeouts_change_without_new_workers(world: World) -> None:
    before = world.math.digest()
    world.write("math", MATH + "[pool]\nwarm = 4\n[timeouts]\nidle_s = 7\n")

    await world.look()

    assert (world.math.pool.warm, world.math.timeouts.idle_s) == (4, 7)
    assert world.math.digest() == before


async def test_the_image_id_and_task_modules_of_an_environment_survive_an_edit_of_its_file(world: World) -> None:
    tasks = '[tasks]\nmodule = "m"\n'
    world.write("math", MATH + tasks)
    await world.look()
    found = CustomTasks(module="m", folder="math", content="c1")
    world.catalog.replace(replace(world.math, image_id="sha256:m1", custom_tasks=found))

    world.write("math", MATH + SPLIT + tasks)
    await world.look()

    assert (world.math.image_id, world.math.custom_tasks) == ("sha256:m1", found)
    assert (world.math.splits["hard"].image_id, world.math.splits["hard"].custom_tasks) == ("sha256:m1", found)


async def test_a_wrong_file_changes_nothing_and_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    before = world.math
    path = world.write("math", MATH + "[pool]\nslots = 0\n")

    await world.look(times=3)

    assert world.math is before
    (line,) = logged(caplog, "environment_file_refused")
    assert line.startswith(f"environment_file_refused environment=math file={path} error={path}:4: pool.slots: ")

    world.write("math", MATH)
    await world.look()
    world.write("math", MATH + "[pool]\nslots = 0\n")
    await world.look()
    assert len(logged(caplog, "environment_file_refused")) == 2  # The file was correct in between.


async def test_a_file_that_names_a_missing_folder_is_taken_up_once_the_folder_exists(
    world: World, tmp_path: Path
) -> None:
    world.write("math", MATH + '[tasks]\ndirectory = "tasks"\n')
    await world.look()
    assert world.math.tasks is None

    (tmp_path / "tasks").mkdir()
    await world.look()

    assert world.math.tasks == (tmp_path / "tasks").resolve()


@pytest.fixture
def long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment_looks, "_SETTLED_S", -60.0)  # As if all files were a minute old.


@pytest.mark.usefixtures("long_ago")
async def test_an_unchanged_file_is_read_again_while_it_is_wrong(world: World, tmp_path: Path) -> None:
    world.write("math", MATH + '[tasks]\ndirectory = "tasks"\n')
    await world.look(times=2)
    (tmp_path / "tasks").mkdir()

    await world.look()

    assert world.math.tasks == (tmp_path / "tasks").resolve()


@pytest.mark.usefixtures("long_ago")
async def test_a_settled_file_is_read_when_it_changes_although_its_date_stays_the_same(world: World) -> None:
    await world.look()
    path = world.directory / "math" / "environment.toml"
    before = path.stat()
    world.write("math", MATH.replace("env-math", "env-moth"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    await world.look()

    assert world.math.image == "env-moth"


def test_a_file_that_was_just_written_is_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # Within one tick of a file system's clock a second edit has the date of the first.
    _, just_written = scan_catalog(world.directory, frozenset(), {})
    monkeypatch.setattr(environment_looks, "_SETTLED_S", -60.0)
    _, at_rest = scan_catalog(world.directory, frozenset(), {})

    assert [stamp for stamp, _ in just_written.values()] == [None, None]
    assert None not in [stamp for stamp, _ in at_rest.values()]
    assert scan_catalog(world.directory, frozenset(), {path: one for path, (one, _) in at_rest.items()})[1] == {}


async def test_a_file_with_the_same_content_is_not_completed_again(world: World) -> None:
    completed: list[str] = []

    async def complete(environment: Environment) -> Environment:
        completed.append(environment.name)
        return environment

    world.begin(complete=complete)
    world.write("math", MATH + "platform_keys = true\n")
    await world.look(times=2)
    world.write("math", "# why\n" + MATH + "platform_keys = true\n")
    await world.look()

    assert completed == ["math"]


async def test_a_new_folder_is_offered(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write("chat", 'name = "chat"\nimage = "env-chat"\n' + SPLIT)

    await world.look(times=2)

    assert [one.name for one in world.catalog] == ["game", "math", "chat"]
    assert world.catalog.known.get("chat.hard") is not None
    assert len(logged(caplog, "environment_offered environment=chat digest=")) == 1
    assert world.changes == 1


async def test_a_new_folder_is_not_offered_if_the_settings_name_the_environments(world: World) -> None:
    world.begin(names=("math",))
    world.write("chat", 'name = "chat"\nimage = "env-chat"\n')
    world.write("game", GAME + "platform_keys = true\n")

    await world.look()

    assert [one.name for one in world.catalog] == ["math"]


async def test_an_environment_whose_file_is_missing_in_two_looks_is_withdrawn(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.remove("math")

    await world.look()
    assert world.catalog.offered.get("math") is not None  # An editor may be replacing the file.

    await world.look(times=2)
    assert world.catalog.offered.get("math") is None
    assert world.catalog.known.get("math") is not None
    assert logged(caplog, "environment_withdrawn") == ["environment_withdrawn environment=math"]

    world.write("math", MATH)
    await world.look()
    assert world.catalog.offered.get("math") is not None


async def test_a_file_that_an_editor_replaces_is_never_withdrawn(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        world.remove("math")
        await world.look()
        world.write("math", MATH)
        await world.look()

    assert world.changes == 0
    assert caplog.records == []


async def test_the_default_environment_stays_without_its_file(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.remove("game")

    await world.look(times=4)

    assert world.catalog.default.name == "game"
    (line,) = logged(caplog, "environment_file_refused")
    assert "environment=game" in line
    assert "default environment" in line


async def test_a_folder_that_was_unmounted_withdraws_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.directory.rename(world.directory.with_name("elsewhere"))

    await world.look(times=4)

    assert [one.name for one in world.catalog] == ["game", "math"]
    assert len(logged(caplog, "environment_files_missing")) == 1


async def test_a_folder_may_be_renamed(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (world.directory / "game").rename(world.directory / "games")

    await world.look(times=4)

    assert [one.name for one in world.catalog] == ["game", "math"]
    assert not logged(caplog, "environment_withdrawn")
    assert not logged(caplog, "environment_file_refused")


async def test_an_environment_may_be_renamed_unless_it_is_the_default_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.write("math", MATH.replace('"math"', '"sums"'))
    world.write("game", GAME.replace('"game"', '"play"'))

    await world.look(times=2)

    assert [one.name for one in world.catalog] == ["game", "sums"]
    assert world.catalog.known.get("math") is not None
    (line,) = logged(caplog, "environment_file_refused")
    assert "keeps its name" in line


async def test_two_files_with_the_same_name_leave_the_first_in_place(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    before = world.math
    world.write("copy", MATH + "platform_keys = true\n")

    await world.look(times=2)

    assert world.math is before
    (line,) = logged(caplog, "environment_file_refused environment=copy")
    assert "two environments have the name 'math'" in line


async def test_a_file_does_not_take_the_name_of_a_server_that_the_settings_name(world: World) -> None:
    static = Environment(
        name=EnvironmentName("counter"), image="x", directory=Path(), command=(), server=Server(url="http://10.0.0.7")
    )
    world.begin(Catalog([*world.catalog, static]))
    world.write("counter", 'name = "counter"\nimage = "env-counter"\n')

    await world.look(times=3)

    assert world.catalog.named("counter") is static


async def test_the_local_backend_leaves_out_environments_that_run_only_in_an_image(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    before = world.math
    world.begin(world.catalog, containers=False)
    world.write("chat", 'name = "chat"\nimage = "env-chat"\ncommand = []\n')
    world.write("math", MATH + "command = []\n")

    await world.look(times=2)

    assert [one.name for one in world.catalog] == ["game", "math"]
    assert world.math is before
    (line,) = logged(caplog, "environment_file_refused")
    assert "GATEWAY_BACKEND=docker" in line
    (line,) = logged(caplog, "environment_left_out")
    assert "environment=chat" in line
    assert "image only" in world.catalog.left_out["chat"]


async def test_an_environment_is_completed_before_it_is_offered(world: World, caplog: pytest.LogCaptureFixture) -> None:
    async def complete(environment: Environment) -> Environment:
        if environment.custom_tasks is None:
            raise ConfigError("no module in it")
        return replace(environment, custom_tasks=replace(environment.custom_tasks, content="c1"))

    world.begin(complete=complete)
    world.write("chat", 'name = "chat"\nimage = "env-chat"\n[tasks]\nmodule = "m"\n')
    world.write("math", MATH + "platform_keys = true\n")

    await world.look(times=2)

    assert world.catalog.named("chat").custom_tasks == CustomTasks(module="m", folder="chat", content="c1")
    assert not world.math.platform_keys
    (line,) = logged(caplog, "environment_file_refused environment=math")
    assert line.endswith("error=no module in it")


async def test_an_unexpected_error_in_one_file_does_not_stop_the_others_from_being_taken_up(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def complete(environment: Environment) -> Environment:
        if environment.name == "chat":
            raise ValueError("a bug")
        return environment

    world.begin(complete=complete)
    world.write("chat", 'name = "chat"\nimage = "env-chat"\n')
    world.write("math", MATH + "platform_keys = true\n")

    await world.look()

    assert world.math.platform_keys
    assert "a bug" in caplog.text


async def test_a_listener_that_fails_does_not_stop_environments_from_being_offered(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("not ready yet")

    world.reload.changed(fail)
    world.write("chat", 'name = "chat"\nimage = "env-chat"\n')
    world.write("zero", 'name = "zero"\nimage = "env-zero"\n')

    await world.look(times=2)

    assert [one.name for one in world.catalog] == ["game", "math", "chat", "zero"]
    assert not logged(caplog, "environment_file_refused")


# -- images ---------------------------------------------------------------------------------------------------------


async def test_the_engine_reports_the_image_ids_at_the_start(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write("math", MATH + SPLIT)
    await world.look()
    assert not world.reload.is_settled("math")
    assert not world.reload.is_settled("math.hard")

    await world.look_images()

    assert [one.image_id for one in world.catalog.all()] == ["sha256:g1", "sha256:m1", "sha256:m1"]
    assert world.reload.is_settled("math")
    assert world.reload.is_settled("math.hard")
    assert len(logged(caplog, "environment_changed environment=math what=image")) == 1


async def test_a_rebuilt_image_changes_the_digest(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.look_images()
    before, changes = world.math, world.changes
    world.engine.ids["env-math"] = "sha256:m2"

    await world.look_images()
    await world.look_images()

    assert (world.math.image_id, world.changes) == ("sha256:m2", changes + 1)
    assert logged(caplog, "environment_changed")[-1] == (
        f"environment_changed environment=math what=image digest={before.digest()}→{world.math.digest()}"
    )


async def test_a_slow_image_pull_does_not_delay_other_images(world: World) -> None:
    world.engine.slow["env-math"] = asyncio.Event()

    await world.reload.look_images(timeout_s=0.05)

    assert world.catalog.named("game").image_id == "sha256:g1"
    assert world.reload.is_settled("game")
    assert not world.reload.is_settled("math")
    assert not world.reload.may_start("math")  # Its worker would be outdated once the image is known.

    world.engine.slow["env-math"].set()
    await until(lambda: world.reload.is_settled("math"))
    assert world.math.image_id == "sha256:m1"
    assert world.reload.may_start("math")


async def test_an_image_has_at_most_one_request_at_a_time(world: World) -> None:
    world.engine.slow["env-math"] = asyncio.Event()
    for _ in range(3):
        await world.reload.look_images(timeout_s=0.01)

    assert world.engine.asked.count("env-math") == 1


async def test_an_engine_that_does_not_answer_leaves_the_known_image_id(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.look_images()
    before = world.math.digest()
    world.engine.ids["env-math"] = BackendError("the engine does not answer")

    await world.look_images()
    await world.look_images()

    assert (world.math.digest(), world.reload.is_settled("math")) == (before, True)
    assert logged(caplog, "environment_image_unknown") == [
        "environment_image_unknown environment=math image=env-math error=the engine does not answer"
    ]


async def test_an_engine_that_returns_an_empty_image_id_leaves_the_known_one(world: World) -> None:
    await world.look_images()
    world.engine.ids["env-math"] = ""

    await world.look_images()

    assert world.math.image_id == "sha256:m1"


async def test_an_environment_with_an_unknown_image_is_not_settled_and_may_try_to_start(world: World) -> None:
    del world.engine.ids["env-math"]

    await world.look_images()

    assert not world.reload.is_settled("math")
    assert world.reload.may_start("math")  # The failed start reports the reason to openings.

    world.engine.ids["env-math"] = "sha256:m1"
    await world.look_images()
    assert world.reload.is_settled("math")


async def test_each_change_of_the_reason_is_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for error in ("one", "one", "two", "one"):
        world.engine.ids["env-math"] = StartFailed(error)
        await world.look_images()

    told = [line.rpartition("=")[2] for line in logged(caplog, "environment_image_unknown")]
    assert told == ["one", "two", "one"]

    world.engine.ids["env-math"] = "sha256:m1"
    await world.look_images()
    world.engine.ids["env-math"] = StartFailed("one")
    await world.look_images()
    assert len(logged(caplog, "environment_image_unknown")) == 4  # The failure ended in between.


async def test_an_unexpected_error_of_one_image_request_is_logged_and_settles_the_others(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.engine.ids["env-math"] = ValueError("a bug")

    await world.look_images()

    assert world.reload.is_settled("game")
    assert world.reload.may_start("math")
    assert "a bug" in caplog.text


async def test_external_servers_unknown_names_and_a_backend_without_images_are_settled(world: World) -> None:
    static = Environment(
        name=EnvironmentName("counter"), image="x", directory=Path(), command=(), server=Server(url="http://10.0.0.7")
    )
    world.begin(Catalog([*world.catalog, static]))
    await world.look_images()

    assert world.reload.is_settled("counter")
    assert world.reload.is_settled("nosuch")
    assert "x" not in world.engine.asked

    world.begin(asks=False)
    await world.look_images()
    assert world.reload.is_settled("math")


async def test_an_environment_without_an_image_id_is_settled_once_the_engine_has_answered(world: World) -> None:
    world.engine.ids["env-math"] = ""
    before = world.math

    await world.look_images()

    assert world.math is before
    assert world.reload.is_settled("math")


async def test_a_new_image_takes_effect_with_all_other_changes_once_it_is_available(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.look_images()
    before = world.math
    world.write("math", MATH.replace("env-math", "env-math:2") + "[limits]\ncpus = 2\n")

    await world.look()
    await world.look_images()
    assert world.math is before  # Working workers stay while the new image is missing.
    assert world.reload.is_settled("math")

    world.engine.ids["env-math:2"] = "sha256:m2"
    await world.look_images()
    assert (world.math.image, world.math.image_id, world.math.limits.cpus) == ("env-math:2", "sha256:m2", 2)
    assert len(logged(caplog, "environment_changed environment=math what=configuration")) == 1


async def test_the_image_in_use_is_still_checked_while_its_replacement_is_unavailable(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.look_images()
    world.write("math", MATH.replace("env-math", "env-math:2"))
    await world.look()
    world.engine.ids["env-math"] = "sha256:m2"

    await world.look_images()
    await world.look_images()

    assert (world.math.image, world.math.image_id) == ("env-math", "sha256:m2")
    assert logged(caplog, "environment_image_unknown") == [
        "environment_image_unknown environment=math image=env-math:2 error=no image env-math:2"
    ]


async def test_a_new_leader_does_not_settle_environments_by_image_ids_from_before(world: World) -> None:
    await world.look_images()
    world.engine.ids["env-math"] = "sha256:m2"  # The previous leader already has workers of it.

    world.reload.ask_again()
    assert not world.reload.is_settled("math")
    assert not world.reload.may_start("math")

    await until(lambda: world.reload.is_settled("math"))
    assert world.math.image_id == "sha256:m2"


async def test_a_leader_whose_engine_does_not_answer_does_not_settle_the_environment(world: World) -> None:
    await world.look_images()
    world.engine.ids["env-math"] = BackendError("the engine does not answer")

    world.reload.ask_again()
    await world.look_images()

    assert (world.reload.is_settled("math"), world.reload.is_settled("game")) == (False, True)
    assert world.reload.may_start("math")


async def test_an_image_that_was_never_available_is_replaced_immediately(world: World) -> None:
    del world.engine.ids["env-math"]
    await world.look_images()
    world.write("math", MATH.replace("env-math", "env-maths"))

    await world.look()

    assert world.math.image == "env-maths"
    assert not world.reload.is_settled("math")


async def test_the_answer_for_an_image_that_is_no_longer_named_settles_nothing(world: World) -> None:
    world.engine.slow["env-math"] = asyncio.Event()
    await world.reload.look_images(timeout_s=0.01)
    world.write("math", MATH.replace("env-math", "env-maths"))
    await world.look()

    world.engine.slow["env-math"].set()
    await world.look_images()

    assert (world.math.image, world.math.image_id) == ("env-maths", "")
    assert not world.reload.is_settled("math")

    world.engine.ids["env-maths"] = "sha256:s1"
    await world.look_images()
    assert world.math.image_id == "sha256:s1"
    assert world.reload.is_settled("math")


async def test_an_environment_that_becomes_an_external_server_has_no_image_id(world: World) -> None:
    await world.look_images()
    world.write("math", 'name = "math"\nprotocol = "openenv"\n[server]\nurl = "http://10.0.0.7"\n')

    await world.look()

    assert (world.math.server.url, world.math.image_id) == ("http://10.0.0.7", "")
    assert world.reload.is_settled("math")


async def test_an_edit_back_to_the_first_image_during_a_pull_keeps_the_first_image(world: World) -> None:
    await world.look_images()
    world.engine.slow["env-math:2"] = asyncio.Event()
    world.write("math", MATH.replace("env-math", "env-math:2"))
    await world.look()
    await world.reload.look_images(timeout_s=0.01)
    world.write("math", MATH + "platform_keys = true\n")
    await world.look()

    world.engine.ids["env-math:2"] = "sha256:m2"
    world.engine.slow["env-math:2"].set()
    await world.look_images()

    assert (world.math.image, world.math.image_id, world.math.platform_keys) == ("env-math", "sha256:m1", True)


async def test_a_change_that_is_undone_before_it_takes_effect_is_not_reported(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.write("math", MATH + SPLIT)
    await world.look()
    await world.look_images()
    told, changes = len(logged(caplog, "environment_changed")), world.changes

    world.write("math", MATH.replace("env-math", "env-math:2") + SPLIT)
    await world.look()
    world.write("math", MATH + SPLIT)
    await world.look()

    assert (len(logged(caplog, "environment_changed")), world.changes) == (told, changes)


async def test_withdrawing_an_environment_cancels_the_pull_of_its_image(world: World) -> None:
    world.engine.slow["env-math"] = asyncio.Event()
    await world.reload.look_images(timeout_s=0.01)

    world.remove("math")
    await world.look(times=2)

    await until(lambda: world.engine.cancelled == 1)
    assert world.reload.is_settled("math")


def test_pauses_between_failed_image_requests_grow() -> None:
    pauses = [retry_s(failures) for failures in range(1, 9)]

    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[1], pauses[-1], retry_s(10_000)) == (2.0, 4.0, RETRY_MAX_S, RETRY_MAX_S)


# -- the loop -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "POLL_S", 0.01)


@pytest.mark.usefixtures("hurried")
async def test_the_loop_takes_up_files_and_images_and_cancels_its_requests_at_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading, "IMAGES_EVERY_S", 0.01)
    running = asyncio.create_task(world.reload.run())
    try:
        await until(lambda: world.reload.is_settled("math") and world.reload.is_settled("game"))
        world.engine.ids["env-math"] = "sha256:m2"
        await until(lambda: world.math.image_id == "sha256:m2")
        world.write("math", MATH + "[limits]\ncpus = 2\n")
        await until(lambda: world.math.limits.cpus == 2)
        world.engine.slow["env-math"] = asyncio.Event()
        await until(lambda: world.engine.at_once == 1)
    finally:
        running.cancel()
        await asyncio.wait({running})

    assert running.cancelled()
    assert (world.engine.at_once, world.engine.cancelled) == (0, 1)


@pytest.mark.usefixtures("hurried")
async def test_the_loop_requests_the_image_of_a_newly_offered_environment(world: World) -> None:
    world.engine.ids["env-chat"] = "sha256:c1"
    running = asyncio.create_task(world.reload.run())
    try:
        await until(lambda: world.reload.is_settled("math"))
        world.write("chat", 'name = "chat"\nimage = "env-chat"\n')
        await until(lambda: (one := world.catalog.known.get("chat")) is not None and one.image_id == "sha256:c1")
    finally:
        running.cancel()
        await asyncio.wait({running})


@pytest.mark.usefixtures("hurried")
async def test_the_loop_requests_the_image_of_an_environment_again_after_each_change(world: World) -> None:
    running = asyncio.create_task(world.reload.run())
    try:
        await until(lambda: world.reload.is_settled("math"))
        world.write("math", MATH + "[limits]\ncpus = 2\n")
        await until(lambda: world.engine.asked.count("env-math") == 2)
    finally:
        running.cancel()
        await asyncio.wait({running})

    assert world.engine.asked.count("env-game") == 1
