"""``gateway env add URL`` and ``--static`` inspect real servers of all three protocols."""

from __future__ import annotations

import asyncio
import re
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path

import httpx
import pytest

from gateway.catalog import static_servers
from gateway.catalog.inspect.detect import detect_url
from gateway.catalog.inspect.findings import Capacity, Finding, FoundSplit
from gateway.catalog.inspect.toml_writer import environment_of
from gateway.catalog.static_servers import StaticServers
from gateway.catalog.toml import STATIC_IMAGE, read_environment
from gateway.core.environment import ActionMapping, Environment, Server, ServerProtocol, SplitType
from gateway.core.errors import ConfigError
from tests.deadlines import HANG_S
from tests.fakes.command import Done, in_process
from tests.fakes.ports import reserved_port
from tests.fakes.splicing import serving, splice
from tests.wire.openenv.clients import FIRST_ASYNC, NEWEST, OLDEST
from tests.wire.openenv.upstream_worlds import image
from tests.wire.processes import ServerProcess
from tests.wire.targets import World

pytestmark = [pytest.mark.wire, pytest.mark.needs("openenv-clients")]

PROJECT = Path(__file__).resolve().parents[2]
UVICORN = r"Uvicorn running on (http://[0-9.:]+)"
SEED_AND_ID = ("seed", "episode_id")
COUNTER_SPLITS = (FoundSplit("train", SplitType.TRAIN, 20), FoundSplit("test", SplitType.TEST, 5))
CLOSED_PORT = "http://127.0.0.1:9"

Start = Callable[..., str]
Env = Callable[..., Done]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a server once for each command and return its URL."""
    urls: dict[object, str] = {}
    with ExitStack() as undo:

        def started(*command: str, ready: str = UVICORN, cwd: Path = PROJECT, **variables: str) -> str:
            key = (command, cwd, tuple(variables.items()))
            if key not in urls:
                log = tmp_path_factory.mktemp("server") / "log"
                process = ServerProcess(command, variables=variables, ready=ready, log=log, cwd=cwd)
                undo.callback(process.stop)
                process.start()
                urls[key] = process.address
            return urls[key]

        yield started


OpenEnv = Callable[[str, str, int], str]
"""Starts an official server of a kind, release and capacity, once for all tests that use it, and returns its URL."""


@pytest.fixture(scope="module")
def openenv() -> Iterator[OpenEnv]:
    with ExitStack() as undo:

        @cache
        def started(kind: str, version: str, capacity: int) -> str:
            return undo.enter_context(image(kind, version=version, capacity=capacity)).url

        yield started


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Env]:
    """Run ``gateway env`` on a catalog in *tmp_path*."""
    variables = {"GATEWAY_CATALOG_DIR": str(tmp_path / "env_images"), "COLUMNS": "200"}
    with in_process(monkeypatch, capfd) as command:
        yield lambda *arguments: command("env", *arguments, **variables)


def official(world: World, package: str) -> str:
    return world.named(f"{package}-server").url


def areal(start: Start) -> str:
    return start(
        sys.executable, str(PROJECT / "tests" / "foreign" / "areal" / "server.py"), "--host", "127.0.0.1", "--port", "0"
    )


def own(start: Start) -> str:
    variables = {
        "PYTHONPATH": str(PROJECT / "env_images" / "base"),
        "ENVSERVER_HOST": "127.0.0.1",
        "ENVSERVER_PORT": "0",
    }
    ready = r"server_ready address=(127[0-9.:]+)"
    found = start(sys.executable, "math_server.py", ready=ready, cwd=PROJECT / "env_images" / "math", **variables)
    return f"http://{found}"


@pytest.mark.parametrize("package", ["ors", "openreward"])
async def test_an_official_ors_server_reports_its_environments_and_splits_and_tools(world: World, package: str) -> None:
    findings = await detect_url(official(world, package), timeout_s=HANG_S)

    assert findings.protocol is ServerProtocol.ORS
    assert findings.version == ("ors-sdk" if package == "ors" else "openreward 0.1.167")
    assert not findings.is_own
    assert findings.environments[:3] == ("probe", "counter", "slowsetup")
    assert findings.chosen == "probe"
    assert findings.capacity == Capacity(16, Finding.ASSUMED)
    assert findings.splits[0].name == "train"
    assert findings.splits[0].count
    assert {"echo", "finish"} <= set(findings.tools)
    assert (findings.default_tool, findings.text_field, findings.trouble) == ("", "", "")
    assert any("Each of the others (counter, slowsetup" in remark for remark in findings.remarks)


async def test_a_named_environment_of_several_is_inspected(world: World) -> None:
    url = official(world, "openreward")

    counter = await detect_url(url, timeout_s=HANG_S, environment="Counter")
    judge = await detect_url(url, timeout_s=HANG_S, environment="judge")

    assert (counter.chosen, counter.tools) == ("counter", ("add", "stop"))
    assert (judge.terminal, judge.default_tool) == ("answer.text", "")
    with pytest.raises(ConfigError, match="no environment 'nope'; there are probe, counter"):
        await detect_url(url, timeout_s=HANG_S, environment="nope")


async def test_the_gateways_own_server_is_recognized(start: Start) -> None:
    findings = await detect_url(own(start), timeout_s=HANG_S)

    assert (findings.protocol, findings.is_own) == (ServerProtocol.ORS, True)
    assert (findings.default_tool, findings.text_field) == ("submit", "answer")


def test_the_command_in_the_docs_adds_a_server(start: Start, env: Env, tmp_path: Path) -> None:
    docs = (PROJECT / "docs" / "images.md").read_text()
    (line,) = re.findall(r"^gateway env (add http://\S+) +#", docs, re.MULTILINE)
    url = own(start)

    done = env(*re.sub(r"http://\S+", url, line).split())

    assert done.returncode == 0, done.stderr
    added = read_environment(tmp_path / "env_images" / "env-127-0-0-1" / "environment.toml")
    assert added.server.url == url


@pytest.mark.parametrize(
    ("version", "shown", "splits"),
    [
        (OLDEST, "openenv-core 0.2.0", ()),
        (FIRST_ASYNC, "openenv-core 0.2.2 to openenv 0.4.0", ()),
        (
            NEWEST,
            "openenv 0.8 or later",
            (FoundSplit("train", SplitType.TRAIN, 20), FoundSplit("test", SplitType.TEST, 5)),
        ),
    ],
)
async def test_the_capacity_of_an_openenv_server_is_known_from_its_refusal(
    openenv: OpenEnv, version: str, shown: str, splits: tuple[FoundSplit, ...]
) -> None:
    url = openenv("counter", version, 3)

    findings = await detect_url(url, timeout_s=HANG_S)

    assert (findings.protocol, findings.version, findings.trouble) == (ServerProtocol.OPENENV, shown, "")
    assert findings.capacity == Capacity(3, Finding.BY_SERVER)
    assert findings.splits == splits
    assert findings.fields == ("op", "by", "file")
    assert findings.text_field == ""  # the field accepts only values of a closed list
    again = await detect_url(url, timeout_s=HANG_S)
    assert again.trouble == ""  # no slot was left taken
    assert again.capacity == Capacity(3, Finding.BY_SERVER)


async def test_an_openenv_server_without_a_refusal_holds_at_least_the_64_sessions_tried(openenv: OpenEnv) -> None:
    findings = await detect_url(openenv("counter", NEWEST, 100), timeout_s=HANG_S)

    assert findings.capacity == Capacity(64, Finding.AT_LEAST)


async def test_an_environment_on_mcp_shows_its_tools(openenv: OpenEnv) -> None:
    url = openenv("riddle", NEWEST, 1)

    findings = await detect_url(url, timeout_s=HANG_S)

    assert set(findings.tools) == {"echo_message", "fail", "finish"}
    assert (findings.default_tool, findings.text_field, findings.trouble) == ("", "", "")
    assert findings.capacity == Capacity(1, Finding.BY_SERVER)


async def test_an_areal_server_reports_its_samples_and_turns(start: Start) -> None:
    findings = await detect_url(areal(start), timeout_s=HANG_S)

    assert (findings.protocol, findings.trouble) == (ServerProtocol.AREAL, "")
    assert findings.splits == (FoundSplit("train", SplitType.TRAIN, 100),)
    assert findings.max_turns
    assert findings.ready == "/api/health"


async def test_a_static_server_is_one_worker_with_the_detected_settings(openenv: OpenEnv) -> None:
    url = openenv("counter", NEWEST, 3)

    environment = environment_of("remote", url + "/", await detect_url(url, timeout_s=HANG_S))

    assert (environment.name, environment.image, environment.command) == ("remote", STATIC_IMAGE, ())
    assert (environment.upstream_name, environment.worker_name) == ("counter", "counter")
    assert environment.server == Server(url=url, ready="/health")
    assert (environment.pool.slots, environment.pool.max_workers, environment.pool.learns_slots) == (3, 1, False)
    assert environment.resets.keys == (*SEED_AND_ID, "split", "index")
    assert environment.actions == ActionMapping()
    assert not environment.needs_an_engine


async def test_a_server_of_no_known_protocol_is_refused_with_its_answer(start: Start, tmp_path: Path) -> None:
    command = (sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path))
    url = start(*command, ready=r"\((http://[0-9.:]+)/\)")

    refused = f"^{url}: it answers HTTP, but as no ORS, OpenEnv, AReaL or NeMo Gym server: .* 404"
    with pytest.raises(ConfigError, match=refused):
        await detect_url(url, timeout_s=HANG_S)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (CLOSED_PORT, "no answer within 1 s"),
        ("ftp://127.0.0.1", "is not a URL"),
        ("http://127.0.0.1:99999", "99999"),
        ("http://user:pass@127.0.0.1:9", "has a user in it"),
    ],
)
async def test_a_url_without_a_server_is_refused_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        await detect_url(url, timeout_s=1)


async def test_detection_waits_for_a_server_that_is_not_up_yet(start: Start, tmp_path: Path) -> None:
    """The server starts to listen only after the first request."""
    asked = asyncio.Event()

    async def refuse(reader: StreamReader, writer: StreamWriter) -> None:
        asked.set()

    async def pass_on(reader: StreamReader, writer: StreamWriter) -> None:
        await splice((reader, writer), await asyncio.open_connection(target.host, target.port))

    target, port = httpx.URL(areal(start)), reserved_port()
    async with serving(refuse, port=port):
        looking = asyncio.create_task(detect_url(f"http://127.0.0.1:{port}", timeout_s=HANG_S))
        await asked.wait()
    async with serving(pass_on, port=port):
        assert (await looking).protocol is ServerProtocol.AREAL


async def test_a_server_is_recognized_although_its_first_tasks_fail(world: World) -> None:
    """Its first tasks need values that they do not get here, but the server itself works."""
    url = official(world, "ors")

    findings = await detect_url(url, timeout_s=HANG_S, environment="counter")

    assert findings.protocol is ServerProtocol.ORS
    assert findings.tools == ("add", "stop")


def test_the_command_writes_a_file_that_loads_and_names_the_next_command(
    openenv: OpenEnv, env: Env, tmp_path: Path
) -> None:
    url = openenv("counter", NEWEST, 3)

    done = env("add", url, "--name", "remote")

    assert done.returncode == 0, done.stderr
    path = tmp_path / "env_images" / "remote" / "environment.toml"
    environment = read_environment(path)
    assert environment.directory == path.parent
    assert environment.server == Server(url=url, ready="/health")
    assert environment == replace(
        environment_of("remote", url, asyncio.run(detect_url(url, timeout_s=HANG_S))), directory=path.parent
    )
    assert "# found: it refused concurrent session 4" in path.read_text()
    assert f"written: {path}" in done.stdout
    assert "gateway check" in done.stdout
    shown = env("show", "remote")
    assert url in shown.stdout
    listed = env("list")
    assert "remote" in listed.stdout


@pytest.mark.parametrize("kind", ["ors", "openreward", "areal", "own"])
def test_the_file_of_any_server_loads(start: Start, world: World, env: Env, tmp_path: Path, kind: str) -> None:
    url = official(world, kind) if kind in ("ors", "openreward") else {"areal": areal, "own": own}[kind](start)

    done = env("add", url, "--name", "any", "--catalog", str(tmp_path / "new" / "catalog"))

    assert done.returncode == 0, done.stderr
    environment = read_environment(tmp_path / "new" / "catalog" / "any" / "environment.toml")
    assert environment.server.url == url
    assert environment == replace(
        environment_of("any", url, asyncio.run(detect_url(url, timeout_s=HANG_S))), directory=environment.directory
    )


def test_an_existing_file_is_kept_without_force_and_overwritten_with_force(
    start: Start, env: Env, tmp_path: Path
) -> None:
    url = areal(start)
    path = tmp_path / "env_images" / "guess" / "environment.toml"
    path.parent.mkdir(parents=True)
    path.write_text("mine")

    refused = env("add", url, "-n", "guess")

    assert refused.returncode == 2
    assert "already exists; --force overwrites it" in refused.stderr
    assert path.read_text() == "mine"
    assert env("add", url, "-n", "guess", "--force").returncode == 0
    assert read_environment(path).protocol is ServerProtocol.AREAL
    assert [entry.name for entry in path.parent.iterdir()] == ["environment.toml"]


def test_all_environments_of_a_server_are_added_at_once(world: World, env: Env, tmp_path: Path) -> None:
    url = official(world, "ors")

    done = env("add", url, "--name", "all", "--all")

    assert done.returncode == 0, done.stderr
    added = {path.parent.name: read_environment(path) for path in tmp_path.glob("env_images/*/environment.toml")}
    assert {"all-probe", "all-counter", "all-slowsetup"} <= added.keys()
    assert added["all-counter"].upstream_name == "counter"
    assert "/nemo/all-counter (NeMo Gym)" in " ".join(done.stdout.split())


async def test_a_static_server_that_cannot_be_used_yet_is_offered_later(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    target, is_up = httpx.URL(areal(start)), False
    offered: list[Environment] = []

    async def answer(reader: StreamReader, writer: StreamWriter) -> None:
        if is_up:
            await splice((reader, writer), await asyncio.open_connection(target.host, target.port))
        elif await reader.read(2**16):
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    port = reserved_port()
    servers = StaticServers({"late": f"http://127.0.0.1:{port}", "guess": str(target)}, step_s=120)
    with caplog.at_level("INFO"):
        async with serving(answer, port=port):
            (found,) = await servers.find()
            missing = dict(servers.missing)
            is_up = True
            await servers.run(offered.append)

    assert list(missing) == ["late"]
    assert "it answers HTTP, but as no ORS, OpenEnv, AReaL or NeMo Gym server" in missing["late"]
    assert (found.name, [one.name for one in offered]) == ("guess", ["late"])
    assert (found.areal.step_s, found.openenv.reset_s, found.timeouts.setup_s) == (120, 120, 120)
    assert f"static_server environment=guess url={found.server.url}" in caplog.text
    assert "static_server_missing environment=late" in caplog.text


async def test_a_start_without_any_static_server_says_why_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_servers, "WAIT_S", 1.0)

    with pytest.raises(ConfigError, match=r"127.0.0.1:1: no answer.*; http://127.0.0.1:1/x: no answer"):
        await StaticServers({"a": "http://127.0.0.1:1", "b": "http://127.0.0.1:1/x"}).find()


async def test_a_static_server_of_several_environments_serves_the_named_one(world: World) -> None:
    url = official(world, "ors")

    (found,) = await StaticServers({"one": f"{url}#counter"}).find()

    assert (found.upstream_name, found.server.url) == ("counter", url)


def test_print_shows_the_file_without_writing_it(start: Start, env: Env, tmp_path: Path) -> None:
    done = env("add", areal(start), "-n", "guess", "--print")

    assert 'name = "guess"' in done.stdout
    assert not (tmp_path / "env_images").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((CLOSED_PORT, "--name", "Bad Name"), "is not a valid name for an environment"),
        ((CLOSED_PORT, "--name", "areal"), "'areal' is a reserved name"),
        ((CLOSED_PORT, "--name", "x", "--port", "80"), "--port and --variable are for an image"),
        (("image", "--variable", "x"), "--variable x: NAME=VALUE"),
        ((CLOSED_PORT, "--name", "x", "--all", "--environment", "y"), "--environment adds one environment, and --all"),
        ((CLOSED_PORT, "--name", "x", "--timeout", "1"), "no answer within 1 s"),
    ],
)
def test_a_wrong_command_fails_with_a_reason_and_writes_no_file(
    env: Env, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    done = env("add", *arguments)

    assert done.returncode == 2, (done.stdout, done.stderr)
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
