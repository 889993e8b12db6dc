"""The generated environment.toml of a third-party server: it loads, invents nothing and overwrites nothing."""

from __future__ import annotations

import itertools
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.catalog.inspect.findings import Capacity, Finding, Findings, FoundSplit, Ran
from gateway.catalog.inspect.toml_writer import check_name, check_place, environment_of, file_text, memory_mib
from gateway.catalog.toml import STATIC_IMAGE, read_environment
from gateway.cli.env import default_name, put
from gateway.core.environment import (
    ActionMapping,
    ActionType,
    Environment,
    ObservationType,
    Relaxations,
    ResetMapping,
    Server,
    ServerProtocol,
    SplitType,
    UpstreamKind,
)
from gateway.core.errors import ConfigError
from gateway.core.routes import RESERVED

URL = "http://10.0.0.7:8000/env"
MIB = 2**20
TRAIN = FoundSplit("train", SplitType.TRAIN, 20)
OPENENV = Findings(
    protocol=ServerProtocol.OPENENV,
    version="openenv 0.8 or later",
    environments=("counter",),
    chosen="counter",
    ready="/health",
    capacity=Capacity(1, Finding.BY_SERVER),
    splits=(TRAIN,),
    fields=("message",),
    text_field="message",
    places=True,
)
NAMELESS = replace(OPENENV, environments=(), chosen="", splits=(), places=False)
MCP = replace(NAMELESS, fields=(), tools=("echo", "end"), text_field="")
ORS = Findings(
    protocol=ServerProtocol.ORS,
    version="ors-sdk",
    environments=("riddles", "sums"),
    chosen="riddles",
    ready="/health",
    capacity=Capacity(16, Finding.ASSUMED),
    splits=(FoundSplit("hard", SplitType.TRAIN, None), FoundSplit("odd", SplitType.TEST, 3)),
    tools=("answer",),
    default_tool="answer",
    text_field="text",
    remarks=("No ORS server tells how many sessions it holds.",),
)
AREAL = Findings(
    protocol=ServerProtocol.AREAL,
    version="an AReaL task server",
    description="Shell puzzles",
    environments=("os",),
    chosen="os",
    ready="/api/health",
    capacity=Capacity(16, Finding.ASSUMED),
    splits=(TRAIN,),
    max_turns=8,
    observation_type=ObservationType.MESSAGES,
    action_type=ActionType.STRUCTURED,
)
OWN = replace(ORS, is_own=True, version="this project's environment server 0.1.0")
RAN = Ran(image="registry.example/counter:1", port=8000, memory_bytes=157 * MIB, pids=13, start_s=3.7)
KINDS = {"openenv": OPENENV, "mcp": MCP, "ors": ORS, "areal": AREAL}


def read(tmp_path: Path, text: str) -> Environment:
    path = tmp_path / "env_images" / "thing" / "environment.toml"
    return put(path, text, force=True)


@pytest.mark.parametrize("findings", KINDS.values(), ids=KINDS)
def test_the_file_of_a_url_describes_the_same_environment_as_serving_the_url_directly(
    tmp_path: Path, findings: Findings
) -> None:
    environment = read(tmp_path, file_text("thing", findings, url=URL + "/"))

    assert environment == replace(environment_of("thing", URL, findings), directory=environment.directory)
    assert (environment.image, environment.server) == (STATIC_IMAGE, Server(url=URL, ready=findings.ready))
    assert (environment.pool.slots, environment.pool.max_workers) == (findings.capacity.slots, 1)


@pytest.mark.parametrize("findings", KINDS.values(), ids=KINDS)
def test_the_file_of_an_image_describes_the_findings(tmp_path: Path, findings: Findings) -> None:
    environment = read(tmp_path, file_text("thing", findings, ran=RAN))

    assert environment.image == RAN.image
    assert environment.server == Server(port=8000, ready=findings.ready)
    assert environment.wire is UpstreamKind(findings.protocol.value)
    assert environment.needs_an_engine
    assert environment.loosened == Relaxations()
    assert (environment.limits.memory_bytes, environment.limits.pids) == (320 * MIB, 256)
    assert environment.actions == ActionMapping(default_tool=findings.default_tool, text_field=findings.text_field)
    usual = environment_of("thing", URL, findings)
    assert (environment.areal, environment.openenv) == (usual.areal, usual.openenv)
    assert (environment.resets, environment.upstream_name) == (usual.resets, usual.upstream_name)


def test_reset_keys_and_splits_are_written_to_the_file(tmp_path: Path) -> None:
    counter = read(tmp_path, file_text("thing", OPENENV, ran=RAN))
    riddles = read(tmp_path, file_text("thing", ORS, ran=RAN))
    shell = read(tmp_path, file_text("thing", AREAL, ran=RAN))

    assert counter.resets == ResetMapping(keys=("seed", "episode_id", "split", "index"))
    assert (counter.areal.split, counter.openenv.split) == ("train", "train")
    assert (riddles.areal.split, riddles.openenv.split) == ("hard", "hard")
    assert (shell.areal.max_turns, shell.description, shell.upstream_name) == (8, "Shell puzzles", "")
    assert (shell.areal.observation_type, shell.areal.action_type) == ("messages", "structured")


def test_measured_times_become_limits_with_room_for_a_busy_server(tmp_path: Path) -> None:
    slow = read(tmp_path, file_text("thing", replace(OPENENV, reset_s=44.2, step_s=13.1), ran=RAN))
    text = file_text("thing", replace(OPENENV, reset_s=0.2, step_s=0.1), ran=RAN)
    quick = read(tmp_path, text)

    assert (slow.openenv.reset_s, slow.openenv.step_s) == (slow.areal.start_s, slow.areal.step_s) == (180, 60)
    assert (slow.timeouts.setup_s, quick.timeouts.setup_s) == (180, 60)
    assert (quick.openenv.reset_s, quick.areal.step_s) == (50, 50)
    assert "step_s = 50 # found: the slowest step of the trial took 0.1 s" in text


def test_a_needed_relaxation_is_written_with_its_reason(tmp_path: Path) -> None:
    loosened = Relaxations(writable_root=True, user="0:0")
    text = file_text("thing", ORS, ran=replace(RAN, loosened=loosened, reason="OSError: Read-only\nfile system"))

    assert read(tmp_path, text).loosened == loosened
    assert "it does not run hardened (OSError: Read-only file system)" in text
    assert "Nothing had to be loosened" in file_text("thing", ORS, ran=RAN)


def test_an_image_of_the_gateways_own_kind_stays_on_its_socket(tmp_path: Path) -> None:
    environment = read(tmp_path, file_text("thing", OWN, ran=replace(RAN, port=0)))

    assert (environment.wire, environment.server, environment.needs_an_engine) == (UpstreamKind.OWN, Server(), True)


@pytest.mark.parametrize(("findings", "place"), list(itertools.product(KINDS.values(), ["image", "url"])))
def test_each_value_says_whether_it_was_found(findings: Findings, place: str) -> None:
    text = file_text("thing", findings, ran=RAN) if place == "image" else file_text("thing", findings, url=URL)

    for line in text.splitlines():
        assert len(line) <= 240
        if line and not line.startswith(("#", "[")):
            value, _, why = line.rpartition(" # ")
            assert value, f"no word about {line!r}"
            assert why.startswith(("found", "assumed", "as given", "what trainers", "of the engine", "a server")), line


def test_text_from_the_server_cannot_break_the_file(tmp_path: Path) -> None:
    nasty = 'a"b\\\n[loosened]\nwritable_root = true # \x00\x7f\u2028é🎲'
    findings = replace(
        ORS,
        description=nasty,
        version=nasty,
        environments=(nasty, nasty),
        chosen=nasty,
        tools=(nasty,),
        default_tool=nasty,
        text_field=nasty,
        splits=(FoundSplit(nasty, SplitType.TEST, 1),),
        fields=(nasty,),
        trouble=nasty,
        remarks=(nasty,),
    )
    ran = replace(RAN, reason=nasty, variables={"A": nasty})

    environment = read(tmp_path, file_text("thing", findings, ran=ran))

    assert environment.loosened == Relaxations()
    assert environment.actions == ActionMapping(default_tool=nasty, text_field=nasty)
    assert environment.variables == {"A": nasty}
    assert environment.upstream_name == ""  # The text is not a valid name.
    assert read(tmp_path, file_text("thing", findings, url=URL)).actions.default_tool == nasty


@pytest.mark.parametrize(
    ("used", "allowed"), [(1, 256), (128 * MIB, 256), (129 * MIB, 320), (1000 * MIB, 2048), (4096 * MIB, 8192)]
)
def test_the_memory_limit_is_twice_the_use_rounded_up_in_steps(used: int, allowed: int) -> None:
    assert memory_mib(used) == allowed


def test_limits_that_the_engine_does_not_report_are_assumed(tmp_path: Path) -> None:
    text = file_text("thing", ORS, ran=Ran(image="x", port=80))

    table = tomllib.loads(text)
    assert table["limits"]["memory_mib"] == 512
    assert "memory_mib = 512 # assumed" in text
    assert "start_s" not in table["timeouts"]


@pytest.mark.parametrize("name", ["", "Upper", "1st", "a b", "a/b", "é", "x" * 64, "../x"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid name for an environment"):
        check_name(name)


def test_a_reserved_name_is_refused() -> None:
    for name in RESERVED - {"openapi.json"}:
        with pytest.raises(ConfigError, match="reserved"):
            check_name(name)
    assert check_name("counter-2_b") == "counter-2_b"


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("counter", "counter"),
        ("env-gateway-test/openenv-counter:latest", "openenv-counter"),
        ("registry.example:5000/team/My.Image:1.2", "my-image"),
        ("x@sha256:0123", "x"),
        ("http://host:8000/env/Chess/", "chess"),
        ("https://games.example", "games-example"),
        ("http://10.0.0.7:8000/a", "a"),
        ("http://10.0.0.7:8000", "env-10-0-0-7"),
        ("8ball", "env-8ball"),
    ],
)
def test_a_default_name_is_derived_from_the_image_or_url(what: str, name: str) -> None:
    assert default_name(what) == name


@pytest.mark.parametrize("what", [":", "http://"])
def test_without_a_derivable_name_the_error_asks_for_one(what: str) -> None:
    with pytest.raises(ConfigError, match="choose one with --name"):
        default_name(what)


def test_a_file_is_overwritten_only_if_that_is_forced(tmp_path: Path) -> None:
    path = tmp_path / "catalog" / "thing" / "environment.toml"
    text = file_text("thing", ORS, url=URL)
    put(path, text, force=False)

    with pytest.raises(ConfigError, match="exists"):
        put(path, file_text("thing", AREAL, url=URL), force=False)
    with pytest.raises(ConfigError, match="already exists"):
        check_place(tmp_path / "catalog", "thing", force=False)

    assert path.read_text() == text
    assert check_place(tmp_path / "catalog", "thing", force=True) == path
    put(path, file_text("thing", AREAL, url=URL), force=True)
    assert read_environment(path).protocol is ServerProtocol.AREAL
    assert list(path.parent.iterdir()) == [path]


def test_a_second_file_with_the_same_name_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "other" / "environment.toml", file_text("thing", ORS, url=URL), force=False)

    with pytest.raises(ConfigError, match=r"other/environment.toml describes an environment 'thing' already"):
        check_place(tmp_path, "thing", force=True)


@pytest.mark.parametrize("text", ["name = 3", "= x", 'name = "thing"\nprotocol = "openenv"\n'])
def test_a_file_that_does_not_load_is_not_left_behind(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        put(tmp_path / "new" / "catalog" / "thing" / "environment.toml", text, force=False)

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "catalog").write_text("a file")

    with pytest.raises(ConfigError, match="catalog"):
        put(tmp_path / "catalog" / "thing" / "environment.toml", file_text("thing", ORS, url=URL), force=False)
