"""Environments with a third-party or external server: the keys that their ``environment.toml`` may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.catalog.catalog import Catalog, describe
from gateway.catalog.toml import read_environment
from gateway.core.environment import (
    ActionMapping,
    Environment,
    ObservationMapping,
    ResetMapping,
    Server,
    ServerProtocol,
    UpstreamKind,
    Volume,
)
from gateway.core.errors import ConfigError

IMAGE = 'name = "counter"\nimage = "counter:1"\nprotocol = "openenv"\n'
PORT = IMAGE + "[server]\nport = 8000\n"
STATIC = 'name = "counter"\nprotocol = "openenv"\n[server]\nurl = "http://10.0.0.7:8000/env"\n'


def read(tmp_path: Path, text: str) -> Environment:
    folder = tmp_path / "env_images" / "counter"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "environment.toml"
    path.write_text(text)
    return read_environment(path)


def test_an_image_with_a_port_is_called_in_its_own_protocol(tmp_path: Path) -> None:
    environment = read(
        tmp_path,
        PORT
        + """ready = "/health"
[actions]
default_tool = "step"
text_field = "message"
[observations]
text = ["context", "question"]
images = ["board"]
hide = ["metadata"]
[resets]
keys = ["seed", "task_name"]
from_task = { task_name = "environment_config.page" }
seeds = 5
[[volumes]]
source = "/srv/data"
target = "/data"
[[volumes]]
source = "scratch"
target = "/scratch"
read_only = false
""",
    )

    assert environment.server == Server(port=8000, ready="/health")
    assert (environment.protocol, environment.wire) == (ServerProtocol.OPENENV, UpstreamKind.OPENENV)
    assert environment.actions == ActionMapping(default_tool="step", text_field="message")
    assert environment.observations == ObservationMapping(
        text=("context", "question"), images=("board",), hide=("metadata",)
    )
    assert environment.resets == ResetMapping(
        keys=("seed", "task_name"), from_task={"task_name": "environment_config.page"}, seeds=5
    )
    assert environment.volumes == (
        Volume(source="/srv/data", target="/data"),
        Volume(source="scratch", target="/scratch", read_only=False),
    )
    assert environment.needs_an_engine


@pytest.mark.parametrize(
    ("pool", "slots", "learns"),
    [("", 1, False), ("[pool]\nslots = 4\n", 4, False), ('[pool]\nslots = "learn"\n', 1, True)],
)
def test_an_openenv_image_holds_one_session_unless_it_says_more(
    tmp_path: Path, pool: str, slots: int, learns: bool
) -> None:
    policy = read(tmp_path, PORT + pool).pool

    assert (policy.slots, policy.learns_slots) == (slots, learns)


@pytest.mark.parametrize("protocol", ["ors", "areal"])
def test_other_servers_hold_many_sessions(tmp_path: Path, protocol: str) -> None:
    environment = read(tmp_path, PORT.replace("openenv", protocol))

    assert (environment.pool.slots, environment.wire) == (16, UpstreamKind(protocol))


@pytest.mark.parametrize(("areal", "own", "foreign"), [("", 20, None), ("[areal]\nmax_turns = 7\n", 7, 7)])
def test_only_episodes_of_own_servers_have_a_limit_of_turns_by_default(
    tmp_path: Path, areal: str, own: int, foreign: int | None
) -> None:
    found = [read(tmp_path, f"{text}{areal}").areal.max_turns for text in ('name = "counter"\nimage = "x"\n', PORT)]

    assert found == [own, foreign]


def test_the_gateways_own_images_are_called_in_the_gateways_own_protocol(tmp_path: Path) -> None:
    assert read(tmp_path, 'name = "counter"\nimage = "x"\n').wire is UpstreamKind.OWN


def test_a_server_with_a_command_runs_without_its_image(tmp_path: Path) -> None:
    text = PORT.replace("[server]", 'command = ["uvicorn", "app:app", "--port", "{port}"]\n[server]')

    assert not read(tmp_path, text).needs_an_engine


def test_a_server_that_runs_already_is_one_worker_and_needs_no_engine(tmp_path: Path) -> None:
    environment = read(tmp_path, STATIC)

    assert (environment.server.url, environment.pool.max_workers) == ("http://10.0.0.7:8000/env", 1)
    assert list(Catalog([environment]).runnable(containers=False)) == [environment]
    assert describe(environment)["image"] == "http://10.0.0.7:8000/env"


@pytest.mark.parametrize(
    ("text", "where", "reason"),
    [
        (IMAGE, "3: protocol", "needs [server] port (for an image) or url"),
        (STATIC + "[pool]\npause_idle_s = 5\n", "6: pool.pause_idle_s", "cannot pause a server"),
        (STATIC + "[limits]\ngpus = 1\n", "6: limits.gpus", "cannot give GPUs"),
        (STATIC + '[limits]\ngpu_ids = ["0"]\n', "6: limits.gpu_ids", "cannot give GPUs"),
        (STATIC + "[splits.hard]\ncpus = 2\n", "1: splits", "its own resources"),
        (PORT + 'url = "http://h"\n', "6: server.url", "either port"),
        (PORT.replace('image = "counter:1"\n', ""), "1: image", "name an image"),
        ('image = "x"\n' + STATIC, "1: image", "has no image"),
        (STATIC + "[pool]\nmax_workers = 2\n", "5: pool", "one worker"),
        (STATIC.replace("http://10.0.0.7:8000/env", "ftp://h"), "4: server.url", "must match"),
        (STATIC.replace("http://10.0.0.7:8000/env", "http://:80"), "4: server.url", "no host"),
        (STATIC + '[[volumes]]\nsource = "/a"\ntarget = "/a"\n', "5: volumes", "cannot mount volumes"),
        (PORT.replace("openenv", "ors") + '[pool]\nslots = "learn"\n', "7: pool.slots", "OpenEnv servers"),
        (PORT.replace("openenv", "ors") + "[resets]\nseeds = 3\n", "6: resets", "OpenEnv servers"),
        (PORT.replace("openenv", "ors") + '[observations]\nhide = ["a"]\n', "6: observations", "OpenEnv servers"),
        (PORT.replace("openenv", "ors") + "[timeouts]\nidle_s = 900\n", "7: timeouts.idle_s", "after 900 s"),
        ('isolation = "sandbox"\n' + PORT, "1: isolation", "not available for third-party servers"),
        (PORT + '[tasks]\nmodule = "custom"\n', "7: tasks.module", "not available for third-party servers"),
        (PORT + '[scorer]\nfiles = ["*.py"]\n', "6: scorer", "the scorer of a third-party server is its image"),
        (PORT + '[errors]\nunexpected = "fail"\n', "6: errors", "an error of a third-party server is the agent's"),
        (
            'name = "counter"\nimage = "x"\n[actions]\ntext_field = "a"\n',
            "3: actions",
            "third-party servers, which have [server] port or url",
        ),
        (PORT + '[[volumes]]\nsource = "../a"\ntarget = "/a"\n', "source", "must match"),
        (PORT + '[[volumes]]\nsource = "/a"\ntarget = "b"\n', "target", "must match"),
        (PORT + 2 * '[[volumes]]\nsource = "/a"\ntarget = "/b"\n', "volumes", "same target"),
        (PORT + '[secrets]\nTOKEN = "env:T"\n', "6: secrets", "'openenv' cannot carry secrets to a server"),
        (PORT.replace("openenv", "ors") + '[secrets]\nT = "s3cret"\n', "7: secrets.T", "must match"),
        (PORT + 'ready = "health"\n', "6: server.ready", "must match"),
        (PORT + "[resets]\nseeds = 0\n", "7: resets.seeds", "at least 1, not 0"),
    ],
)
def test_keys_that_contradict_each_other_are_reported_with_their_line(
    tmp_path: Path, text: str, where: str, reason: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, text)

    assert where in str(refused.value)
    assert reason in str(refused.value)
