"""What changes while the gateway runs: which files and images the catalog takes up, and when."""

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
    """Names images: what `ids` has; asked for one that is in `slow`, it waits until it is taken out of there."""

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
    """Adds to environments what a function of the test's does."""

    completed: Callable[[Environment], Awaitable[Environment]]

    async def complete(self, environment: Environment) -> Environment:
        return await self.completed(environment)


class World:
    """A folder of environments, game (the default one) and math, and who watches it."""

    def __init__(self, root: Path) -> None:
        self.directory = root / "env_images"
        self.engine = Engine()
        self.changes = 0
        self.write("math", MATH)
        self.write("game", GAME)
        self.begin()

    def begin(self, catalog: Catalog | None = None, *, asks: bool = True, complete: Any = None, **options: Any) -> None:
        """Read the catalog and watch it anew, as a gateway does that is started."""
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


async def test_files_in_which_nothing_changed_change_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    before = list(world.catalog)

    await world.look(times=3)

    assert [one is other for one, other in zip(before, world.catalog, strict=True)] == [True, True]
    assert (world.changes, caplog.records) == (0, [])


async def test_another_limit_is_another_make_from_then_on(world: World, caplog: pytest.LogCaptureFixture) -> None:
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
async def test_our_own_images_have_the_tag_of_the_settings_before_an_edit_and_after_it(
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


async def test_what_was_found_out_of_an_environment_outlives_an_edit_of_its_file(world: World) -> None:
    tasks = '[tasks]\nmodule = "m"\n'
    world.write("math", MATH + tasks)
    await world.look()
    found = CustomTasks(module="m", folder="math", content="c1")
    world.catalog.replace(replace(world.math, image_id="sha256:m1", custom_tasks=found))

    world.write("math", MATH + SPLIT + tasks)
    await world.look()

    assert (world.math.image_id, world.math.custom_tasks) == ("sha256:m1", found)
    assert (world.math.splits["hard"].image_id, world.math.splits["hard"].custom_tasks) == ("sha256:m1", found)


async def test_a_wrong_file_changes_nothing_and_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
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
    assert len(logged(caplog, "environment_file_refused")) == 2  # it was mended between


async def test_a_file_that_was_wrong_for_what_it_names_is_taken_up_when_that_is_there(
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
    monkeypatch.setattr(environment_looks, "_SETTLED_S", -60.0)  # as if all files were a minute old


@pytest.mark.usefixtures("long_ago")
async def test_a_file_at_rest_is_read_again_as_long_as_it_was_wrong(world: World, tmp_path: Path) -> None:
    world.write("math", MATH + '[tasks]\ndirectory = "tasks"\n')
    await world.look(times=2)
    (tmp_path / "tasks").mkdir()

    await world.look()

    assert world.math.tasks == (tmp_path / "tasks").resolve()


@pytest.mark.usefixtures("long_ago")
async def test_a_file_at_rest_is_read_when_it_changes_though_its_date_is_kept(world: World) -> None:
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


async def test_a_file_that_says_the_same_is_not_completed_again(world: World) -> None:
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


async def test_where_environments_are_named_a_new_folder_is_not_offered(world: World) -> None:
    world.begin(names=("math",))
    world.write("chat", 'name = "chat"\nimage = "env-chat"\n')
    world.write("game", GAME + "platform_keys = true\n")

    await world.look()

    assert [one.name for one in world.catalog] == ["math"]


async def test_what_is_gone_for_two_looks_is_withdrawn(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.remove("math")

    await world.look()
    assert world.catalog.offered.get("math") is not None  # an editor may be at it

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


async def test_two_files_of_one_name_leave_the_first_in_place(world: World, caplog: pytest.LogCaptureFixture) -> None:
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


async def test_for_local_processes_what_runs_in_an_image_only_is_left_out(
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


async def test_what_a_file_does_not_say_is_added_before_it_is_offered(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
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


async def test_a_fault_in_taking_up_one_file_keeps_no_other_from_being_taken_up(
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


async def test_a_listener_that_fails_keeps_nothing_from_being_offered(
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


async def test_the_engine_says_at_the_start_what_images_are(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.write("math", MATH + SPLIT)
    await world.look()
    assert not world.reload.is_settled("math")
    assert not world.reload.is_settled("math.hard")

    await world.look_images()

    assert [one.image_id for one in world.catalog.all()] == ["sha256:g1", "sha256:m1", "sha256:m1"]
    assert world.reload.is_settled("math")
    assert world.reload.is_settled("math.hard")
    assert len(logged(caplog, "environment_changed environment=math what=image")) == 1


async def test_an_image_that_was_built_anew_is_another_make(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.look_images()
    before, changes = world.math, world.changes
    world.engine.ids["env-math"] = "sha256:m2"

    await world.look_images()
    await world.look_images()

    assert (world.math.image_id, world.changes) == ("sha256:m2", changes + 1)
    assert logged(caplog, "environment_changed")[-1] == (
        f"environment_changed environment=math what=image digest={before.digest()}→{world.math.digest()}"
    )


async def test_an_image_that_is_pulled_for_long_holds_up_no_other(world: World) -> None:
    world.engine.slow["env-math"] = asyncio.Event()

    await world.reload.look_images(timeout_s=0.05)

    assert world.catalog.named("game").image_id == "sha256:g1"
    assert world.reload.is_settled("game")
    assert not world.reload.is_settled("math")
    assert not world.reload.may_start("math")  # its worker would be of a make that nobody wants in a moment

    world.engine.slow["env-math"].set()
    await until(lambda: world.reload.is_settled("math"))
    assert world.math.image_id == "sha256:m1"
    assert world.reload.may_start("math")


async def test_an_image_is_asked_for_once_at_a_time(world: World) -> None:
    world.engine.slow["env-math"] = asyncio.Event()
    for _ in range(3):
        await world.reload.look_images(timeout_s=0.01)

    assert world.engine.asked.count("env-math") == 1


async def test_an_engine_that_does_not_answer_leaves_what_is_known(
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


async def test_an_engine_that_names_nothing_any_more_leaves_what_is_known(world: World) -> None:
    await world.look_images()
    world.engine.ids["env-math"] = ""

    await world.look_images()

    assert world.math.image_id == "sha256:m1"


async def test_an_environment_whose_image_was_never_known_is_not_settled_and_may_fail_to_start(world: World) -> None:
    del world.engine.ids["env-math"]

    await world.look_images()

    assert not world.reload.is_settled("math")
    assert world.reload.may_start("math")  # and the start tells openings why it can't

    world.engine.ids["env-math"] = "sha256:m1"
    await world.look_images()
    assert world.reload.is_settled("math")


async def test_every_other_reason_is_told(world: World, caplog: pytest.LogCaptureFixture) -> None:
    for error in ("one", "one", "two", "one"):
        world.engine.ids["env-math"] = StartFailed(error)
        await world.look_images()

    told = [line.rpartition("=")[2] for line in logged(caplog, "environment_image_unknown")]
    assert told == ["one", "two", "one"]

    world.engine.ids["env-math"] = "sha256:m1"
    await world.look_images()
    world.engine.ids["env-math"] = StartFailed("one")
    await world.look_images()
    assert len(logged(caplog, "environment_image_unknown")) == 4  # it had an end between


async def test_a_fault_of_one_question_is_logged_and_asked_again(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.engine.ids["env-math"] = ValueError("a bug")

    await world.look_images()

    assert world.reload.is_settled("game")
    assert world.reload.may_start("math")
    assert "a bug" in caplog.text


async def test_a_server_that_runs_already_and_one_of_which_nobody_asks_are_settled(world: World) -> None:
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


async def test_workers_without_images_are_settled_once_that_is_known(world: World) -> None:
    world.engine.ids["env-math"] = ""
    before = world.math

    await world.look_images()

    assert world.math is before
    assert world.reload.is_settled("math")


async def test_another_image_takes_effect_when_it_is_there_and_all_at_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    await world.look_images()
    before = world.math
    world.write("math", MATH.replace("env-math", "env-math:2") + "[limits]\ncpus = 2\n")

    await world.look()
    await world.look_images()
    assert world.math is before  # good workers do not go for an image that nobody has
    assert world.reload.is_settled("math")

    world.engine.ids["env-math:2"] = "sha256:m2"
    await world.look_images()
    assert (world.math.image, world.math.image_id, world.math.limits.cpus) == ("env-math:2", "sha256:m2", 2)
    assert len(logged(caplog, "environment_changed environment=math what=configuration")) == 1


async def test_while_another_image_is_not_to_be_had_the_one_in_use_is_still_looked_at(
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


async def test_a_new_leader_settles_nothing_by_what_it_knew_before(world: World) -> None:
    await world.look_images()
    world.engine.ids["env-math"] = "sha256:m2"  # the one that led has workers of it already

    world.reload.ask_again()
    assert not world.reload.is_settled("math")
    assert not world.reload.may_start("math")

    await until(lambda: world.reload.is_settled("math"))
    assert world.math.image_id == "sha256:m2"


async def test_a_leader_whose_engine_is_silent_takes_no_worker_for_outdated(world: World) -> None:
    await world.look_images()
    world.engine.ids["env-math"] = BackendError("the engine does not answer")

    world.reload.ask_again()
    await world.look_images()

    assert (world.reload.is_settled("math"), world.reload.is_settled("game")) == (False, True)
    assert world.reload.may_start("math")


async def test_an_image_that_was_never_there_is_replaced_at_once(world: World) -> None:
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


async def test_an_environment_that_becomes_a_server_of_somebody_elses_has_no_image(world: World) -> None:
    await world.look_images()
    world.write("math", 'name = "math"\nprotocol = "openenv"\n[server]\nurl = "http://10.0.0.7"\n')

    await world.look()

    assert (world.math.server.url, world.math.image_id) == ("http://10.0.0.7", "")
    assert world.reload.is_settled("math")


async def test_a_change_of_mind_while_another_image_is_pulled_keeps_the_first(world: World) -> None:
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


async def test_a_change_that_is_taken_back_before_it_took_effect_is_none(
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


async def test_what_is_withdrawn_while_its_image_is_pulled_is_not_waited_for(world: World) -> None:
    world.engine.slow["env-math"] = asyncio.Event()
    await world.reload.look_images(timeout_s=0.01)

    world.remove("math")
    await world.look(times=2)

    await until(lambda: world.engine.cancelled == 1)
    assert world.reload.is_settled("math")


def test_pauses_between_failed_questions_grow() -> None:
    pauses = [retry_s(failures) for failures in range(1, 9)]

    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[1], pauses[-1], retry_s(10_000)) == (2.0, 4.0, RETRY_MAX_S, RETRY_MAX_S)


# -- the loop -------------------------------------------------------------------------------------------------------


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "POLL_S", 0.01)


@pytest.mark.usefixtures("hurried")
async def test_the_loop_takes_up_files_and_images_and_ends_its_questions(
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
async def test_the_loop_asks_for_the_image_of_what_is_offered_anew(world: World) -> None:
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
async def test_the_loop_asks_for_the_image_again_after_each_change(world: World) -> None:
    running = asyncio.create_task(world.reload.run())
    try:
        await until(lambda: world.reload.is_settled("math"))
        world.write("math", MATH + "[limits]\ncpus = 2\n")
        await until(lambda: world.engine.asked.count("env-math") == 2)
    finally:
        running.cancel()
        await asyncio.wait({running})

    assert world.engine.asked.count("env-game") == 1
