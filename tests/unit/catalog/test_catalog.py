"""Reading ``environment.toml``: the files that are refused, each with file, line and reason."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.catalog.catalog import Catalog, describe, load_catalog
from gateway.catalog.toml import line_of, read_environment
from gateway.core.environment import (
    ALL_GPUS,
    ActionMapping,
    ActionType,
    Areal,
    CustomTasks,
    Environment,
    Isolation,
    Limits,
    Nemo,
    ObservationMapping,
    ObservationType,
    OpenEnv,
    PoolPolicy,
    Relaxations,
    ResetMapping,
    SandboxLimits,
    Scorer,
    SeedRule,
    Server,
    ServerProtocol,
    StepLogging,
    StepLogPolicy,
    TaskView,
    Timeouts,
    Unexpected,
    Volume,
)
from gateway.core.errors import ConfigError, UnknownEnvironment
from gateway.core.ids import EnvironmentName, Owner
from gateway.core.routes import GATEWAY_SEGMENTS, ORS_OPERATIONS, ORS_ROUTES, RESERVED

GOOD = 'name = "math"\nimage = "env-math"\n'
SANDBOX = GOOD + 'isolation = "sandbox"\n'
FULL = """\
# all of it
name = "math"
image = "env-math:1"
description = "Sums."
command = ["python3", "-m", "sums"]
upstream_name = "mathenv"

[variables]
LEVEL = "hard"

[pool]
slots = 8
min_workers = 1
max_workers = 3
warm = 10
idle_worker_s = 5
pause_idle_s = 2.5
max_uses = 100

[limits]
memory_mib = 256
cpus = 0.5
pids = 64
tmp_mib = 8
gpus = 2

[timeouts]
idle_s = 30
start_s = 31.5
open_s = 32
setup_s = 33
call_s = 34
close_s = 35

[loosened]
user = "0:0"
writable_root = true
network = "bridge"
capabilities = ["SYS_PTRACE"]

[areal]
name = "math-gateway"
description = "Sums, one answer each."
split = "extra"
max_turns = 8
observation_type = "messages"
action_type = "structured"
start_s = 40
step_s = 41.5

[tasks]
directory = "tasks/math"
"""


def written(root: Path, text: str | bytes, folder: str = "math") -> Path:
    """Write an environment's file into the folder of a catalog."""
    path = root / "env_images" / folder / "environment.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def complaint(path: Path) -> str:
    """Return the reason why the file at *path* is refused, without the path's folder."""
    with pytest.raises(ConfigError) as refusal:
        read_environment(path)
    return refusal.value.detail.replace(f"{path.parent}/", "")


# -- reading --------------------------------------------------------------------------------------------------------


def test_two_lines_are_an_environment_with_the_documented_defaults(tmp_path: Path) -> None:
    environment = read_environment(written(tmp_path, GOOD))

    assert environment == Environment(
        name=EnvironmentName("math"),
        image="env-math",
        directory=(tmp_path / "env_images" / "math").resolve(),
        command=("python3", "server.py"),
    )
    assert read_environment(written(tmp_path, GOOD)).timeouts.idle_s == 300


def test_every_key_sets_its_field(tmp_path: Path) -> None:
    (tmp_path / "tasks" / "math").mkdir(parents=True)
    (tmp_path / "tasks" / "math" / "extra.jsonl").touch()

    environment = read_environment(written(tmp_path, FULL))

    assert environment == Environment(
        name=EnvironmentName("math"),
        image="env-math:1",
        description="Sums.",
        directory=(tmp_path / "env_images" / "math").resolve(),
        command=("python3", "-m", "sums"),
        upstream_name="mathenv",
        variables={"LEVEL": "hard"},
        pool=PoolPolicy(
            slots=8, min_workers=1, max_workers=3, warm=10, idle_worker_s=5, pause_idle_s=2.5, max_uses=100
        ),
        limits=Limits(memory_bytes=256 * 2**20, cpus=0.5, pids=64, tmp_bytes=8 * 2**20, gpus=2),
        timeouts=Timeouts(idle_s=30, start_s=31.5, open_s=32, setup_s=33, call_s=34, close_s=35),
        loosened=Relaxations(user="0:0", writable_root=True, network="bridge", capabilities=("SYS_PTRACE",)),
        areal=Areal(
            name="math-gateway",
            description="Sums, one answer each.",
            split="extra",
            max_turns=8,
            observation_type=ObservationType.MESSAGES,
            action_type=ActionType.STRUCTURED,
            start_s=40,
            step_s=41.5,
        ),
        tasks=(tmp_path / "tasks" / "math").resolve(),
    )
    assert environment.worker_name == "mathenv"


def test_the_split_that_areal_serves_must_exist(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "test.jsonl").touch()
    tasks = '[tasks]\ndirectory = "tasks"\n'

    said = complaint(written(tmp_path, GOOD + tasks + '[areal]\nsplit = "train"\nmax_turns = 3\n'))
    served = read_environment(written(tmp_path, GOOD + tasks + '[areal]\nsplit = "test"\n'))
    by_default = read_environment(written(tmp_path, GOOD + tasks))

    assert said.startswith("environment.toml:6: areal.split: ")
    assert "train.jsonl: no such file" in said
    assert (served.areal.split, by_default.areal) == ("test", Areal())


def test_a_sandboxed_environment_may_set_sandbox_limits_and_a_network(tmp_path: Path) -> None:
    limits = "memory_mib = 256\npids = 64\ndisk_mib = 32\ncpu_s = 60"
    text = f'{SANDBOX}[sandbox]\n{limits}\n[loosened]\nnetwork = "mirrors"\n'

    environment = read_environment(written(tmp_path, text))

    assert environment.isolation is Isolation.SANDBOX
    assert environment.sandbox == SandboxLimits(memory_bytes=2**28, pids=64, disk_bytes=2**25, cpu_s=60)
    assert read_environment(written(tmp_path, SANDBOX)).sandbox == SandboxLimits()
    assert describe(environment)["loosened"][1:] == ["network=mirrors"]
    assert "SETUID, SETGID" in describe(environment)["loosened"][0]


def test_a_tasks_folder_may_be_absolute(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    environment = read_environment(written(tmp_path, GOOD + f'[tasks]\ndirectory = "{elsewhere}"\n'))

    assert environment.tasks == elsewhere.resolve()


def test_exclusive_environments_have_workers_for_one_session(tmp_path: Path) -> None:
    text = GOOD + 'isolation = "exclusive"\n[pool]\nslots = 1\nmax_uses = 1\n'

    assert read_environment(written(tmp_path, text)).isolation is Isolation.EXCLUSIVE


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        pytest.param(GOOD + 'colour = "red"\n', "3: colour", "there is no such key", id="unknown key"),
        pytest.param(
            GOOD + "[pool]\nsolts = 3\n", "4: pool.solts", "there is no such key", id="unknown key in a table"
        ),
        pytest.param(GOOD + "[areal]\nmax_turns = 0\n", "4: areal.max_turns", "at least", id="no turns"),
        pytest.param(
            GOOD + '[areal]\nsample_ids = "dev-00000"\n', "4: areal.sample_ids", "the same name", id="one name for all"
        ),
        pytest.param(
            GOOD + '[areal]\nsample_ids = "dev-{}-{}"\n', "4: areal.sample_ids", "not a format", id="two numbers"
        ),
        pytest.param(
            GOOD + '[areal]\nobservation_type = "sound"\n',
            "4: areal.observation_type",
            "'text'",
            id="unknown observation",
        ),
        pytest.param(GOOD + "[gpu]\nany = 1\n", "3: gpu", "there is no such key", id="unknown table"),
        pytest.param('image = "x"\n', "1: name", "it is required", id="missing name"),
        pytest.param('# why\n\nname = "math"\ncommand = []\n', "1: image", "name an image", id="missing image"),
        pytest.param(GOOD + '[tasks]\nmodule = "a b"\n', "4: tasks.module", "must match", id="not a module's name"),
        pytest.param(GOOD + '[tasks]\nfolder = "../x"\n', "4: tasks.folder", "must match", id="not a folder's name"),
        pytest.param('name = "math"\nimage = ""\ncommand = []\n', "2: image", "name an image", id="empty image"),
        pytest.param('name = 3\nimage = "x"\n', "1: name", "a text", id="wrong type"),
        pytest.param(GOOD + '[pool]\nslots = "many"\n', "4: pool.slots", "an integer", id="wrong type in a table"),
        pytest.param(GOOD + "[pool]\nslots = 1.5\n", "4: pool.slots", "an integer", id="a fraction of a slot"),
        pytest.param(GOOD + "[pool]\nslots = 0\n", "4: pool.slots", "at least 1, not 0", id="no slots"),
        pytest.param(GOOD + "[pool]\nmax_workers = 0\n", "4: pool.max_workers", "at least", id="no workers"),
        pytest.param(
            GOOD + "[pool]\nmin_workers = -1\n", "4: pool.min_workers", "at least", id="a negative number of workers"
        ),
        pytest.param(GOOD + "[limits]\nmemory_mib = 8\n", "4: limits.memory_mib", "at least", id="no memory"),
        pytest.param(GOOD + "[limits]\ncpus = 0\n", "4: limits.cpus", "greater than 0", id="no CPU"),
        pytest.param(
            GOOD + "[limits]\ngpus = -1\n", "4: limits.gpus: ", "at least 0, not -1", id="a negative number of GPUs"
        ),
        pytest.param(GOOD + '[limits]\ngpus = "some"\n', "4: limits.gpus: ", "an integer", id="GPUs by a word"),
        pytest.param(GOOD + '[limits]\ngpu_ids = ["a b"]\n', "4: limits.gpu_ids", "must match", id="an invalid GPU id"),
        pytest.param(GOOD + '[limits]\ngpu_ids = ["0", "0"]\n', "4: limits.gpu_ids", "twice", id="a GPU twice"),
        pytest.param(
            GOOD + '[limits]\ngpus = 1\ngpu_ids = ["0"]\n', "5: limits.gpu_ids", "either gpus", id="GPUs in two ways"
        ),
        pytest.param(GOOD + "[pool]\nwarm = -1\n", "4: pool.warm", "at least", id="a negative number of warm slots"),
        pytest.param(
            GOOD + "[pool]\nslots = 2\nmax_workers = 3\nwarm = 7\n",
            "6: pool.warm",
            "at most 6: max_workers = 3 with 2 sessions each",
            id="more warm slots than the workers hold",
        ),
        pytest.param(
            GOOD + "[pool]\nslots = 9\nmax_uses = 1\nmax_workers = 3\nwarm = 4\n",
            "7: pool.warm",
            "with 1 session each",
            id="more warm slots than uses",
        ),
        pytest.param(
            GOOD + "[pool]\npause_idle_s = 60\n",
            "4: pool.pause_idle_s",
            "less than idle_worker_s = 60",
            id="a pause after the worker is stopped",
        ),
        pytest.param(GOOD + "[pool]\npause_idle_s = -1\n", "4: pool.pause_idle_s", "at least", id="a negative pause"),
        pytest.param(GOOD + "[limits]\ncpus = nan\n", "4: limits.cpus", "", id="NaN as the number of CPUs"),
        pytest.param(GOOD + "[timeouts]\nidle_s = 0\n", "4: timeouts.idle_s", "greater than 0", id="a timeout of 0"),
        pytest.param(GOOD + "[timeouts]\nopen_s = inf\n", "4: timeouts.open_s", "finite", id="an infinite timeout"),
        pytest.param(GOOD + "[limits]\ncpus = inf\n", "4: limits.cpus", "finite", id="an infinite number of CPUs"),
        *(
            pytest.param(
                GOOD + "[timeouts]\njudge_s = 60\n" + text,
                "4: timeouts.judge_s",
                f"the judge may take 60 s, and {limit}: give steps more",
                id=f"a judge that outlasts {limit}",
            )
            for text, limit in (
                ("", "[areal] step_s is 50"),
                ("[areal]\nstep_s = 60\n", "[areal] step_s is 60"),
                ("[areal]\nstep_s = 61\n", "[openenv] step_s is 50"),
                ("call_s = 59\n", "[timeouts] call_s is 59"),
            )
        ),
        pytest.param(GOOD + '[loosened]\nuser = "root"\n', "4: loosened.user", "must match", id="a user by name"),
        pytest.param(
            GOOD + '[loosened]\nnetwork = "a b"\n', "4: loosened.network", "must match", id="an invalid network name"
        ),
        pytest.param(
            GOOD + 'protocol = "smtp"\n', "3: protocol", "'ors', 'openenv', 'areal' or 'nemo'", id="unknown protocol"
        ),
        pytest.param(GOOD + 'protocol = "openenv"\n', "3: protocol", "needs [server] port", id="no port"),
        pytest.param(
            GOOD + "[sandbox]\npids = 64\n", "3: sandbox", "needs isolation", id="sandbox limits without a sandbox"
        ),
        pytest.param(SANDBOX + "[sandbox]\npids = 0\n", "5: sandbox.pids", "at least", id="no processes"),
        pytest.param(SANDBOX + "[sandbox]\nmemory_mib = 1\n", "5: sandbox.memory_mib", "at least", id="tiny sandbox"),
        *(
            pytest.param(
                f"{SANDBOX}[loosened]\n{line}\n", "4: loosened", "only network can be loosened", id=f"sandbox, {line}"
            )
            for line in ('user = "0:0"', "writable_root = true", 'capabilities = ["SETUID"]')
        ),
        pytest.param(
            GOOD + "[pool]\nmax_workers = 2\nmin_workers = 3\n",
            "5: pool.min_workers",
            "at most max_workers = 2, not 3",
            id="min_workers above max_workers",
        ),
        pytest.param(
            GOOD + 'isolation = "exclusive"\n[pool]\nslots = 2\nmax_uses = 1\n',
            "3: isolation",
            "slots = 1 and max_uses = 1",
            id="exclusive with two slots",
        ),
        pytest.param(
            GOOD + 'isolation = "exclusive"\n[pool]\nslots = 1\n',
            "3: isolation",
            "max_uses = 1",
            id="exclusive with many uses",
        ),
        pytest.param(
            GOOD + '[tasks]\ndirectory = "nosuch"\n',
            "4: tasks.directory",
            "no such folder",
            id="a missing tasks folder",
        ),
        pytest.param(
            GOOD + '[variables]\nENVSERVER_PORT = "1"\n',
            "4: variables.ENVSERVER_PORT",
            "begin with a digit or ENVSERVER_",
            id="a variable of the gateway",
        ),
        pytest.param(
            GOOD + '[variables]\n"A B" = "1"\n',
            "variables.A B",
            "begin with a digit or ENVSERVER_",
            id="an invalid variable name",
        ),
        pytest.param(
            GOOD + '[variables]\n"A=B" = "1"\n',
            "variables.A=B",
            "begin with a digit or ENVSERVER_",
            id="a variable name with an equals sign",
        ),
        pytest.param(GOOD + "[variables]\nA = 1\n", "4: variables.A", "a text", id="a variable that is not a string"),
        pytest.param('name = "math\nimage = "x"\n', "1: ", "at line 1", id="syntax error"),
        pytest.param(GOOD + "pool = \n", "3: ", "Invalid value", id="a missing value"),
        pytest.param('name = "a"\nname = "b"\n', "2: ", "overwrite", id="a duplicate key"),
        pytest.param('name = """math\n\nimage', "3: ", "end of", id="an unterminated string"),
    ],
)
def test_an_error_in_a_file_is_reported_with_its_line(tmp_path: Path, text: str, where: str, reason: str) -> None:
    said = complaint(written(tmp_path, text))

    assert said.startswith("environment.toml:")
    assert where in said
    assert reason in said


@pytest.mark.parametrize("name", ["Math", "1math", "-math", "ma th", "math/x", "", "m" * 64, "é"])
def test_a_name_that_is_long_or_not_fit_for_a_path_is_refused(tmp_path: Path, name: str) -> None:
    said = complaint(written(tmp_path, f'image = "x"\nname = "{name}"\n'))

    assert said.startswith("environment.toml:2: name: ")


@pytest.mark.parametrize("name", sorted(RESERVED))
def test_the_name_of_a_route_or_operation_is_refused(tmp_path: Path, name: str) -> None:
    said = complaint(written(tmp_path, f'image = "x"\nname = "{name}"\n'))

    assert said.startswith("environment.toml:2: name: ")
    assert "reserved" in said or not name.isidentifier()


def test_the_reserved_names_are_those_of_the_protocol_and_of_the_gateways_own_routes() -> None:
    protocol = "health version ping list_environments create delete create_session delete_session docs redoc"
    operations = "tools splits tasks num_tasks task task_range prompt task_tools call messages score_group"
    ours = "areal api openenv nemo v1 dashboard k admin metrics healthz readyz openapi.json peers"

    assert set(protocol.split()) == ORS_ROUTES
    assert set(operations.split()) == ORS_OPERATIONS
    assert set(ours.split()) == GATEWAY_SEGMENTS


def test_all_errors_of_a_file_are_reported_together(tmp_path: Path) -> None:
    said = complaint(written(tmp_path, 'name = "math"\nimage = 3\n[pool]\nslots = 0\n')).splitlines()

    assert [line.split(" ")[0] for line in said] == ["environment.toml:2:", "environment.toml:4:"]


def test_a_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    assert "not UTF-8" in complaint(written(tmp_path, b'name = "\xff"\n'))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert complaint(tmp_path / "environment.toml") == "environment.toml: No such file or directory"


@pytest.mark.parametrize("name", ["a b", "a/b", "a?b", "math\\r\\nx: y", "é"])
def test_an_upstream_name_that_is_not_fit_for_a_path_is_refused(tmp_path: Path, name: str) -> None:
    # The gateway writes the name into the request line unchanged.
    assert "upstream_name" in complaint(written(tmp_path, GOOD + f'upstream_name = "{name}"\n'))


# -- lines ----------------------------------------------------------------------------------------------------------

SOURCE = """\
name = "math"

[pool]  # how many
slots = 4

[ limits ]
"cpus" = 1
[a.b]
c.d = 2
[[list]]
x = 1
[[list]]
x = 2
"""


@pytest.mark.parametrize(
    ("location", "line"),
    [
        (("name",), 1),
        (("nosuch",), 1),
        (("pool",), 3),
        (("pool", "slots"), 4),
        (("pool", "nosuch"), 3),
        (("limits", "cpus"), 7),
        (("a", "b"), 8),
        (("a", "b", "c", "d"), 9),
        (("a", "b", "c", "d", "0"), 9),
        (("list",), 10),
        (("list", 0, "x"), 11),
        (("list", 1), 12),
        (("list", "1", "x"), 13),
        (("list", 1, "nosuch"), 12),
        ((), 1),
    ],
)
def test_the_line_of_a_key_is_found_or_that_of_its_table(location: tuple[int | str, ...], line: int) -> None:
    assert line_of(SOURCE, location) == line


# -- the catalog ----------------------------------------------------------------------------------------------------


def catalog_of(tmp_path: Path, *names: str, **options: Any) -> Catalog:
    for name in names:
        written(tmp_path, f'name = "{name}"\nimage = "x"\n', folder=name)
    return load_catalog(tmp_path / "env_images", **options)


def test_all_environments_of_the_folder_are_served_by_name(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, "zeta", "alpha")

    assert [environment.name for environment in catalog] == ["alpha", "zeta"]
    assert (catalog.default.name, len(catalog)) == ("alpha", 2)


def test_only_the_named_environments_are_served_in_the_given_order(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, "alpha", "beta", "zeta", names=("zeta", "alpha"))

    assert [environment.name for environment in catalog] == ["zeta", "alpha"]


def test_the_default_environment_comes_first(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, "alpha", "beta", "zeta", default="Beta")

    assert [environment.name for environment in catalog] == ["beta", "alpha", "zeta"]


def test_names_are_matched_without_regard_to_case(tmp_path: Path) -> None:
    catalog = catalog_of(tmp_path, "alpha")

    assert catalog.known.get("alpha") is catalog.named("alPHa") is catalog.default
    assert catalog.known.get("beta") is None
    with pytest.raises(UnknownEnvironment, match=r"^unknown environment 'Beta'; there are alpha$"):
        catalog.named("Beta")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"names": ("nosuch",)}, "no environment nosuch; there are alpha"),
        ({"default": "nosuch"}, "default_environment 'nosuch' is not available; choose one of alpha"),
        ({"names": ("alpha", "alpha")}, "two environments have the same name"),
    ],
)
def test_an_invalid_choice_of_environments_is_refused(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        catalog_of(tmp_path, "alpha", **options)


def test_environments_that_cannot_run_on_a_backend_are_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, GOOD.replace("math", "pages") + "command = []\n", folder="pages")
    written(tmp_path, GOOD.replace("math", "shell") + 'isolation = "sandbox"\n', folder="shell")
    written(tmp_path, 'name = "local"\n', folder="local")
    catalog = catalog_of(tmp_path, "alpha", "beta")
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))

    local, contained = catalog.runnable(containers=False), catalog.runnable(containers=True)
    (programs / "bwrap").touch(0o755)
    with_bubblewrap = catalog.runnable(containers=False)

    assert [environment.name for environment in local] == ["alpha", "beta", "local"]
    assert "no bwrap on PATH: install bubblewrap" in local.left_out["shell"]
    assert "use GATEWAY_BACKEND=docker" in local.left_out["pages"]
    with pytest.raises(UnknownEnvironment, match=r"'Shell' is not available: its sandboxes need bubblewrap"):
        local.wanted("Shell")
    with pytest.raises(UnknownEnvironment, match=r"^unknown environment 'nope'; there are alpha, beta, local$"):
        local.wanted("nope")
    assert [environment.name for environment in with_bubblewrap] == ["alpha", "beta", "local", "shell"]
    assert [environment.name for environment in contained] == ["alpha", "beta", "pages", "shell"]
    assert "names no image" in contained.left_out["local"]
    with pytest.raises(ConfigError, match="'pages' is not available: it runs in its image only"):
        catalog.runnable(containers=False, default="pages")
    with pytest.raises(ConfigError, match="no environment is available: pages: it runs in its image only"):
        Catalog([catalog.named("pages")]).runnable(containers=False)


def test_two_files_with_one_name_are_refused(tmp_path: Path) -> None:
    written(tmp_path, GOOD, folder="copy")

    with pytest.raises(ConfigError, match="the same name"):
        catalog_of(tmp_path, "math")


def test_a_missing_or_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        load_catalog(tmp_path / "nosuch")
    with pytest.raises(ConfigError, match=r"no \*/environment.toml"):
        load_catalog(tmp_path)
    with pytest.raises(ConfigError, match="no environment is available"):
        Catalog([])


# -- the digest -----------------------------------------------------------------------------------------------------

BASE = Environment(name=EnvironmentName("math"), image="one", directory=Path("/a"), command=("python3", "server.py"))
OTHER_LIMITS: dict[str, Any] = {"gpu_ids": ("GPU-1",)}
"""Values for the limits that are not numbers."""
WORKERS_ARE_MADE_ANEW = {
    "name": replace(BASE, name=EnvironmentName("sums")),
    "image": replace(BASE, image="two"),
    "command": replace(BASE, command=("python3",)),
    "protocol": replace(BASE, protocol=ServerProtocol.OPENENV),
    "isolation": replace(BASE, isolation=Isolation.SANDBOX),
    "upstream_name": replace(BASE, upstream_name="mathenv"),
    "variables": replace(BASE, variables={"A": "1"}),
    "pool.slots": replace(BASE, pool=PoolPolicy(slots=1)),
    **{
        f"limits.{field.name}": replace(BASE, limits=replace(BASE.limits, **{field.name: other}))
        for field in dataclasses.fields(Limits)
        for other in [OTHER_LIMITS.get(field.name, 77)]
    },
    "image_id": replace(BASE, image_id="sha256:1"),
    **{
        f"sandbox.{field.name}": replace(BASE, sandbox=SandboxLimits(**{field.name: 2**20}))
        for field in dataclasses.fields(SandboxLimits)
    },
    **{
        f"custom_tasks.{name}": replace(BASE, custom_tasks=CustomTasks(**{"module": "m", "folder": "f", name: "x"}))
        for name in ("module", "folder", "content")
    },
    "scorer.files": replace(BASE, scorer=Scorer(files=("*.py",))),
    "scorer.packages": replace(BASE, scorer=Scorer(packages=("one",))),
    "unexpected": replace(BASE, unexpected=Unexpected.FAIL),
    "server.port": replace(BASE, server=Server(port=8000)),
    "server.url": replace(BASE, server=Server(url="http://127.0.0.1:8000")),
    "volumes": replace(BASE, volumes=(Volume(source="data", target="/data"),)),
    "loosened.user": replace(BASE, loosened=Relaxations(user="0:0")),
    "loosened.writable_root": replace(BASE, loosened=Relaxations(writable_root=True)),
    "loosened.network": replace(BASE, loosened=Relaxations(network="bridge")),
    "loosened.capabilities": replace(BASE, loosened=Relaxations(capabilities=("SYS_PTRACE",))),
}
WORKERS_STAY = {
    "directory": replace(BASE, directory=Path("/b")),
    "description": replace(BASE, description="Sums."),
    "platform_keys": replace(BASE, platform_keys=True),
    "secrets": replace(BASE, secrets={"TOKEN": "env:TOKEN"}),
    "areal": replace(BASE, areal=Areal(max_turns=7)),
    "openenv": replace(BASE, openenv=OpenEnv(step_s=7)),
    "actions": replace(BASE, actions=ActionMapping(default_tool="step")),
    "resets": replace(BASE, resets=ResetMapping(keys=("task_name",))),
    "observations": replace(BASE, observations=ObservationMapping(hide=("metadata",))),
    "nemo": replace(BASE, nemo=Nemo(final_text=True)),
    "env_types": replace(BASE, env_types=("sums",)),
    "task_view": replace(BASE, task_view=TaskView.FULL),
    "seed_rule": replace(BASE, seed_rule=SeedRule.DRAWN),
    "public_fields": replace(BASE, public_fields=("config.level",)),
    "step_log": replace(BASE, step_log=StepLogPolicy(mode=StepLogging.OFF)),
    "tasks": replace(BASE, tasks=Path("/tasks")),
    "server.ready": replace(BASE, server=Server(ready="/health")),
    "base": replace(BASE, base=EnvironmentName("sums")),
    "tenants": replace(BASE, tenants={Owner("alice"): BASE.for_tenant("alice")}),
    "splits": replace(BASE, splits={"hard": replace(BASE, name=EnvironmentName("math.hard"))}),
    **{
        f"pool.{name}": replace(BASE, pool=PoolPolicy(**{name: 7}))  # type: ignore[arg-type]  # none is the flag
        for name in ("min_workers", "max_workers", "warm", "idle_worker_s", "pause_idle_s", "max_uses")
    },
    "pool.learns_slots": replace(BASE, pool=replace(BASE.pool, learns_slots=True)),
    **{
        f"timeouts.{field.name}": replace(BASE, timeouts=replace(BASE.timeouts, **{field.name: 7.0}))
        for field in dataclasses.fields(Timeouts)
    },
}


def test_the_two_tables_name_every_field() -> None:
    named = {name.partition(".")[0] for name in (*WORKERS_ARE_MADE_ANEW, *WORKERS_STAY)}

    assert named == {field.name for field in dataclasses.fields(Environment)}


@pytest.mark.parametrize("changed", WORKERS_ARE_MADE_ANEW.values(), ids=WORKERS_ARE_MADE_ANEW.keys())
def test_a_change_that_needs_new_workers_changes_the_digest(changed: Environment) -> None:
    assert changed.digest() != BASE.digest()


@pytest.mark.parametrize("changed", WORKERS_STAY.values(), ids=WORKERS_STAY.keys())
def test_a_change_that_needs_no_new_workers_keeps_the_digest(changed: Environment) -> None:
    assert changed.digest() == BASE.digest()


def test_the_digest_does_not_depend_on_the_order_of_variables() -> None:
    one = replace(BASE, variables={"A": "1", "B": "2"})
    other = replace(BASE, variables={"B": "2", "A": "1"})

    assert one.digest() == other.digest()
    assert BASE.digest() == replace(BASE).digest()
    assert len(BASE.digest()) == 16


# -- the output of a check ------------------------------------------------------------------------------------------


def test_each_relaxation_is_listed_by_name() -> None:
    everything = Relaxations(user="0:0", writable_root=True, network="bridge", capabilities=("A", "B"))

    assert Relaxations().words() == ()
    assert everything.words() == ("user=0:0", "writable root", "network=bridge", "capability A", "capability B")


def test_a_check_shows_the_settings_of_an_environment() -> None:
    shown = describe(replace(BASE, loosened=Relaxations(user="0:0")))

    assert shown == {
        "name": "math",
        "image": "one",
        "protocol": "ors",
        "isolation": "shared",
        "workers": "0-4 x 16 slots",
        "resources": "1 CPU, 512 MiB",
        "idle_s": 300.0,
        "loosened": ["user=0:0"],
        "remarks": [],
    }


def test_a_check_shows_warm_slots_pauses_and_gpus() -> None:
    pool = PoolPolicy(slots=2, warm=3, pause_idle_s=30)
    one = describe(replace(BASE, pool=pool, limits=Limits(cpus=2.5, gpus=1)))
    every = describe(replace(BASE, limits=Limits(gpus=ALL_GPUS)))
    certain = describe(replace(BASE, limits=Limits(gpu_ids=("0", "GPU-1"))))
    other = describe(replace(BASE, server=Server(url="http://10.0.0.7")))

    assert one["workers"] == "0-4 x 2 slots, 3 warm, paused after 30 s"
    assert one["resources"] == "2.5 CPUs, 512 MiB, 1 GPU"
    assert every["resources"] == "1 CPU, 512 MiB, all GPUs"
    assert certain["resources"] == "1 CPU, 512 MiB, GPU 0, GPU-1"
    assert other["resources"] == "not ours"


def test_task_modules_are_listed_among_the_relaxations() -> None:
    shown = describe(replace(BASE, custom_tasks=CustomTasks(module="custom_tasks.mine", folder="math")))

    assert shown["loosened"] == ["task modules custom_tasks.mine of folder math"]
